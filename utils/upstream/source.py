"""A copy of Transformers (a checkout, an unpacked sdist or the installed package), and edits of it in memory."""

import difflib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import libcst as cst

from .edits import TargetChanged, callers, edit


# The path of the package in the repository, and in every diff.
PREFIX = "src/transformers"
# The line length in Transformers' ruff settings.
LINE_LENGTH = 119


@cache
def parse(text: str) -> cst.Module:
    return cst.parse_module(text)


class Source:
    """The package of a copy of Transformers.

    Args:
        path (`str` or `Path`, *optional*):
            A checkout, an unpacked sdist, or the package itself; by default the installed package.
    """

    def __init__(self, path: str | Path | None = None):
        if path is None:
            spec = importlib.util.find_spec("transformers")
            if spec is None or spec.origin is None:
                raise SystemExit("upstream_patch: Transformers is not installed; name a checkout with --transformers.")
            path = Path(spec.origin).parent
        candidates = [Path(path), Path(path) / PREFIX, Path(path) / "transformers"]
        found = [p for p in candidates if (p / "__init__.py").is_file() and (p / "models").is_dir()]
        if not found:
            raise SystemExit(
                f"upstream_patch: expected a checkout of Transformers, an unpacked sdist or the package, got {path}."
            )
        self.package = found[0].resolve()
        version = re.search(r'^__version__ = "([^"]+)"', (self.package / "__init__.py").read_text("utf-8"), re.M)
        self.version = version[1] if version else "unknown"

    def read(self, path: str) -> str:
        try:
            return (self.package / path).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise TargetChanged(f"expected a file {path}") from None

    def models_with(self, text: str) -> list[str]:
        """List the modular and modeling files that contain a text."""
        files = [f for kind in ("modular", "modeling") for f in (self.package / "models").glob(f"*/{kind}_*.py")]
        return sorted(f.relative_to(self.package).as_posix() for f in files if text in f.read_text(encoding="utf-8"))

    def copy_to(self, folder: Path, texts: dict[str, str]) -> Path:
        """Copy the package to `folder/transformers` with some files replaced. Uses hard links where possible."""

        def link(source, target):
            try:
                os.link(source, target)
            except OSError:
                shutil.copy2(source, target)

        package = folder / "transformers"
        shutil.copytree(self.package, package, copy_function=link)
        for path, text in texts.items():
            # Writing in place would change the original, which is a hard link to the same file.
            (package / path).unlink()
            (package / path).write_text(text, encoding="utf-8")
        return package


@cache
def formatted(text: str) -> str:
    """Format a text in the style of Transformers."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", str(LINE_LENGTH), "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True, check=True).stdout


class Edited:
    """The edited files of a source. Several patches may edit the same file in turn."""

    def __init__(self, source: Source):
        self.source = source
        self.texts: dict[str, str] = {}

    def read(self, path: str) -> str:
        return self.texts.get(path) or self.source.read(path)

    def edit(self, path: str, change: Callable[[cst.Module], cst.Module]) -> None:
        try:
            text = change(parse(self.read(path))).code
        except TargetChanged as error:
            raise TargetChanged(f"{path}: {error}") from None
        if text == self.read(path):
            raise TargetChanged(f"{path}: nothing to change")
        self.texts[path] = text

    def edit_callers(self, function: str, change: Callable[[cst.FunctionDef], cst.FunctionDef]) -> None:
        """Apply `change` to each method of a model that calls a function."""
        files = self.source.models_with(f"{function}(\n")
        found = [(file, path) for file in files for path in callers(parse(self.read(file)), function)]
        if not found:
            raise TargetChanged(f"no layer calls {function}")
        for file, path in found:
            self.edit(file, lambda module, path=path: edit(module, path, change))

    def format(self) -> None:
        """Format the edited files whose originals are formatted as by the installed ruff."""
        for path, text in self.texts.items():
            original = self.source.read(path)
            if formatted(original) == original:
                self.texts[path] = formatted(text)

    def diff(self) -> str:
        """Create a unified diff against the source for `git apply`, with paths from the root of the repository."""
        lines: list[str] = []
        for path, text in sorted(self.texts.items()):
            name = f"{PREFIX}/{path}"
            old, new = (t.splitlines(keepends=True) for t in (self.source.read(path), text))
            lines += [f"diff --git a/{name} b/{name}\n", *difflib.unified_diff(old, new, f"a/{name}", f"b/{name}")]
        return "".join(lines)


def changed_lines(diff: str) -> list[str]:
    """List the added and removed lines of a diff, with their sign."""
    return [line for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
