"""Rows for two processes, and models that they train by DDP or FSDP2."""

import torch
from mixins.model import packed_batch
from torch import distributed
from torch.distributed.fsdp import fully_shard


LENGTHS = {0: [9, 1, 4, 6], 1: [12, 5, 2, 1]}


def batch(rank: int) -> dict:
    return packed_batch([torch.arange(1 + rank, n + 1 + rank) for n in LENGTHS[rank]], "cu_seqlens")


def targets_of(batch: dict) -> int:
    return int((batch["labels"][..., 1:] != -100).sum())


def wrapped_by(kind: str, model: torch.nn.Module) -> torch.nn.Module:
    """The model in `ddp`, or sharded by `fsdp2`, or by `fsdp2_resharded` after each forward of a layer."""
    if kind == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    mesh = distributed.init_device_mesh("cpu", (2,))
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module, mesh=mesh, reshard_after_forward=kind == "fsdp2_resharded")
    return fully_shard(model, mesh=mesh)
