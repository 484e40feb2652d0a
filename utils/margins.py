"""The margins of the numeric tests on several instruction sets: how many times a difference fits into its bar.

A test that compares with a bar, `assertLess(difference, 1e-5)`, may pass on one processor and fail on another, where sums
have another order. This script runs the tests once for each value of `ATEN_CPU_CAPABILITY` and each number of threads, and
prints the smallest margins of all runs. With a margin of 3, a processor may round three times worse.

    python utils/margins.py [TESTS ...] [--capabilities default avx2 avx512] [--threads 1 4] [--least 3]

The exit status is 1 if a margin is below `--least`, or if a test fails. Comparisons in processes that a test starts do not
count. A bar is a number of at most 0.1, so that `assertLess(after, before)` is none. A comparison counts if its margin varies
between runs.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path


LARGEST_BAR = 0.1
FOLDER = "TRANSFORMERS_PACKED_MARGINS"
SHOWN = 10
_SAME = 1.02
_found: dict[str, float] = {}


def pytest_configure() -> None:
    """This file is also a plugin of pytest, which records the margins."""
    if FOLDER in os.environ:
        for name in ("assertLess", "assertLessEqual"):
            _record(name, lambda difference, bar, *_, **__: (difference, bar))
        _record("assertAlmostEqual", _of_almost_equal)


def _of_almost_equal(first, second, places=None, msg=None, delta=None):
    bar = delta if delta is not None else 0.5 * 10 ** -(7 if places is None else places)
    return abs(first - second), bar


def _record(name: str, read) -> None:
    original = getattr(unittest.TestCase, name)

    @functools.wraps(original)
    def checked(self, *args, **kwargs):
        try:
            difference, bar = map(float, read(*args, **kwargs))
        except (TypeError, ValueError):
            difference, bar = 0.0, 0.0
        # Counts are whole numbers.
        if difference > 0 < bar <= LARGEST_BAR and not isinstance(args[0], int):
            frame = sys._getframe(1)
            file = os.path.relpath(frame.f_code.co_filename)
            test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition("::")[2].partition(" ")[0]
            where = f"{file}:{frame.f_lineno} in {test}"
            _found[where] = min(bar / difference, _found.get(where, float("inf")))
        return original(self, *args, **kwargs)

    setattr(unittest.TestCase, name, checked)


def pytest_sessionfinish() -> None:
    if FOLDER in os.environ:
        Path(os.environ[FOLDER], f"{os.getpid()}.json").write_text(json.dumps(_found))


def measure(tests: list[str], capability: str, threads: int) -> tuple[dict[str, float], int]:
    """Run the tests, and return the smallest margin of each comparison, and pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": str(threads), FOLDER: folder}
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parent), os.getenv("PYTHONPATH")]))
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "margins",
            "-n",
            "auto",
            "-m",
            "not slow and not gpu",
            *tests,
        ]
        status = subprocess.run(command, env=os.environ | environment).returncode
        margins: dict[str, float] = {}
        for path in Path(folder).iterdir():
            for where, margin in json.loads(path.read_text()).items():
                margins[where] = min(margin, margins.get(where, margin))
    return margins, status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", default=["tests"])
    parser.add_argument("--capabilities", nargs="+", default=["default", "avx2", "avx512"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--least", type=float, default=3.0, help="the smallest margin that is no failure")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, str]]] = {}
    failed = 0
    for capability in args.capabilities:
        for threads in args.threads:
            margins, status = measure(args.tests, capability, threads)
            failed |= status
            run = f"{capability}, {threads} threads"
            for where, margin in margins.items():
                found.setdefault(where, []).append((margin, run))
    # What is the same on all of them is a count or a bound, such as the rounding of a dtype.
    varies = {
        where: min(runs) for where, runs in found.items() if max(runs)[0] > _SAME * min(runs)[0] or len(runs) == 1
    }
    ranked = sorted((margin, where, run) for where, (margin, run) in varies.items())
    below = [each for each in ranked if each[0] < args.least]
    print(
        f"{len(found):,} comparisons, {len(ranked):,} of them vary, {len(below)} with a margin below {args.least:g}:"
    )
    for margin, where, run in ranked[: max(SHOWN, len(below))]:
        print(f"{margin:8.2f}  {where} ({run})")
    return int(bool(failed or below))


if __name__ == "__main__":
    sys.exit(main())
