"""Apply a causal function without support for document boundaries to each document separately.

Documents of similar length form a right-padded batch. The function runs on each batch, and the results are joined to a
row again. Padding follows the real tokens, so it cannot affect the outputs of a causal function at these tokens. It is
zero, so it spreads neither values nor NaNs. Everything is differentiable: the gradients of one document's outputs with
respect to another document's inputs are exactly zero, because no operation joins them.

The cost is one gather and one scatter of the row, and one call of the function per bucket of lengths. At most a fifth
of a bucket is padding (documents of up to 64 tokens share one bucket). The layout is computed once per batch on the
host and cached in [`SequenceBoundaries`].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..boundaries import CHUNK_SIZE, SequenceBoundaries
from ..errors import input_error


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
    function: Callable[..., Any], *tensors: torch.Tensor, boundaries: SequenceBoundaries
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
    boundaries.check_whole("Train this model without sequence parallelism.")
    for tensor in tensors:
        if tensor.ndim < 2 or tensor.shape[:2] != (1, boundaries.total_length):
            expected = f"tensors of shape [1, {boundaries.total_length}, ...], the packed row"
            raise input_error(expected, tuple(tensor.shape), "Pass tensors of the row that the boundaries describe.")
    layout = boundaries.derived("per_document", lambda: _layout(boundaries))
    sizes = [bucket.tokens for bucket in layout.buckets]
    ordered = [row[0] if layout.order is None else row[0].index_select(0, layout.order) for row in tensors]
    results = [
        function(*(to_batch(chunk, bucket) for chunk in chunks))
        for bucket, *chunks in zip(layout.buckets, *(row.split(sizes) for row in ordered), strict=True)
    ]
    if not isinstance(results[0], tuple):
        return _to_row(results, layout)
    columns = zip(*results, strict=True)
    return tuple(None if batches[0] is None else _to_row(batches, layout) for batches in columns)


def _to_row(batches: Sequence[torch.Tensor], layout: BucketLayout) -> torch.Tensor:
    """Concatenate the padded batches of the buckets, without padding, in the order of the row."""
    pieces = []
    for bucket, batch in zip(layout.buckets, batches, strict=True):
        flat = batch.flatten(0, 1)
        pieces.append(flat if bucket.slots is None else flat.index_select(0, bucket.slots))
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return (packed if layout.inverse is None else packed.index_select(0, layout.inverse))[None]


def to_batch(chunk: torch.Tensor, bucket: LengthBucket) -> torch.Tensor:
    """Lay out the tokens `[tokens, ...]` of a bucket as a batch `[documents, length, ...]`, padded with zeros."""
    shape = (bucket.num_documents, bucket.length)
    if bucket.slots is None:
        return chunk.unflatten(0, shape)
    padded = chunk.new_zeros((bucket.num_documents * bucket.length, *chunk.shape[1:]))
    return padded.index_copy(0, bucket.slots, chunk).unflatten(0, shape)


def _layout(boundaries: SequenceBoundaries) -> BucketLayout:
    """Compute the layout of a row as padded batches, once per row on the host."""
    lengths = boundaries.lengths
    return layout_of(
        boundaries, [(group, max(lengths[document] for document in group)) for group in _group_by_length(lengths)]
    )


def layout_of(boundaries: SequenceBoundaries, groups: list[tuple[list[int], int]]) -> BucketLayout:
    """Return the layout of a row for groups of documents, each with the length to which they are padded.

    The tokens of documents in no group come last, in the order of the row.
    """
    lengths, starts, device = boundaries.lengths, boundaries.cu_seqlens_cpu.tolist(), boundaries.cu_seqlens.device
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
    order = torch.cat([torch.arange(starts[d], starts[d + 1]) for d in documents_in_order])
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return BucketLayout(tuple(buckets), order.to(device, non_blocking=True), inverse.to(device, non_blocking=True))


def _group_by_length(lengths: list[int]) -> list[list[int]]:
    """Group documents, longest first, to minimize the total cost of padding each group to its longest document."""
    steps: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        steps.setdefault(-(-length // CHUNK_SIZE), []).append(document)
    sizes = sorted(steps, reverse=True)
    # best[i]: the cost of the i longest sizes, and the start of their last group.
    best = [(0, 0)]
    for end in range(1, len(sizes) + 1):
        options, documents = [], 0
        for begin in reversed(range(end)):
            documents += len(steps[sizes[begin]])
            options.append((best[begin][0] + documents * sizes[begin] * CHUNK_SIZE + _BATCH_COST, begin))
        best.append(min(options))
    groups, end = [], len(sizes)
    while end:
        begin = best[end][1]
        groups.append([document for size in sizes[begin:end] for document in steps[size]])
        end = begin
    return groups[::-1]
