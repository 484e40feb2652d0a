"""The two arms of `demo` and `bench`: their names, processes and tables."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from .process import end_on_error, silence_other_packages


ARMS = {"padded": "padded, Transformers", "packed": "packed, transformers_packed"}
COLORS = {"padded": "#d1605e", "packed": "#1f4e79"}


def print_table(rows: list[list[str]]) -> None:
    """Print rows of cells below their header, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *cells in rows:
        print("  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))]))


def run_arms(
    module: str, work: Path, settings: dict[str, Any], limit: float | None = None
) -> dict[str, dict[str, Any]]:
    """Run each arm in a process of its own, which reads `settings.json` in `work`, and return what they write.

    An arm that takes longer than `limit` seconds is stopped. Its result is an error that says so.
    """
    (work / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    results = {}
    for arm in ARMS:
        try:
            run_module(module, arm, str(work), limit=limit)
            results[arm] = json.loads((work / f"{arm}.json").read_text(encoding="utf-8"))
        except subprocess.TimeoutExpired:
            results[arm] = {"error": f"stopped after {limit:g} s"}
    return results


def run_module(module: str, *arguments: str, limit: float | None = None) -> None:
    """Run `main` of a module of this package in a separate process, with an arm and a folder.

    Raises:
        `ChildProcessError`: its exit status is not 0.
        `subprocess.TimeoutExpired`: it took longer than `limit` seconds.
    """
    command = [sys.executable, "-m", f"{__package__}.arms", module, *arguments]
    # In its own session, the process does not receive Ctrl-C. `subprocess.run` kills it when interrupted or too late.
    status = subprocess.run(command, start_new_session=True, timeout=limit).returncode
    if status:
        raise ChildProcessError(f"the process for {arguments[0]!r} ended with status {status}")


if __name__ == "__main__":
    sys.excepthook = end_on_error
    silence_other_packages()
    import_module(f"{__package__}.{sys.argv[1]}").main(sys.argv[2], Path(sys.argv[3]))
