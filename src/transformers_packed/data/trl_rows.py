"""Rows of TRL's trainer for asynchronous GRPO, whose samples share tokens.

`trl.experimental.async_grpo.packing.TreeRow.pack()` returns the segments of a trie, depth first, and for each segment the
places of all keys from the first one to its own. Tokens count as the same if the next ones are, too. The last token of a
segment therefore has the same target in all that continue it, and the row has shifted labels.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..shared_prompts import SharedPrompts


# The columns that describe the segments, and those with one value per token.
_SEGMENTS = ("tree_cu_seqlens_q", "tree_cu_seqlens_k", "tree_kv_index")
_TOKENS = ("input_ids", "position_ids", "shift_labels")
_FIX = "Pass the row unchanged."


def is_trl_row(element: Any) -> bool:
    """Whether a batch element is such a row."""
    return isinstance(element, Mapping) and element.get(_SEGMENTS[0]) is not None


def read_trl_row(row: Mapping[str, Any]) -> tuple[SequenceBoundaries, list[int], dict[str, torch.Tensor]]:
    """Return the documents of a row, the document that each one continues, or -1, and the other columns of the row.

    Args:
        row (`Mapping`):
            `input_ids`, `position_ids` and `shift_labels` `[N]`, `tree_kv_index` `[K]`, and `tree_cu_seqlens_q` and
            `tree_cu_seqlens_k` `[S+1]` for `S` segments. Other columns, those of the terms of the loss, are unchanged.

    Returns:
        `tuple`: [`SequenceBoundaries`] of the segments, their parents, and the columns, with tokens as `[1, N]`.
            `labels` equals `shift_labels`, for code that checks whether a batch has labels.

    Raises:
        `ValueError`: a tensor is missing or has another shape, or the segments are no trees.
    """
    for name in (*_SEGMENTS, *_TOKENS):
        if not isinstance(row.get(name), torch.Tensor) or row[name].ndim != 1:
            got = f"shape {tuple(row[name].shape)}" if isinstance(row.get(name), torch.Tensor) else "none"
            raise input_error(f"{name} of TreeRow.pack(), a flat tensor", got, _FIX)
    queries, keys, places = (row[name].long() for name in _SEGMENTS)
    boundaries = SequenceBoundaries.from_cu_seqlens(queries, total_length=row["input_ids"].numel())
    SequenceBoundaries.from_cu_seqlens(keys, total_length=places.numel())
    if keys.shape != queries.shape:
        got = f"{keys.numel() - 1} paths"
        raise input_error(f"a path of keys for each of the {boundaries.num_documents} segments", got, _FIX)
    before = keys.diff() - queries.diff()
    # The last key before those of the segment itself.
    last = places[(keys[:-1] + before - 1).clamp(min=0)]
    parent_of = (torch.searchsorted(queries, last, right=True) - 1).masked_fill(before <= 0, -1).tolist()
    positions = (SharedPrompts.of(boundaries, parent_of) if max(parent_of) >= 0 else boundaries).position_ids[0]
    if not torch.equal(positions, row["position_ids"]):
        raise input_error("position_ids that count on from the segment before", "others", _FIX)
    columns = {name: x for name, x in row.items() if not name.startswith("tree_")}
    columns |= {name: row[name][None] for name in _TOKENS}
    return boundaries, parent_of, columns | {"labels": columns["shift_labels"]}
