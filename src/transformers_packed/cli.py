"""The command line, `transformers-packed`.

Each subcommand is a pair of functions: one adds its parser with `run` as a default, `run` takes the parsed arguments
and returns the exit status. What a subcommand needs is imported by its `run`.
"""

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1 after a failure, 130 after Ctrl-C.

    Args:
        argv (`list[str]`, *optional*):
            The arguments, by default those of the process. Wrong ones exit with status 2, as `argparse` does it.
    """
    parser = argparse.ArgumentParser(
        prog="transformers-packed",
        description="Packed (padding-free) training of hybrid linear-attention models in Transformers.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in (_add_demo,):
        add(subparsers)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print(f"\ntransformers-packed {args.command}: interrupted", file=sys.stderr)
        return 130
    except (ImportError, OSError, ValueError) as error:
        print(f"transformers-packed {args.command}: {error}", file=sys.stderr)
        return 1


def positive_int(text: str) -> int:
    """The `type` of options that count something."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def _add_demo(subparsers) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="train a small model padded and packed on the CPU and compare",
        description="Train a small Qwen3.5 on the CPU twice, on padded batches with Transformers' class and on packed "
        "rows with ours, from the same weights and samples. Prints a comparison and writes demo.png.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("."), metavar="DIR", help="where demo.png goes")
    parser.add_argument("--samples", type=positive_int, default=4000, metavar="N", help="samples to train on")
    parser.add_argument("--steps", type=positive_int, default=50, metavar="N", help="training steps of each arm")
    parser.add_argument("--batch-size", type=positive_int, default=8, metavar="N", help="samples per step")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights and of the samples' order")
    parser.set_defaults(run=_run_demo)


def _run_demo(args: argparse.Namespace) -> int:
    from .demo import run_demo

    return run_demo(args.output, samples=args.samples, steps=args.steps, batch_size=args.batch_size, seed=args.seed)
