"""The rows that training makes of a dataset: their lengths and numbers of documents, before it starts."""

from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset

from ..models.cuda_graphs import graph_length
from .dataset import sampled_lengths


_TYPICAL_DOCUMENT = 512
# The share of batches that graphs serve.
_SERVED = 0.95


class Rows(NamedTuple):
    """The rows that a model gets in training.

    A graph serves rows of up to `max_length` tokens, a multiple of 64. A typical row has `tokens` in `documents`, and the
    longest one `longest` tokens. Rows have from `fewest` to `most` documents.
    """

    max_length: int
    tokens: int
    documents: int
    longest: int
    fewest: int
    most: int


def rows_of(
    dataset: Any, batch: int, packed: bool, max_length: int | None = None, order: str = "random"
) -> Rows | None:
    """Return the rows of a dataset, or `None` if their length is unknown.

    Packed rows are full. Their documents are the median of the plan, or one per 512 tokens. Batches of single samples are
    those of an epoch in the `order` that `train_sampling_strategy` names.

    Args:
        dataset (`Any`):
            Samples or packed rows.
        batch (`int`):
            Samples or packed rows per batch.
        packed (`bool`):
            Whether the dataset has packed rows.
        max_length (`int`, *optional*):
            The length of the packed rows of a stream that does not tell it.
        order (`str`, *optional*, defaults to `"random"`):
            `"random"`, `"sequential"` or `"group_by_length"`.
    """
    stream = isinstance(dataset, IterableDataset)
    if not stream and not (dataset and len(dataset)):
        return None
    if packed:
        return _of_packed_rows(dataset, batch, max_length, stream)
    if stream:
        return None
    lengths = sampled_lengths(dataset)
    if order == "group_by_length":
        lengths = np.sort(lengths)
    elif order != "sequential":
        lengths = np.random.default_rng(0).permutation(lengths)
    sums = np.add.reduceat(lengths, np.arange(0, len(lengths), batch))
    served, typical = np.quantile(sums, [_SERVED, 0.5], method="higher").tolist()
    documents = min(batch, len(lengths))
    return Rows(graph_length(served), max(typical, documents), documents, int(sums.max()), documents, documents)


def _of_packed_rows(dataset: Any, batch: int, max_length: int | None, stream: bool) -> Rows | None:
    plan = getattr(dataset, "plan", None)
    if plan is not None:
        length = plan.max_length
    elif stream:
        length = getattr(dataset, "max_length", None) or max_length
    else:
        length = int(sampled_lengths(dataset).max())
    if length is None:
        return None
    counts = np.array([max(length // _TYPICAL_DOCUMENT, 1)]) if plan is None else plan.documents_per_row
    documents = [int(f(counts)) * batch for f in (np.median, np.min, np.max)]
    return Rows(graph_length(length * batch), length * batch, documents[0], length * batch, *documents[1:])
