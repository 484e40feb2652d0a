"""`audit --all`: every causal type of Transformers, in processes of its own.

A type that crashes, hangs or takes all memory ends its process, which is that type's verdict; a new process goes on
with the next one.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from ..errors import input_error
from .matrix import COLUMNS, SupportMatrix


TIME_LIMIT = 180.0
_WORKER = (sys.executable, "-m", "transformers_packed.audit.sweep")


def causal_types() -> list[str]:
    """Every type in Transformers' mapping of causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def audit_all(types: Sequence[str] | None = None, *, jobs: int | None = None) -> SupportMatrix:
    """Audit tiny models of these types, by default of all, in `jobs` processes, with a progress bar on stderr.

    Args:
        types (`Sequence[str]`, *optional*):
            Model types in Transformers' mapping of causal language models.
        jobs (`int`, *optional*):
            How many processes, by default one for each core.

    Raises:
        `ValueError`: a type is not in the mapping.
    """
    known = causal_types()
    types = list(dict.fromkeys(types)) if types is not None else known
    unknown = [name for name in types if name not in known]
    if unknown:
        raise input_error(
            "types in Transformers' mapping of causal language models",
            ", ".join(unknown),
            "Leave --types out to audit all of them.",
        )
    found = {}
    with tqdm(total=len(types), unit="type", file=sys.stderr) as bar:
        for name, entry in run_types(types, jobs or _cores()):
            found[name] = entry
            bar.set_postfix_str(name)
            bar.update()
    versions = (transformers.__version__, torch.__version__.partition("+")[0])
    return SupportMatrix(*versions, {name: found[name] for name in types})


def run_types(
    types: Sequence[str], jobs: int, time_limit: float = TIME_LIMIT, command: Sequence[str] = _WORKER
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each type with its entry, in the order in which they finish. `command` answers a type's line with one of JSON."""
    waiting, done = queue.SimpleQueue(), queue.SimpleQueue()
    for name in types:
        waiting.put(name)
    workers = [_Worker(command, time_limit) for _ in range(min(jobs, len(types)))]
    threads = [threading.Thread(target=worker.run, args=(waiting, done), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        for _ in types:
            answer = done.get()
            if isinstance(answer, Exception):
                raise answer
            yield answer
    finally:
        for worker in workers:
            worker.stop()
        for thread in threads:
            thread.join(timeout=10.0)


class _Worker:
    """A process that audits type after type, and is started again when it has died."""

    def __init__(self, command: Sequence[str], time_limit: float):
        self.command, self.time_limit = command, time_limit
        self.process: subprocess.Popen | None = None
        self.stopped = False
        self.lock = threading.Lock()

    def run(self, waiting: queue.SimpleQueue, done: queue.SimpleQueue) -> None:
        while not self.stopped:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            try:
                done.put((name, self.audit(name)))
            except Exception as error:  # Nobody would ever learn of it in this thread.
                done.put(error)
        self.stop()

    def audit(self, name: str) -> dict[str, Any]:
        process = self._start()
        late = threading.Event()

        def give_up():
            late.set()
            process.kill()

        timer = threading.Timer(self.time_limit, give_up)
        timer.start()
        try:
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if answer.endswith("\n"):
            return json.loads(answer)
        status = self._end()
        if late.is_set():
            return {"not_built": f"no answer within {self.time_limit:g} s"}
        return {"not_built": f"the process ended with {_status(status)}"}

    def _start(self) -> subprocess.Popen:
        with self.lock:
            if self.stopped:
                raise RuntimeError("stopped")
            if self.process is None:
                package = str(Path(__file__).parents[2])
                paths = (package, os.environ.get("PYTHONPATH"))
                environment = os.environ | {
                    "PYTHONPATH": os.pathsep.join(path for path in paths if path),
                    "OMP_NUM_THREADS": "1",
                }
                # In a session of its own Ctrl-C does not reach it, and stopping it is up to `stop`.
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    encoding="utf-8",
                    env=environment,
                    start_new_session=True,
                )
            return self.process

    def _end(self) -> int:
        with self.lock:
            process, self.process = self.process, None
        if process is None:
            return 0
        process.kill()
        status = process.wait()
        # What it did not read any more.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        return status

    def stop(self) -> None:
        self.stopped = True
        self._end()


def _status(status: int) -> str:
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"exit status {status}"


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def summary(matrix: SupportMatrix) -> str:
    """One line for each of the columns: how many types have which verdict."""
    return "\n".join(
        f"{title.replace('`', '')}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        for title, counts in zip(COLUMNS.values(), matrix.counts().values(), strict=True)
    )
