"""`transformers-packed memory`: compute how many GPUs must share a packed row.

Compute how many GPUs must share a row of --row-length tokens to train --model under FSDP2, and how much data they
exchange.

    transformers-packed memory --model Qwen/Qwen3.5-9B --gpus 8 --gpu-memory 80 --row-length 1048576
    transformers-packed memory --model Qwen/Qwen3.5-9B --gpus 1 --gpu-memory 80 --row-length 16384 --optim flash_adamw_release
    transformers-packed memory --model Qwen/Qwen3.5-35B-A3B --gpus 1 --gpu-memory 80 --row-length 16384 --lora --load-in-4bit
    transformers-packed memory --model Qwen/Qwen3.5-4B --gpus 1 --gpu-memory 80 --row-length 65536 --lora --mtp --keep-attention
    transformers-packed memory --model Qwen/Qwen3.5-9B --gpus 1 --gpu-memory 80 --row-length 524288 --lora --segment-tokens 32768
"""

import argparse
import sys
from functools import partial

from ..errors import input_error
from .options import Parser, positive_float, positive_int


def add_options(parser: Parser) -> None:
    """Declare the options of the command."""
    add, shared = parser.add_argument, parser.add_shared
    shared("--model", help="checkpoint or config.json")
    add("--gpus", type=positive_int, required=True, metavar="N", help="number of GPUs")
    add("--gpu-memory", type=positive_float, required=True, metavar="GIB", help="memory per GPU")
    add("--expert-parallel", type=positive_int, default=1, metavar="N", help="GPUs that share the experts (ep_size)")
    shared("--row-length", required=True, help="tokens per row")
    weights = "dtype of weights, gradients and moments; with --lora of frozen weights"
    shared("--weights", default=None, help=f"{weights} (default: as in `train`)")
    parser.add_lora("train LoRA adapters on all linear layers")
    shared("--experts-in-host-memory", "--layers-in-host-memory")
    head = parser.add_mutually_exclusive_group()
    head.add_argument("--mtp", action="store_true", help="also train the head of multi-token prediction")
    shared("--mtp-only", to=head)
    kept = "do not recompute attention with gradient checkpointing"
    add("--keep-attention", action="store_true", help=kept)
    cut = (
        "checkpointed layers compute segments of N tokens (default: the plan names segments if whole rows do not fit)"
    )
    add("--segment-tokens", type=partial(positive_int, lowest=64), metavar="N", help=cut)
    shared("--gradient-accumulation-steps", "--optim", "--trust-remote-code")


def run(args: argparse.Namespace) -> None:
    """Print the plan."""
    from ..data.planning.memory import plan_sequence_parallel
    from ..models.checkpoint_kinds import stored_as
    from ..models.optimizers import dtype_of_weights
    from .checkpoint import lacking_weights, load_config

    config = load_config("--model", args.model, args.trust_remote_code)
    rank = args.lora_rank if args.lora else 0
    if (stored := stored_as(config)) and not rank and not args.mtp_only:
        expected, got = "a checkpoint in 16 or 32 bit", f"one in {stored.title}"
        raise input_error(expected, got, "Add --lora: its weights stay as they are.", option="--model")
    names = (
        "load_in_4bit gradient_accumulation_steps expert_parallel mtp mtp_only keep_attention segment_tokens".split()
    )
    options = {name: getattr(args, name) for name in (*names, "experts_in_host_memory", "layers_in_host_memory")}
    options |= {"lora_rank": rank, "lora_experts": args.experts, "optimizer": args.optim}
    options["weights"] = args.weights or dtype_of_weights(args.optim, args.lora)
    print(plan_sequence_parallel(config, args.row_length, args.gpus, args.gpu_memory, **options).summary())
    if lacking := lacking_weights(args.model):
        print(f"Note: {args.model} has no {lacking}, so its weights cannot be loaded.", file=sys.stderr)
