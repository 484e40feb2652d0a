"""What both packing datasets do with one sample: measure it, cut it."""

from collections.abc import Mapping
from typing import Any

from transformers.utils import logging

from ..errors import input_error


logger = logging.get_logger(__name__)

OVERLONG = ("error", "truncate", "split", "drop")
SIDES = ("right", "left")
# Their first dimension counts patches or images; it may equal a sample's length by accident.
_VISION_COLUMNS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


def check_settings(call: str, max_length: int, overlong: str, truncation_side: str) -> None:
    """Check the arguments that both datasets share."""
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 1:
        raise input_error("max_length of at least 1 token", f"{max_length!r}", "Pass the tokens of a row.")
    for name, value, choices in (("overlong", overlong, OVERLONG), ("truncation_side", truncation_side, SIDES)):
        if value not in choices:
            raise input_error(f"{name} to be one of {choices}", f"{value!r}", "Choose one.")


def overlong_pieces(length: int, max_length: int, overlong: str, truncation_side: str) -> list[tuple[int, int]]:
    """Start and length of each document that becomes of a sample."""
    if length <= max_length:
        return [(0, length)]
    if overlong in ("drop", "error"):
        return []
    if overlong == "truncate":
        return [(0 if truncation_side == "right" else length - max_length, max_length)]
    return [(start, min(max_length, length - start)) for start in range(0, length, max_length)]


def cut_sample(sample: Mapping[str, Any], start: int, length: int) -> Mapping[str, Any]:
    """Tokens `start` to `start + length` of a sample, in every column with one value per token.

    Those are the lists, tuples, arrays and tensors of the length of `input_ids`. Other columns stay as they are, and a
    sample of which nothing is cut is returned itself.

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
        name: column[cut] if name not in _VISION_COLUMNS and _per_token(column, total) else column
        for name, column in sample.items()
    }


def _per_token(column: Any, length: int) -> bool:
    if isinstance(column, list | tuple):
        return len(column) == length
    shape = getattr(column, "shape", ())
    return len(shape) > 0 and shape[0] == length
