"""The ops that look at other tokens, for a part of a row: as in [`transformers_packed.ops`], by the same names."""

import sys
from types import ModuleType

from .. import ops
from ..boundaries import SequenceBoundaries
from .attention import attention
from .gated_delta import causal_conv1d, causal_conv1d_qkv, gated_delta_rule
from .shard import RowShard


__all__ = ["attention", "causal_conv1d", "causal_conv1d_qkv", "gated_delta_rule", "ops_for"]

_OF_SHARDS = sys.modules[__name__]


def ops_for(boundaries: SequenceBoundaries | None) -> ModuleType:
    """What a layer computes these `boundaries` with: the ops, or for a part of a row those of this module."""
    return _OF_SHARDS if isinstance(boundaries, RowShard) else ops
