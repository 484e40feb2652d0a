"""The proof of a patch: its tests run in a copy of Transformers without and with the patch, on a CPU.

Each test fails without the patch and passes with it. Tests named `test_unchanged...` check preserved behaviour and pass
both times.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .patch import file_of_tests, load
from .source import PREFIX, Source


RUNNER = Path(__file__).with_name("run_tests.py")


@dataclass(frozen=True)
class Run:
    """The outcome of a patch's tests and reproduction in one copy of Transformers."""

    tests: dict[str, str]
    reproduction: str


def apply_diff(source: Source, diff: str, paths: list[str]) -> dict[str, str]:
    """Apply a diff to fresh copies of the files with `git apply` and return their texts."""
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
            target = Path(folder, PREFIX, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.package / path, target)
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(Path(folder).parent)}
        options = {"input": diff, "text": True, "capture_output": True, "cwd": folder, "env": environment}
        result = subprocess.run(["git", "apply", "-"], **options)
        if result.returncode:
            raise RuntimeError(f"`git apply -` refused the diff:\n{result.stderr}")
        return {path: Path(folder, PREFIX, path).read_text(encoding="utf-8") for path in paths}


def jobs_of(names: list[str]) -> dict[str, tuple[Path, str]]:
    """Return the tests of each patch, and the script to run after them."""
    return {name: (file_of_tests(name), load(name).reproduction) for name in names}


def run(source: Source, texts: dict[str, str], jobs: dict[str, tuple[Path, str]], path: str = "") -> dict[str, Run]:
    """Run tests on a copy of the source with some files replaced, in one process with `path` on its import path."""
    with tempfile.TemporaryDirectory() as folder:
        source.copy_to(Path(folder), texts)
        paths = os.pathsep.join(filter(None, (folder, path)))
        result = subprocess.run(
            [sys.executable, str(RUNNER), folder],
            input=json.dumps([(name, str(test), script) for name, (test, script) in jobs.items()]),
            text=True,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
    if result.returncode:
        raise RuntimeError(f"the tests of {', '.join(jobs)} could not be run:\n{result.stderr[-4000:]}")
    return {name: Run(**found) for name, found in json.loads(result.stdout).items()}


def problems(before: Run, after: Run) -> list[str]:
    """List the tests whose outcomes without and with the patch are not as expected."""
    found = []
    if set(before.tests) != set(after.tests) or not before.tests:
        found.append(f"not the same tests ran: {sorted(set(before.tests) ^ set(after.tests))}")
    for name in sorted(set(before.tests) & set(after.tests)):
        stays = name.rpartition(".")[2].startswith("test_unchanged")
        expected = ("passed" if stays else "failed", "passed")
        outcome = tuple(one.tests[name].split(":")[0] for one in (before, after))
        if outcome != expected:
            details = "; ".join(one.tests[name] for one in (before, after))
            found.append(f"{name}: expected {' then '.join(expected)}, got {details}")
    return found
