"""The scripts in `examples/` with their default arguments, as users run them."""

import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
import unittest
from contextlib import redirect_stderr
from pathlib import Path
from unittest import mock

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from common.processes import run_script
from parameterized import parameterized
from transformers import AutoModelForCausalLM, Trainer
from transformers.models.qwen3_5 import modeling_qwen3_5

from transformers_packed.models.versions import averages_experts


EXAMPLES = Path(__file__).parent.parent / "examples"
PADDING_FREE = [
    r"Padding-free on: about \d\.\d x fewer tokens computed than in padded batches; isolation by ",
    r"'tokens_per_second': .*'documents_per_row': '4', 'padding_avoided': ",
    r"Padding-free: 40 documents with [\d,]+ tokens in ",
]
PACKED = [r"'packing_fill': ", r"Packing: [\d,]+ documents with [\d,]+ tokens in .* fill \d\d\.\d%, "]
SHARED = [r"Padding-free on: the model computes only the real tokens .* a prompt once for all of its answers; "]
# The expected output and saved files of each script.
SCRIPTS = {
    "trainer": (PADDING_FREE, "model.safetensors"),
    "sft": ([r"Packing on: isolation by ", *PACKED], "model.safetensors"),
    "experts": (
        [r"Packing on: fill \d\d\.\d%, .* rows of at most 1,024 tokens", *PACKED, r"'experts_unused': "],
        "model.safetensors",
    ),
    "lora": ([r"Packing on: fill \d\d\.\d%, .* rows of at most 1,024 tokens", *PACKED], "adapter_model.safetensors"),
    "distillation": (
        [*PADDING_FREE, r"trains 0.5 x its own loss with 0.5 x the loss of the divergence", r"'divergence': '0"],
        "model.safetensors",
    ),
    "dpo": ([*SHARED, r"'rewards/margins': "], "adapter_model.safetensors"),
    "reward": (
        [*SHARED, r"Verified packing on .* loss, gradient and reward differ by ", r"'margin': "],
        "adapter_model.safetensors",
    ),
    "grpo": ([*SHARED, r"'rewards/short_answers/mean': "], "model.safetensors"),
    "sequence_parallel": (
        [r"Packing on: fill \d\d\.\d%, .* rows of at most 1,024 tokens", *PACKED],
        "model.safetensors",
    ),
    "tree": (
        [
            r"Tokens: 1,\d\d\d as trees, 4,\d\d\d as separate samples \(2\.9 x\)",
            r"Loss: (-?\d\.\d{5})\d as trees, \1\d as separate samples; gradients differ by \de-0[67]",
            r"Step: [\d.]+ s as trees, [\d.]+ s as separate samples \([\d.]+ x\)",
            r"Step 9: loss -?\d\.\d+",
        ],
        "adapter_model.safetensors",
    ),
    "vision_language": (PADDING_FREE, "model.safetensors"),
}


class ExamplesTest(unittest.TestCase):
    def setUp(self):
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_none_is_left_out(self):
        self.assertEqual({path.stem for path in EXAMPLES.glob("*.py")} - {"common"}, set(SCRIPTS))

    def run_script(self, name, *arguments, **variables):
        (result,) = run_script(EXAMPLES / f"{name}.py", *arguments, folder=self.directory, **variables)
        self.assertEqual(result.status, 0, result.stderr[-3000:])
        return result

    @pytest.mark.slow
    @parameterized.expand([("sequence_parallel", "2", ["--sequence_parallel_size", "2"]), ("experts", "1", [])])
    def test_two_processes(self, name, batch, options):
        """They share rows or experts, and give the updates of one process: the same loss, rounded to four digits.

        This is the only test that starts torchrun itself.
        """
        if name == "experts" and not averages_experts():
            self.skipTest("needs Transformers 5.23")
        arguments = ["--max-steps", "5", "--batch-size"]
        # Run on the CPU even if the machine has a GPU.
        variables = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        alone = self.run_script(name, *arguments, "2", **variables)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
        shared = subprocess.run(
            [*launch, str(EXAMPLES / f"{name}.py"), *arguments, batch, *options],
            capture_output=True,
            text=True,
            cwd=self.directory,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", **variables},
        )
        self.assertEqual(shared.returncode, 0, shared.stderr[-3000:])
        losses = [re.findall(r"'loss': '([\d.]+)'", result.stdout) for result in (alone, shared)]
        self.assertEqual([len(x) for x in losses], [1, 1])
        self.assertAlmostEqual(float(losses[0][0]), float(losses[1][0]), delta=2e-3)
        self.assertTrue((self.directory / "example" / "model.safetensors").is_file())

    @parameterized.expand(["fsdp2", "hsdp"])
    def test_the_config_of_accelerate(self, name):
        """accelerate accepts every key, and shards the named layer."""
        with redirect_stderr(io.StringIO()):
            config = load_config_from_file(str(EXAMPLES / f"{name}.yaml"))
        self.assertEqual(config.distributed_type, "FSDP")
        known = vars(launch_command_parser().parse_args(["script.py"]))
        self.assertEqual({*config.fsdp_config, *config.parallelism_config} - set(known), set())
        sizes = {"dp_shard_size": 2, "dp_replicate_size": 2} if name == "hsdp" else {}
        self.assertEqual(config.parallelism_config, {f"parallelism_config_{x}": n for x, n in sizes.items()})
        self.assertTrue(hasattr(modeling_qwen3_5, config.fsdp_config["fsdp_transformer_layer_cls_to_wrap"]))

    @parameterized.expand(SCRIPTS)
    def test_default_arguments(self, name):
        printed, saved = SCRIPTS[name]
        result = self.run_script(name)
        for line in printed:
            self.assertRegex(result.stdout, line)
        self.assertTrue((self.directory / "example" / saved).is_file())
        if name == "trainer":
            # The stock class loads it without new or missing weights.
            _, loading = AutoModelForCausalLM.from_pretrained(self.directory / "example", output_loading_info=True)
            self.assertFalse(any(loading.values()), loading)

    def run_here(self, name, *arguments):
        """Return the exit status and the stderr of the script."""
        stderr, argv = io.StringIO(), [f"{name}.py", "--output", str(self.directory), *arguments]
        # The tests have a package of the same name.
        ours = {module: sys.modules.pop(module) for module in [*sys.modules] if module.split(".")[0] == "common"}
        self.addCleanup(sys.modules.update, ours)
        self.addCleanup(sys.modules.pop, "common", None)
        with (
            mock.patch.object(sys, "argv", argv),
            mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
            redirect_stderr(stderr),
            self.assertRaises(SystemExit) as exit,
        ):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return exit.exception.code, stderr.getvalue()

    @parameterized.expand(SCRIPTS)
    def test_wrong_flags(self, name):
        for arguments, message in (
            (["--modell", "x"], "unrecognized arguments: --modell"),
            (["--max-steps", "many"], "argument --max-steps: invalid int value"),
        ):
            status, stderr = self.run_here(name, *arguments)
            self.assertEqual(status, 2)
            self.assertRegex(stderr, rf"^usage: {name}.py")
            self.assertIn(message, stderr)

    def test_ctrl_c(self):
        with mock.patch.object(Trainer, "training_step", side_effect=KeyboardInterrupt):
            status, stderr = self.run_here("trainer")
        self.assertEqual(status, 130)
        self.assertTrue(stderr.endswith("\nInterrupted.\n"), stderr)
        self.assertNotIn("Traceback", stderr)
