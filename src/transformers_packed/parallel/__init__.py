"""Sequence parallelism: several processes compute one packed row. Each process holds a part of its tokens."""

import warnings
from importlib import import_module
from typing import Any

from .groups import SequenceParallel
from .layers import ops_for
from .losses import gather_loss_tensors
from .shard import RowShard, shard_batch


__all__ = ["RowShard", "SequenceParallel", "gather_loss_tensors", "ops_for", "shard_batch"]


def __getattr__(name: str) -> Any:
    if name in ("SequenceParallelPlan", "plan_sequence_parallel"):
        home = "transformers_packed.data.planning.memory"
        warnings.warn(f"{__name__}.{name} has moved to {home}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
