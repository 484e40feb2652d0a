"""`transformers-packed memory`."""

import json
import tempfile
import unittest
from pathlib import Path

from common.commands import run_command
from common.sizes import SIZES
from parameterized import parameterized
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from transformers_packed.data.planning.memory import plan_sequence_parallel


class MemoryCommandTest(unittest.TestCase):
    def setUp(self):
        self.path = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.config = Qwen3_5TextConfig(**SIZES["4B"])
        self.config.save_pretrained(self.path)

    def test_prints_the_plan(self):
        options = ("--model", self.path / "config.json", "--row-length", 2**20, "--gpu-memory", 80)
        expected = f"{plan_sequence_parallel(self.config, 2**20, 8, 80, weights='float32').summary()}\n"
        self.assertEqual(run_command("memory", "--gpus", 8, *options), (0, expected, ""))
        for part in ("Smallest P with gradient checkpointing: P = 8", "states in float32", "FSDP2 transfers per GPU"):
            self.assertIn(part, expected)

    @parameterized.expand(
        [
            ([], {"weights": "float32"}),
            (["--weights", "bfloat16"], {}),
            (["--lora"], {"lora_rank": 16}),
            (["--lora", "--mtp", "--keep-attention"], {"lora_rank": 16, "mtp": True, "keep_attention": True}),
            (["--lora", "--segment-tokens", 4096], {"lora_rank": 16, "segment_tokens": 4096}),
            (["--mtp-only"], {"weights": "float32", "mtp_only": True}),
            (["--lora", "--lora-rank", 8], {"lora_rank": 8}),
            (["--optim", "flash_adamw_release"], {"optimizer": "flash_adamw_release"}),
            (["--optim", "muon"], {"optimizer": "muon", "weights": "float32"}),
            (["--optim", "adamw_8bit"], {"optimizer": "adamw_8bit", "weights": "float32"}),
            (
                ["--lora", "--experts", "--lora-rank", 8, "--load-in-4bit"],
                {"lora_rank": 8, "lora_experts": True, "load_in_4bit": True},
            ),
            (["--lora", "--layers-in-host-memory"], {"lora_rank": 16, "layers_in_host_memory": True}),
            (
                ["--lora", "--experts", "--experts-in-host-memory"],
                {"lora_rank": 16, "lora_experts": True, "experts_in_host_memory": True},
            ),
        ]
    )
    def test_options(self, given, options):
        config = Qwen3_5MoeTextConfig(num_hidden_layers=4) if "--experts" in given else self.config
        config.save_pretrained(self.path)
        source = self.path / "config.json"
        command = ("memory", "--model", source, "--row-length", 2**14, "--gpu-memory", 80, "--gpus", 1, *given)
        expected = f"{plan_sequence_parallel(config, 2**14, 1, 80, **options).summary()}\n"
        self.assertEqual(run_command(*command), (0, expected, ""))

    def test_a_file_of_weights_that_is_missing(self):
        options = ("memory", "--row-length", 2**14, "--gpus", 1, "--gpu-memory", 80, "--lora", "--model")
        expected = run_command(*options, self.path / "config.json")[1]
        note = f"Note: {self.path} has no %s, so its weights cannot be loaded.\n"
        self.assertEqual(run_command(*options, self.path), (0, expected, note % "model.safetensors"))
        index = {"weight_map": {"a": "second.safetensors", "b": "first.safetensors"}}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index))
        self.assertEqual(run_command(*options, self.path), (0, expected, note % "first.safetensors"))
        for name in index["weight_map"].values():
            (self.path / name).touch()
        self.assertEqual(run_command(*options, self.path), (0, expected, ""))

    @parameterized.expand([64, 2**20])
    def test_the_memory_that_an_error_names_suffices(self, tokens):
        sizes = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
        Qwen3_5TextConfig(**sizes).save_pretrained(self.path)
        options = ("memory", "--model", self.path, "--row-length", tokens, "--gpus", 1, "--gpu-memory")
        status, _, stderr = run_command(*options, 1e-6)
        self.assertEqual(status, 1)
        least = float(stderr.partition("expected at least ")[2].split()[0].replace(",", ""))
        self.assertEqual(run_command(*options, least)[0], 0)
        self.assertEqual(run_command(*options, 0.8 * least)[0], 1)

    def test_checkpoint_in_fp8(self):
        self.config.quantization_config = {"quant_method": "fp8", "modules_to_not_convert": []}
        self.config.save_pretrained(self.path)
        command = ("memory", "--model", self.path, "--row-length", 2**14, "--gpus", 1, "--gpu-memory", 80)
        status, stdout, _ = run_command(*command, "--lora")
        self.assertEqual(status, 0)
        self.assertRegex(stdout, r"4.21 B parameters \(3.57 B in FP8\) and 32 M in adapters")
        status, _, stderr = run_command(*command)
        self.assertEqual(status, 1)
        self.assertIn("--model: expected a checkpoint in 16 or 32 bit, got one in FP8. Add --lora", stderr)

    def test_what_cannot_be_is_an_error(self):
        gpus = ("--row-length", 2**20, "--gpus", 2)
        fits = (*gpus, "--model", self.path, "--gpu-memory", 24)
        for arguments, expected, part in (
            (fits, 1, "GiB per GPU"),
            ((*gpus, "--model", self.path / "missing", "--gpu-memory", 24), 1, "missing"),
            (gpus, 2, "arguments are required: --model, --gpu-memory"),
            ((*fits, "--load-in-4bit"), 2, "--load-in-4bit needs --lora: weights in 4 bit are not trained"),
            ((*fits, "--optim", "adam"), 2, "invalid choice: 'adam'"),
            ((*fits, "--seed", 3), 2, "unrecognized arguments: --seed"),
            ((*fits, "--data", "x"), 2, "unrecognized arguments: --data"),
        ):
            status, stdout, stderr = run_command("memory", *arguments)
            self.assertEqual((status, stdout), (expected, ""), stderr)
            self.assertIn(part, stderr)
        arguments = ("plan", "--data", "x", "--row-length", 9, "--weights", "float32")
        self.assertIn("unrecognized arguments: --weights", run_command(*arguments)[2])
        self.assertIn("arguments are required: --data", run_command("plan", "--row-length", 9)[2])
