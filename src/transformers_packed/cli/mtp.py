"""`transformers-packed mtp`: measure how many drafts of a multi-token prediction head a model accepts.

Measure how often the head of multi-token prediction has the same first choice as the model, at the targets of the data.

    transformers-packed mtp --model Qwen/Qwen3.5-0.8B --data chats.jsonl
"""

import argparse
import json
import sys
from itertools import islice

from ..errors import count, input_error
from .early import check_attention
from .lines import say
from .options import LONGEST_SAMPLE, Parser


def add_options(parser: Parser) -> None:
    """Declare the options of the command."""
    shared = parser.add_shared
    shared("--model", "--data", "--split", "--subset", "--format")
    steps = "tokens to draft one after the other, num_speculative_tokens of servers"
    parser.add_count("--steps", steps, 3)
    parser.add_count("--samples", "first records to read", 200)
    parser.add_count("--max-length", "tokens to which samples are truncated", LONGEST_SAMPLE)
    shared("--attn", "--dtype", "--json")
    shared("--trust-remote-code", help="run code of the tokenizer")


def run(args: argparse.Namespace) -> None:
    """Print the shares of accepted tokens."""
    check_attention(args.attn)
    if not args.json:
        say(f"Loading {args.model} ...")
    import torch
    from transformers.utils import logging

    from ..audit.acceptance import mtp_acceptance
    from ..data.records.samples import make_samples, read_records
    from .checkpoint import load_tokenizer
    from .models import check_head, check_vocabulary, compute_dtype, load, supported_config

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    config = supported_config(args.model)
    tokenizer = load_tokenizer("--model", args.model, args.trust_remote_code)
    records = islice(read_records(args.data, args.split, args.subset), args.samples)
    samples = make_samples(records, tokenizer, args.max_length, args.format)
    model = load("--model", args.model, args.attn, compute_dtype(args.dtype))
    check_head(config, "--model")
    check_vocabulary(model, samples)
    torch.nn.Module.to(model, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    found = mtp_acceptance(model, samples.data, steps=args.steps)
    drafted, number = found.drafted.sum(0).tolist(), len(samples.data)
    if not drafted[0]:
        expected, got = "samples with a target after their second token", f"none in {count(number, 'sample')}"
        raise input_error(expected, got, "Take longer records.", option="--data")
    if args.json:
        # JSON has no NaN.
        rates = [rate if tokens else None for rate, tokens in zip(found.rates, drafted, strict=True)]
        figures = {"documents": number, "loss": found.loss, "drafted": drafted, "accepted": rates}
        print(json.dumps(figures | {"tokens_per_forward": found.tokens_per_forward}))
        return
    say(f"{count(number, 'sample')}, loss of the head {found.loss:.4f}")
    for step, (rate, tokens) in enumerate(zip(found.rates, drafted, strict=True), start=1):
        say(f"token {step}: {rate:7.1%} accepted of {tokens:,} drafted" if tokens else f"token {step}: none drafted")
    say(f"{found.tokens_per_forward:.2f} tokens per forward of the model with {count(args.steps, 'drafted token')}")
