"""Read what an attention mask says: which tokens are real, and which documents they form.

A 2-D mask `[B, T]` marks real tokens with 1 and padding with 0. A 4-D mask `[B, 1, T, T]` says for each token to which
others it attends. Layers other than attention cannot follow it, so it must be a causal block for each document.
"""

from typing import Any
from weakref import ReferenceType, ref

import torch
from transformers.utils.import_utils import is_tracing

from ..boundaries import SequenceBoundaries
from ..boundary_checks import restarts_in
from ..errors import input_error
from ..foreign import is_exporting


# Masks of floats are added to the scores. No score is as large as this.
_BLOCKED = -1e4


def is_padding(mask: Any) -> bool:
    """Whether a mask has the shape of one that marks padding."""
    return isinstance(mask, torch.Tensor) and mask.ndim == 2


# The last mask that was read, its version and the result. The models in a model get the same mask.
_last: tuple[ReferenceType[torch.Tensor], int, torch.Tensor | None] | None = None


def read_padding(mask: torch.Tensor) -> torch.Tensor | None:
    """Read a mask `[B, T]` of any integers or floats to the host, as bool: whether a token is real.

    Returns `None` if its values cannot be read (in graphs and transforms), or if a mask of floats is added to scores.
    Reading the same mask again costs no host sync.

    Raises:
        `ValueError`: the mask has other numbers. As a padding mask, they would mean one document.
    """
    global _last
    # A late import: the ops import torch's compiler.
    from ..ops.autograd import is_transformed

    if mask.is_meta or is_tracing(mask) or is_transformed():
        return None
    # Tensors created in inference mode have no version.
    version = -1 if mask.is_inference() else mask._version
    if _last is not None and version >= 0 and _last[0]() is mask and _last[1] == version:
        return _last[2]
    numbers = mask.to("cpu")
    real = numbers == 1
    others = numbers[~(real | (numbers == 0))]
    if others.numel() and (not mask.is_floating_point() or bool((others > 0).any())):
        raise _other_numbers("attention_mask of 0 and 1", numbers, others[0].item())
    _last = ref(mask), version, None if others.numel() else real
    return _last[2]


def _other_numbers(expected: str, numbers: torch.Tensor, got: object) -> ValueError:
    """The error of a mask with numbers that describe documents, as some collators for FlashAttention have it."""
    if len(numbers) == 1:
        numbers = numbers[0]
    if numbers.ndim == 1 and not numbers[:1].any() and bool((numbers.diff() > 0).all()):
        fix = "Pass them as cu_seq_lens_q without a mask."
        return input_error(expected, "cumulative lengths of documents", fix)
    return input_error(expected, got, "If they number documents, pass them as seq_idx without a mask.")


def read_documents(
    mask: Any, rows: int, length: int, mixes: bool = True
) -> tuple[torch.Tensor, SequenceBoundaries | None] | None:
    """Read a mask `[B or 1, 1, T, T]` whose real tokens attend to the tokens of their document up to themselves.

    The mask is bool, or has 0 where a token attends and very negative numbers elsewhere. No real token attends to
    padding. The tokens to which padding attends are arbitrary: all, none, or those before it, as Transformers' masks
    have them. Only one small tensor is copied to the host.

    Returns:
        `tuple`: whether a token is real, bool `[B, T]` on the host; and the boundaries on the host if the row has
            several documents. A run of padding is then a document too. `None` if the mask has another pattern and
            attention is the only layer that mixes tokens, as `mixes` tells.

    Raises:
        `ValueError`: one of several rows has several documents, or the mask has another pattern.
    """
    if isinstance(mask, torch.Tensor) and mask.ndim == 1:
        # One for each document, or for each token. No model reads it, but some would fail without a reason.
        got = f"{mask.dtype} {tuple(mask.shape)}"
        raise _other_numbers("an attention_mask [B, T] of padding", mask.to("cpu"), got)
    found = None if is_exporting() else _blocks(mask, rows, length)
    if found is None and mixes:
        expected = "an attention_mask [B, T] of padding, or [B, 1, T, T] with a causal block for each document"
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        fix = "Pass documents as cu_seqlens or seq_idx, without a mask. Only attention would apply another mask."
        raise input_error(expected, f"another pattern ({got})", fix)
    if found is None:
        return None
    real, starts = found
    if not (starts.sum(1) > 1).any():
        return real.expand(rows, length), None
    if rows > 1:
        expected, got = "one row if a mask separates documents in it", f"{rows} rows"
        raise input_error(expected, got, "Set the batch size to 1, or pass one row of cu_seqlens.")
    numbers = torch.where(real, starts, real.roll(1, 1)).cumsum(1)
    boundaries = SequenceBoundaries.from_seq_idx(numbers - numbers[:, :1])
    return real, boundaries if real[0, -1] else boundaries.with_padding(boundaries.lengths[-1])


def _blocks(mask: Any, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Whether each token is real and whether it starts a document, bool `[B or 1, T]`, or `None` for other patterns."""
    if not isinstance(mask, torch.Tensor) or mask.shape not in {(n, 1, length, length) for n in (1, rows)}:
        return None
    if mask.dtype == torch.bool:
        attends, known = mask[:, 0], mask.new_ones(())
    elif mask.is_floating_point():
        attends, known = mask[:, 0] == 0, ((mask == 0) | (mask < _BLOCKED)).all()
    else:
        return None
    # Of several maxima, argmax returns the first.
    first, from_end = (x.byte().argmax(-1) for x in (attends, attends.flip(-1)))
    itself = attends.diagonal(dim1=1, dim2=2)
    facts = torch.stack([first, length - 1 - from_end, attends.sum(-1), itself.long(), known.expand_as(first).long()])
    first, last, count, itself, known = facts.to("cpu")
    index = torch.arange(length)
    # A token that attends to all is padding, unless it is the last one of a document as long as the row.
    real = itself.bool() & (count < length)
    before = real.roll(1, 1) & (first.roll(1, 1) == first)
    before[:, 0] = False
    real[:, -1] |= (count[:, -1] == length) & (before[:, -1] | (length == 1))
    starts = first == index
    block = (last == index) & (count == index - first + 1) & (starts | before)
    fits = bool(known.all()) and bool(block[real].all()) and bool(real.any(1).all())
    return (real, starts & real) if fits else None


def restarts_with(boundaries: SequenceBoundaries, real: torch.Tensor, position_ids: torch.Tensor) -> bool:
    """Whether position ids `[R, 1, T]` restart in each document of a mask. Those of padding may be any.

    They may also count over the whole row. Otherwise a `ValueError` is raised.
    """
    both = real[0, 1:] & real[0, :-1]
    restarts, complete = restarts_in(position_ids.to("cpu"))
    restarts, starts = restarts[0] & both, (boundaries.seq_idx[0].diff() != 0) & both
    if bool(restarts.any()) and not (restarts if complete else restarts | starts).equal(starts):
        expected = "position_ids that restart where attention_mask separates documents"
        raise input_error(expected, "other documents", "Leave one of them out.")
    return bool(restarts.any()) or not complete
