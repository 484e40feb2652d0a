"""`transformers-packed train`: fine-tune a checkpoint on packed rows."""

import argparse
import sys
from pathlib import Path

from .options import Parser, positive_float


def add_parser(subparsers) -> Parser:
    """Declare the command and its options."""
    parser = subparsers.add_parser(
        "train",
        help="fine-tune a model on packed rows",
        description="Fine-tune a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE checkpoint on packed rows with the stock Trainer. A "
        "record of the data is a conversation (messages), a prompt and its completion, or a text. The loss covers the "
        "assistant's turns, the completion, or the whole text.",
    )
    add, count, shared = parser.add_argument, parser.add_count, parser.add_shared
    shared("--model", "--data")
    folder = "output directory for the trained model, new or empty"
    add("--output", type=Path, required=True, metavar="DIR", help=folder)
    shared("--split", "--subset", "--format")
    count("--max-length", "maximum number of tokens per sample; longer samples are truncated", 2048)
    add("--epochs", type=positive_float, default=1.0, metavar="X", help="passes over the data")
    count("--max-steps", "number of optimizer steps, instead of --epochs")
    count("--batch-size", "samples per packed row on each device", 8)
    count("--gradient-accumulation-steps", "rows per optimizer step on each device", 1)
    rate = "peak learning rate, with linear decay to 0 (default: 2e-5, LoRA 2e-4)"
    add("--learning-rate", type=positive_float, metavar="X", help=rate)
    count("--warmup-steps", "steps of linear learning rate warmup (default: none)", 0)
    parser.add_lora()
    add("--float8", action="store_true", help="train linear layers with products in float8")
    graphs = "never run layers as CUDA graphs (default: on a GPU, where a measured row is faster with them)"
    add("--no-cuda-graphs", action="store_true", help=graphs)
    shared("--attn")
    dtype = "compute dtype; trained weights stay float32 (auto: bfloat16 on CUDA, else float32)"
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help=dtype)
    shared("--gradient-checkpointing")
    count("--save-steps", "steps between checkpoints; the last two are kept (default: no checkpoints)")
    count("--logging-steps", "steps between logged losses", 10)
    add("--resume", action="store_true", help="continue from the last checkpoint in --output")
    shared("--seed")
    add("--trust-remote-code", action="store_true", help="run code of the tokenizer")
    return parser


def run(args: argparse.Namespace) -> int:
    """Train and save the model."""
    from transformers.utils import logging

    from .finetune import finetune

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return finetune(args)
