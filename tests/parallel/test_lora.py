"""PEFT's adapters in fused layers, experts, and products in float8, with DDP, FSDP2 and sequence parallelism, in two processes on a CPU."""

import unittest

import torch
from common.processes import run_once
from common.sharded import LENGTHS, batch, targets_of, wrapped_by
from mixins.lora import all_linear, builtin_model, recorded
from mixins.model import total_relative_error
from mixins.patch import on_a_gpu
from parameterized import parameterized
from torch import distributed

from transformers_packed import patch_model, use_float8
from transformers_packed.ops import implementations_used
from transformers_packed.parallel import SequenceParallel, shard_batch


def make(family: str) -> torch.nn.Module:
    """A model with adapters, those of the experts of Qwen3-Next included, or one that is trained as a whole."""
    if family == "float8":
        return use_float8(patch_model(builtin_model("qwen3_5")), lambda layer, name: ".mlp." in name).train()
    return patch_model(builtin_model("qwen3_5_moe") if family == "experts" else all_linear(family))


def gradients(model) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name.removeprefix("module.")] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return found


def run(kind: str, family: str) -> tuple[dict, int]:
    """Gradients of the mean loss of both processes' rows, and the number of fused layers."""
    with on_a_gpu():
        model = make(family)
        wrapped = wrapped_by(kind, model)
        with recorded(model) as (fused, called):
            loss = wrapped(**batch(distributed.get_rank()), use_cache=False).loss
        loss.backward()
        # The router and the gate of the shared expert are called.
        assert all(name.endswith("gate") for name in called), called
        assert family != "float8" or "linear_float8" in implementations_used()
        return gradients(wrapped), len(fused)


def run_on_parts(family: str) -> tuple[dict, int]:
    """Gradients of a process's part of a row, and the number of fused layers."""
    with on_a_gpu():
        model, parallel, row = make(family).train(), SequenceParallel(2), batch(0)
        inputs = shard_batch(row, parallel.rank, 2, parallel=parallel)
        with recorded(model) as (fused, called):
            loss = model(**inputs, num_items_in_batch=targets_of(row)).loss
        loss.backward()
        # The router and the gate of the shared expert are called.
        assert all(name.endswith("gate") for name in called), called
        return gradients(model), len(fused)


class ShardedTrainingTest(unittest.TestCase):
    @parameterized.expand(
        [("ddp", "qwen3_5"), ("fsdp2", "qwen3_5"), ("fsdp2_resharded", "qwen3_next"), ("fsdp2_resharded", "experts")]
        + [("ddp", "float8"), ("fsdp2_resharded", "float8")]
    )
    def test_equals_one_process(self, kind, family):
        model = make(family)
        loss = sum(model(**batch(rank), use_cache=False).loss for rank in LENGTHS) / 2
        loss.backward()
        expected = gradients(model)
        for found, fused in run_once(run, 2, kind, family):
            self.assertTrue(fused > 10 or family in ("experts", "float8"))
            self.assertEqual(found.keys(), expected.keys())
            self.assertLess(total_relative_error(found, expected), 1e-5)

    @parameterized.expand(["qwen3_5", "experts"])
    def test_parts_of_a_row(self, family):
        model = make(family).train()
        model(**batch(0), use_cache=False, num_items_in_batch=targets_of(batch(0))).loss.backward()
        expected = gradients(model)
        (first, fused), (second, _) = run_once(run_on_parts, 2, family)
        self.assertTrue(fused > 10 or family == "experts")
        total = {name: first[name] + second[name] for name in expected}
        self.assertLess(total_relative_error(total, expected), 1e-5)
