"""Sequence parallelism: several processes compute one packed row. Each process holds a part of its tokens."""

from .groups import SequenceParallel
from .layers import ops_for
from .losses import gather_loss_tensors
from .shard import RowShard, shard_batch


__all__ = ["RowShard", "SequenceParallel", "gather_loss_tensors", "ops_for", "shard_batch"]
