"""Functions on one sample that the collator and the datasets share."""

from collections.abc import Mapping
from typing import Any

from ..boundaries import TOKEN_TYPES, VISION_KINDS


__all__ = ["IGNORED_LABEL", "TOKEN_TYPES", "VISION_COLUMNS", "VISION_GRIDS", "cut_sample", "has_items"]

# The label of a token without loss.
IGNORED_LABEL = -100
VISION_GRIDS = tuple(grid for _, _, grid in VISION_KINDS.values())
# Their first dimension counts patches or images. It may happen to equal a sample's length.
VISION_COLUMNS = tuple(name for _, *names in VISION_KINDS.values() for name in names)


def has_items(dataset: Any) -> bool:
    """Whether a dataset has indices and a length. A stream has neither."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


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
    return {
        name: column[cut] if name not in VISION_COLUMNS and _per_token(column, total) else column
        for name, column in sample.items()
    }


def _per_token(column: Any, length: int) -> bool:
    shape: tuple = (len(column),) if isinstance(column, list | tuple) else getattr(column, "shape", ())
    return len(shape) > 0 and shape[0] == length
