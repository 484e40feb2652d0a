"""The documents of packed rows: as a dataset of samples, and as a padded batch.

Evaluation with predictions and the comparison with padded training need what a packed row stands for.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from ..boundaries import SequenceBoundaries
from .collator import DataCollatorWithFlattening
from .dataset import PackingDataset
from .samples import IGNORED_LABEL, documents_of, has_items, is_row, some_samples
from .streaming import IterablePackingDataset
from .tables import columns_of, with_lists


def is_packed(dataset: Any) -> bool:
    """Whether the dataset already has packed rows: lists of samples, or samples in one with their lengths."""
    if isinstance(dataset, PackingDataset | IterablePackingDataset):
        return True
    if not has_items(dataset):
        # A stream of datasets may know its columns.
        return "seq_lengths" in (getattr(dataset, "column_names", None) or ())
    columns = columns_of(dataset)
    if columns is not None:
        return "seq_lengths" in columns and bool(with_lists(dataset, columns["seq_lengths"]))
    # Those of a concatenation differ at its ends.
    samples = dataset if isinstance(dataset, list | tuple) else some_samples(dataset, 2)
    return any(isinstance(sample, list) or is_row(sample) for sample in samples)


def first_sample(dataset: Any) -> Mapping[str, Any] | None:
    """The first sample of a dataset, or `None` for a stream and an empty dataset."""
    if isinstance(dataset, PackingDataset):
        dataset = dataset.dataset
    return next(iter(some_samples(dataset, 1)), None)


def unpacked(dataset: Any) -> Any:
    """The documents of a dataset of packed rows, or the dataset itself if it has samples."""
    if has_items(dataset):
        return Documents(dataset) if is_packed(dataset) else dataset
    # Each element of a stream tells whether it is a row.
    return DocumentStream(dataset)


class Documents(Dataset):
    """The documents of packed rows, in the order of the rows.

    Args:
        rows (`Sequence`):
            Rows of [`PackingDataset`] (lists of samples), or of [`pack_dataset`] (with their `seq_lengths`).
    """

    def __init__(self, rows: Any):
        # Tables and plans have the numbers of documents without reading a sample.
        if (plan := getattr(rows, "plan", None)) is not None:
            counts = plan.documents_per_row
        elif hasattr(rows, "column_names"):
            counts = [1 if lengths is None else len(lengths) for lengths in rows["seq_lengths"]]
        else:
            counts = [sum(1 for _ in documents_of(row)) for row in rows]
        self.rows, self.ends = rows, np.cumsum(counts)
        self._last: tuple[int, list] = -1, []

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def __getitem__(self, index: int) -> Any:
        row = int(np.searchsorted(self.ends, index, side="right"))
        if self._last[0] != row:
            # Documents are read in order, so that each row is read once.
            self._last = row, list(documents_of(self.rows[row]))
        return self._last[1][index - int(self.ends[row])]


class DocumentStream(IterableDataset):
    """The documents of a stream of packed rows, or of samples, which are documents themselves."""

    def __init__(self, rows: IterableDataset):
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(map(documents_of, self.rows))


class PaddedSamples:
    """Collates samples, or the samples of packed rows, to a batch `[N, L]` that is padded on the right.

    Columns are those of [`DataCollatorWithFlattening`]. Samples with one label each stay a packed row, because
    classifiers return one result per document.

    Args:
        token_columns (`Sequence[str]`, *optional*):
            As in [`DataCollatorWithFlattening`].
        pad_token_id (`int`, *optional*, defaults to 0):
            The token at padding.
    """

    def __init__(self, token_columns: tuple[str, ...] = (), pad_token_id: int | None = None):
        self.flatten = DataCollatorWithFlattening(token_columns=token_columns, on_leak="ignore")
        self.pad_token_id = pad_token_id or 0

    def __call__(self, features: list) -> dict[str, Any]:
        row = self.flatten(features)
        if row["labels"].ndim == 1:
            return row
        boundaries = SequenceBoundaries.from_position_ids(row.pop("position_ids"))
        values = {"input_ids": self.pad_token_id, "labels": IGNORED_LABEL}
        per_token = {name: x for name, x in row.items() if x.shape[:2] == (1, boundaries.total_length)}
        padded = {name: boundaries.unpack(x, padding_value=values.get(name, 0)) for name, x in per_token.items()}
        return row | padded | {"attention_mask": boundaries.unpack(torch.ones_like(row["input_ids"]))}
