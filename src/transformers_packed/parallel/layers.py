"""The ops of [`transformers_packed.ops`] that mix tokens, under the same names, for a part of a row.

[`ops_for`] also knows the ops for rows with shared prompts.
"""

import sys
from types import ModuleType

from .. import ops
from ..boundaries import SequenceBoundaries
from ..ops import prompts
from ..shared_prompts import SharedPrompts
from .attention import attention
from .gated_delta import causal_conv1d, causal_conv1d_qkv, gated_delta_rule
from .shard import RowShard


__all__ = ["attention", "causal_conv1d", "causal_conv1d_qkv", "gated_delta_rule", "ops_for"]

_OF_SHARDS = sys.modules[__name__]


def ops_for(boundaries: SequenceBoundaries | None) -> ModuleType:
    """Return the module with the ops for these `boundaries`.

    It is [`transformers_packed.ops`], this one for a shard, or `ops.prompts` for a row with shared prompts.
    """
    if isinstance(boundaries, SharedPrompts):
        return prompts
    return _OF_SHARDS if isinstance(boundaries, RowShard) else ops
