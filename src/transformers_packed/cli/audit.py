"""`transformers-packed audit`: measure whether a model keeps the documents of a packed row apart.

Change one document of a packed row and measure the effect on the logits and gradients of the others. Exit status: 0 if
documents are isolated with all boundaries of the collator (without 'all' in --inputs, or if the model refuses it, with
each kind that it accepts), 1 if they leak, 2 if the audit failed. With --invariance, 1 if a document has other bits
anywhere, else 0.

    transformers-packed audit qwen3_5_text --stock
    transformers-packed audit Qwen/Qwen3.5-0.8B --json > audit.json
    transformers-packed audit Qwen/Qwen3.5-0.8B --invariance
"""

import argparse
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import input_error
from .options import Parser, positive_int


if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Stock classes call these packages if they can be imported, even for CPU tensors, on which they crash.
GPU_ONLY = ("fla", "causal_conv1d", "mamba_ssm")

# The exit status after an error.
FAILED = 2


def add_options(parser: Parser) -> None:
    """Declare the options of the command."""
    add = parser.add_argument
    add("model", metavar="MODEL_OR_TYPE", help="checkpoint (directory or Hub), or model type, built tiny")
    add("--stock", action="store_true", help="audit Transformers' class")
    parser.add_shared("--attn", "--seed", "--trust-remote-code")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, help="dtype of the model (default: of the checkpoint; float32 for a type)")
    add("--device", metavar="NAME", help="device of the model (default: cuda if available, else cpu)")
    sources, inputs = ("position_ids", "seq_idx", "cu_seq_lens", "all"), ["position_ids", "all"]
    told = "boundaries to pass (default: position_ids all)"
    add("--inputs", nargs="+", choices=sources, default=inputs, help=told)
    add("--lengths", nargs="+", type=positive_int, metavar="N", help="document lengths (default: selected edge cases)")
    told = "compare bits in rows, in padded batches and alone"
    add("--invariance", action="store_true", help=told)
    parser.add_shared("--batch-invariant")
    parser.add_shared("--plot", metavar="FILE", help="plot the influence between documents (needs matplotlib)")
    parser.add_shared("--json")


def hide_gpu_packages() -> list[str]:
    """Block imports of the packages that need a GPU. Returns the names of the installed ones."""
    hidden = [name for name in GPU_ONLY if name not in sys.modules and find_spec(name) is not None]
    sys.modules.update(dict.fromkeys(hidden))
    return hidden


def run(args: argparse.Namespace) -> int:
    """Print the report. Returns 0 if it is `ok`, and 1 if documents leak or, with `--invariance`, have other bits.

    Raises:
        `ImportError`, `OSError`, `ValueError`: the audit failed.
    """
    import torch

    if args.plot and args.invariance:
        got = "both, and --invariance measures no influence"
        raise input_error("--plot without --invariance", got, "Remove one of them.")

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    hidden = [] if device.startswith("cuda") else hide_gpu_packages()
    # A late import: model classes select their kernels at import time.
    from transformers.utils import logging

    from ..audit.audit import audit_model
    from ..models.registry import registered
    from ..ops.invariance import batch_invariant

    logging.disable_progress_bar()
    try:
        with nullcontext() if args.stock else registered():
            model = load_model(args, device)
    except OSError:
        raise
    except Exception as error:  # A configuration or custom model code may raise anything.
        raise ValueError(f"{args.model} cannot be built: {error}") from error
    options = {"lengths": args.lengths, "inputs": args.inputs, "invariance": args.invariance, "seed": args.seed}
    with batch_invariant() if args.batch_invariant else nullcontext():
        report = audit_model(model, **options)
    if hidden:
        report.notes.append(f"{', '.join(hidden)} cannot run without a GPU, so the PyTorch references were audited")
    print(report.to_json() if args.json else report.table())
    if args.plot:
        report.plot(args.plot)
    if report.refused:
        reasons = dict.fromkeys(report.refusals.values())
        raise ValueError(f"{args.model} could not be audited: {'; '.join(reasons)}")
    return 0 if report.ok else 1


def load_model(args: argparse.Namespace, device: str) -> "PreTrainedModel":
    """The model of a checkpoint, or a tiny one of a model type."""
    from transformers import CONFIG_MAPPING

    from ..audit.tiny import tiny_model
    from ..models.releases import auto_class
    from .checkpoint import load_config, load_weights

    source = args.model
    options = {"attn_implementation": args.attn} if args.attn else {}
    if source in CONFIG_MAPPING and not Path(source).is_dir():
        return tiny_model(source, dtype=args.dtype or "float32", seed=args.seed, **options).to(device)
    expected = "a model type, a local directory or a model on the Hub"
    config = load_config("MODEL_OR_TYPE", source, args.trust_remote_code, expected)
    options |= {"dtype": args.dtype or "auto", "trust_remote_code": args.trust_remote_code}
    return load_weights("MODEL_OR_TYPE", source, auto_class(config), **options).to(device)
