"""Softmax attention on a part of a row: exchange tokens for heads, or gather all keys and values."""

from typing import Any

import torch

from .. import ops
from ..boundaries import SequenceBoundaries
from ..ops.attention import (
    attention_of_last_queries,
    attention_with_earlier_keys,
    kernel_for_earlier_keys,
)
from ..ops.dispatch import for_rows, ran
from .collectives import all_gather, all_to_all
from .groups import attention_method, check_methods
from .shard import RowShard


class _WithGroups:
    """An attention layer with another number of query heads per key head, for attention functions."""

    def __init__(self, module: torch.nn.Module, num_key_value_groups: int):
        self._module, self.num_key_value_groups = module, num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@for_rows(RowShard)
def attention(module, query, key, value, *, boundaries: RowShard, impl: str = "auto", **options):
    """[`ops.attention`] on a part of a row: query `[1, H, L, D]`, key and value `[1, HKV, L, D]`."""
    shard = boundaries
    size, heads, kv_heads = shard.size, query.shape[1], key.shape[1]
    # With "gather", the rank after the cut of a long document has most of the work and needs a kernel for earlier
    # keys.
    gather_is_even = not shard.is_cut_in_long_pieces and kernel_for_earlier_keys(module, query, **options) is not None
    if attention_method(size, heads, kv_heads, shard.processes.attention, gather_is_even) == "gather":
        return _by_gather(shard, module, query, key, value, impl, **options), None
    check_methods(size, "state", "heads", (heads, kv_heads), (0, 0))
    return _by_heads(shard, module, query, key, value, impl=impl, **options), None


def _by_heads(shard: RowShard, module, query, key, value, **options: Any) -> torch.Tensor:
    size, group = shard.size, shard.processes.group
    if key.shape[1] < size:
        # Each rank gets the key head of its query heads. The gradients of the copies are summed.
        key, value = (x.repeat_interleave(size // x.shape[1], dim=1) for x in (key, value))
    module = _WithGroups(module, query.shape[1] // key.shape[1])
    query, key, value = (all_to_all(x, 1, 2, group) for x in (query, key, value))
    output = ops.attention(module, query, key, value, None, boundaries=shard.row, **options)[0]
    return all_to_all(output, 1, 2, group)


def _by_gather(shard: RowShard, module, query, key, value, impl: str, **options: Any) -> torch.Tensor:
    # One exchange for keys and values. The used keys start with the first document, which may begin on an earlier
    # rank.
    begin, before = shard.start - shard.tokens_before, shard.tokens_before
    both = all_gather(torch.cat([key, value], dim=-1), 2, shard.processes.group)
    key, value = both[:, :, begin : shard.start + shard.total_length].split([key.shape[-1], value.shape[-1]], dim=-1)
    if not before:
        return ops.attention(module, query, key, value, None, boundaries=_pieces(shard, 0), impl=impl, **options)[0]
    if query.is_cuda:
        # Compute all pieces at once if a kernel supports it.
        lengths = {"boundaries": _pieces(shard, 0), "keys": _keys(shard)}
        output = attention_with_earlier_keys(module, query, key, value, **lengths, **options)
        if output is not None:
            return output
    ran("attention", "mask of earlier keys")
    first = shard.lengths[0]
    own = query[:, :, :first], *(x[:, :, : before + first] for x in (key, value))
    outputs = [attention_of_last_queries(module, *own, **options)]
    if shard.num_documents > 1:
        q, (k, v) = query[:, :, first:], (x[:, :, before + first :] for x in (key, value))
        outputs.append(ops.attention(module, q, k, v, None, boundaries=_pieces(shard, 1), impl=impl, **options)[0])
    return torch.cat(outputs, dim=1)


def _pieces(shard: RowShard, begin: int) -> SequenceBoundaries:
    """Return the boundaries of a row of only the pieces from `begin` on."""
    lengths, device = shard.lengths[begin:], shard.cu_seqlens.device
    return shard.derived(f"pieces from {begin}", lambda: SequenceBoundaries.from_lengths(lengths, device=device))


def _keys(shard: RowShard) -> SequenceBoundaries:
    """Return the boundaries of the keys. Those of the first piece include the earlier tokens of its document."""
    first, *others = shard.lengths
    lengths = [shard.tokens_before + first, *others]
    return shard.derived("keys", lambda: SequenceBoundaries.from_lengths(lengths, device=shard.cu_seqlens.device))
