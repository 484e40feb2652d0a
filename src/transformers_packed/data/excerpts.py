"""A few short documents of a dataset, with which a set-up can be tried out before training."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch

from .dataset import PackingDataset
from .samples import (
    IGNORED_LABEL,
    VISION_COLUMNS,
    count_targets,
    cut_sample,
    documents_of,
    has_items,
    is_tree,
    real_sample,
    some_samples,
)
from .streaming import IterablePackingDataset


# Samples that are looked at, and the tokens before the first target of a document.
_LOOKED_AT, _CONTEXT = 16, 12
STREAM = "workers of the data loader read the stream of samples"


def excerpts(dataset: Any, lengths: tuple[int, ...]) -> tuple[list, str | None]:
    """A document for each of `lengths`, cut to as many tokens, or the reason why there are none.

    Each document has a target. The dataset may be inside those of accelerate, and have samples or packed rows.
    """
    dataset = source_of(dataset)
    if not has_items(dataset):
        return [], STREAM
    documents: list = []
    for document in chain.from_iterable(map(documents_of, some_samples(dataset, _LOOKED_AT))):
        if is_tree(document):
            return [], "samples have turns that branch. Check a batch with verify_packing"
        cut = cut_around_target(document, lengths[len(documents)])
        if len(cut["input_ids"]) > 1 and ("labels" not in cut or targets_of(cut)):
            documents.append(cut)
        if len(documents) == len(lengths):
            break
    return documents, None if len(documents) > 1 else "fewer than two samples have a target"


def source_of(dataset: Any) -> Any:
    """The dataset inside of those of accelerate and of those that pack."""
    while type(dataset).__module__.startswith("accelerate.") and hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    return dataset.dataset if isinstance(dataset, PackingDataset | IterablePackingDataset) else dataset


def cut_around_target(sample: Mapping[str, Any], length: int) -> Mapping[str, Any]:
    """At most `length` tokens of a sample around its first target. Images cannot be cut."""
    sample = real_sample(sample)
    if any(sample.get(name) is not None for name in VISION_COLUMNS) or len(sample["input_ids"]) <= length:
        return sample
    labels = np.asarray(sample.get("labels", sample["input_ids"]))
    targets = np.flatnonzero(labels != IGNORED_LABEL) if labels.ndim == 1 else np.zeros(1, int)
    start = max(int(targets[0]) - _CONTEXT, 0) if len(targets) else 0
    return cut_sample(sample, start, min(length, len(sample["input_ids"]) - start))


def targets_of(sample: Mapping[str, Any]) -> int:
    """The number of tokens of a sample that are targets, or 1 for a sample with one label."""
    return targets_in(np.asarray(sample.get("labels", []))[None])


def targets_in(labels: np.ndarray) -> int:
    """The number of targets in labels `[B, T]`, of which no token predicts the first, or in one label per sample `[B]`."""
    return count_targets(labels) if labels.ndim > 1 else int((labels != IGNORED_LABEL).sum())


def places_of(batch: Mapping[str, Any], documents: list) -> list[torch.Tensor] | None:
    """The indices of each document's tokens in the flattened batch, or `None` if a document is not in it."""
    rows = batch["input_ids"].tolist()
    flat, width = [token for row in rows for token in row], len(rows[0])
    places, cursor = [], 0
    for document in documents:
        ids = torch.as_tensor(document["input_ids"]).tolist()
        starts = (at for at in range(cursor, len(flat) - len(ids) + 1) if flat[at : at + len(ids)] == ids)
        start = next((at for at in starts if at // width == (at + len(ids) - 1) // width), None)
        if start is None:
            return None
        places.append(torch.arange(start, start + len(ids)))
        cursor = start + len(ids)
    return places
