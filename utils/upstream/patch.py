"""The definition of a patch, and the list of all patches."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .source import Edited


PATCHES = Path(__file__).parent / "patches"
# In the order of application: dispatch-by-device adapts the code that earlier patches insert.
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
            The title of the pull request.
        summary (`str`):
            The problem in one sentence.
        problem (`str`):
            The error and the affected users.
        change (`str`):
            The effect of the patch, and the behaviour that it keeps.
        families (`str`):
            The models that the patch fixes.
        issues (`tuple[str]`):
            Related issues and pull requests upstream.
        reproduction (`str`):
            A script whose output or error shows the problem before the patch and the fix after it.
        apply (`Callable`):
            The function that makes the edits, or raises `TargetChanged` or `AlreadyFixed`.
        beside (`str`):
            The place of the tests in the repository of Transformers.
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
