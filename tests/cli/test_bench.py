"""`transformers-packed bench`: both arms compute the same documents, and the report follows from their results."""

import json
import os
import subprocess
import tempfile
import unittest
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from common.commands import run_command
from common.processes import EXPERTS, run_cli_module
from scripts.trainer_arms import TINY
from transformers import Qwen3_5TextConfig, Qwen3NextConfig

from transformers_packed.cli import arms, bench_arm
from transformers_packed.cli.bench import choose_lengths
from transformers_packed.cli.models import untrained_model


RESULT = {
    "seconds": 0.5,
    "tokens": 1000,
    "computed_tokens": 1600,
    "peak_memory": 3 * 2**30,
    "first_step": 4.2,
    "loss": 2.0,
}


class BenchTestCase(unittest.TestCase):
    def setUp(self):
        self.path = Path(self.enterContext(tempfile.TemporaryDirectory()))
        Qwen3_5TextConfig(**TINY).save_pretrained(self.path)

    def command(self, *arguments):
        """Return the exit status, and the output to stdout and stderr."""
        return run_command("bench", "--model", self.path, *arguments)


class CommandTest(BenchTestCase):
    def test_both_arms(self):
        self.check_both_arms()

    @pytest.mark.slow
    def test_both_arms_with_lora(self):
        self.check_both_arms("--lora", "--lora-rank", 4, "--gradient-checkpointing")

    @unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
    def test_both_arms_compute_the_same_weights_in_4_bit(self):
        """Also where Transformers keeps experts in the dtype of the model."""
        names = "lora", "float8", "cuda_graphs", "gradient_checkpointing"
        settings = Namespace(load_in_4bit=True, attn=None, weights="float32", **dict.fromkeys(names, False))
        config = Qwen3NextConfig(**TINY, **EXPERTS)
        ids, losses = torch.arange(1, 25)[None], []
        for ours in (False, True):
            torch.manual_seed(0)
            # In evaluation, bitsandbytes packs the weights anew on some CPUs, which fails for small layers.
            model = untrained_model(config, settings, torch.float32, torch.device("cpu"), 64, ours).train()
            with torch.no_grad():
                losses.append(model(input_ids=ids, labels=ids).loss.item())
            linear = {name.rpartition(".")[2] for name, x in model.named_modules() if type(x).__name__ == "Linear4bit"}
            self.assertGreaterEqual(linear, {"out_proj", "q_proj"})
            self.assertFalse(linear & {"lm_head", "in_proj_a", "in_proj_ba"})
            quantized = sum(type(x).__name__ == "ExpertsIn4bit" for x in model.parameters())
            self.assertEqual(quantized > 0, ours)
        self.assertLess(abs(losses[1] / losses[0] - 1), 1e-5)

    def check_both_arms(self, *options):
        """Run them in their processes, with the lengths of a file."""
        lengths, picture = [5, 90, 30, 64, 20], self.path / "bench.png"
        data = self.path / "data.jsonl"
        data.write_text("".join(f"{json.dumps({'input_ids': [1] * n})}\n" for n in lengths))
        with mock.patch.object(arms, "run_module", run_cli_module):
            status, stdout, stderr = self.command(
                "--data", data, "--row-length", 209, "--batch-size", 2, "--seconds", 0.01, "--plot", picture, *options
            )
        self.assertEqual(status, 0, stderr)
        lines = stdout.splitlines()
        name = json.loads((self.path / "config.json").read_text())["model_type"]
        self.assertEqual(lines[0], f"{name} on CPU: 5 documents of 5 to 90 tokens, 209 in a step.")
        self.assertRegex(stdout, r"\npadded, Transformers +[\d,]+ +[\d,]+ +\d\.\d GiB +\d+% +\d+ s\n")
        self.assertRegex(stdout, r"\npacked, transformers_packed +[\d,]+ +[\d,]+ +\d\.\d GiB +0% +\d+ s\n")
        self.assertRegex(
            stdout, r"Relative loss difference of the first step: \d\.\de[-+]\d+ \(must be below 0.0001\)"
        )
        self.assertEqual(picture.read_bytes()[:4], b"\x89PNG")

    def report(self, padded, packed):
        def write(module, arm, work, limit):
            self.assertEqual(limit, 300)
            self.assertEqual(module, "bench_arm")
            (Path(work) / f"{arm}.json").write_text(json.dumps({"padded": padded, "packed": packed}[arm]))

        with mock.patch.object(arms, "run_module", write):
            return self.command("--plot", self.path / "bench.png")

    def test_ratios(self):
        packed = RESULT | {"seconds": 0.2, "computed_tokens": 1000, "peak_memory": 2**30, "loss": 2.0001}
        status, stdout, _ = self.report(RESULT, packed)
        self.assertEqual(status, 0)
        self.assertRegex(stdout, r"padded, Transformers +2,000 +500 +3.0 GiB +38% +4 s\n")
        self.assertRegex(stdout, r"packed, transformers_packed +5,000 +200 +1.0 GiB +0% +4 s\n")
        self.assertIn("Speed, packed / padded: 2.50x\nMemory, packed / padded: 0.33x\n", stdout)

    def test_losses_that_differ(self):
        for loss in (2.001, float("nan")):
            status, stdout, _ = self.report(RESULT, RESULT | {"loss": loss})
            self.assertEqual(status, 1)
            self.assertIn("(must be below 0.0001)", stdout)

    def test_too_little_memory(self):
        status, stdout, _ = self.report({"error": "out of memory"}, RESULT)
        self.assertEqual(status, 0)
        self.assertRegex(stdout, r"padded, Transformers +out of memory")
        self.assertNotIn("Speed", stdout)
        with mock.patch.object(bench_arm, "time_arm", side_effect=torch.OutOfMemoryError):
            with mock.patch.dict("sys.modules"):
                bench_arm.main("padded", self.path)
        self.assertEqual(json.loads((self.path / "padded.json").read_text()), {"error": "out of memory"})

    def test_an_arm_that_takes_too_long(self):
        """It is stopped, and the report has the other one."""

        def run(command, timeout, **options):
            *_, arm, work = command
            if arm == "padded":
                raise subprocess.TimeoutExpired(command, timeout)
            (Path(work) / f"{arm}.json").write_text(json.dumps(RESULT))
            return subprocess.CompletedProcess(command, 0)

        with mock.patch.object(arms.subprocess, "run", run):
            status, stdout, stderr = self.command("--time-limit", 2.5)
        self.assertEqual((status, stderr), (0, ""))
        self.assertRegex(stdout, r"padded, Transformers +stopped after 2.5 s")
        self.assertRegex(stdout, r"packed, transformers_packed +2,000 +500 ")

    def test_the_padded_arm_runs_no_flash_qla(self):
        for arm, value in (("padded", "0"), ("packed", None)):
            found = []
            with mock.patch.dict("sys.modules"), mock.patch.dict("os.environ"):
                os.environ.pop("FLA_FLASH_QLA", None)
                seen = lambda *_: found.append(os.environ.get("FLA_FLASH_QLA")) or RESULT  # noqa: B023, E731
                with mock.patch.object(bench_arm, "time_arm", seen):
                    bench_arm.main(arm, self.path)
            self.assertEqual(found, [value])

    def test_the_padded_arm_compiles_for_the_packed_one(self):
        """It waits before it measures."""
        settings = {"batch_size": 8, "lora": False, "gradient_checkpointing": False, "attn": "sdpa", "float8": False}
        settings |= {"weights": "float32", "cuda_graphs": False, "seconds": 0.01, "seed": 0, "lengths": [5, 9]}
        settings |= {"load_in_4bit": False}
        (self.path / "settings.json").write_text(json.dumps(settings | {"dtype": "float32"}))
        for arm in arms.ARMS:
            kernels, measured = mock.Mock(), mock.Mock(wraps=bench_arm.tqdm)
            order = mock.Mock()
            order.attach_mock(kernels, "kernels")
            order.attach_mock(measured, "bar")
            with (
                mock.patch.object(bench_arm, "start_compiling", return_value=[kernels]) as start,
                mock.patch.object(bench_arm, "tqdm", measured),
            ):
                result = bench_arm.time_arm(arm, self.path, torch.device("cpu"))
            self.assertEqual(result["compiled_for_packed"], arm == "padded")
            names = [call[0] for call in order.mock_calls]
            self.assertEqual(names, ["kernels.wait", "bar"] if arm == "padded" else ["bar"])
            self.assertEqual(start.call_count, int(arm == "padded"))
        _, stdout, _ = self.report(RESULT | {"compiled_for_packed": True}, RESULT)
        self.assertIn("\nThe padded arm also compiled FlashQLA's kernels for the packed arm", stdout)
        _, stdout, _ = self.report(RESULT, RESULT)
        self.assertNotIn("FlashQLA", stdout)

    def test_errors(self):
        data = self.path / "data.jsonl"
        data.write_text('{"input_ids": [1, 2, 3]}\n')
        for arguments, status, message in (
            (("--data", data), 1, "--data: expected documents with 4,096 tokens, got 3"),
            (("--plot", self.path), 2, "expected a file, got the directory"),
            (("--seconds", 0), 2, "expected a number above 0"),
            (("--steps", 3), 2, "unrecognized arguments: --steps"),
        ):
            found = self.command(*arguments)
            self.assertEqual(found[:2], (status, ""))
            self.assertIn(message, found[2])

    @pytest.mark.slow
    def test_a_process_that_fails(self):
        """Its own output names the cause, and nothing is reported as if it were a result."""
        status, stdout, stderr = self.command("--row-length", 64, "--attn", "no/such_attention")
        self.assertEqual(status, 1)
        self.assertIn("the process for 'padded' ended with status 1", stderr)
        self.assertNotIn("tokens/s", stdout)


class DocumentsTest(BenchTestCase):
    def choose(self, **options):
        defaults = {"data": None, "seed": 0, "row_length": 4096, "mean_length": 480, "tokenizer": None}
        return choose_lengths(Namespace(**defaults | options))

    def test_lengths(self):
        for seed in range(50):
            lengths = self.choose(seed=seed, row_length=1000, mean_length=30)
            self.assertEqual(sum(lengths), 1000)
            self.assertGreater(min(lengths), 1)
        many = self.choose(row_length=1_000_000)
        self.assertLess(abs(sum(many) / len(many) / 480 - 1), 0.1)
        self.assertEqual(self.choose(), self.choose())
        self.assertNotEqual(self.choose(), self.choose(seed=1))
        self.assertEqual(self.choose(row_length=2), [2])

    def test_the_same_tokens(self):
        documents = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 1]]
        (row,), batches = bench_arm.pack(documents, None), bench_arm.pad(documents, 3)
        self.assertEqual(row["input_ids"][0].tolist(), sum(documents, []))
        self.assertEqual([batch["input_ids"].shape for batch in batches], [(3, 4), (1, 2)])
        self.assertEqual(
            [b["input_ids"][b["attention_mask"] == 1].tolist() for b in batches], [sum(documents[:3], []), [1, 1]]
        )
        # The first token of each document has no target.
        self.assertEqual((row["labels"] != -100).sum(), sum(map(len, documents)) - len(documents))
