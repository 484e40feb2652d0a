"""Sequence parallelism: several processes compute one packed row. Each process holds a part of its tokens."""

from . import attention, gated_delta  # noqa: F401  the forms of the ops for parts of a row
from .groups import SequenceParallel
from .losses import gather_loss_tensors
from .shard import RowShard, shard_batch


__all__ = ["RowShard", "SequenceParallel", "gather_loss_tensors", "shard_batch"]
