"""The `plan` command: plan packed rows over a file or a dataset, and show what they look like."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..data.planning.plan import PackingPlan
from ..data.planning.planner import plan_packing
from ..data.records.samples import IGNORED_LABEL, count_targets, make_samples, read_records
from ..errors import input_error
from .checkpoint import directory_of, load_config, load_tokenizer


_SHOWN_ROWS = 24
_SHOWN_CHARACTERS = 160
_TOKENS, _LABELS = "input_ids", "labels"
_LARGEST_ID = np.iinfo(np.int32).max
_COLORS = ("#1f4e79", "#e0a030", "#4c9a6a", "#d1605e", "#7a6cb0", "#5fb0c9", "#a6744a", "#8a8f3c")


@dataclass(frozen=True)
class PlanSettings:
    """What to plan, and what to show.

    Args:
        data (`str`):
            A JSON-lines or parquet file, or a dataset: a name on the Hub or a directory.
        max_length (`int`):
            The most tokens of a row.
        tokenizer (`str`, *optional*):
            A directory or a name on the Hub, for data that holds no `input_ids`; by default that of `model`.
        model (`str`, *optional*):
            A directory, its config.json or a name on the Hub: the configuration says what documents cost.
        split, subset (`str`, *optional*):
            The dataset's split and configuration.
        format (`str`, *optional*):
            Which columns to tokenize; see [`make_samples`].
        world_size, gradient_accumulation_steps, overlong, truncation_side, seed:
            As in [`plan_packing`].
        plot (`Path`, *optional*):
            Where to draw histograms of lengths and fill, and the first rows.
        preview (`int`, *optional*, defaults to 0):
            How many rows to print as text.
        save (`Path`, *optional*):
            Where to write the plan.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Run code that comes with the tokenizer or the configuration.
    """

    data: str
    max_length: int
    tokenizer: str | None = None
    model: str | None = None
    split: str | None = None
    subset: str | None = None
    format: str | None = None
    world_size: int = 1
    gradient_accumulation_steps: int = 1
    overlong: str = "error"
    truncation_side: str = "right"
    seed: int = 0
    plot: Path | None = None
    preview: int = 0
    save: Path | None = None
    trust_remote_code: bool = False


def report_plan(settings: PlanSettings) -> int:
    """Plan, print the summary, and write and print what `settings` ask for; returns the exit status 0.

    Raises:
        `ImportError`: matplotlib or the datasets library is needed and missing.
        `OSError`: the data, the tokenizer or the configuration cannot be read, or a file cannot be written.
        `ValueError`: the data or an argument is malformed; see [`plan_packing`].
    """
    if settings.plot and find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install matplotlib")
    # That of --model is read where it is needed; a configuration may stand alone.
    tokenizer = find_tokenizer(settings) if settings.tokenizer or settings.preview else None
    if settings.preview and tokenizer is None:
        raise input_error("a tokenizer", "none", "Give --tokenizer.", option="--preview")
    balance = load_config("--model", settings.model, settings.trust_remote_code) if settings.model else True
    samples = read_samples(settings, tokenizer)
    lengths = [len(sample[_TOKENS]) for sample in samples]
    plan = plan_packing(
        lengths,
        settings.max_length,
        overlong=settings.overlong,
        truncation_side=settings.truncation_side,
        world_size=settings.world_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        balance=balance,
        seed=settings.seed,
    )
    print(plan.summary())
    if settings.save:
        plan.save(settings.save)
        print(f"Wrote {settings.save}")
    if settings.plot:
        draw(plan, np.asarray(lengths), settings.plot)
        print(f"Wrote {settings.plot}")
    for row in range(min(settings.preview, len(plan))):
        print()
        print("\n".join(describe_row(plan, row, samples, tokenizer)))
    return 0


def find_tokenizer(settings: PlanSettings) -> PreTrainedTokenizerBase | None:
    """The tokenizer that is named, or that of the model."""
    if settings.tokenizer:
        return load_tokenizer("--tokenizer", settings.tokenizer, settings.trust_remote_code)
    if settings.model:
        return load_tokenizer("--model", directory_of(settings.model), settings.trust_remote_code)
    return None


def read_samples(settings: PlanSettings, tokenizer: PreTrainedTokenizerBase | None) -> list[dict[str, np.ndarray]]:
    """The samples of the data, each with `input_ids` and perhaps `labels`, tokenized where they are not yet.

    Raises:
        `ValueError`: a record is malformed, or there is text and no tokenizer.
    """
    records = read_records(settings.data, settings.split, settings.subset)
    first = next(records, None)
    if first is None:
        raise input_error("at least one record", "none", "Check the file or the split.", option="--data")
    records = chain([first], records)
    if isinstance(first[1], dict) and first[1].get(_TOKENS) is not None and settings.format is None:
        return [_tokenized(place, record) for place, record in tqdm(records, "reading", unit="record", disable=None)]
    tokenizer = tokenizer or find_tokenizer(settings)
    if tokenizer is None:
        raise input_error(
            f"the column {_TOKENS}, or a tokenizer",
            f"{settings.data} without it",
            "Give --tokenizer.",
            option="--data",
        )
    # The plan decides what becomes of samples that are too long.
    samples = make_samples(records, tokenizer, sys.maxsize, settings.format)
    if samples.dropped:
        print(f"{samples.dropped:,} records have no token with loss and were left out.", file=sys.stderr)
    return samples.data


def _tokenized(place: str, record: Any) -> dict[str, np.ndarray]:
    columns = {}
    for name in (_TOKENS, _LABELS):
        value = record.get(name) if isinstance(record, dict) else None
        if value is None and name == _LABELS:
            continue
        try:
            column = np.asarray(value)
        except ValueError:
            column = np.empty(0)
        if column.ndim != 1 or column.dtype.kind not in "iu" or len(column) == 0:
            raise input_error(f"{name} as a list of at least one token id", repr(value)[:60], "Correct it.")
        wrong = (column < 0) & (column != IGNORED_LABEL if name == _LABELS else True) | (column > _LARGEST_ID)
        if wrong.any():
            expected = f"token ids from 0 to {_LARGEST_ID}{' or -100' if name == _LABELS else ''} in {name}"
            raise input_error(expected, f"{column[wrong][0]}", "Correct it.")
        columns[name] = column.astype(np.int32)
    if _LABELS in columns and len(columns[_LABELS]) != len(columns[_TOKENS]):
        raise input_error(
            f"{_LABELS} of the length of {_TOKENS}, {len(columns[_TOKENS])}",
            f"{len(columns[_LABELS])}",
            "Tokenize both together.",
        )
    return columns


def describe_row(
    plan: PackingPlan, row: int, samples: list[dict[str, np.ndarray]], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """The lines that show a row's documents as text, each under a line of its own."""
    documents = list(zip(*(array.tolist() for array in plan.row(row)), strict=True))
    tokens = sum(length for _, _, length in documents)
    yield f"Row {row}: {_count(len(documents), 'document')}, {tokens:,} of {plan.max_length:,} tokens"
    for number, (index, start, length) in enumerate(documents, 1):
        part = {name: column[start : start + length] for name, column in samples[index].items()}
        about = f"document {number}, sample {index}, {_count(length, 'token')}"
        if length < len(samples[index][_TOKENS]):
            about += f" from {start:,} on"
        if _LABELS in part:
            about += f", {count_targets(part[_LABELS]):,} with loss"
        yield f"+-- {about} {'-' * max(0, 75 - len(about))}"
        for line in _shorten(tokenizer.decode(part[_TOKENS].tolist())).splitlines():
            # Control characters would change the terminal.
            yield "|   " + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)
    yield f"+{'-' * 79}"


def _shorten(text: str) -> str:
    left_out = len(text) - 2 * _SHOWN_CHARACTERS
    if left_out <= 40:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}\n[... {left_out:,} characters ...]\n{text[-_SHOWN_CHARACTERS:]}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def draw(plan: PackingPlan, lengths: np.ndarray, path: Path) -> None:
    """Draw the samples' lengths, how full the rows are, and the documents of the first rows.

    Args:
        plan (`PackingPlan`):
            The plan.
        lengths (`np.ndarray`):
            The lengths that it was made from, `[samples]`.
        path (`Path`):
            The picture's file; its ending says the format.
    """
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
    axes.set(xlabel="share of max_length that holds tokens", xlim=(0, 1.02))
    axes.set_ylim(bottom=0.7)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    for name in ("lengths", "fill"):
        panels[name].yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        panels[name].grid(axis="y", alpha=0.3)

    axes = panels["rows"]
    shown = min(_SHOWN_ROWS, len(plan))
    for row in range(shown):
        length = plan.row(row)[2]
        spans = np.stack([np.cumsum(length) - length, length], axis=1)
        # Each row starts with another colour, so that columns do not look as if they belonged together.
        colors = [_COLORS[(row * 3 + number) % len(_COLORS)] for number in range(len(length))]
        axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=colors, edgecolor="white", linewidth=0.6)
    axes.axvline(plan.max_length, color=_COLORS[3], linestyle="--")
    axes.set(
        title=f"The first {_count(shown, 'row')}, each block one document", xlabel="token in the row", ylabel="row"
    )
    axes.set(xlim=(0, plan.max_length * 1.01), ylim=(shown - 0.4, -0.6))
    axes.yaxis.get_major_locator().set_params(integer=True)
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
    for name in ("lengths", "rows"):
        panels[name].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    saved = f"padded batches of 8 would be {plan.padding_avoided:.0%} padding"
    figure.suptitle(f"Packing plan: {len(lengths):,} samples in {len(plan):,} rows; {saved}", weight="bold")
    figure.savefig(path)
