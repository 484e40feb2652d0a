"""Checkpoints in host memory, and those that keep attention, with DDP, FSDP2, sequence parallelism and adapters."""

import unittest

import torch
from common.late_copies import on_a_cpu
from common.processes import run_once
from common.sharded import batch, wrapped_by
from mixins.lora import all_linear, builtin_model
from parameterized import parameterized
from torch import distributed

from transformers_packed import patch_model
from transformers_packed.models.versions import can_select_checkpoints
from transformers_packed.parallel import SequenceParallel, shard_batch


def run(kind: str, lora: bool) -> int:
    """Check that gradients are the same to the bit, and return the number of copies."""
    model = patch_model(all_linear("qwen3_5") if lora else builtin_model("qwen3_5")).train()
    inner = model.get_base_model() if lora else model
    inner.activation_checkpointing_enable({"use_reentrant": False})
    if kind == "parts":
        parallel = SequenceParallel(2)
        wrapped, row = model, shard_batch(batch(0), parallel.rank, 2, parallel=parallel)
    else:
        wrapped, row = wrapped_by(kind, model), batch(distributed.get_rank()) | {"use_cache": False}

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        wrapped(**row).loss.backward()
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for x in found]

    def check() -> None:
        actual = gradients()
        assert len(actual) == len(expected) > 0
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))

    expected = gradients()
    inner.activation_checkpointing_enable({"keep_attention": True})
    check()
    with on_a_cpu(64):
        inner.activation_checkpointing_enable({"use_reentrant": False}, offload=True)
        for _ in range(2):
            check()
        (copies,) = inner.host_checkpoints._copies.values()
        assert len(copies.free) == inner.config.num_hidden_layers
        return copies.copies


@unittest.skipUnless(can_select_checkpoints(), "needs Transformers 5.23")
class OffloadTest(unittest.TestCase):
    @parameterized.expand([("ddp", False), ("fsdp2", True), ("fsdp2_resharded", False), ("parts", True)])
    def test_changes_no_bit(self, kind, lora):
        for copies in run_once(run, 2, kind, lora):
            # Of each layer to the host and back, but for the last one, in two steps.
            layers = builtin_model("qwen3_5").config.num_hidden_layers
            self.assertEqual(copies, 2 * (2 * layers - 1))
