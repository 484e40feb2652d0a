"""Layers that compute rows in segments under DDP and FSDP2, and the error in a process that has a part of a row."""

import unittest

import torch
from common.processes import run_once
from common.sharded import wrapped_by
from mixins.lora import all_linear, builtin_model
from mixins.model import packed_batch
from parameterized import parameterized
from torch import distributed

from transformers_packed import patch_model
from transformers_packed.models.versions import can_cut_rows
from transformers_packed.parallel import SequenceParallel, shard_batch


LENGTHS = {0: [90, 1, 70], 1: [200, 5]}


def make_batch(rank: int) -> dict:
    return packed_batch([torch.arange(length) % 80 + 1 + rank for length in LENGTHS[rank]]) | {"use_cache": False}


def run(kind: str, lora: bool) -> float:
    """Return the relative difference between the gradients of rows in segments and of whole rows."""
    model = patch_model(all_linear("qwen3_5") if lora else builtin_model("qwen3_5")).double().train()
    inner = model.get_base_model() if lora else model
    inner.activation_checkpointing_enable({"use_reentrant": False})
    wrapped, found = wrapped_by(kind, model), []
    for options in ({"use_reentrant": False}, {"segment_tokens": 64}):
        inner.activation_checkpointing_enable(options)
        for _ in range(2):
            model.zero_grad()
            wrapped(**make_batch(distributed.get_rank())).loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        gradients = [x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for x in gradients]
        found.append(torch.cat([x.flatten() for x in gradients]))
    return float((found[1] - found[0]).norm() / found[0].norm())


def run_part() -> str:
    model = patch_model(builtin_model("qwen3_5")).train()
    model.activation_checkpointing_enable({"segment_tokens": 64})
    parallel = SequenceParallel(2)
    try:
        model(**shard_batch(make_batch(1), parallel.rank, 2, parallel=parallel))
    except ValueError as error:
        return str(error)
    return ""


@unittest.skipUnless(can_cut_rows(), "needs Transformers 5.24")
class SegmentsTest(unittest.TestCase):
    @parameterized.expand([("ddp", False), ("ddp", True), ("fsdp2", True), ("fsdp2_resharded", False)])
    def test_equals_the_whole_row(self, kind, lora):
        for difference in run_once(run, 2, kind, lora):
            self.assertLess(difference, 1e-12)

    def test_a_part_of_a_row(self):
        for message in run_once(run_part, 2):
            expected = "segment_tokens does not support a part of a row. Train without sequence parallelism."
            self.assertEqual(message, expected)
