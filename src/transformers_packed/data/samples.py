"""Functions on one sample that the collator and the datasets share.

A sample consists of its real tokens. Tokens with an `attention_mask` of 0 are padding: they count nowhere, and no row
holds them. Every reader of samples applies [`real_sample`] first.

A column that is `None` is absent ([`present`]), as in a table of several kinds of samples, which has all of their columns.
This excludes `input_ids` and `labels`: all tokens of a sample without labels are targets, so a missing value is an error.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, compress
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset
from transformers.utils import logging

from ..boundaries import TOKEN_TYPES, VISION_KINDS
from ..errors import input_error


logger = logging.get_logger(__name__)

# The label of a token without loss.
IGNORED_LABEL = -100
VISION_GRIDS = tuple(grid for _, _, grid in VISION_KINDS.values())
# Their first dimension counts patches or images.
VISION_COLUMNS = tuple(name for _, *names in VISION_KINDS.values() for name in names)
MASK = "attention_mask"
# The samples that continue a sample (`data/trees.py`), those of a group, and the tokens that these continue.
TURNS, ANSWERS, PREFIX = "turns", "answers", "prefix"
# Columns that are never absent by a missing value.
NEEDED = ("input_ids", "labels")
# The columns that divide rows and trees.
DIVIDING_COLUMNS = ("seq_lengths", TURNS, ANSWERS, PREFIX)
# Columns that always have one value per token. Labels may also be one number.
TOKEN_COLUMNS = ("input_ids", "labels", MASK, TOKEN_TYPES)
_ROWS = "Pass a row of several documents as its samples, or with a column seq_lengths."
_REMOVE = "Remove such samples from the dataset."


def has_items(dataset: Any) -> bool:
    """Whether a dataset has indices and a length. A stream may have a length, and torch's declare indices."""
    indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    return indexed and not isinstance(dataset, IterableDataset)


def spread(samples: int, number: int) -> list[int]:
    """The indices of `number` evenly spaced samples, or of all if there are fewer."""
    return np.unique(np.linspace(0, samples - 1, min(samples, number)).astype(int)).tolist()


def some_samples(dataset: Any, number: int) -> Iterable:
    """Up to `number` samples of a dataset with items, and none of a stream.

    Only training reads a stream: nothing tells whether a second pass would return the samples of the first one. What
    depends on the samples is therefore decided by the first batch, or for each sample.
    """
    return (dataset[index] for index in spread(len(dataset), number)) if has_items(dataset) else ()


def present(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns that a sample has. If none is missing, the sample itself is returned.

    Example:

    ```python
    >>> from transformers_packed.data.samples import present
    >>> present({"input_ids": [6, 7], "attention_mask": None, "labels": None})
    {'input_ids': [6, 7], 'labels': None}

    ```
    """
    if all(column is not None or name in NEEDED for name, column in sample.items()):
        return sample
    return {name: column for name, column in sample.items() if column is not None or name in NEEDED}


def documents_of(element: Any) -> Iterator[Mapping[str, Any]]:
    """The samples of one batch element: a sample or tree, or a row (a list of them, or samples joined by `seq_lengths`)."""
    if isinstance(element, list | tuple):
        for sample in element:
            yield from documents_of(sample)
    elif is_row(element):
        columns = {name: column for name, column in present(element).items() if name != "seq_lengths"}
        lengths, total = as_list(element["seq_lengths"]), len(columns["input_ids"])
        if sum(lengths) != total:
            fix = "Pass the rows unchanged, as pack_dataset returns them."
            raise input_error(f"seq_lengths that sum to the row's {total} tokens", sum(lengths), fix)
        for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
            yield cut_sample(columns, start, length)
    else:
        yield present(element) if isinstance(element, Mapping) else element


def is_row(element: Any) -> bool:
    """Whether a batch element is a row of samples joined by `seq_lengths`."""
    names = "seq_lengths", "input_ids"
    return isinstance(element, Mapping) and all(element.get(name) is not None for name in names)


def is_tree(sample: Mapping[str, Any]) -> bool:
    """Whether a sample is a tree or a group of samples. Other columns "turns", as of messages, are the user's."""
    if sample.get("input_ids") is None:
        return sample.get(ANSWERS) is not None and sample.get(PREFIX) is not None
    turns = as_list(sample.get(TURNS))
    return isinstance(turns, list | tuple) and any(map(_is_turn, turns))


def _is_turn(value: Any) -> bool:
    # Lists of tokens are turns in a wrong form, which is an error.
    return "input_ids" in value if isinstance(value, Mapping) else isinstance(as_list(value), list | tuple)


def count_targets(labels: np.ndarray) -> int:
    """The number of tokens with loss in labels `[..., tokens]`. No token predicts the first."""
    return int((labels[..., 1:] != IGNORED_LABEL).sum())


def real_sample(sample: Mapping[str, Any], index: int | None = None) -> Mapping[str, Any]:
    """A sample without its masked tokens, in every column with one value per token, and without missing columns.

    If there are none, the sample itself is returned. A warning notes masked tokens with a label, or between real ones.

    Args:
        sample (`Mapping`):
            `input_ids` and any other columns. Without `attention_mask`, all tokens are real.
        index (`int`, *optional*):
            The number of the sample, for error messages.

    Raises:
        `ValueError`: `input_ids` or the mask is missing, has another shape or length, or the mask has a value other
            than 0 and 1.

    Example:

    ```python
    >>> from transformers_packed.data.samples import real_sample
    >>> real_sample({"input_ids": [0, 6, 7], "attention_mask": [0, 1, 1], "source": "a book"})
    {'input_ids': [6, 7], 'attention_mask': [1, 1], 'source': 'a book'}

    ```
    """
    sample = present(sample)
    mask = _padding_mask(sample, index)
    if mask is None:
        return sample
    _note_masked_targets(sample.get("labels"), mask)
    real = np.array([position for position, keep in enumerate(mask) if keep], np.int64)
    _note_gap(real)

    def kept(column: Any) -> Any:
        return type(column)(compress(column, mask)) if isinstance(column, list | tuple) else column[real]

    return {name: kept(x) if _per_token(name, x, len(mask)) else x for name, x in sample.items()}


def real_length(sample: Mapping[str, Any], index: int | None = None) -> int:
    """The number of real tokens of a sample. Raises the errors of [`real_sample`]."""
    mask = _padding_mask(present(sample), index)
    return len(sample["input_ids"]) if mask is None else mask.count(1)


def _padding_mask(sample: Mapping[str, Any], index: int | None) -> Any:
    """The mask of a sample as a list or tuple, or `None` if all tokens are real."""
    where = place(index)
    refuse_tree(index, sample)
    if "input_ids" not in sample:
        fix = "Set remove_unused_columns=False if Trainer removes columns that you need."
        raise input_error(f"input_ids in {where}", f"columns {sorted(sample)}", fix)
    refuse_missing(index, {name: sample[name] for name in ("input_ids", MASK) if name in sample}, values=False)
    tokens = sample["input_ids"]
    if len(tokens) and np.ndim(tokens[0]):
        raise input_error(
            f"input_ids [tokens] in {where}", "nested input_ids", "Remove the batch dimension: input_ids[0]."
        )
    if MASK not in sample:
        return None
    mask = as_list(sample[MASK])
    if len(mask) != len(tokens):
        raise input_error(f"{MASK} with the length of input_ids, {len(tokens)}, in {where}", len(mask))
    real = mask.count(1)
    if real == len(mask):
        return None
    if real + mask.count(0) != len(mask):
        refuse_missing(index, {MASK: mask})
        other = next(value for value in mask if value != 0 and value != 1)
        raise input_error(f"{MASK} of 0 and 1 in {where}", other, f"Real tokens have 1. {_ROWS}")
    return mask


def _note_masked_targets(labels: Any, mask: Any) -> None:
    labels = as_list(labels)
    if isinstance(labels, list | tuple) and any(
        not keep and label != IGNORED_LABEL for label, keep in zip(labels, mask, strict=False)
    ):
        logger.warning_once(
            "Tokens with an attention_mask of 0 have labels. They are not part of the packed row, so the loss differs "
            "from that of a padded batch. Set these labels to -100 to make both equal."
        )


def _note_gap(real: np.ndarray) -> None:
    if len(real) and real[-1] - real[0] >= len(real):
        logger.warning_once(
            "A sample has an attention_mask of 0 between tokens. They are removed, so the tokens after them have other "
            "positions than in a padded batch. Mask padding alone to make both equal, and set other labels to -100."
        )


def cut_sample(sample: Mapping[str, Any], start: int, length: int) -> Mapping[str, Any]:
    """Cut a sample to the tokens `start` to `start + length`, in every column with one value per token.

    These are the lists, tuples, arrays and tensors with the length of `input_ids`. Other columns are unchanged. If no
    token is removed, the sample itself is returned.

    Example:

    ```python
    >>> from transformers_packed.data.samples import cut_sample
    >>> cut_sample({"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "source": "a book"}, 1, 2)
    {'input_ids': [6, 7], 'labels': [6, 7], 'source': 'a book'}

    ```
    """
    total = len(sample["input_ids"])
    if start == 0 and length == total:
        return sample
    cut = slice(start, start + length)
    return {name: column[cut] if _per_token(name, column, total) else column for name, column in sample.items()}


def _per_token(name: str, column: Any, length: int) -> bool:
    shape: tuple = (len(column),) if isinstance(column, list | tuple) else getattr(column, "shape", ())
    return name not in VISION_COLUMNS and len(shape) > 0 and shape[0] == length


def has_tokens(index: int, sample: Mapping[str, Any]) -> bool:
    """Whether a sample has a real token. Without one it is skipped, but not if it has a label of its own."""
    if len(sample["input_ids"]):
        return True
    if "labels" in sample and is_number(sample["labels"]):
        raise input_error(f"at least one token in {place(index)}, which has a label of its own", "none", _REMOVE)
    return False


def check_lengths(index: int | None, sample: Mapping[str, Any], names: tuple[str, ...] = ()) -> None:
    """Raise a `ValueError` if per-token columns, also those in `names`, do not have the length of `input_ids`."""
    sample = present(sample)
    columns = {name: sample[name] for name in (*TOKEN_COLUMNS, *names) if name in sample}
    refuse_missing(index, columns, values=False)
    length = len(columns["input_ids"])
    for name, column in columns.items():
        if not (name == "labels" and is_number(column)) and len(column) != length:
            raise input_error(f"{name} with the length of input_ids, {length}, in {place(index)}", len(column))


def check_sample(index: int, sample: Mapping[str, Any]) -> None:
    """Raise a `ValueError` that names the sample and the reason if the collator cannot use it."""
    real = real_sample(sample, index)
    check_lengths(index, sample)
    sample = present(sample)
    refuse_missing(index, {name: sample[name] for name in TOKEN_COLUMNS if name in sample})
    has_tokens(index, real)
    check_one_document(index, real)


def check_one_document(index: int, sample: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if the position ids `[tokens]` of a sample restart."""
    if sample.get("position_ids") is None:
        return
    position_ids = as_list(sample["position_ids"])
    refuse_missing(index, {"position_ids": position_ids})
    if np.ndim(position_ids) == 1 and len(breaks := np.flatnonzero(np.diff(position_ids) != 1)):
        got = f"{position_ids[breaks[0] + 1]} after {position_ids[breaks[0]]}"
        raise input_error(f"position_ids of one document in {place(index)}", got, _ROWS)


def refuse_tree(index: int | None, sample: Mapping[str, Any]) -> None:
    """Raise a `ValueError` for a tree or a group."""
    if is_tree(sample):
        fix = "Pack trees and groups with PackingDataset."
        raise input_error(f"one document in {place(index)}", "samples that continue others", fix)


def refuse_missing(index: int | None, columns: Mapping[str, Any], values: bool = True) -> None:
    """Raise a `ValueError` for a column that is `None`, or with `values` for one that holds `None`."""
    for name, column in columns.items():
        column = as_list(column) if values else column
        if column is None or values and isinstance(column, list | tuple) and None in column:
            got = "None" if column is None else f"None at token {column.index(None)}"
            raise input_error(f"{name} without missing values in {place(index)}", got, _REMOVE)


def place(index: int | None) -> str:
    """A sample in words."""
    return "the sample" if index is None else f"sample {index}"


def as_list(column: Any) -> Any:
    """Arrays and tensors as lists, anything else unchanged."""
    return column.tolist() if hasattr(column, "tolist") else column


def is_number(column: Any) -> bool:
    """Whether a column holds one value per sample."""
    return not isinstance(column, list | tuple) and np.ndim(column) == 0
