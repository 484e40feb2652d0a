"""`transformers-packed memory`: how many GPUs have to share a packed row."""

import argparse

from .options import Parser, positive_float, positive_int


def add_parser(subparsers) -> Parser:
    """Declare the command and its options."""
    parser = subparsers.add_parser(
        "memory",
        help="how many GPUs have to share a row of a model",
        description="How many GPUs have to share a row of --max-length tokens of --model to train it with AdamW under "
        "FSDP2, and what they exchange.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="PATH|NAME", help="checkpoint or config.json")
    add("--gpus", type=positive_int, required=True, metavar="N", help="how many there are")
    add("--gpu-memory", type=positive_float, required=True, metavar="GIB", help="of each of them")
    add("--max-length", type=positive_int, required=True, metavar="N", help="tokens of the row")
    weights = "dtype of parameters, gradients and AdamW's moments"
    add("--weights", choices=("bfloat16", "float32"), default="bfloat16", help=weights)
    parser.add_shared("--trust-remote-code")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from ..data.planning.memory import plan_sequence_parallel
    from .checkpoint import load_config

    config = load_config("--model", args.model, args.trust_remote_code)
    plan = plan_sequence_parallel(config, args.max_length, args.gpus, args.gpu_memory, weights=args.weights)
    print(plan.summary())
    return 0
