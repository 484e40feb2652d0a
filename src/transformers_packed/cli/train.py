"""`transformers-packed train`: fine-tune a model on packed rows.

Fine-tune a checkpoint of Qwen3-Next, Qwen3.5/3.6/3.8, Qwen3.5/3.6/3.8-MoE, OLMo-Hybrid, Kimi-Linear or Bailing-Hybrid
on packed rows. Records are conversations (messages), prompts with completions, texts, or tokens (input_ids). The loss
covers the assistant's turns, the completion, the text, or the tokens that labels or a mask leave in.

    transformers-packed train --model Qwen/Qwen3.5-0.8B --data chats.jsonl --output tuned
    transformers-packed train --model Qwen/Qwen3.5-0.8B --data chats.jsonl --output adapter --lora
    transformers-packed train --model Qwen/Qwen3.5-35B-A3B --data chats.jsonl --output adapter --lora --experts --load-in-4bit
    transformers-packed train --model Qwen/Qwen3.5-0.8B --data chats.jsonl --output tuned --row-length 8192
    transformers-packed train --model Qwen/Qwen3.5-0.8B --data chats.jsonl --output tuned --save-steps 100 --resume
    transformers-packed train --model Qwen/Qwen3.5-0.8B --data chats.jsonl --output distilled --teacher Qwen/Qwen3.5-4B
"""

import argparse
import os
import sys
from dataclasses import fields
from functools import partial
from itertools import product

from ..errors import input_error
from ..training.options import Options, TrainingOptions
from .early import check_data, check_packages, check_source
from .lines import say
from .options import (
    AUTO,
    EXCLUDES,
    LONGEST_SAMPLE,
    SAMPLES,
    Parser,
    dest,
    not_empty,
    output_folder,
    positive_float,
    positive_int,
    positive_int_or_auto,
)
from .run_folder import find_checkpoint


# The usual weight of the loss of multi-token prediction.
MTP_LOSS_WEIGHT = 0.1


def add_options(parser: Parser) -> None:
    """Declare the options of the command."""
    add, count, shared = parser.add_argument, parser.add_count, parser.add_shared
    shared("--model", "--data")
    folder = "new or empty directory for the trained model"
    add("--output", type=output_folder, required=True, metavar="DIR", help=folder)
    shared("--split", "--subset", "--format")
    longest = f"tokens to which samples are truncated (default: {LONGEST_SAMPLE}, or "
    count("--max-length", f"{longest}--row-length)")
    turns = "train each assistant turn after the conversation as the template renders it up to there"
    add("--every-turn", action="store_true", help=turns)
    length = parser.add_mutually_exclusive_group()
    # As with the rows below, a default would hide an option that has the same value.
    length.add_argument("--epochs", type=positive_float, metavar="X", help="passes over the data (default: 1)")
    length.add_argument("--max-steps", type=positive_int, metavar="N", help="instead, optimizer steps")
    rows = parser.add_mutually_exclusive_group()
    per_row = f"samples per packed row on each device (default: {SAMPLES})"
    # argparse would not see a value that equals the default beside the other option.
    rows.add_argument("--batch-size", type=positive_int, metavar="N", help=per_row)
    full = "instead, one full row of up to N tokens on each device"
    shared("--row-length", to=rows, help=full)
    shared("--gradient-accumulation-steps", "--sequence-parallel-size")
    rate = "peak, with linear decay to 0 (default: 2e-5, LoRA 2e-4)"
    add("--learning-rate", type=positive_float, metavar="X", help=rate)
    count("--warmup-steps", "steps of linear warmup (default: none)", 0)
    shared("--optim")
    parser.add_lora()
    shared("--experts-in-host-memory", "--layers-in-host-memory", "--float8", "--batch-invariant")
    head = parser.add_mutually_exclusive_group()
    both = "also train the head of multi-token prediction, with 0.1 x its loss"
    head.add_argument("--mtp", action="store_true", help=both)
    shared("--mtp-only", to=head)
    teacher = "checkpoint with the same vocabulary, whose next-token distributions are also targets"
    add("--teacher", type=not_empty, metavar="PATH|NAME", help=teacher)
    add("--teacher-in-host-memory", action="store_true", help="as --layers-in-host-memory, for the teacher")
    shared("--distill-weight", "--distill-beta", "--distill-temperature")
    shared("--cuda-graphs", "--attn")
    dtype = "compute dtype (default: bfloat16 on CUDA, else float32)"
    shared("--dtype", help=dtype)
    shared("--gradient-checkpointing")
    host = "keep inputs of checkpointed layers in host memory (default: where that costs no time)"
    add("--offload", action=argparse.BooleanOptionalAction, help=host)
    kept = "do not recompute attention (default: for long documents, in host memory)"
    add("--keep-attention", action=argparse.BooleanOptionalAction, help=kept)
    every = (
        "checkpoint every n-th layer; auto: as few layers as fit, also none, before rows are cut (default: all layers)"
    )
    add("--every-n-layers", type=positive_int_or_auto, metavar=f"N|{AUTO}", help=every)
    cut = "compute layers in segments of N tokens, which needs less memory; auto: the longest that fit (default: whole rows)"
    add("--segment-tokens", type=partial(positive_int_or_auto, lowest=64), metavar=f"N|{AUTO}", help=cut)
    count("--save-steps", "steps between checkpoints, of which two are kept (default: none)")
    count("--logging-steps", "steps between logged losses", 10)
    add("--resume", action="store_true", help="continue from the last checkpoint in --output")
    shared("--seed")
    shared("--trust-remote-code", help="run code of the tokenizer")


def _check_together(args: argparse.Namespace) -> None:
    """Raise a `ValueError` for options that exclude each other."""
    if args.mtp_only and args.lora:
        raise input_error("--mtp-only without --lora", "both", "Adapters would not be trained.", option="--mtp-only")
    shares, cuts = args.sequence_parallel_size > 1, args.segment_tokens
    for option, given, other, also in (
        ("--every-turn", args.every_turn, "--sequence-parallel-size", shares),
        ("--segment-tokens", cuts, "--sequence-parallel-size", shares),
        ("--every-turn", args.every_turn, "--segment-tokens", cuts),
    ):
        if given and also:
            raise input_error(f"{option} without {other}", "both", f"Remove {other}.", option=option)
    for option, (other, why) in EXCLUDES.items():
        if getattr(args, dest(option)) and getattr(args, dest(other)):
            raise input_error(f"no {other}", "it", why, option=option)
    left_out = {"--teacher": "teachers", "--every-turn": "trees of turns", "--cuda-graphs": "graphs"}
    for option, (other, what) in product(("--every-n-layers", "--segment-tokens"), left_out.items()):
        if getattr(args, dest(option)) == AUTO and getattr(args, dest(other)):
            fix = f"The plan of memory leaves {what} out."
            raise input_error(f"a number with {other}", AUTO, fix, option=option)


def run(args: argparse.Namespace) -> None:
    """Train and save the model."""
    args.max_length = args.max_length or args.row_length or LONGEST_SAMPLE
    _check_together(args)
    size, processes = args.sequence_parallel_size, int(os.environ.get("WORLD_SIZE", 1))
    if processes % size:
        fix = f"Start the command with torchrun --no-python --nproc_per_node {size}."
        expected, got = f"a multiple of {size} processes", "1 process" if processes == 1 else f"{processes} processes"
        raise input_error(expected, got, fix, option="--sequence-parallel-size")
    if args.row_length and args.max_length > args.row_length:
        fix = "Lower it, or raise --row-length."
        raise input_error(
            f"at most --row-length, {args.row_length:,} tokens", f"{args.max_length:,}", fix, option="--max-length"
        )
    args.batch_size = 1 if args.row_length else args.batch_size or SAMPLES
    args.epochs = args.epochs or 1.0
    args.options = {x.name: getattr(args, x.name) for x in fields(TrainingOptions) if hasattr(args, x.name)}
    args.options |= {"packing": "pack" if args.row_length else "padding_free", "max_length": args.row_length}
    args.options |= {"mtp_loss_weight": MTP_LOSS_WEIGHT * args.mtp, "teacher": args.teacher}
    Options(**args.options).check()
    # Before torch is imported, which takes seconds.
    check_packages(args)
    checkpoint, damaged = find_checkpoint(args.output, args.resume)
    check_source("--model", args.model)
    if args.teacher:
        check_source("--teacher", args.teacher)
    check_data(args.data)
    say("Importing torch and transformers ...")
    from transformers.utils import logging

    from .finetune import finetune

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    finetune(args, checkpoint, damaged)
