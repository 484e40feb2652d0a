"""PEFT's adapters in fused layers with DDP, FSDP2 and sequence parallelism, in two processes on a CPU."""

import unittest
from unittest import mock

import torch
from common.processes import run_once
from mixins.lora import all_linear, recorded
from mixins.model import packed_batch, total_relative_error
from parameterized import parameterized
from torch import distributed
from torch.distributed.fsdp import fully_shard

from transformers_packed import patch_model
from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers_packed.parallel import SequenceParallel, shard_batch


LENGTHS = {0: [9, 1, 4, 6], 1: [12, 5, 2, 1]}


def batch(rank: int) -> dict:
    return packed_batch([torch.arange(1 + rank, n + 1 + rank) for n in LENGTHS[rank]], "cu_seqlens")


def on_a_gpu():
    """The layers choose what they fuse on a GPU, in torch forms."""
    triton = "transformers_packed.ops.backends.triton"
    return mock.patch.multiple(triton, on_gpu=lambda tensor: True, problem=lambda: "are left out here")


def adapted() -> torch.nn.Module:
    return patch_model(all_linear("qwen3_5"))


def gradients(model) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[name.removeprefix("module.")] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return found


def run(kind: str) -> tuple[dict, int]:
    """Gradients of the mean loss of both processes' rows, and the number of fused layers."""
    with on_a_gpu():
        model = adapted()
        if kind == "ddp":
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
        else:
            mesh = distributed.init_device_mesh("cpu", (2,))
            for module in model.modules():
                if isinstance(module, Qwen3_5DecoderLayer):
                    fully_shard(module, mesh=mesh, reshard_after_forward=kind == "fsdp2_resharded")
            wrapped = fully_shard(model, mesh=mesh)
        with recorded(model) as (fused, called):
            loss = wrapped(**batch(distributed.get_rank()), use_cache=False).loss
        loss.backward()
        assert not called, called
        return gradients(wrapped), len(fused)


def run_on_parts() -> tuple[dict, int]:
    """Gradients of a process's part of a row, and the number of fused layers."""
    with on_a_gpu():
        model, parallel, row = adapted().train(), SequenceParallel(2), batch(0)
        inputs = shard_batch(row, parallel.rank, 2, parallel=parallel)
        with recorded(model) as (fused, called):
            loss = model(**inputs, num_items_in_batch=targets(row)).loss
        loss.backward()
        assert not called, called
        return gradients(model), len(fused)


def targets(row: dict) -> int:
    return int((row["labels"][..., 1:] != -100).sum())


class ShardedTrainingTest(unittest.TestCase):
    @parameterized.expand([("ddp",), ("fsdp2",), ("fsdp2_resharded",)])
    def test_equals_one_process(self, kind):
        model = adapted()
        loss = sum(model(**batch(rank), use_cache=False).loss for rank in LENGTHS) / 2
        loss.backward()
        expected = gradients(model)
        for found, fused in run_once(run, 2, kind):
            self.assertGreater(fused, 10)
            self.assertEqual(found.keys(), expected.keys())
            self.assertLess(total_relative_error(found, expected), 1e-5)

    def test_parts_of_a_row(self):
        model = adapted().train()
        model(**batch(0), use_cache=False, num_items_in_batch=targets(batch(0))).loss.backward()
        expected = gradients(model)
        (first, fused), (second, _) = run_once(run_on_parts, 2)
        self.assertGreater(fused, 10)
        total = {name: first[name] + second[name] for name in expected}
        self.assertLess(total_relative_error(total, expected), 1e-5)


if __name__ == "__main__":
    unittest.main()
