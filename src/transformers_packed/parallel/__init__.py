"""Sequence parallelism: several processes compute one packed row, each a part of its tokens."""

from .groups import SequenceParallel
from .losses import gather_loss_tensors
from .plan import SequenceParallelPlan, plan_sequence_parallel
from .shard import RowShard, shard_batch


__all__ = [
    "RowShard",
    "SequenceParallel",
    "SequenceParallelPlan",
    "gather_loss_tensors",
    "plan_sequence_parallel",
    "shard_batch",
]
