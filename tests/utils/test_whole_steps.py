"""What the benchmark of whole steps reads from a profile, and its steps with each optimizer on a CPU."""

import io
import json
import sys
import tempfile
import unittest
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import whole_steps
from common.commands import run_main
from common.late_experts import copied_on_a_cpu
from common.optimizers import flashoptim
from parameterized import parameterized
from torch.autograd import DeviceType
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock
from whole_steps import OPTIMIZERS, summary

from transformers_packed.models import host_parameters


def event(name: str, start: int, end: int, device=DeviceType.CUDA, annotation: bool = False) -> SimpleNamespace:
    span = SimpleNamespace(start=1000 * start, end=1000 * end)
    return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=annotation)


class SummaryTest(unittest.TestCase):
    def test_kernels_communication_and_waits(self):
        events = [
            event("gemm", 0, 10),
            event("norm", 5, 12),
            event("ncclDevKernel_AllReduce", 8, 20),
            event("DistributedDataParallel.forward", 0, 100, annotation=True),
            event("nccl:all_reduce", 0, 100, annotation=True),
            event("Memset (Device)", 30, 40),
            event("Memcpy HtoD (Pageable -> Device)", 50, 60),
            event("cudaStreamSynchronize", 0, 90, DeviceType.CPU),
        ]
        found = summary(SimpleNamespace(events=lambda: events))
        self.assertEqual(found["computation_ms"], 12)
        self.assertEqual(found["communication_ms"], 12)
        self.assertEqual(found["uncovered_communication_ms"], 8)
        self.assertEqual(found["kernels"], 2)
        self.assertEqual((found["idle_ms"], found["host_waits_ms"]), (0, 90))
        self.assertEqual(found["longest_ms"], {"ncclDevKernel_AllReduce": 12, "gemm": 10, "norm": 7})
        self.assertEqual(found["longest_gaps_ms"], {})
        self.assertEqual(found["waits"], {"cudaStreamSynchronize": 1})
        self.assertEqual(found["copies"], {"Memcpy HtoD (Pageable -> Device)": 1})

    def test_gaps_between_kernels(self):
        spans = [("a", 0, 9), ("b", 1, 2), ("c", 12, 13), ("a", 13, 20), ("c", 24, 30)]
        events = [event(*span) for span in spans]
        found = summary(SimpleNamespace(events=lambda: events))
        self.assertEqual(found["longest_gaps_ms"], {"a | c": 7})
        self.assertEqual(found["idle_ms"], 7)


class SkewTest(unittest.TestCase):
    def test_an_expert_with_eight_times_the_mean(self):
        torch.manual_seed(0)
        config = Qwen3_5MoeTextConfig(hidden_size=64, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=8)
        block = Qwen3_5MoeSparseMoeBlock(config)
        torch.nn.init.normal_(block.gate.weight)
        x, found = torch.randn(4096, 64), []
        for change in (lambda module: None, whole_steps.skew):
            change(block)
            with torch.no_grad():
                counts = block.gate(x)[-1].flatten().bincount(minlength=256)
            found.append(float(counts.max() / counts.float().mean()))
        self.assertLess(found[0], 3)
        self.assertTrue(6 < found[1] < 10, found)


class OptimizersTest(unittest.TestCase):
    @parameterized.expand([*OPTIMIZERS, "adamw_torch"])
    @pytest.mark.slow
    def test_two_steps(self, name):
        """flashoptim's are the stand-in."""
        optimizer = OPTIMIZERS.get(name)
        modules = {"flashoptim": flashoptim()}
        if optimizer is not None and optimizer.package not in modules and find_spec(optimizer.package) is None:
            self.skipTest(f"needs {optimizer.package}")
        options = ["--model", "tiny", "--tokens", "128", "--warmup", "1", "--steps", "1", "--optim", name]
        with tempfile.TemporaryDirectory() as folder:
            path, scratch = Path(folder, "runs.json"), str(Path(folder, "scratch"))
            with (
                mock.patch.dict(sys.modules, modules),
                mock.patch.object(torch, "compile", lambda function, **kwargs: function),
            ):
                run_main(whole_steps, *options, "--output", path, "--scratch", scratch)
            (run,) = json.loads(path.read_text())["runs"]
        self.assertEqual((run["optim"], run["kind"]), (name, "one"))
        self.assertEqual(run["weights"], "float32" if optimizer is None else optimizer.weights)
        self.assertGreater(run["step_ms"], 0)


class HostMemoryTest(unittest.TestCase):
    @parameterized.expand([("bfloat16", "experts"), ("nvfp4", "experts"), ("bfloat16", "layers"), ("nvfp4", "layers")])
    @pytest.mark.slow
    def test_weights_in_host_memory(self, weights, what):
        if what == "layers":
            self.enterContext(mock.patch.object(host_parameters, "SMALLEST", 1 << 10))
        options = [
            "--model",
            "tiny-moe",
            "--tokens",
            "128",
            "--warmup",
            "1",
            "--steps",
            "1",
            "--lora",
            "--checkpointing",
        ]
        options += ["--weights", weights]
        moved = []
        with tempfile.TemporaryDirectory() as folder, copied_on_a_cpu() as copies:
            path, scratch = Path(folder, "runs.json"), str(Path(folder, "scratch"))
            for option in ([], [f"--{what}-in-host-memory"]):
                moved.append(copies.copies.copies)
                run_main(whole_steps, *options, *option, "--output", path, "--scratch", scratch)
            runs = json.loads(path.read_text())["runs"]
        self.assertEqual([run[f"{what}_in_host_memory"] for run in runs], [False, True])
        self.assertEqual([f"{what}_on_host_GiB" in run for run in runs], [False, True])
        self.assertEqual(moved, [0, 0])
        self.assertGreater(copies.copies.copies, 0)

    def test_experts_in_host_memory_of_other_runs(self):
        for options in (["--lora", "--weights", "float32"], ["--lora", "--weights", "float8"], ["--weights", "nvfp4"]):
            with self.assertRaises(SystemExit), redirect_stderr(io.StringIO()) as stderr:
                run_main(whole_steps, "--experts-in-host-memory", *options)
            said = "--experts-in-host-memory needs --lora and --weights of bfloat16, nf4, fp8, nvfp4, awq"
            self.assertIn(said, stderr.getvalue())
