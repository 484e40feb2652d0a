"""Handling of samples longer than a row, and the argument checks that planners and datasets share."""

from numbers import Integral
from typing import Any, Literal, get_args

from ..errors import input_error


Overlong = Literal["error", "truncate", "split", "drop"]
TruncationSide = Literal["right", "left"]
# What happened to samples that were too long, by action.
FATES = {"truncate": "truncated", "split": "split", "drop": "dropped"}


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise a `ValueError` unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise input_error(f"{name} as a whole number of at least {least}", repr(value))


def check_settings(max_length: int, overlong: str, truncation_side: str) -> None:
    """Raise a `ValueError` for a bad row length, overlong action or truncation side."""
    check_count("max_length", max_length)
    for name, value, choice in (
        ("overlong", overlong, Overlong),
        ("truncation_side", truncation_side, TruncationSide),
    ):
        if value not in get_args(choice):
            raise input_error(f"{name} {' or '.join(map(repr, get_args(choice)))}", repr(value))


def longest_tree(max_length: int, overlong: str) -> int | None:
    """The most tokens of a tree of samples, which cannot be cut. `None` if longer ones are dropped."""
    return None if overlong == "drop" else max_length


def overlong_pieces(length: int, max_length: int, overlong: str, truncation_side: str) -> list[tuple[int, int]]:
    """The start and length of each document made from a sample."""
    if length <= max_length:
        return [(0, length)]
    if overlong == "truncate":
        return [(0 if truncation_side == "right" else length - max_length, max_length)]
    if overlong == "split":
        return [(start, min(max_length, length - start)) for start in range(0, length, max_length)]
    return []
