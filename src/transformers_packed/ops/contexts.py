"""Lay out a row of tokens with those that each document continues in front of it, for functions of windows of tokens."""

import torch

from ..boundaries import SequenceBoundaries
from ..shared_prompts import SharedPrompts


def with_contexts(
    tokens: torch.Tensor, boundaries: SequenceBoundaries, width: int, fill: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Insert the `width` tokens before each document: the last ones of its ancestors if it has any, otherwise `fill`.

    Args:
        tokens (`torch.LongTensor` of shape `[1, T]`):
            Token ids of a packed row.
        boundaries ([`SequenceBoundaries`]):
            Its `N` documents.
        width (`int`):
            Tokens before each document.
        fill (`int`):
            The token before the first one of a document or of a prompt.

    Returns:
        `tuple`: the row with contexts `[1, T + N * width]`, and the places of its own tokens in it `[T]`.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed import SequenceBoundaries
    >>> from transformers_packed.ops.contexts import with_contexts
    >>> row, places = with_contexts(torch.tensor([[5, 6, 7]]), SequenceBoundaries.from_lengths([1, 2]), 2, 0)
    >>> row.tolist(), places.tolist()
    ([[0, 0, 5, 0, 0, 6, 7]], [2, 5, 6])

    ```
    """
    row = tokens[0]
    layout = boundaries.layout if isinstance(boundaries, SharedPrompts) else None
    if layout is not None:
        boundaries = layout.runs
    documents = torch.arange(boundaries.num_documents, device=tokens.device)
    contexts = row.new_full((len(documents), width), fill)
    if layout is not None and layout.continued:
        tails = layout.tails(width).rows.unflatten(0, (-1, width))
        # Before the first token of a tree, `tails` repeats that one.
        repeated = torch.nn.functional.pad(tails[:, 1:] == tails[:, :-1], (0, 1))
        contexts[layout.continued] = row[tails].masked_fill(repeated, fill)
    places = torch.arange(len(row), device=row.device) + width * (boundaries.seq_idx[0] + 1)
    before = (boundaries.cu_seqlens[:-1] + width * documents)[:, None] + torch.arange(width, device=row.device)
    result = row.new_empty(len(row) + contexts.numel())
    return result.index_copy(0, places, row).index_copy(0, before.flatten(), contexts.flatten())[None], places
