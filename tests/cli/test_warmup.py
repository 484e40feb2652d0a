"""`transformers-packed warmup`. The CPU counts as a device for which kernels are compiled."""

import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
from common.commands import run_command
from common.families import tiny_config
from mixins.patch import OTHERS
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS, EXPERTS, TINY
from transformers import LlamaConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from transformers_packed.cli.options import LONGEST_SAMPLE, SAMPLES, parsers
from transformers_packed.models import float8_marks
from transformers_packed.models.versions import can_cut_rows
from transformers_packed.ops import kernel_archive
from transformers_packed.ops.backends import caches as backends
from transformers_packed.ops.compilations import Compilation
from transformers_packed.training import kernels
from transformers_packed.training import warm_up as module
from transformers_packed.training.kernels import CUT, WHOLE, Needs
from transformers_packed.training.warm_up import compile_kernels


FOUND = [
    Compilation("tilelang", "forward", "16", 61.0, False),
    Compilation("tilelang", "backward", "16", 9.04, False),
    Compilation("triton", "norm", "64", 1.25, False),
    Compilation("triton", "norm", "128", 0.5, False),
    Compilation("triton", "glu", "64", 0.01, True),
]
CACHES = {"triton": ("/root/.triton/cache", "TRITON_CACHE_DIR"), "tilelang": ("/tl", "TILELANG_CACHE_DIR")}


class WarmupCommandTest(unittest.TestCase):
    def setUp(self):
        self.path = Path(self.enterContext(tempfile.TemporaryDirectory()))
        # Deeper than the model that runs.
        kinds = ["linear_attention"] * 3 + ["full_attention"]
        Qwen3_5TextConfig(**TINY | {"num_hidden_layers": 8, "layer_types": 2 * kinds}).save_pretrained(self.path)
        self.calls = []
        self.enterContext(mock.patch.object(module, "compiles_kernels", lambda device: True))
        self.enterContext(mock.patch.object(module, "compile_kernels", self.record))
        self.enterContext(mock.patch.object(backends, "caches", lambda: CACHES))

    def record(self, model, needs, **options):
        self.calls.append((model, needs))
        compile_kernels(model, needs, **options)
        return FOUND

    def command(self, *arguments, status=0):
        """Return the output to stdout, or to stderr if the command fails."""
        found, stdout, stderr = run_command("warmup", "--model", self.path, *arguments)
        self.assertEqual((found, stdout if status else ""), (status, ""), stderr)
        return stderr if status else stdout

    def test_the_longest_row_of_train(self):
        _, commands = parsers()
        train = commands["train"].parse_args(["--model", "m", "--data", "d", "--output", "o"])
        warmup = commands["warmup"].parse_args(["--model", "m"])
        self.assertIsNone(train.batch_size)
        self.assertEqual(warmup.row_length, SAMPLES * LONGEST_SAMPLE)

    def test_what_it_prints(self):
        stdout = self.command("--row-length", 24, "--max-documents", 3)
        lines = [
            "tilelang: 2 compiled in 70.0 s, 0 loaded from disk",
            "  backward: 1",
            "  forward: 1",
            "triton: 2 compiled in 1.8 s, 1 loaded from disk",
            "  norm: 2",
            "The kernels are in these directories. --export makes one file of them for machines like this one:",
            "  /root/.triton/cache (TRITON_CACHE_DIR)",
            "  /tl (TILELANG_CACHE_DIR)",
        ]
        self.assertEqual(stdout.splitlines(), lines)
        self.assertEqual(self.calls[0][1], Needs(24, 3))

    def test_rows_of_trees(self):
        with mock.patch.object(module, "make_tree", wraps=module.make_tree) as made:
            self.command("--row-length", 200, "--max-documents", 2)
            made.assert_not_called()
            self.command("--row-length", 200, "--max-documents", 2, "--trees")
        # The last one without gradients.
        self.assertEqual([call.args[1] for call in made.mock_calls], [127, 128, 127])

    def test_rows_that_are_cut(self):
        """By segments, or between processes: calls of the delta rule have states."""
        options = "--row-length", 200, "--max-documents", 2
        cases = [(("--sequence-parallel-size", 2), CUT), ((), WHOLE)]
        if can_cut_rows():
            cases += [(("--gradient-checkpointing", "--segment-tokens", n), x) for n, x in ((64, CUT), (200, WHOLE))]
        for more, expected in cases:
            with mock.patch.object(kernels.flash_qla, "start_compiling", return_value=[]) as started:
                self.command(*options, *more)
            self.assertEqual(started.call_args[0][4], expected, more)
        stderr = self.command(*options, "--segment-tokens", 64, status=2)
        self.assertIn("--segment-tokens needs --gradient-checkpointing", stderr)

    def test_adapters_of_experts(self):
        options = "--lora", "--experts", "--row-length", 24, "--max-documents", 2
        stderr = self.command(*options, status=1)
        self.assertIn("warmup: --experts: expected a mixture of experts as --model, got ", stderr)
        Qwen3_5MoeTextConfig(**TINY, **EXPERTS).save_pretrained(self.path)
        self.command(*options)
        ((model, _),) = self.calls
        adapters = [name for name, _ in model.named_parameters() if "experts" in name and "lora_A" in name]
        self.assertEqual(len(adapters), 2 * model.config.num_hidden_layers)

    @parameterized.expand(
        [
            (["--lora", "--lora-rank", 4, "--dtype", "bfloat16"], 3, torch.bfloat16, 0),
            (["--float8", "--gradient-checkpointing"], 5, torch.float32, 3),
        ]
    )
    def test_the_model_that_runs(self, options, layers, dtype, in_float8):
        self.command("--row-length", 24, "--max-documents", 2, *options)
        ((model, _),) = self.calls
        base = model.get_base_model() if "--lora" in options else model
        self.assertEqual(len(base.model.layers), layers)
        self.assertTrue(type(base).__module__.startswith("transformers_packed."))
        self.assertEqual(base.model.layers[0].mlp.gate_proj.weight.dtype, dtype)
        if "--lora" in options:
            adapters = [x for name, x in model.named_parameters() if "lora_A" in name]
            self.assertEqual({(len(x), x.requires_grad) for x in adapters}, {(4, True)})
        chosen = {name.split(".")[2] for name, x in base.named_modules() if vars(x).get(float8_marks.MARK) is not None}
        self.assertEqual(len(chosen), in_float8)
        # Both kinds of layers, also among those in float8, and a first kind that gets a gradient of its input.
        self.assertEqual({*base.config.layer_types[1:]}, {"linear_attention", "full_attention"})
        self.assertEqual(
            {x.gradient_checkpointing for x in base.model.layers}, {"--gradient-checkpointing" in options}
        )

    @parameterized.expand(
        [
            (["--row-length", 1], 2, "--row-length: expected a whole number of at least 2, got '1'"),
            (["--row-length", 24, "--max-documents", 0], 2, "--max-documents: expected a whole number of at least 1"),
        ]
    )
    def test_wrong_arguments(self, arguments, expected, part):
        stderr = self.command(*arguments, status=expected)
        self.assertIn(part, stderr)
        self.assertEqual(self.calls, [])

    def test_an_archive(self):
        cache, other, file = (self.path / name for name in ("cache", "other", "kernels.tar.gz"))
        (cache / "KEY").mkdir(parents=True)
        (cache / "KEY" / "launcher.so").write_bytes(b"code")
        with mock.patch.object(kernel_archive, "caches", lambda: {"triton": (str(cache), "")}):
            stdout = self.command("--row-length", 24, "--max-documents", 3, "--export", file)
            self.assertEqual(stdout.splitlines()[-1], f"1 kernel in {file}")
            self.assertEqual(len(self.calls), 1)
            self.assertEqual(
                run_command("warmup", "--import", file)[1], "0 kernels added to the caches, 1 were there\n"
            )
        with mock.patch.object(kernel_archive, "caches", lambda: {"triton": (str(other), "")}):
            self.assertEqual(
                run_command("warmup", "--import", file)[1], "1 kernel added to the caches, 0 were there\n"
            )
        self.assertEqual((other / "KEY" / "launcher.so").read_bytes(), b"code")
        self.assertEqual(len(self.calls), 1)

    @parameterized.expand(
        [
            ([], 2, "expected --model, --import or --export"),
            (["--import", "nowhere.tar.gz"], 1, "--import: nowhere.tar.gz does not exist"),
            (
                ["--export", "/nowhere/kernels.tar.gz"],
                1,
                "--export: expected a file in a directory that can be written, got /nowhere/kernels.tar.gz",
            ),
            (["--export", "/tmp"], 1, "--export: expected a file in a directory that can be written, got /tmp"),
            (["--import", __file__], 1, "expected a file that warmup --export wrote, got "),
        ]
    )
    def test_wrong_archives(self, arguments, expected, part):
        status, _, stderr = run_command("warmup", *arguments)
        self.assertEqual(status, expected)
        self.assertIn(part, stderr)

    def test_a_machine_without_a_gpu(self):
        with mock.patch.object(module, "compiles_kernels", lambda device: device.type == "cuda"):
            stderr = self.command("--row-length", 24, status=1)
        self.assertIn("expected a CUDA device, for which kernels are compiled, got cpu. Run the command where", stderr)

    def test_another_family(self):
        LlamaConfig().save_pretrained(self.path)
        stderr = self.command("--row-length", 24, status=1)
        self.assertIn("--model: expected a checkpoint of Qwen3-Next, ", stderr)

    def test_ctrl_c(self):
        def stopped(*args, **kwargs):
            raise KeyboardInterrupt

        with mock.patch("transformers_packed.models.qwen3_5.modeling_qwen3_5.Qwen3_5ForCausalLM.forward", stopped):
            stderr = self.command("--row-length", 24, status=130)
        last = "transformers-packed warmup: interrupted while compiling kernels, before the first step; 0 are ready"
        self.assertEqual(stderr.splitlines()[-1], last)

    def test_other_families_of_this_package(self):
        for name in ("qwen3_next_moe", *({"kimi_linear"} & {*OTHERS})):
            CONFIGS[name]().save_pretrained(self.path)
            # FlashQLA has no kernels for Kimi delta attention.
            with mock.patch.object(kernels.flash_qla, "start_compiling", return_value=[]) as started:
                self.command("--row-length", 24, "--max-documents", 2)
            self.assertEqual(started.called, name != "kimi_linear")

    def test_layers_with_and_without_experts(self):
        """One of each kind, although the mixtures of the model come late."""
        if "kimi_linear" not in OTHERS:
            self.skipTest("this release has no such family")
        kinds = ["linear_attention", "linear_attention", "full_attention"]
        config = tiny_config("kimi_linear", layer_types=2 * kinds, num_hidden_layers=6)
        config.mlp_layer_types = 4 * ["dense"] + 2 * ["sparse"]
        config.save_pretrained(self.path)
        self.command("--row-length", 24, "--max-documents", 2)
        found = self.calls[0][0].config
        self.assertEqual(found.layer_types, ["linear_attention", "full_attention"] * 2 + ["linear_attention"])
        self.assertEqual(found.mlp_layer_types, ["dense", "dense", "sparse", "sparse", "dense"])
