"""What a patch is, and the list of them."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .source import Edited


PATCHES = Path(__file__).parent / "patches"
# In the order in which they are applied together: dispatch-by-device adapts what the patches before it have put in.
NAMES = (
    "collator-return-cu-seqlens",
    "gdn-conv-cu-seqlens",
    "gdn-torch-path-packed",
    "dispatch-by-device",
    "kda-cu-seqlens",
    "forward-kwargs",
    "granitemoehybrid-position-ids",
    "composite-use-cache",
)


@dataclass(frozen=True)
class Patch:
    """A change of Transformers.

    Args:
        title (`str`):
            The title of a pull request.
        summary (`str`):
            The problem in a sentence.
        problem (`str`):
            What is wrong, and for whom.
        change (`str`):
            What the patch does, and what it leaves as it is.
        families (`str`):
            The models that it is for.
        issues (`tuple[str]`):
            Issues and pull requests upstream that it belongs to.
        reproduction (`str`):
            A script that shows it in what it prints or raises, before and after.
        apply (`Callable`):
            Makes the edits, or raises `TargetChanged` or `AlreadyFixed`.
        beside (`str`):
            Where the tests belong in Transformers' repository.
    """

    title: str
    summary: str
    problem: str
    change: str
    families: str
    issues: tuple[str, ...]
    reproduction: str
    apply: Callable[[Edited], None]
    beside: str


def module_name(name: str) -> str:
    return name.replace("-", "_")


def load(name: str) -> Patch:
    return importlib.import_module(f"{__package__}.patches.{module_name(name)}").PATCH


def file_of_tests(name: str) -> Path:
    return PATCHES / f"test_{module_name(name)}.py"
