"""The two arms of `demo` and `bench`: their names, processes and tables."""

import json
import os
import subprocess
import sys
import time
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
    _write_settings(work, settings)
    results = {}
    for arm in ARMS:
        try:
            run_module(module, arm, str(work), limit=limit)
            results[arm] = _read_result(work, arm)
        except subprocess.TimeoutExpired:
            results[arm] = {"error": f"stopped after {limit:g} s"}
    return results


def run_in_turns(module: str, work: Path, settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Run both arms at the same time, each in a process of its own, and return what they write.

    They take turns by the pipes of [`pipe_of`], so that other load on the machine slows both alike.

    Raises:
        `ChildProcessError`: one of them failed, and the other one was stopped.
    """
    _write_settings(work, settings)
    for arm in ARMS:
        os.mkfifo(pipe_of(work, arm))
    running: dict[str, Any] = {}
    try:
        for arm in ARMS:
            running[arm] = start_module(module, arm, str(work))
        while None in (statuses := [process.poll() for process in running.values()]) and not any(statuses):
            time.sleep(0.1)
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    for arm, status in zip(ARMS, statuses, strict=True):
        _check_status(arm, status)
    return {arm: _read_result(work, arm) for arm in ARMS}


def pipe_of(work: Path, arm: str) -> Path:
    """The named pipe from which an arm reads that its turn begins."""
    return work / f"{arm}.turn"


def _write_settings(work: Path, settings: dict[str, Any]) -> None:
    (work / "settings.json").write_text(json.dumps(settings), encoding="utf-8")


def _read_result(work: Path, arm: str) -> dict[str, Any]:
    return json.loads((work / f"{arm}.json").read_text(encoding="utf-8"))


def run_module(module: str, *arguments: str, limit: float | None = None) -> None:
    """Run `main` of a module of this package in a separate process, with an arm and a folder.

    Raises:
        `ChildProcessError`: its exit status is not 0.
        `subprocess.TimeoutExpired`: it took longer than `limit` seconds.
    """
    # In its own session, the process does not receive Ctrl-C. `subprocess.run` kills it when interrupted or too late.
    status = subprocess.run(_command(module, *arguments), start_new_session=True, timeout=limit).returncode
    _check_status(arguments[0], status)


def start_module(module: str, *arguments: str) -> subprocess.Popen:
    """Start what [`run_module`] runs. Who calls this function has to kill it when interrupted."""
    return subprocess.Popen(_command(module, *arguments), start_new_session=True)


def _command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"{__package__}.arms", module, *arguments]


def _check_status(arm: str, status: int | None) -> None:
    if status:
        raise ChildProcessError(f"the process for {arm!r} ended with status {status}")


if __name__ == "__main__":
    sys.excepthook = end_on_error
    silence_other_packages()
    import_module(f"{__package__}.{sys.argv[1]}").main(sys.argv[2], Path(sys.argv[3]))
