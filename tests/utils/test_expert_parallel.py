"""The benchmark of experts spread over GPUs, by two processes on a CPU."""

import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import expert_parallel
import pytest
import torch
import torch.distributed as dist
from common.commands import run_main
from common.processes import run_processes
from data_parallel import make_row
from expert_parallel import DEFAULT_ARMS, OTHER_ARMS, average_gradients, differences, make_optimizer, measure

from transformers_packed.models.versions import can_select_checkpoints


FEW = ("ours, EP", "ours, FSDP2", "ours, FSDP2, LoRA of experts", "ours, DDP, LoRA of experts", "ours, EP, LoRA, SP")
REFUSED = "ours, EP, LoRA of experts"


def row_of(*given, stock: bool = False) -> dict:
    """Stock classes need no boundaries for one document. On a CPU, they refuse them."""
    row = make_row(*given, stock=stock)
    return {name: row[name] for name in ("input_ids", "labels")} if stock else row


def on_ranks(path: str, arms: tuple[str, ...], *options: str) -> None:
    """Run the benchmark in a process that already is in a group."""
    given = ["--model", "tiny-moe", "--device", "cpu", "--tokens", "64", "--one-document", "--warmup", "1"]
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(expert_parallel, "make_row", row_of),
    ):
        run_main(expert_parallel, *given, "--repeats", "1", "--output", path, *options, "--arms", *arms)


def out_of_memory_on_ranks(path: str) -> str:
    def fails(arm, *given):
        if arm == FEW[1]:
            raise torch.OutOfMemoryError("too little")
        return measure(arm, *given)

    with mock.patch.object(expert_parallel, "measure", fails):
        try:
            on_ranks(path, FEW[:2])
        except torch.OutOfMemoryError as error:
            return str(error)


def averaged() -> list[float]:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.full((1, 2), float(dist.get_rank()))
    average_gradients(model)
    return model.weight.grad.flatten().tolist()


class ExpertParallelTest(unittest.TestCase):
    def setUp(self):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.path = Path(folder, "runs.json")

    def run_of(self, arms: tuple[str, ...], *options: str) -> dict:
        run_processes(on_ranks, 2, str(self.path), arms, *options)
        return json.loads(self.path.read_text())["runs"][-1]

    def check(self, run: dict, arms: tuple[str, ...], steps: int) -> None:
        self.assertEqual(list(run["arms"]), list(arms))
        self.assertLess(max(run["loss_differences"].values()), 1e-4)
        for arm, entry in run["arms"].items():
            if arm == REFUSED:
                self.assertIn("experts.base_layer, split over efsdp, ep", entry["error"])
            else:
                self.assertGreater(entry.get("ms", 0), 0, (arm, entry))
                self.assertEqual(len(entry["losses"]), steps, arm)
        # One splits weights and averages gradients of adapters by itself, the other one does neither.
        split, whole = (run["arms"][f"ours, {plan}, LoRA of experts"]["losses"] for plan in ("FSDP2", "DDP"))
        for got, expected in zip(split, whole, strict=True):
            self.assertAlmostEqual(got, expected, delta=1e-5)

    @unittest.skipUnless(can_select_checkpoints(), "needs Transformers 5.23")
    def test_arms_compute_the_same(self):
        run = self.run_of((*FEW, REFUSED), "--checkpointing", "--offload", "--optim", "adamw_torch_fused")
        self.check(run, (*FEW, REFUSED), steps=2)
        self.assertEqual((run["gpus"], run["layers"], run["optim"]), (2, 4, "adamw_torch_fused"))
        self.assertEqual(run["loss_differences"].keys(), {"rows", "LoRA of experts", "SP"})
        for plan in ("EP", "FSDP2"):
            first, second = run["arms"][f"ours, {plan}"]["losses"]
            self.assertLess(second, first)

    @pytest.mark.slow
    def test_every_arm(self):
        arms = (*DEFAULT_ARMS, *OTHER_ARMS)
        run = self.run_of(arms, "--checkpointing", "--profile", "--optim", "adamw_torch_fused")
        self.check(run, arms, steps=3)
        self.assertIn("uncovered_communication_ms", run["arms"]["stock, EP"]["profile"])

    def test_an_arm_that_does_not_end(self):
        errors = run_processes(out_of_memory_on_ranks, 2, str(self.path))
        self.assertEqual(errors, ["too little"] * 2)
        (run,) = json.loads(self.path.read_text())["runs"]
        self.assertIn("ms", run["arms"][FEW[0]])
        self.assertEqual(run["arms"][FEW[1]], {"error": expert_parallel.NOT_ENDED})

    def test_gradients_of_adapters_are_averaged(self):
        self.assertEqual(run_processes(averaged, 2), [[0.5, 0.5]] * 2)

    def test_a_group_for_each_mesh(self):
        model = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(3))
        model[1].weight.device_mesh = "experts"
        groups = make_optimizer("adamw_torch_fused", model, "cpu").param_groups
        self.assertEqual([len(group["params"]) for group in groups], [2, 1])

    def test_losses_of_calls_are_compared(self):
        runs = [
            {"arms": {"ours, EP": {"loss": 2.0}, "ours, EP, LoRA, SP": {"loss": 3.0}}},
            {
                "arms": {
                    "stock, EP": {"loss": 2.1},
                    "ours, FSDP2": {"error": "no"},
                    "ours, DDP, LoRA, NF4": {"loss": 9},
                }
            },
        ]
        found = differences(runs)
        self.assertEqual(found.keys(), {"rows", "SP"})
        self.assertAlmostEqual(found["rows"], 0.05)
        self.assertEqual(found["SP"], 0)
