"""Apply a causal function without support for document boundaries to each document separately.

Documents of similar length form a right-padded batch. The function runs on each batch, and the results are joined to a
row again. Padding follows the real tokens, so it cannot affect the outputs of a causal function at these tokens. It is
zero, so it spreads neither values nor NaNs. Everything is differentiable: the gradients of one document's outputs with
respect to another document's inputs are exactly zero, because no operation joins them.

The cost is one gather and one scatter of the row, and one call of the function per bucket of lengths. At most a fifth
of a bucket is padding (documents of up to 64 tokens share one bucket). The layout is computed once per batch on the
host and cached in [`SequenceBoundaries`]. Within [`batch_invariant`], each document is a batch of its own without padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..boundaries import CHUNK_SIZE, SequenceBoundaries
from .invariance import is_batch_invariant


@dataclass(frozen=True)
class LengthBucket:
    """Documents of similar length that form a right-padded batch `[num_documents, length, ...]`.

    `slots` (`torch.LongTensor` `[tokens]`) is the index of each of the `tokens` real tokens in the flattened batch, or
    `None` if every document fills its row and needs no padding.
    """

    num_documents: int
    length: int
    tokens: int
    slots: torch.Tensor | None


@dataclass(frozen=True)
class BucketLayout:
    """The split of a packed row into [`LengthBucket`]s.

    `order` (`torch.LongTensor` `[T]`) lists the tokens of the row in bucket order, and `inverse` is its inverse
    permutation. Both are `None` if the documents of the row are already in bucket order.
    """

    buckets: tuple[LengthBucket, ...]
    order: torch.Tensor | None
    inverse: torch.Tensor | None


# Cost of one more batch in tokens of padding, measured on a CPU, where the fallback runs. Lengths are compared in
# chunks of the gated delta rule.
_BATCH_COST = 128


def per_document(
    function: Callable[..., Any], *tensors: torch.Tensor, boundaries: SequenceBoundaries, once: bool = False
) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
    """Apply a causal `function` to each document of a packed row.

    Args:
        function (`Callable`):
            Takes one tensor `[documents, length, ...]` for each of `tensors`. Returns a tensor
            `[documents, length, ...]` whose entry `t` depends only on the entries up to `t`, or a tuple of such
            tensors and `None`. It is called once per bucket of documents of similar length, padded with zeros on the
            right.
        *tensors (`torch.Tensor` of shape `[1, T, ...]`):
            Packed rows, the inputs of the function.
        boundaries ([`SequenceBoundaries`]):
            Document boundaries of the rows.
        once (`bool`, *optional*, defaults to `False`):
            Whether to pad all documents to the longest one, and call the function once for each row. Within
            [`batch_invariant`], it has no effect.

    Returns:
        `torch.Tensor` of shape `[1, T, ...]`: the packed results, in a tuple if the function returns a tuple.

    Raises:
        `ValueError`: a tensor is not a row of `T` tokens.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed import SequenceBoundaries
    >>> from transformers_packed.ops import per_document
    >>> row = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0]])
    >>> per_document(lambda x: x.cumsum(1), row, boundaries=SequenceBoundaries.from_lengths([2, 3])).tolist()
    [[1.0, 2.0, 1.0, 2.0, 3.0]]

    ```
    """
    boundaries.check_kind("a function of each document")
    for tensor in tensors:
        boundaries.check_row(tensor, "tensors", "...")
    device = boundaries.cu_seqlens.device
    alone = is_batch_invariant()
    layout = boundaries.derived(
        f"per_document {once=} {alone=}", lambda: _layout(boundaries.lengths, device, once, alone)
    )
    return in_batches(function, [row[0] for row in tensors], layout)


def in_batches(
    function: Callable[..., Any],
    rows: Sequence[torch.Tensor],
    layout: BucketLayout,
    rest: Callable[..., torch.Tensor] | None = None,
) -> Any:
    """Apply `function` to the batches of a layout, and return its results as packed rows `[1, T, ...]`.

    `rows` have the shape `[T, ...]`. `rest` computes the tokens that follow those of the batches, without padding.
    """
    sizes = [bucket.tokens for bucket in layout.buckets]
    if rest is not None:
        sizes.append(len(rows[0]) - sum(sizes))
    ordered = [_take(row, layout.order, layout.inverse) for row in rows]
    chunks = list(zip(*(row.split(sizes) for row in ordered), strict=True))
    pieces = [
        _without_padding(function(*(to_batch(chunk, bucket) for chunk in of_bucket)), bucket)
        for bucket, of_bucket in zip(layout.buckets, chunks, strict=False)
    ]
    if rest is not None:
        pieces.append(rest(*chunks[-1]))
    if not isinstance(pieces[0], tuple):
        return _to_row(pieces, layout)
    return tuple(_to_row(column, layout) for column in zip(*pieces, strict=True))


def _without_padding(result: Any, bucket: LengthBucket) -> Any:
    """Return the tokens of a batch, or of each batch in a tuple."""
    if isinstance(result, tuple):
        return tuple(_without_padding(batch, bucket) for batch in result)
    if result is None:
        return None
    return _take(result.flatten(0, 1), bucket.slots)


def _to_row(pieces: Sequence[Any], layout: BucketLayout) -> torch.Tensor | None:
    """Concatenate the tokens of the batches in the order of the row."""
    if pieces[0] is None:
        return None
    packed = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
    return _take(packed, layout.inverse, layout.order)[None]


class _Take(torch.autograd.Function):
    """`x.index_select(0, index)` for indices that differ. Autograd would add up gradients as if they could be equal."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, index, inverse):
        return x.index_select(0, index)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, index, inverse = inputs
        ctx.save_for_backward(index, inverse)
        ctx.save_for_forward(index)
        ctx.rows = len(x)

    @staticmethod
    def jvp(ctx, tangent, *_):
        return tangent.index_select(0, ctx.saved_tensors[0])

    @staticmethod
    def backward(ctx, gradient):
        index, inverse = ctx.saved_tensors
        if inverse is not None:
            return _Take.apply(gradient, inverse, index), None, None
        return gradient.new_zeros(ctx.rows, *gradient.shape[1:]).index_copy(0, index, gradient), None, None


def _take(x: torch.Tensor, index: torch.Tensor | None, inverse: torch.Tensor | None = None) -> torch.Tensor:
    """Return the rows of `x` at `index`, or all. `inverse` is the inverse permutation if `index` is one."""
    return x if index is None else _Take.apply(x, index, inverse)


def to_batch(chunk: torch.Tensor, bucket: LengthBucket) -> torch.Tensor:
    """Lay out the tokens `[tokens, ...]` of a bucket as a batch `[documents, length, ...]`, padded with zeros."""
    shape = (bucket.num_documents, bucket.length)
    if bucket.slots is None:
        return chunk.unflatten(0, shape)
    padded = chunk.new_zeros((bucket.num_documents * bucket.length, *chunk.shape[1:]))
    return padded.index_copy(0, bucket.slots, chunk).unflatten(0, shape)


def _layout(lengths: list[int], device: torch.device, once: bool, alone: bool) -> BucketLayout:
    """Compute the layout of a row as padded batches, once per row on the host."""
    if alone:
        groups = [[document] for document in range(len(lengths))]
    else:
        groups = [list(range(len(lengths)))] if once else _group_by_length(lengths)
    return layout_of(lengths, device, [(group, max(lengths[document] for document in group)) for group in groups])


def layout_of(lengths: list[int], device: torch.device, groups: list[tuple[list[int], int]]) -> BucketLayout:
    """Return the layout of a row for groups of documents, each with the length to which they are padded.

    The tokens of documents in no group come last, in the order of the row.
    """
    buckets, documents_in_order = [], []
    for group, longest in groups:
        group = sorted(group)
        documents_in_order += group
        size = [lengths[document] for document in group]
        slots = None
        if min(size) < longest:
            places = [torch.arange(n) + row * longest for row, n in enumerate(size)]
            slots = torch.cat(places).to(device, non_blocking=True)
        buckets.append(LengthBucket(len(group), longest, sum(size), slots))
    grouped = set(documents_in_order)
    documents_in_order += [document for document in range(len(lengths)) if document not in grouped]
    if documents_in_order == list(range(len(lengths))):
        return BucketLayout(tuple(buckets), None, None)
    tokens = torch.arange(sum(lengths)).split(lengths)
    order = torch.cat([tokens[document] for document in documents_in_order])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return BucketLayout(tuple(buckets), order.to(device, non_blocking=True), inverse.to(device, non_blocking=True))


def _group_by_length(lengths: list[int]) -> list[list[int]]:
    """Group documents, longest first, to minimize the total cost of padding each group to its longest document."""
    steps: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        steps.setdefault(-(-length // CHUNK_SIZE), []).append(document)
    sizes = sorted(steps, reverse=True)
    best = cheapest_groups(
        [len(steps[size]) for size in sizes],
        lambda begin, documents: documents * sizes[begin] * CHUNK_SIZE + _BATCH_COST,
    )
    return [
        [document for size in sizes[begin:end] for document in steps[size]] for begin, end in spans(best, len(sizes))
    ]


def cheapest_groups(numbers: Sequence[int], cost: Callable[[int, int], float]) -> list[tuple[float, int]]:
    """Cut a list of sizes, longest first, into consecutive groups of the lowest total cost.

    Args:
        numbers (`Sequence[int]`):
            Documents of each size.
        cost (`Callable`):
            Cost of a group by the index of its longest size and its number of documents.

    Returns:
        `list`: for each `i` from 0, the cost of the `i` longest sizes and the start of their last group, for
        [`spans`].
    """
    best: list[tuple[float, int]] = [(0, 0)]
    for end in range(1, len(numbers) + 1):
        options, documents = [], 0
        for begin in reversed(range(end)):
            documents += numbers[begin]
            options.append((best[begin][0] + cost(begin, documents), begin))
        best.append(min(options))
    return best


def spans(best: list[tuple[float, int]], end: int) -> list[tuple[int, int]]:
    """Return start and end of each group of the `end` longest sizes, by the result of [`cheapest_groups`]."""
    found = []
    while end:
        found.append((best[end][1], end))
        end = best[end][1]
    return found[::-1]
