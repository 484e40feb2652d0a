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
    "qwen-mtp-layers",
    "mtp-config-on-save",
)


@dataclass(frozen=True)
class Patch:
    """A change of Transformers, and the texts of its pull request."""

    title: str
    summary: str  # the problem in one sentence
    problem: str  # the error and the affected users
    change: str  # the effect of the patch, and the behaviour that it keeps
    families: str  # the models that it fixes
    issues: tuple[str, ...]  # related issues and pull requests upstream
    reproduction: str  # a script whose output or error shows the problem before the patch and the fix after it
    apply: Callable[[Edited], None]  # makes the edits, or raises `TargetChanged` or `AlreadyFixed`
    beside: str  # the place of the tests in the repository of Transformers


def module_name(name: str) -> str:
    return name.replace("-", "_")


def load(name: str) -> Patch:
    return importlib.import_module(f"{__package__}.patches.{module_name(name)}").PATCH


def file_of_tests(name: str) -> Path:
    return PATCHES / f"test_{module_name(name)}.py"
