"""The `audit` command."""

import argparse
import sys
from contextlib import nullcontext
from importlib.util import find_spec

import torch

from ..audit.matrix import COLUMNS


# The built-in classes hand tensors to these whenever they can be imported, also tensors on a CPU, where they crash.
_GPU_ONLY = ("fla", "causal_conv1d", "mamba_ssm")


def hide_gpu_packages() -> list[str]:
    """Let nothing import the packages that cannot run without a GPU; the names of those that are installed."""
    hidden = [name for name in _GPU_ONLY if name not in sys.modules and find_spec(name) is not None]
    sys.modules.update(dict.fromkeys(hidden))
    return hidden


def run_audit(args: argparse.Namespace) -> int:
    """Print the report: 0 if it is `ok`, 1 if documents leak, 2 if nothing could be measured."""
    misplaced = [f"--{name}" for name in ("types", "jobs", "output") if getattr(args, name) is not None]
    if args.model is None or misplaced:
        got = " ".join(misplaced) or "neither"
        print(f"transformers-packed audit: expected a model, or --all with its options, got {got}", file=sys.stderr)
        return 2
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    hidden = [] if device.startswith("cuda") else hide_gpu_packages()
    # Model classes choose their kernels when they are imported, so only now.
    from transformers.utils import logging

    from ..audit.probe import audit_model
    from ..audit.tiny import load_model
    from ..models.registry import registered

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with nullcontext() if args.stock else registered():
            model = load_model(
                args.model,
                attn=args.attn,
                dtype=args.dtype,
                device=device,
                trust_remote_code=args.trust_remote_code,
                seed=args.seed,
            )
    except Exception as error:  # A configuration or code of the model's own may raise anything.
        print(f"transformers-packed audit: {args.model} cannot be built: {error}", file=sys.stderr)
        return 2
    try:
        report = audit_model(model, lengths=args.lengths, inputs=args.inputs, seed=args.seed)
        if hidden:
            report.notes.append(f"without a GPU {', '.join(hidden)} cannot run, so the torch forms were audited")
        print(report.table())
        if args.json:
            args.json.write_text(report.to_json() + "\n", encoding="utf-8")
        if args.plot:
            report.plot(args.plot)
    except BrokenPipeError:
        raise
    except (ImportError, OSError, ValueError) as error:
        print(f"transformers-packed audit: {error}", file=sys.stderr)
        return 2
    if report.refused:
        reasons = "; ".join(dict.fromkeys(str(result.reason) for result in report.sources.values()))
        print(f"transformers-packed audit: {args.model} could not be audited: {reasons}", file=sys.stderr)
        return 2
    return 0 if report.ok else 1


def run_all(args: argparse.Namespace) -> int:
    """Audit every type: 0, 1 if a model of ours leaks, 2 for options of the audit of a single model."""
    single = ("model", "stock", "attn", "dtype", "device", "lengths", "plot", "seed", "trust_remote_code")
    misplaced = [name for name in single if getattr(args, name)]
    if misplaced or args.inputs != ["position_ids", "all"]:
        print(
            "transformers-packed audit: --all goes with --types, --jobs, --output and --json alone; "
            "leave it out to audit one model",
            file=sys.stderr,
        )
        return 2
    from ..audit.all_types import audit_all, summary

    matrix = audit_all(args.types, jobs=args.jobs)
    if args.json:
        args.json.write_text(matrix.to_json(), encoding="utf-8")
    if args.output:
        args.output.write_text(matrix.to_markdown(), encoding="utf-8")
        print(f"{summary(matrix)}\n\nWrote {args.output}")
    else:
        print(matrix.to_markdown(), end="")
    return int(any(matrix.counts()[column]["leaks"] for column in COLUMNS if column[0] == "ours"))
