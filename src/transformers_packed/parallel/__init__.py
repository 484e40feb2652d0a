"""Sequence parallelism: several processes compute one packed row, each a part of its tokens."""

from .groups import SequenceParallel
from .shard import RowShard, shard_batch


__all__ = ["RowShard", "SequenceParallel", "shard_batch"]
