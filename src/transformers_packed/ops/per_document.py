"""Run a causal function that knows nothing of document boundaries on each document alone.

The packed row is cut into its documents, documents of similar length become one right-padded batch, the function runs
on each batch, and the results are laid end to end again. Padding stands after the real tokens, so a causal function
cannot see it, and it is zero, so it can spread neither values nor NaNs. Everything is differentiable: gradients of
one document's outputs with respect to another document's inputs are exactly zero, because no operation joins them.

Cost: one gather and one scatter of the row, one call of the function per bucket of lengths, and at most a fifth of
padding in a bucket (documents of up to 64 tokens share one). The layout is computed once per batch, on the host, and
kept by [`SequenceBoundaries`].
"""

from collections.abc import Callable

import torch

from ..boundaries import LengthBucket, SequenceBoundaries
from ..errors import input_error


def per_document(
    function: Callable[..., torch.Tensor], *tensors: torch.Tensor, boundaries: SequenceBoundaries
) -> torch.Tensor:
    """Apply a causal `function` to each document of a packed row.

    Args:
        function (`Callable`):
            Takes one tensor `[documents, length, ...]` for each of `tensors` and returns a tensor
            `[documents, length, ...]` whose entry `t` depends on the entries up to `t` only. It is called once per
            bucket of documents of similar length, padded on the right with zeros.
        tensors (`torch.Tensor` of shape `[1, T, ...]`):
            The packed rows that the function reads.
        boundaries ([`SequenceBoundaries`]):
            Where the documents are.

    Returns:
        `torch.Tensor` of shape `[1, T, ...]`: the packed results.

    Raises:
        `ValueError`: a tensor is not one row of `T` tokens.

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
    for tensor in tensors:
        if tensor.ndim < 2 or tensor.shape[:2] != (1, boundaries.total_length):
            raise input_error(
                "per_document",
                expected=f"tensors of shape [1, {boundaries.total_length}, ...], the packed row",
                got=f"{tuple(tensor.shape)}",
                fix="Pass the tensors of the row that the boundaries describe.",
            )
    layout = boundaries.bucket_layout
    sizes = [bucket.tokens for bucket in layout.buckets]
    ordered = [row[0] if layout.order is None else row[0].index_select(0, layout.order) for row in tensors]
    pieces = []
    for bucket, *chunks in zip(layout.buckets, *(row.split(sizes) for row in ordered), strict=True):
        batch = function(*(_to_batch(chunk, bucket) for chunk in chunks))
        flat = batch.flatten(0, 1)
        pieces.append(flat if bucket.slots is None else flat.index_select(0, bucket.slots))
    packed = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return (packed if layout.inverse is None else packed.index_select(0, layout.inverse))[None]


def _to_batch(chunk: torch.Tensor, bucket: LengthBucket) -> torch.Tensor:
    shape = (bucket.num_documents, bucket.length)
    if bucket.slots is None:
        return chunk.unflatten(0, shape)
    padded = chunk.new_zeros((bucket.num_documents * bucket.length, *chunk.shape[1:]))
    return padded.index_copy(0, bucket.slots, chunk).unflatten(0, shape)
