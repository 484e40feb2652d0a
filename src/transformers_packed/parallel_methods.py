"""How processes may share a row. Nothing is imported here, because the options of the command line are made of it."""

from typing import Literal


# How processes share a layer of each kind.
DeltaRuleMethod = Literal["state", "heads"]
AttentionMethod = Literal["heads", "gather"]


def is_size(size: object) -> bool:
    """Whether this is a number of processes. `True` is not, although it counts as 1."""
    return type(size) is int and size >= 1
