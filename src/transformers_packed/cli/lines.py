"""Lines of the commands: how they tell a time, and which process prints them."""

import os
import sys
from collections.abc import Iterable


def say(line: str) -> None:
    """Print a line in the first of several processes."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(line, flush=True)


def tell(line: str) -> None:
    """Print a line of progress if someone watches a terminal. A report on standard output stays as it is."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def shortened(names: Iterable[str], most: int = 3) -> str:
    """The first names in alphabetical order, and dots for others."""
    names = sorted(names)
    return ", ".join(names if len(names) <= most else [*names[:most], "..."])


def duration(seconds: float) -> str:
    """A time in words, such as `40 s`, `3 min 5 s` or `2 h 7 min`."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
