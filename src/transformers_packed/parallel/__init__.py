"""Sequence parallelism: several processes compute one packed row, each a part of its tokens."""

from .groups import SequenceParallel
from .losses import gather_loss_tensors
from .shard import RowShard, shard_batch


__all__ = ["RowShard", "SequenceParallel", "gather_loss_tensors", "shard_batch"]
