"""Audit one tiny model of a type, built-in and as this package makes it; as a process, type after type.

`python -m transformers_packed.audit.sweep` reads model types from its standard input and writes a line of JSON for
each: the entry of the support matrix. What kills the process is for the one that feeds it to notice (`all_types`).
"""

import json
import os
import re
import sys
from contextlib import suppress
from typing import Any


# What the collator can give beside position ids.
PARTIAL = ("position_ids+seq_idx", "position_ids+cu_seq_lens")
SOURCES = ("position_ids", "all")
# A tiny model that needs more is none.
_MEMORY_LIMIT = 8 * 2**30


def audit_type(model_type: str, seed: int = 0) -> dict[str, Any]:
    """The entry of the support matrix for a model type: verdicts by source, of the built-in model and of ours."""
    from ..models.registry import patch_model
    from ..models.verdict import text_config
    from .probe import audit_model, conv_width
    from .tiny import load_model

    try:
        model = load_model(model_type, seed=seed)
    except Exception as error:  # Whatever a configuration or a model raises.
        return {"not_built": _message(error)}
    entry: dict[str, Any] = {
        "class": type(model).__name__,
        "attention": text_config(model)._attn_implementation,
    }
    # A single token, less than the convolution, the edges of a chunk of 64, and several chunks; few tokens keep it fast.
    lengths = [65, 1, 130, max(conv_width(model) - 1, 1), 64]

    def verdicts(inputs: tuple[str, ...]) -> dict[str, dict]:
        report = audit_model(model, lengths=lengths, inputs=inputs, seed=seed)
        return {name: _verdict(report, name) for name in inputs}

    entry["builtin"] = verdicts(SOURCES)
    # What is between two ends of one verdict has it too.
    if {found["verdict"] for found in entry["builtin"].values()} not in ({"isolated"}, {"refused"}):
        entry["builtin"] |= verdicts(PARTIAL)
    try:
        model = patch_model(model)
    except (ImportError, ValueError) as error:
        refusal = {"verdict": "refused", "reason": _message(error)}
        entry["ours"] = dict.fromkeys(SOURCES, refusal)
        return entry
    entry["ours"] = verdicts(SOURCES)
    cause = unpacking_cause(model)
    if cause is not None:
        for found in entry["ours"].values():
            if found["verdict"] == "isolated":
                found.update(verdict="isolated by unpacking", reason=cause)
    return entry


def unpacking_cause(model: Any) -> str | None:
    """Why `patch_model` lets this model run its documents one by one; `None` if it runs the row as it is."""
    from transformers import PreTrainedModel

    try:
        from ..models.families import UNPACKED
    except ImportError:
        return None
    # Ours derive from the built-in classes, whose modules are named after the family.
    bases = (
        base for module in model.modules() if isinstance(module, PreTrainedModel) for base in type(module).__mro__
    )
    families = [base.__module__.split(".")[-2] for base in bases if base.__module__.startswith("transformers.models.")]
    found = next((UNPACKED[name] for name in families if name in UNPACKED), None)
    return getattr(found, "cause", found)


def _verdict(report: Any, source: str) -> dict[str, str]:
    result = report.sources[source]
    found = {"verdict": result.verdict}
    if result.verdict == "refused":
        # Figures differ from machine to machine.
        found["reason"] = re.sub(r"^(not causal): .*", r"\1: later tokens change earlier ones", result.reason)
    if result.verdict == "leaks":
        leaks = [leak for leak in report.leaks if leak.source == source]
        order = ("forward", "backward", "alone")
        leak = min(leaks, key=lambda leak: (leak.module is None, order.index(leak.direction)))
        found["module"] = leak.module_class or "not found"
        found["kind"] = leak.kind or leak.direction
    return found


def _message(error: Exception) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines()]
    # The first line of a validator's message only says that it is one.
    return f"{type(error).__name__}: {' '.join(lines[:2]) or 'no message'}"


def main() -> None:
    """Answer every line of standard input, a model type, with a line of JSON."""
    from ..cli.audit import hide_gpu_packages

    hide_gpu_packages()
    # What a model prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_LIMIT, _MEMORY_LIMIT))
    from transformers.utils import logging

    logging.set_verbosity_error()
    for line in sys.stdin:
        print(json.dumps(audit_type(line.strip())), file=answers, flush=True)


if __name__ == "__main__":
    main()
