"""Break the package in one place at a time, and see that a test fails: what a shorter test suite must still find.

`mutants.toml` lists the mutants. Each is a small edit of one source file, a mistake that one could make: a name, the
file in the package, the text to replace, which occurs once in it, the new text, and the tests that are expected to fail.
Tests are files or folders, so that they may change or go. `-k EXPRESSION` chooses some of them to run first. If these pass
or are gone, all tests of the files and folders run.

The edits are made in a copy of the repository. A test counts only if it passes there without the edit, which is looked
at in the end. With `--output`, the result is a dictionary of `versions`, `command` and `mutants`, which have:

* `name` and `file`;
* `killed_by`: the first test that fails, or `null` for a mutant that survives;
* `seconds`: the time of its tests.

Usage: python utils/mutants.py [--only NAME ...] [--jobs N] [--check] [--output FILE]

It fails if a mutant survives or does not apply. `--check` only looks at the latter.
"""

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src", "transformers_packed")
LIST = Path(__file__).with_suffix(".toml")
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu")
# A mutant may run forever, for example if one of several processes waits for the others.
TIME_LIMIT = 1200.0
PACKAGES = ("torch", "transformers", "triton", "peft", "trl")
# To import these takes longer than most of the tests. Each run is a fork of this process, which has done so.
LIBRARIES = ["pytest", "torch._dynamo", "transformers.modeling_utils", "transformers.trainer"]
FORKS = multiprocessing.get_context("fork")
# As in conftest.py, but before the imports. The GPU is hidden, because interpreted kernels are to be tested.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1",
    "TRITON_INTERPRET": "1",
}
# Codes of pytest: tests passed, tests failed, and no test was found.
PASSED, FAILED, NONE = 0, 1, 5


def read() -> list[dict[str, Any]]:
    """Return all mutants."""
    return tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]


def mutated(mutant: dict[str, Any], root: Path = ROOT) -> str:
    """Return the text of the mutant's file with its edit.

    Raises:
        `ValueError`: the text to replace is not there once, or the new one is no code.
    """
    path = root / SOURCE / mutant["file"]
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if text.count(mutant["old"]) != 1:
        got = f"{text.count(mutant['old'])} times" if path.exists() else "no such file"
        raise ValueError(f"{mutant['name']}: expected this text once in {mutant['file']}, got {got}: {mutant['old']}")
    text = text.replace(mutant["old"], mutant["new"])
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise ValueError(f"{mutant['name']}: expected code, got {error}") from error
    return text


def problems(mutants: Sequence[dict[str, Any]], root: Path = ROOT) -> list[str]:
    """Return why mutants cannot be made or looked for."""
    found = []
    for mutant in mutants:
        try:
            mutated(mutant, root)
        except ValueError as error:
            found.append(str(error))
        paths = [path for path in mutant["tests"] if not path.startswith("-k ")]
        if not any((root / path).exists() for path in paths):
            found.append(f"{mutant['name']}: none of its tests exists: {', '.join(paths)}")
    return found


def copy_repository(target: Path) -> Path:
    """Copy all files that git does not ignore, and return the copy."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        # A file may be deleted and not yet committed.
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def run_tests(copy: Path, arguments: Sequence[str]) -> tuple[int | None, list[str], str]:
    """Run tests of a copy. Return the code of pytest, the failed tests, and the output."""
    log = copy / "pytest.log"
    process = FORKS.Process(target=_pytest, args=(copy, log, [*PYTEST, *arguments]))
    process.start()
    process.join(TIME_LIMIT)
    if process.is_alive():
        process.kill()
        process.join()
    output = log.read_text(encoding="utf-8", errors="replace")
    failed = re.findall(r"^(?:FAILED|SUBFAILED.*?|ERROR) (tests/\S+?::\S+)", output, re.MULTILINE)
    return process.exitcode, failed, output


def _pytest(copy: Path, log: Path, arguments: list[str]) -> None:
    """Run pytest in this process, which has imported the libraries but not yet the package."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    # As `python -m pytest` does with the current folder. Tests import themselves in other processes.
    sys.path[:0] = [str(copy / "src"), str(copy)]
    os.environ["PYTHONPATH"] = str(copy / "src")
    # A copy has no bytecode at first.
    sys.dont_write_bytecode = False
    import pytest

    assert "transformers_packed" not in sys.modules
    code = pytest.main(arguments)
    sys.stdout.flush()
    # A normal exit would wait for the threads of the parent.
    os._exit(int(code))


def kill(mutant: dict[str, Any], copy: Path) -> dict[str, Any]:
    """Make the edit in a copy, run the mutant's tests until one fails, and undo the edit."""
    path = copy / SOURCE / mutant["file"]
    before, start, killed_by = path.read_text(encoding="utf-8"), time.perf_counter(), None
    files = [x for x in mutant["tests"] if not x.startswith("-k ") and (copy / x).exists()]
    chosen = [x.removeprefix("-k ") for x in mutant["tests"] if x.startswith("-k ")]
    path.write_text(mutated(mutant, copy), encoding="utf-8")
    try:
        for arguments in (*((*files, "-k", expression) for expression in chosen), files):
            code, failed, output = run_tests(copy, arguments)
            if code == FAILED and failed:
                killed_by = failed[0]
                break
            if code == -signal.SIGSEGV:
                # Such as of memory that is read after its end. No test is named then.
                killed_by = files[0]
                break
            if code not in (PASSED, NONE):
                raise RuntimeError(f"{mutant['name']}: pytest ended with {code}:\n{output[-2000:]}")
    finally:
        path.write_text(before, encoding="utf-8")
    seconds = round(time.perf_counter() - start, 1)
    print(f"{mutant['name']:32} {seconds:6.1f} s  {killed_by or 'SURVIVED'}", flush=True)
    return {"name": mutant["name"], "file": mutant["file"], "killed_by": killed_by, "seconds": seconds}


def kill_all(mutants: Sequence[dict[str, Any]], jobs: int) -> list[dict[str, Any]]:
    """Return the results of mutants. A test that also fails without them kills none."""
    os.environ.update(ENVIRONMENT)
    for library in LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for job in range(jobs):
            copies.put(copy_repository(Path(folder, str(job))))

        def in_a_copy(mutant: dict[str, Any]) -> dict[str, Any]:
            copy = copies.get()
            try:
                return kill(mutant, copy)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(in_a_copy, mutants))
        tests = sorted({x["killed_by"] for x in results if x["killed_by"]})
        if tests:
            code, failed, output = run_tests(copies.get(), ["--maxfail=1000", *tests])
            if code not in (PASSED, FAILED):
                raise RuntimeError(f"pytest ended with {code} without mutants:\n{output[-2000:]}")
            for result in results:
                if result["killed_by"] in failed:
                    print(f"{result['name']:32} SURVIVED: its test also fails without it")
                    result["killed_by"] = None
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these mutants")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--check", action="store_true", help="only look whether all mutants apply")
    parser.add_argument("--output", type=Path, help="JSON of the results")
    args = parser.parse_args(arguments)
    mutants = read()
    if unknown := {*(args.only or ())} - {x["name"] for x in mutants}:
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
    mutants = [x for x in mutants if not args.only or x["name"] in args.only]
    if found := problems(mutants):
        print("\n".join(found), file=sys.stderr)
        return 1
    if args.check:
        print(f"{len(mutants)} mutants apply")
        return 0
    results = kill_all(mutants, args.jobs)
    survivors = [x["name"] for x in results if x["killed_by"] is None]
    print(f"{len(results) - len(survivors)} of {len(results)} mutants killed")
    if args.output is not None:
        about = {"versions": {x: version(x) for x in PACKAGES}, "command": shlex.join(["pytest", *PYTEST])}
        args.output.write_text(json.dumps(about | {"mutants": results}, indent=1) + "\n", encoding="utf-8")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
