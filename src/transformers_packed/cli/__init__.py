"""The command line, `transformers-packed`.

Each subcommand is a pair of functions: one adds its parser with `run` as a default, `run` takes the parsed arguments
and returns the exit status. What a subcommand needs is imported by its `run`.
"""

import argparse
import os
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 0, 1 after a failure (`audit`: 0, 1 or 2), 130 after Ctrl-C, 141
    when nobody reads its output any more.

    Args:
        argv (`list[str]`, *optional*):
            The arguments, by default those of the process. Wrong ones exit with status 2, as `argparse` does it.
    """
    parser = argparse.ArgumentParser(
        prog="transformers-packed",
        description="Packed (padding-free) training of hybrid linear-attention models in Transformers.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in (_add_demo, _add_train, _add_plan, _add_audit, _add_env):
        add(subparsers)
    args = parser.parse_args(argv)
    try:
        status = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"\ntransformers-packed {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # As in `transformers-packed env | head -3`. Python will flush once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ImportError, OSError, ValueError) as error:
        print(f"transformers-packed {args.command}: {error}", file=sys.stderr)
        return 1


def positive_int(text: str) -> int:
    """The `type` of options that count something."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def positive_float(text: str) -> float:
    """The `type` of options that measure something."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def output_file(text: str) -> Path:
    """The `type` of options that name a file to write: what would fail after minutes fails at once."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file, got the directory {text}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent} for {text}")
    return path


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


def _add_train(subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="fine-tune a model on packed rows",
        description="Fine-tune a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE checkpoint on packed rows with the stock Trainer. A "
        "record of the data is a conversation (messages), a prompt and its completion, or a text; loss is on what the "
        "assistant writes, on the completion, or on the whole text.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="PATH|NAME", help="checkpoint: a directory or a name on the Hub")
    add(
        "--data",
        required=True,
        metavar="FILE|NAME",
        help="JSON-lines or parquet file, or dataset: a name on the Hub or a directory",
    )
    add(
        "--output",
        type=Path,
        required=True,
        metavar="DIR",
        help="where the trained model goes: a new or empty directory",
    )
    add("--split", metavar="NAME", help="split of the dataset (default: train)")
    add("--subset", metavar="NAME", help="configuration of the dataset")
    add(
        "--format",
        choices=("messages", "prompt-completion", "text"),
        help="which columns to use (default: those found)",
    )
    add(
        "--max-length",
        type=positive_int,
        default=2048,
        metavar="N",
        help="longer samples are cut (default: %(default)s)",
    )
    add("--epochs", type=positive_float, default=1.0, metavar="X", help="passes over the data (default: %(default)s)")
    add("--max-steps", type=positive_int, metavar="N", help="optimizer steps, instead of --epochs")
    add(
        "--batch-size", type=positive_int, default=8, metavar="N", help="samples per packed row (default: %(default)s)"
    )
    add(
        "--gradient-accumulation-steps",
        type=positive_int,
        default=1,
        metavar="N",
        help="rows per optimizer step (default: %(default)s)",
    )
    add(
        "--learning-rate",
        type=positive_float,
        metavar="X",
        help="falls linearly to 0 (default: 2e-5, LoRA 2e-4)",
    )
    add(
        "--warmup-steps",
        type=positive_int,
        default=0,
        metavar="N",
        help="steps in which it first rises (default: none)",
    )
    add("--lora", action="store_true", help="train LoRA adapters instead of all weights (needs peft)")
    add("--lora-rank", type=positive_int, default=16, metavar="N", help="their rank (default: %(default)s)")
    add("--attn", metavar="NAME", help="attention implementation: sdpa, eager, flash_attention_2, ... (default: sdpa)")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the computation; trained weights stay float32 (default: bfloat16 on CUDA, else float32)",
    )
    add("--gradient-checkpointing", action="store_true", help="less memory, more time")
    add(
        "--save-steps",
        type=positive_int,
        metavar="N",
        help="steps between checkpoints, of which two stay (default: none)",
    )
    add(
        "--logging-steps",
        type=positive_int,
        default=10,
        metavar="N",
        help="steps between losses (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of the samples' order and LoRA's weights (default: %(default)s)",
    )
    add("--resume", action="store_true", help="continue from the last checkpoint in --output")
    add("--trust-remote-code", action="store_true", help="run code that comes with the tokenizer")
    parser.set_defaults(run=_run_train)


def _run_train(args: argparse.Namespace) -> int:
    from transformers.utils import logging

    from .train import FinetuneSettings, finetune

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    settings = {name: value for name, value in vars(args).items() if name not in ("command", "run")}
    return finetune(FinetuneSettings(**settings))


def _add_plan(subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="plan packed rows over a dataset, or over GPUs, and show them",
        description="With --data: plan packed rows over a file or a dataset and print how many there are, how full they "
        "are, what was too long, and how evenly ranks share them. Records hold input_ids, or what `train` takes. With "
        "--gpus: how many GPUs have to share a row of --max-length tokens of --model to train it with AdamW under FSDP2, "
        "and what they exchange; of the other options only those of GPUs are taken then.",
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--data",
        metavar="FILE|NAME",
        help="JSON-lines or parquet file, or dataset: a name on the Hub or a directory",
    )
    source.add_argument("--gpus", type=positive_int, metavar="N", help="how many there are")
    add("--gpu-memory", type=positive_float, metavar="GIB", help="with --gpus: of each of them")
    add(
        "--weights",
        choices=("bfloat16", "float32"),
        help="with --gpus: dtype of parameters, gradients and AdamW's moments (default: bfloat16)",
    )
    add("--max-length", type=positive_int, required=True, metavar="N", help="the most tokens of a row")
    add("--tokenizer", metavar="PATH|NAME", help="for data without input_ids (default: that of --model)")
    add(
        "--model",
        metavar="PATH|NAME",
        help="checkpoint or config.json whose configuration says what tokens cost (default with --data: about Qwen3.5 9B)",
    )
    add("--split", metavar="NAME", help="split of the dataset (default: train)")
    add("--subset", metavar="NAME", help="configuration of the dataset")
    add(
        "--format",
        choices=("messages", "prompt-completion", "text"),
        help="which columns to tokenize (default: those found)",
    )
    add(
        "--world-size",
        type=positive_int,
        default=1,
        metavar="N",
        help="ranks that share the rows (default: %(default)s)",
    )
    add(
        "--gradient-accumulation-steps",
        type=positive_int,
        default=1,
        metavar="N",
        help="rows of a rank per optimizer step (default: %(default)s)",
    )
    add(
        "--overlong",
        choices=("error", "truncate", "split", "drop"),
        default="error",
        help="what becomes of samples above --max-length (default: %(default)s)",
    )
    add(
        "--truncation-side",
        choices=("right", "left"),
        default="right",
        help="where --overlong truncate cuts (default: %(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the order (default: %(default)s)")
    add(
        "--plot", type=output_file, metavar="FILE.png", help="draw lengths, fill and the first rows (needs matplotlib)"
    )
    add("--preview", type=positive_int, default=0, metavar="K", help="print the first K rows as text")
    add("--save", type=output_file, metavar="FILE", help="write the plan, for PackingPlan.load")
    add("--trust-remote-code", action="store_true", help="run code that comes with the tokenizer or the model")
    parser.set_defaults(run=lambda args: _run_plan(args, parser))


def _run_plan(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    of_gpus = {"gpu_memory", "weights"}
    given = {k: v for k, v in vars(args).items() if k not in ("command", "run")}
    changed = {name for name, value in given.items() if value != parser.get_default(name)}
    useless = (
        changed - of_gpus - {"gpus", "model", "max_length", "trust_remote_code"} if args.gpus else changed & of_gpus
    )
    if useless:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(useless))
        parser.error(f"{options}: not allowed with --{'gpus' if args.gpus else 'data'}")
    if not args.gpus:
        from .plan import PlanSettings, report_plan

        return report_plan(PlanSettings(**{k: v for k, v in given.items() if k not in (*of_gpus, "gpus")}))
    if not (args.model and args.gpu_memory):
        parser.error("--gpus needs --model and --gpu-memory")
    from ..data.planning.memory import plan_sequence_parallel
    from .checkpoint import load_config

    config = load_config("--model", args.model, args.trust_remote_code)
    weights = args.weights or "bfloat16"
    print(plan_sequence_parallel(config, args.max_length, args.gpus, args.gpu_memory, weights=weights).summary())
    return 0


def _add_env(subparsers) -> None:
    parser = subparsers.add_parser(
        "env",
        help="print versions, devices, and which implementations would run",
        description="Print versions and devices, and for each op which implementation a packed row would train with "
        "here and why the others would not run.",
    )
    parser.set_defaults(run=_run_env)


def _run_env(args: argparse.Namespace) -> int:
    from .env import describe_environment

    print(describe_environment())
    return 0


def _add_audit(subparsers) -> None:
    parser = subparsers.add_parser(
        "audit",
        help="measure whether a model keeps the documents of a packed row apart",
        description="Change one document of a packed row and see which others notice, in logits and in gradients. Exit "
        "status: 0 when documents are isolated with all boundaries that the collator can give (without 'all' among the "
        "inputs, or if the model refuses it, with every kind that the model accepts), 1 when they leak, 2 when nothing "
        "could be measured. With --all: tiny models of every causal type of Transformers, built-in and as patch_model "
        "makes them; 1 when one of the latter leaks.",
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL_OR_TYPE",
        help="a checkpoint (directory or name on the Hub), or a type, built tiny",
    )
    add(
        "--all", action="store_true", help="every causal type of Transformers; takes --types, --jobs, --output, --json"
    )
    add("--types", nargs="+", metavar="TYPE", help="with --all: these types only")
    add("--jobs", type=positive_int, metavar="N", help="with --all: processes (default: one for each core)")
    add(
        "--output",
        type=output_file,
        metavar="FILE.md",
        help="with --all: write the support matrix there, not to stdout",
    )
    add("--stock", action="store_true", help="Transformers' class also where this package has one")
    add("--attn", metavar="NAME", help="attention implementation: sdpa, eager, flash_attention_2, ... (default: sdpa)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: the checkpoint's; float32 for a type",
    )
    add("--device", metavar="NAME", help="default: cuda if there is a GPU, else cpu")
    add(
        "--inputs",
        nargs="+",
        choices=("position_ids", "seq_idx", "cu_seq_lens", "all"),
        default=["position_ids", "all"],
        help="boundaries to give the model (default: position_ids all)",
    )
    add("--lengths", nargs="+", type=positive_int, metavar="N", help="documents of the row (default: chosen edges)")
    add("--plot", type=output_file, metavar="FILE", help="write a picture of who changes whom (needs matplotlib)")
    add("--json", type=output_file, metavar="FILE", help="write the report, or the matrix, as JSON")
    add("--seed", type=int, default=0, metavar="N", help="of the tokens and a tiny model's weights")
    add("--trust-remote-code", action="store_true", help="run code that comes with the checkpoint")
    parser.set_defaults(run=_run_audit)


def _run_audit(args: argparse.Namespace) -> int:
    from .audit import run_all, run_audit

    return run_all(args) if args.all else run_audit(args)


if __name__ == "__main__":
    sys.exit(main())
