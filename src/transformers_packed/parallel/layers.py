"""The ops of [`transformers_packed.ops`] that mix tokens, under the same names, for a part of a row."""

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
    """Return the module with the ops for these `boundaries`: [`transformers_packed.ops`], or this one for a shard."""
    return _OF_SHARDS if isinstance(boundaries, RowShard) else ops
