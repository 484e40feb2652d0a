"""The plugin for ms-swift. `make test-integrations` runs all of these tests with ms-swift itself."""

import json
import subprocess
import sys
import tempfile
import unittest
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from common import swift_parts
from common.frameworks import ROOT, SCRIPTS, assert_same_training, environment, function_of
from mixins.model import packed_batch
from mixins.patch import documents
from parameterized import parameterized
from safetensors.torch import load_file
from transformers import LlamaConfig, Qwen3NextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as builtin_moe

from transformers_packed.audit.tiny import tiny_model
from transformers_packed.models.registry import has_our_classes


swift_parts.install()
# Importing the plugin changes ms-swift in this process.
from transformers_packed.integrations.ms_swift import packed_hooks  # noqa: E402


class HooksTest(unittest.TestCase):
    def setUp(self):
        classes = (builtin.Qwen3_5GatedDeltaNet, builtin_moe.Qwen3_5MoeGatedDeltaNet, builtin.Qwen3_5MLP)
        self.stock = {cls: cls.forward for cls in classes}
        for cls, forward in self.stock.items():
            self.addCleanup(setattr, cls, "forward", forward)

    def load(self, model):
        loader = SimpleNamespace(model=model)
        loaded = packed_hooks._patch_loaded(swift_parts.Loader.load)(loader)
        self.assertEqual(loaded, (model, "processor"))

    def test_undoes_the_change_whose_work_it_does(self):
        model = tiny_model("qwen3_5_text")
        changed = (builtin.Qwen3_5GatedDeltaNet, builtin_moe.Qwen3_5MoeGatedDeltaNet)
        for cls in changed:
            cls.forward = function_of("swift.model.models.qwen")
            cls._ms_swift_sp_linear_patched = True
        self.load(model)
        for cls in changed:
            self.assertIs(cls.forward, self.stock[cls])
            self.assertNotIn("_ms_swift_sp_linear_patched", vars(cls))
        self.assertTrue(has_our_classes(model))
        self.load(None)

    @parameterized.expand(
        [
            ("liger_kernel.transformers", "Set --use_liger_kernel false."),
            ("swift.model.npu_patch.model", "Set --enable_npu_model_patch false."),
            ("swift.sequence_parallel.ulysses", "Set --sequence_parallel_size 1, and train in a new process."),
            ("unsloth.models", "Set --tuner_backend peft, and train in a new process."),
            ("another", "Turn off what sets it, and train in a new process."),
        ]
    )
    def test_refuses_other_changes_by_their_option(self, module, fix):
        model = tiny_model("qwen3_5_text")
        builtin.Qwen3_5MLP.forward = function_of(module)
        with self.assertRaises(ValueError) as caught:
            self.load(model)
        self.assertIn(f"got Qwen3_5MLP.forward of {module}. {fix}", str(caught.exception))
        self.assertFalse(has_our_classes(model))

    def check(self, config, **options):
        """Check the arguments of a model with this configuration. Returns whether rows are padding-free."""
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            known = {"packing": True, "padding_free": False, "attn_impl": None, **packed_hooks._REQUIRED}
            arguments = SimpleNamespace(**known | options, model_info=SimpleNamespace(model_dir=folder))
            packed_hooks.SftArguments._check_padding_free(arguments)
        return arguments.padding_free

    def test_packs_with_every_attention_implementation(self):
        self.assertTrue(self.check(Qwen3NextConfig()))
        self.assertTrue(self.check(Qwen3NextConfig(), packing=False, padding_free=True))
        self.assertFalse(self.check(Qwen3NextConfig(), packing=False))
        with self.assertRaisesRegex(ValueError, "requires a flash attention implementation"):
            self.check(LlamaConfig())

    @parameterized.expand(
        [
            ("sequence_parallel_size", 2, "--sequence_parallel_size 1"),
            ("task_type", "seq_cls", "--task_type causal_lm"),
            ("tuner_backend", "unsloth", "--tuner_backend peft"),
            ("use_liger_kernel", True, "--use_liger_kernel false"),
        ]
    )
    def test_refuses_options_that_change_the_model_or_cut_rows(self, name, value, expected):
        with self.assertRaisesRegex(ValueError, f"expected {expected} with the plugin .*, got {value}. Set it"):
            self.check(Qwen3NextConfig(), **{name: value})

    def test_a_release_without_a_method_that_it_replaces(self):
        class Loader:
            def load(self, path):
                pass

        for name in ("load", "open"):
            with self.assertRaisesRegex(
                ValueError, rf"a method Loader.{name}\(self\), got ms-swift .*ms-swift==4.6.0"
            ):
                packed_hooks._replace(Loader, name, ("self",), lambda method: method)

    def test_no_logits_for_a_metric(self):
        model, template = tiny_model("qwen3_5_text"), packed_hooks.Template
        self.load(model)
        batch = packed_batch(documents())
        for training in (True, False):
            outputs = template.compute_sft_loss(SimpleNamespace(), model.train(training), batch)
            self.assertEqual(outputs.logits is None, training)

    def test_prints_the_path_of_the_file_to_load(self):
        # Without torch, and so without ms-swift.
        code = "import runpy, sys; runpy.run_module('transformers_packed.integrations.ms_swift', run_name='__main__')"
        code += "; assert 'torch' not in sys.modules"
        run = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
        self.assertEqual(run.stdout.strip(), str(PLUGIN), run.stderr)
        self.assertTrue(PLUGIN.is_file())


PLUGIN = ROOT / "src/transformers_packed/integrations/ms_swift/packed_plugin.py"
STEPS = 6
OPTIONS = {
    "dataset": "chats.jsonl",
    "split_dataset_ratio": 0,
    "dataset_shuffle": False,
    "train_dataloader_shuffle": False,
    "dataset_num_proc": 1,
    "dataloader_num_workers": 0,
    "max_length": 512,
    "packing_strategy": "sequential",
    "torch_dtype": "float32",
    "use_cpu": True,
    "gradient_checkpointing": False,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 1,
    "optim": "sgd",
    "learning_rate": 0.003,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0,
    "logging_steps": 1,
    "save_steps": STEPS,
    "save_only_model": True,
    "report_to": "none",
    "check_model": False,
    "add_version": False,
    "tuner_type": "full",
}
PADDED = {"per_device_train_batch_size": 3}
PLUGGED = {"external_plugins": PLUGIN}
LORA = {"tuner_type": "lora", "lora_rank": 4, "lora_dropout": 0, "target_modules": "all-linear", "learning_rate": 0.02}


@cache
def folder() -> Path:
    """Create a folder with tiny checkpoints and chats."""
    root = Path(tempfile.mkdtemp(prefix="swift-"))
    for family in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        swift_parts.save_checkpoint(root / family, family)
    swift_parts.save_chats(root / "chats.jsonl", 3 * STEPS)
    return root


def run(command: list, family: str, **options) -> str:
    """Run a command with ms-swift's options. Returns its output."""
    template = "qwen3_nothinking" if family == "qwen3_next" else "qwen3_5"
    for name, value in (OPTIONS | {"model_type": family, "template": template} | options).items():
        command = [*command, f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    result = subprocess.run(command, cwd=folder(), env=environment(), capture_output=True, text=True, timeout=600)
    if result.returncode:
        raise RuntimeError((result.stdout + result.stderr)[-5000:])
    return result.stdout


@cache
def train(name: str, **options) -> tuple[list, list, dict]:
    """Run `swift sft`. Returns the losses and gradient norms of all steps, and the trained weights."""
    output = folder() / name
    run([str(SCRIPTS / "swift"), "sft", "--model", "qwen3_5"], "qwen3_5", output_dir=output, **options)
    (checkpoint,) = output.glob("checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    log = [entry for entry in state["log_history"] if "grad_norm" in entry]
    (weights,) = checkpoint.glob("*.safetensors")
    return [entry["loss"] for entry in log], [entry["grad_norm"] for entry in log], load_file(weights)


def step(family: str, **options) -> dict:
    """Compare a step on a packed row with the stock class on each document alone."""
    script = [sys.executable, str(ROOT / "tests/scripts/swift_step.py"), str(folder() / family)]
    output = run(script, family, output_dir=folder() / f"step_{family}", packing_length=300, **options)
    return json.loads(output.splitlines()[-1])


@pytest.mark.slow
@unittest.skipUnless(swift_parts.HAS_SWIFT, "make test-integrations has ms-swift")
class SwiftTest(unittest.TestCase):
    """Compare ms-swift on packed rows with the stock classes."""

    @parameterized.expand([("qwen3_5", 3), ("qwen3_5_moe", 3), ("qwen3_next", 2)])
    def test_a_packed_row_equals_its_documents_alone(self, family, dimensions):
        result = step(family, packing=True, **PLUGGED)
        self.assertGreater(result["documents"], 2)
        self.assertEqual(len(result["position_ids"]), dimensions)
        self.assertLess(abs(result["loss"] / result["alone"] - 1), 1e-6)
        self.assertLess(result["gradients"], 1e-5)

    def test_without_the_plugin_the_comparison_fails(self):
        result = step("qwen3_next", lazy_tokenize=False)
        self.assertGreater(abs(result["loss"] / result["alone"] - 1), 1e-3)
        self.assertGreater(result["gradients"], 1e-2)
        with self.assertRaisesRegex(RuntimeError, "requires flash-linear-attention"):
            step("qwen3_5", lazy_tokenize=False)
        with self.assertRaisesRegex(RuntimeError, 'The "packing" feature requires a flash attention implementation'):
            step("qwen3_5", packing=True)

    def test_packed_rows_train_like_padded_batches(self):
        padded = train("padded", **PADDED)
        # Samples have 49 to 75 tokens, so that three of them fill a row.
        rows = {"packing": True, "packing_length": 200, "per_device_train_batch_size": 1}
        for name, options in (("free", {"padding_free": True, **PADDED}), ("rows", rows)):
            with self.subTest(name):
                assert_same_training(self, train(name, **options, **PLUGGED), padded, STEPS)

    def test_lora(self):
        padded = train("lora_padded", **PADDED | LORA)
        self.assertTrue(all("lora" in name for name in padded[2]))
        assert_same_training(self, train("lora", padding_free=True, **PADDED | LORA | PLUGGED), padded, STEPS)
