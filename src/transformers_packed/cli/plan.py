"""`transformers-packed plan`: plan packed rows over a dataset and show them.

Plan packed rows over a file or a dataset. Prints their number and fill, the number of samples that are too long, and
the balance between ranks. These are the rows of `train` with the same --model, --data, --row-length,
--gradient-accumulation-steps and --seed.

    transformers-packed plan --data chats.jsonl --model Qwen/Qwen3.5-0.8B --row-length 4096 --plot plan.png --preview 2
"""

import argparse
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import count, input_error
from .early import check_data
from .options import Parser, output_file


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..data.planning.plan import PackingPlan


_SHOWN_ROWS = 24
_SHOWN_CHARACTERS = 160
_TOKENS, _LABELS = "input_ids", "labels"
_COLORS = ("#1f4e79", "#e0a030", "#4c9a6a", "#d1605e", "#7a6cb0", "#5fb0c9", "#a6744a", "#8a8f3c")


def add_options(parser: Parser) -> None:
    """Declare the options of the command."""
    add, add_count, shared = parser.add_argument, parser.add_count, parser.add_shared
    shared("--data")
    shared("--row-length", required=True, help="most tokens per row")
    shared("--tokenizer")
    model = "checkpoint or config.json for the cost of rows (default: about Qwen3.5 9B)"
    shared("--model", required=False, help=model)
    shared("--split", "--subset", "--format")
    add_count("--world-size", "ranks that share the rows", 1)
    shared("--gradient-accumulation-steps")
    overlong = "action for samples longer than --row-length"
    add("--overlong", choices=("truncate", "split", "drop", "error"), default="truncate", help=overlong)
    side = "side that --overlong truncate cuts off"
    add("--truncation-side", choices=("right", "left"), default="right", help=side)
    picture = "plot the rows (needs matplotlib)"
    shared("--plot", help=picture)
    add_count("--preview", "print the first N rows as text", 0)
    add("--save", type=output_file, metavar="FILE", help="save the plan for PackingPlan.load")
    shared("--seed", "--trust-remote-code")


def run(args: argparse.Namespace) -> None:
    """Plan, print the summary, and write the requested outputs.

    Raises:
        `ImportError`: matplotlib or the datasets library is needed and missing.
        `OSError`: the data, the tokenizer or the configuration cannot be read, or a file cannot be written.
        `ValueError`: the data or an argument is malformed; see [`plan_packing`].
    """
    # Before torch is imported, which takes seconds.
    check_data(args.data)
    from ..data.planning.planner import plan_packing
    from .checkpoint import load_config

    if args.plot and find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install matplotlib")
    tokenizer = find_tokenizer(args) if args.tokenizer or args.preview else None
    if args.preview and tokenizer is None:
        raise input_error("a tokenizer", "none", "Pass --tokenizer.", option="--preview")
    balance = load_config("--model", args.model, args.trust_remote_code) if args.model else True
    cut = (args.overlong, args.truncation_side) == ("truncate", "right")
    samples = read_samples(args, tokenizer, args.row_length if cut else None)
    lengths = [len(sample[_TOKENS]) for sample in samples]
    names = ("overlong", "truncation_side", "world_size", "gradient_accumulation_steps", "seed")
    options = {name: getattr(args, name) for name in names}
    plan = plan_packing(lengths, args.row_length, balance=balance, **options)
    print(plan.summary())
    if args.save:
        plan.save(args.save)
        print(f"Wrote {args.save}")
    if args.plot:
        draw(plan, np.asarray(lengths), args.plot)
        print(f"Wrote {args.plot}")
    for row in range(min(args.preview, len(plan))):
        print("", *describe_row(plan, row, samples, tokenizer), sep="\n")


def find_tokenizer(args: argparse.Namespace) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of `--tokenizer`, or else of `--model`."""
    from .checkpoint import directory_of, load_tokenizer

    if args.tokenizer:
        return load_tokenizer("--tokenizer", args.tokenizer, args.trust_remote_code)
    return load_tokenizer("--model", directory_of(args.model), args.trust_remote_code) if args.model else None


def read_samples(
    args: argparse.Namespace, tokenizer: "PreTrainedTokenizerBase | None", longest: int | None = None
) -> list[dict[str, np.ndarray]]:
    """Read samples with `input_ids` and `labels`. Tokenizes records without `input_ids`.

    Records without a target among their first `longest` tokens are dropped, as `train` does, but not those of tokens.

    Raises:
        `ValueError`: a record is malformed, or text comes without a tokenizer.
    """
    from ..data.records.samples import make_samples, read_records
    from ..data.samples import count_targets

    records = read_records(args.data, args.split, args.subset)
    first = next(records, None)
    if first is None:
        raise input_error("at least one record", "none", "Check the file or the split.", option="--data")
    # The tokenizer of --model is read only if needed, because a configuration may come without one.
    tokens = args.format in (None, "tokens") and isinstance(first[1], dict) and first[1].get(_TOKENS) is not None
    tokenizer = tokenizer if tokens else tokenizer or find_tokenizer(args)
    # The planner handles samples that are too long.
    samples = make_samples(chain([first], records), tokenizer, sys.maxsize, args.format, keep_all=tokens)
    if tokens:
        # A saved plan has the numbers of the records.
        return samples.data
    kept = [sample for sample in samples.data if count_targets(sample[_LABELS][:longest])]
    if not kept:
        fix = "Raise --row-length, or pass --overlong split."
        raise input_error(f"a target among the first {longest:,} tokens of a sample", "none", fix, option="--data")
    if dropped := samples.dropped + len(samples.data) - len(kept):
        cut = dropped - samples.dropped
        why = f" ({cut:,} by truncation to {longest:,} tokens), which the plan leaves out" if cut else ""
        print(f"Dropped {count(dropped, 'record')} without a token with loss{why}.", file=sys.stderr)
    return kept


def describe_row(plan: "PackingPlan", row: int, samples: list, tokenizer: "PreTrainedTokenizerBase") -> Iterator[str]:
    """Lines of text that show the documents of a row, each with a heading."""
    from ..data.samples import count_targets

    documents = list(zip(*(array.tolist() for array in plan.row(row)), strict=True))
    tokens = sum(length for _, _, length in documents)
    yield f"Row {row}: {count(len(documents), 'document')}, {tokens:,} of {plan.max_length:,} tokens"
    for number, (index, start, length) in enumerate(documents, 1):
        part = {name: column[start : start + length] for name, column in samples[index].items()}
        about = f"document {number}, sample {index}, {count(length, 'token')}"
        if length < len(samples[index][_TOKENS]):
            about += f" from {start:,} on"
        about += f", {count_targets(part[_LABELS]):,} with loss"
        yield f"+-- {about} {'-' * max(0, 75 - len(about))}"
        for line in _shorten(tokenizer.decode(part[_TOKENS].tolist())).splitlines():
            # Escape control characters, which could change the terminal.
            yield "|   " + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    yield f"+{'-' * 79}"


def _shorten(text: str) -> str:
    left_out = len(text) - 2 * _SHOWN_CHARACTERS
    if left_out <= 40:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}\n[... {left_out:,} characters ...]\n{text[-_SHOWN_CHARACTERS:]}"


def draw(plan: "PackingPlan", lengths: np.ndarray, path: Path) -> None:
    """Plot the sample `lengths` `[samples]`, the fill of the rows, and the documents of the first rows."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter, StrMethodFormatter

    figure = Figure(figsize=(11, 8.2), layout="constrained", dpi=150)
    panels = figure.subplot_mosaic([["lengths", "fill"], ["rows", "rows"]], height_ratios=[1, 1.5])

    axes = panels["lengths"]
    axes.hist(lengths, bins=60, color=_COLORS[0])
    axes.axvline(plan.max_length, color=_COLORS[3], linestyle="--", label=f"max_length {plan.max_length:,}")
    axes.axvline(lengths.mean(), color=_COLORS[1], label=f"mean {lengths.mean():,.0f}")
    axes.set(title=f"{len(lengths):,} samples by length", xlabel="tokens of a sample", ylabel="samples")
    axes.legend(frameon=False)

    axes = panels["fill"]
    axes.hist(plan.row_tokens / plan.max_length, bins=np.linspace(0, 1, 51), color=_COLORS[2])
    axes.set(title=f"{len(plan):,} rows by fill, {plan.fill:.2%} on average", ylabel="rows (log scale)", yscale="log")
    axes.set(xlabel="fraction of max_length filled with tokens", xlim=(0, 1.02))
    axes.set_ylim(bottom=0.7)
    axes.xaxis.set_major_formatter(PercentFormatter(1))

    axes, shown = panels["rows"], min(_SHOWN_ROWS, len(plan))
    for row in range(shown):
        length = plan.row(row)[2]
        spans = np.stack([np.cumsum(length) - length, length], axis=1)
        # Each row starts with a different color, so that columns do not look related.
        colors = [_COLORS[(row * 3 + number) % len(_COLORS)] for number in range(len(length))]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colors, edgecolor="white", linewidth=0.6)
    axes.axvline(plan.max_length, color=_COLORS[3], linestyle="--")
    axes.set(title=f"The first {count(shown, 'row')}, each block one document", ylabel="row")
    axes.set(xlabel="token in the row", xlim=(0, plan.max_length * 1.01), ylim=(shown - 0.4, -0.6))
    axes.yaxis.get_major_locator().set_params(integer=True)

    for name, axes in panels.items():
        axes.spines[["top", "right"]].set_visible(False)
        if name != "fill":
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        if name != "rows":
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            axes.grid(axis="y", alpha=0.3)
    saved = f"padded batches of 8 would be {plan.padding_avoided:.0%} padding"
    figure.suptitle(f"Packing plan: {len(lengths):,} samples in {len(plan):,} rows; {saved}", weight="bold")
    figure.savefig(path)
