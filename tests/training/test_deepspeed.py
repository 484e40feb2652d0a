"""Training with DeepSpeed's ZeRO-2 and ZeRO-3 in two processes on a CPU equals training with DDP.

`make test-integrations` runs these tests with DeepSpeed. `tests/models/test_gathered_weights.py` has those without it.
"""

import tempfile
import unittest
from importlib.util import find_spec

import torch
from common.families import tiny_model
from common.records import make_tokenizer
from common.trl_trainers import build_model
from mixins.model import total_relative_error
from mixins.patch import builtin_model
from parameterized import parameterized
from safetensors.torch import load_file
from scripts.trainer_arms import run_in_two_processes
from transformers import AutoModelForCausalLM


# Such a module runs on each document, in a number of calls that depends on the row.
ON_DOCUMENTS = "zaya"
TIMES = ("runtime", "per_second")


@unittest.skipUnless(find_spec("deepspeed"), "needs DeepSpeed: make test-integrations")
class ZeroTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def train(self, stage: int, kind: str) -> dict:
        variables = {"ACCELERATE_USE_CPU": "false", "ACCELERATE_TORCH_DEVICE": "cpu"} if stage else {}
        arguments = f"{self.folder}/source", str(stage), kind, f"{self.folder}/{stage}"
        return run_in_two_processes(self, "zero_arms.py", *arguments, **variables)[1]

    @parameterized.expand(
        [
            ("qwen3_5", "full"),
            ("qwen3_5", "lora"),
            ("qwen3_5", "dpo"),
            ("qwen3_next", "full"),
            ("qwen3_next", "lora"),
            ("qwen3_next", "shared"),
            (ON_DOCUMENTS, "full"),
        ]
    )
    def test_equals_ddp(self, name, kind):
        """The same updates, log, evaluation and saved weights. Qwen3-Next has experts, and its checkpoint has each alone."""
        if kind == "dpo":
            model = build_model("padded", len(make_tokenizer()))
        else:
            model = tiny_model(name) if name == ON_DOCUMENTS else builtin_model(name)
        model.save_pretrained(f"{self.folder}/source")
        ddp = self.train(0, kind)
        self.assertGreater(min(x.abs().max() for x in ddp["updates"].values()), 0)
        for stage in (2, 3):
            found = self.train(stage, kind)
            self.assertEqual((ddp["partitioned"], found["partitioned"]), (False, stage == 3))
            self.assertEqual(found["updates"].keys(), ddp["updates"].keys())
            self.assertLess(total_relative_error(found["updates"], ddp["updates"]), 1e-5)
            for got, want in zip(found["log"], ddp["log"], strict=True):
                self.assertEqual(got.keys(), want.keys())
                for figure, value in want.items():
                    if not figure.endswith(TIMES):
                        self.assertLess(abs(got[figure] - value), 1e-5 * max(1, abs(value)), figure)
            self.check_saved(f"{self.folder}/{stage}.saved", found["weights"], kind == "lora")

    def check_saved(self, folder: str, weights: dict, lora: bool) -> None:
        if lora:
            saved = load_file(f"{folder}/adapter_model.safetensors")
            self.assertTrue(saved)
            weights = {name.replace(".default.", "."): x for name, x in weights.items()}
        else:
            saved = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
            self.assertEqual(saved.keys(), weights.keys())
        for name, x in saved.items():
            self.assertTrue(torch.equal(x, weights[name]), name)
