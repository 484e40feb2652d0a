"""The import order of the package's layers, and the absence of hidden lookups."""

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from fnmatch import fnmatch
from pathlib import Path


ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "transformers_packed"

# Imports of our own modules inside functions: (file, imported module), with the reason.
LATE_IMPORTS = (
    ("ops/*", "ops.backends.*"),  # kernels of optional packages
    ("cli/*", "*"),  # the parser runs before torch is imported
    ("training/losses.py", "ops"),  # the compiler of torch, for one kind of head
    ("models/trl_head.py", "ops"),  # the compiler of torch, for models that a trainer of TRL has changed
    ("models/packed_model.py", "ops.offload"),  # the compiler of torch, for checkpoints in host memory
    ("models/packed_model.py", "ops.attention"),  # the compiler of torch, for checkpoints that keep attention
    ("models/quantized_weights.py", "ops.dequantization"),  # the compiler of torch, for experts in 4 bit
    ("models/inputs.py", "ops.dispatch"),  # the compiler of torch, for compiled models
    ("models/masks.py", "ops.autograd"),  # the compiler of torch, for masks in transforms
)
# Ways to read state that was not passed as an argument.
HIDDEN = {
    "_getframe",
    "currentframe",
    "f_locals",
    "__closure__",
    "cell_contents",
    "getclosurevars",
    "__code__",
    "co_consts",
}
# Each exception has a comment in the code that explains why no simpler way works.
EXCEPTIONS = {
    ("models/replacements.py", "__class__"),
    ("models/releases.py", "getclosurevars"),
    ("models/releases.py", "__code__"),
    *(("training/state.py", name) for name in ("__closure__", "cell_contents", "__code__", "co_consts")),
}


def _files():
    for path in sorted(SRC.rglob("*.py")):
        if not path.name.startswith("modeling_"):
            yield str(path.relative_to(SRC)), ast.parse(path.read_text(encoding="utf-8"))


def _late_imports(name: str, tree: ast.Module):
    package = ["transformers_packed", *Path(name).parent.parts]
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom) and node.level:
                target = package[: len(package) - node.level + 1] + (node.module or "").split(".")
                yield ".".join(filter(None, target[1:]))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers_packed"):
                yield node.module.removeprefix("transformers_packed.")


class HouseTest(unittest.TestCase):
    def test_own_modules_are_imported_inside_functions_only_where_listed(self):
        found = [(name, target) for name, tree in _files() for target in _late_imports(name, tree)]
        allowed = lambda name, target: any(fnmatch(name, f) and fnmatch(target, t) for f, t in LATE_IMPORTS)  # noqa: E731
        self.assertEqual([pair for pair in found if not allowed(*pair)], [])
        for listed in LATE_IMPORTS:
            self.assertTrue(any(fnmatch(n, listed[0]) and fnmatch(t, listed[1]) for n, t in found), listed)

    def test_nothing_looks_into_frames_closures_or_code_or_changes_a_class(self):
        found = set()
        for name, tree in _files():
            for node in ast.walk(tree):
                attribute = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
                if isinstance(node, ast.FunctionDef | ast.Constant):
                    attribute = node.name if isinstance(node, ast.FunctionDef) else node.value
                if attribute in HIDDEN or attribute == "__class__":
                    found.add((name, attribute))
        self.assertEqual(found, EXCEPTIONS)

    @unittest.skipUnless(importlib.util.find_spec("importlinter"), "needs import-linter")
    def test_the_contract_fails_on_an_upward_import(self):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder, "transformers_packed")
            shutil.copytree(SRC, copy, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copy(ROOT / "pyproject.toml", folder)
            self.assertEqual(_lint(folder), 0)
            planted = copy / "ops" / "dispatch.py"
            planted.write_text(
                f"from ..models import registry\n{planted.read_text(encoding='utf-8')}", encoding="utf-8"
            )
            self.assertEqual(_lint(folder), 1)


def _lint(folder: str) -> int:
    code = "from importlinter.cli import lint_imports_command as main; main()"
    environment = os.environ | {"PYTHONPATH": folder}
    command = [sys.executable, "-c", code, "--no-cache"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode
