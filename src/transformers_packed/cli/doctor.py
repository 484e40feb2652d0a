"""`transformers-packed doctor`: find problems and slow parts of this machine or a model, and their fixes.

Print versions, the implementation of each op on this machine, why others do not run, and the commands that change it.
With --model, also whether and how the model keeps documents apart. Exit status: 1 if documents would mix, results would
be wrong, a shard of the checkpoint is missing, or a GPU lacks a kernel that can be installed, else 0.

    transformers-packed doctor
    transformers-packed doctor --model Qwen/Qwen3.5-0.8B
"""

import argparse
import json
import platform
import textwrap
from dataclasses import asdict

from . import env
from .lines import tell
from .options import Parser


_HEADINGS = {"problem": "Problems:", "warning": "Slow:", "note": "Notes:"}


def add_options(parser: Parser) -> None:
    """Declare the options of the command."""
    parser.add_shared("--model", required=False, help="checkpoint or config.json")
    parser.add_shared("--attn", "--trust-remote-code", "--json")


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis. Returns 0 without problems, else 1."""
    tell("Importing torch ...")
    import torch

    if not args.json:
        print(env.describe_environment(), flush=True)
    tell("Importing transformers ...")
    from .checkpoint import load_config, reading
    from .diagnosis import diagnose

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = load_config("--model", args.model, args.trust_remote_code) if args.model else None
    with reading("--model", args.model, "checkpoint"):
        options = {"name": args.model, "trust_remote_code": args.trust_remote_code}
        tell("Checking models and ops ...")
        diagnosis = diagnose(device, config, args.attn, **options)
    print(_json(diagnosis) if args.json else "\n".join(_lines(diagnosis)))
    return 0 if diagnosis.ok else 1


def _json(diagnosis) -> str:
    packages = [package for packages in env.PACKAGES.values() for package in packages]
    versions = {"python": platform.python_version(), **{package: env.version(package) for package in packages}}
    found = asdict(diagnosis)
    found["ops"] = {
        op: {"runs": runs, "refused": [{"implementation": name, "reason": reason} for name, reason in refused]}
        for op, (runs, refused) in diagnosis.ops.items()
    }
    return json.dumps({"versions": versions, "gpus": env.gpus(), **found, "ok": diagnosis.ok}, indent=2)


def _lines(diagnosis) -> list[str]:
    lines = []
    if diagnosis.model:
        model = diagnosis.model
        family = f" ({model['family']})" if model["family"] else ""
        lines += ["", f"{model['class']}{family}, {model['parameters'] / 1e9:.2f}B parameters: {model['support']}"]
        lines += [f"  of this package: {', '.join(model['ours']) or 'none'}"]
        lines += [f"  of Transformers: {', '.join(model['stock']) or 'none'}"]
    if diagnosis.ops:
        lines += ["", f"On {diagnosis.device}, {diagnosis.dtype}, a packed row would train with"]
    lines += _table(diagnosis)
    for level, heading in _HEADINGS.items():
        findings = [finding for finding in diagnosis.findings if finding.level == level]
        lines += ["", heading] if findings else []
        for finding in findings:
            lines += [f"  {finding.text}"] + ([f"    {finding.fix}"] if finding.fix else [])
    return lines


def _table(diagnosis) -> list[str]:
    """One row for ops that run alike, with their implementation and the reasons against the preferred ones."""
    alike: dict[tuple, list[str]] = {}
    for op, (runs, refused) in diagnosis.ops.items():
        # On a CPU all reasons are the same.
        against = tuple(refused) if diagnosis.device != "cpu" or runs is None else ()
        alike.setdefault((runs, against), []).append(op)
    lines = []
    for (runs, against), ops in alike.items():
        indent = f"  {'':<20}"
        lines += textwrap.wrap(
            ", ".join(ops), 110, initial_indent=f"  {runs or 'nothing':<20}", subsequent_indent=indent
        )
        lines += [f"{indent}  not {name}: it {reason}" for name, reason in against]
    return lines
