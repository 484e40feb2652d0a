"""Audit a tiny model of every causal type of Transformers, before and after `patch_model`.

Worker processes read model types from standard input. They answer each with its entry of the support matrix, as a line
of JSON. A type that crashes, hangs or exhausts the memory ends its process, and this becomes the verdict of the type.
A new process continues with the next type.

The matrix is the dictionary in `support_matrix.json`: the versions, and `types` with an entry for each model type. An
entry has either `not_built` with a reason, or:

* `class`;
* `attention`: the implementation that ran;
* `builtin` and `ours`: a verdict for each source of boundaries. A leak adds `module` and `kind`, a refusal `reason`.

Usage: python utils/audit_all.py [--types TYPE ...] [--jobs N] [--output FILE.md] [--json FILE]
"""

import argparse
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from transformers_packed.cli.audit import hide_gpu_packages
from transformers_packed.cli.options import output_file, positive_int


SOURCES = ("position_ids", "all")
# The collator can return these in addition to position ids.
PARTIAL = ("position_ids+seq_idx", "position_ids+cu_seq_lens")
# The columns of the page: the model and its source of boundaries, and the title.
COLUMNS = {
    ("builtin", "position_ids"): "stock, `position_ids`",
    ("builtin", "all"): "stock, all",
    ("ours", "position_ids"): "`patch_model`, `position_ids`",
    ("ours", "all"): "`patch_model`, all",
}
MODELS = {"builtin": "stock", "ours": "`patch_model`"}
# Columns of the table with the types that are always isolated.
WIDTH = 3
# What the refusals of `patch_model`, and the errors of stock classes, have in common.
FRAME = re.compile(r"^ValueError: (expected a causal language model of a family that can be packed, got \w+: )?")
VERDICTS = ("isolated", "isolated by unpacking", "leaks", "refused", "not built")
ROOT = Path(__file__).resolve().parents[1]
# The page has an introduction, written by hand, up to the first table.
PAGE = ROOT / "docs" / "reference" / "support_matrix.md"
TIME_LIMIT = 180.0
# No tiny model needs more memory than this.
MEMORY_LIMIT = 8 * 2**30
WORKER = (sys.executable, __file__, "--worker")


# One type


def audit_type(model_type: str, seed: int = 0) -> dict[str, Any]:
    """Build the support matrix entry of a model type: verdicts by source for the stock and the patched model."""
    from transformers_packed import patch_model
    from transformers_packed.audit.audit import audit_model
    from transformers_packed.audit.probe import conv_width
    from transformers_packed.audit.tiny import tiny_model
    from transformers_packed.models.verdict import text_config

    try:
        model = tiny_model(model_type, seed=seed)
    except Exception as error:  # Configurations and models raise all kinds of errors.
        return {"not_built": message(error)}
    entry: dict[str, Any] = {"class": type(model).__name__, "attention": text_config(model)._attn_implementation}
    # One token, fewer than the convolution's width, around a chunk of 64, and several chunks. Few tokens keep it fast.
    lengths = [65, 1, 130, max(conv_width(model) - 1, 1), 64]

    def verdicts(inputs: tuple[str, ...]) -> dict[str, dict]:
        report = audit_model(model, lengths=lengths, inputs=inputs, seed=seed)
        return {name: verdict_of(report, name) for name in inputs}

    entry["builtin"] = verdicts(SOURCES)
    # If both extremes give one verdict, the partial sources between them give the same.
    if {found["verdict"] for found in entry["builtin"].values()} not in ({"isolated"}, {"refused"}):
        entry["builtin"] |= verdicts(PARTIAL)
    try:
        model = patch_model(model)
    except (ImportError, ValueError) as error:
        entry["ours"] = dict.fromkeys(SOURCES, {"verdict": "refused", "reason": message(error)})
        return entry
    entry["ours"] = verdicts(SOURCES)
    cause = unpacking_cause(model)
    for found in entry["ours"].values():
        if cause is not None and found["verdict"] == "isolated":
            found.update(verdict="isolated by unpacking", reason=cause)
    return entry


def unpacking_cause(model: Any) -> str | None:
    """Return the reason why the patched model unpacks its rows, or `None` if it computes the row directly."""
    from transformers_packed.models.families import families_of
    from transformers_packed.models.family import Unpacked

    return next((family.apart.cause for family in families_of(model, Unpacked)), None)


def verdict_of(report: Any, source: str) -> dict[str, str]:
    """Return the cell of the matrix for one source of an [`AuditReport`]."""
    result = report.sources[source]
    found = {"verdict": result.verdict}
    if result.verdict == "refused":
        # Drop the figures, which differ between machines.
        found["reason"] = re.sub(r"^(not causal): .*", r"\1: later tokens change earlier ones", result.reason)
    if result.verdict == "leaks":
        leaks = [leak for leak in report.leaks if leak.source == source]
        order = ("forward", "backward", "alone")
        leak = min(leaks, key=lambda leak: (leak.module is None, order.index(leak.direction)))
        found["module"] = leak.module_class or "not found"
        found["kind"] = leak.kind or leak.direction
    return found


def message(error: Exception) -> str:
    """Format an error with its type in one line."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    # The first line of a validation error has no details.
    return f"{type(error).__name__}: {' '.join(lines[:2]) or 'no message'}"


def answer() -> None:
    """Run a worker: answer every line of standard input, a model type, with a line of JSON."""
    hide_gpu_packages()
    # Keep the output of models out of the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    from transformers.utils import logging

    logging.set_verbosity_error()
    for line in sys.stdin:
        print(json.dumps(audit_type(line.strip())), file=answers, flush=True)


# All types, in processes


def causal_types() -> list[str]:
    """List the types in Transformers' mapping of causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def audit_all(types: Sequence[str], jobs: int) -> dict[str, Any]:
    """Measure the support matrix of these types in `jobs` processes, with a progress bar on stderr."""
    found = {}
    with tqdm(total=len(types), unit="type", file=sys.stderr) as bar:
        for name, entry in run_types(types, jobs):
            found[name] = entry
            bar.set_postfix_str(name)
            bar.update()
    versions = {name: version(name).partition("+")[0] for name in ("transformers", "torch")}
    return {**versions, "types": {name: found[name] for name in types}}


def run_types(
    types: Sequence[str], jobs: int, time_limit: float = TIME_LIMIT, command: Sequence[str] = WORKER
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each type with its entry, in the order of completion. `command` starts a worker."""
    workers, idle = [Worker(command, time_limit) for _ in range(min(jobs, len(types)))], queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def audit(name: str) -> tuple[str, dict[str, Any]]:
        worker = idle.get()
        try:
            return name, worker.audit(name)
        finally:
            idle.put(worker)

    threads = ThreadPoolExecutor(len(workers))
    try:
        for done in as_completed([threads.submit(audit, name) for name in types]):
            yield done.result()
    finally:
        for worker in workers:
            worker.stop()
        threads.shutdown(cancel_futures=True)


class Worker:
    """A process that audits one type after another and restarts after a crash."""

    def __init__(self, command: Sequence[str], time_limit: float):
        self.command, self.time_limit = command, time_limit
        self.process: subprocess.Popen | None = None
        self.stopped = False
        self.lock = threading.Lock()

    def audit(self, name: str) -> dict[str, Any]:
        """Audit one type and return its entry."""
        process, start = self._start(), time.monotonic()
        timer = threading.Timer(self.time_limit, process.kill)
        timer.start()
        try:
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if line.endswith("\n"):
            return json.loads(line)
        status = self._end()
        if time.monotonic() - start >= self.time_limit:
            return {"not_built": f"no answer within {self.time_limit:g} s"}
        try:
            return {"not_built": f"the process ended with {signal.Signals(-status).name}"}
        except ValueError:
            return {"not_built": f"the process ended with exit status {status}"}

    def _start(self) -> subprocess.Popen:
        with self.lock:
            if self.stopped:
                raise RuntimeError("stopped")
            if self.process is None:
                # In its own session the process receives no Ctrl-C. Only `stop` ends it.
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    encoding="utf-8",
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
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
        # Closing flushes input that the process did not read.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        return status

    def stop(self) -> None:
        """End the process."""
        self.stopped = True
        self._end()


# The matrix as text


def counts(matrix: dict[str, Any]) -> dict[tuple[str, str], Counter]:
    """Count the types per verdict for each of `COLUMNS`."""
    entries = matrix["types"].values()
    return {
        (model, source): Counter("not built" if "not_built" in e else e[model][source]["verdict"] for e in entries)
        for model, source in COLUMNS
    }


def summary(matrix: dict[str, Any]) -> str:
    """Format the counts as one line per column."""
    return "\n".join(
        f"{title.replace('`', '')}: " + ", ".join(f"{count} {verdict}" for verdict, count in found.most_common())
        for title, found in zip(COLUMNS.values(), counts(matrix).values(), strict=True)
    )


def to_json(matrix: dict[str, Any]) -> str:
    """Format the matrix as JSON with one line per type."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in matrix["types"].items())
    head = "".join(f' "{name}": {json.dumps(matrix[name])},\n' for name in ("transformers", "torch"))
    return f'{{\n{head} "types": {{\n{lines}\n }}\n}}\n'


def to_markdown(matrix: dict[str, Any]) -> str:
    """Format the matrix as the page `docs/reference/support_matrix.md`."""
    found = counts(matrix)
    lines = [
        PAGE.read_text(encoding="utf-8").partition("The audit ran with")[0]
        + f"The audit ran with transformers {matrix['transformers']} and torch {matrix['torch']}.\n",
        _row(f"{len(matrix['types'])} types", *COLUMNS.values()),
        "|---|" + "---:|" * len(COLUMNS),
        *(_row(verdict, *(found[column][verdict] or "" for column in COLUMNS)) for verdict in VERDICTS),
        "",
        '<div class="matrix" markdown>\n',
    ]
    alone, others = [], []
    for name, entry in sorted(matrix["types"].items()):
        if "not_built" in entry:
            others.append(_row(f"`{name}`", f"not built: {entry['not_built'].partition('. ')[0]}", "not built"))
            continue
        title, cells = f"`{name}`<br>`{entry['class']}`", [_cell(entry[model]) for model in MODELS]
        if cells == ["isolated", "isolated"]:
            alone.append(title)
        else:
            others.append(_row(title, *cells))
    lines += [_row("type and class", *MODELS.values()), "|---" * (len(MODELS) + 1) + "|", *others]
    if alone:
        lines += ["\nThese are isolated as stock and after `patch_model`:\n", _row(*["type and class"] * WIDTH)]
        alone += [""] * (-len(alone) % WIDTH)
        lines += ["|---" * WIDTH + "|", *(_row(*alone[i : i + WIDTH]) for i in range(0, len(alone), WIDTH))]
    return "\n".join([*lines, "", "</div>"]) + "\n"


def _cell(found: dict[str, dict[str, str]]) -> str:
    """Format the verdicts of a model: one if both sources of boundaries give the same."""
    alone, full = (_verdict(found[source]) for source in SOURCES)
    return alone if alone == full else f"{alone}; with all: {full}"


def _verdict(found: dict[str, str]) -> str:
    if found["verdict"] == "leaks":
        return f"leaks: `{found['module']}` ({found['kind']})"
    # What to do follows in sentences of its own.
    reason = FRAME.sub("", found.get("reason", "")).partition(". ")[0]
    return f"{found['verdict']}: {reason}" if reason else found["verdict"]


def _row(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def main(argv: list[str] | None = None) -> int:
    """Audit the types. The exit status is 0, 1 if a patched model leaks, and 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--types", nargs="+", metavar="TYPE", help="audit only these types")
    add("--jobs", type=positive_int, metavar="N", help="number of processes (default: one per core)")
    add("--output", type=output_file, metavar="FILE.md", help="write the matrix to this file instead of stdout")
    add("--json", type=output_file, metavar="FILE", help="write the matrix as JSON to this file")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        answer()
        return 0
    known = causal_types()
    types = list(dict.fromkeys(args.types or known))
    unknown = ", ".join(name for name in types if name not in known)
    if unknown:
        parser.error(f"--types: expected types in Transformers' mapping of causal language models, got {unknown}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        matrix = audit_all(types, args.jobs or cores or 1)
    except KeyboardInterrupt:
        print("\naudit_all: interrupted", file=sys.stderr)
        return 130
    if args.json:
        args.json.write_text(to_json(matrix), encoding="utf-8")
    if args.output:
        args.output.write_text(to_markdown(matrix), encoding="utf-8")
        print(f"{summary(matrix)}\n\nWrote {args.output}")
    else:
        print(to_markdown(matrix), end="")
    return int(any(found["leaks"] for (model, _), found in counts(matrix).items() if model == "ours"))


if __name__ == "__main__":
    sys.exit(main())
