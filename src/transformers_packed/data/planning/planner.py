"""Plan packed rows from sample lengths alone.

`plan_packing` plans the whole dataset at once and returns indices. It neither reads nor copies tokens. It searches
rows over the histogram of lengths (`best_fit.py`), assigns samples of one length to them in random order, shuffles the
rows, and mixes their documents (`mixing.py`). The time of the search depends on the number of distinct lengths. All
other work is a sort by length and array operations over the samples.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...errors import input_error
from ..overlong import Overlong, TruncationSide, check_count, check_settings
from .best_fit import Patterns, best_fit, even_out, number_of_rows, open_rows
from .cost import PackingCost, default_cost
from .mixing import mix_rows
from .plan import PackingPlan
from .rows import histogram, offsets_of, ranges


# Maximum fraction of extra rows for balancing the cost of rows.
_EXTRA_ROWS = 0.005
# Rows that cost more than this multiple of the average are not mixed with other rows. A lower value evens out the cost of
# rows a little more, but steps then vary more in the mean length of their documents.
_MIXED_COST = 1.0225
_BLOCK = 1 << 18
_LONGEST = np.iinfo(np.int32).max


def plan_packing(
    lengths: ArrayLike,
    max_length: int,
    *,
    overlong: Overlong = "error",
    truncation_side: TruncationSide = "right",
    world_size: int = 1,
    gradient_accumulation_steps: int = 1,
    balance: bool | PackingCost | Any = True,
    seed: int = 0,
) -> PackingPlan:
    """Plan packed rows of at most `max_length` tokens over all samples.

    Each sample is in exactly one row, and whole unless it is too long. All ranks get the same number of rows, and the
    rows of a step cost about the same. To achieve this, the planner adds rows until their number is a multiple of
    `world_size * gradient_accumulation_steps`. Up to 0.5 % more rows keep rows with long documents from costing more
    than others. Each step has the same rows for every `world_size` with the same product, so a run on two GPUs can
    continue on one that accumulates twice as many rows.

    Rows are in random order and hold documents of mixed lengths. With thousands of rows, the mean document length
    varies between steps about as much as for samples in random order. When rows are balanced, a row that costs more
    than others because of a long document is not mixed.

    Args:
        lengths (`ArrayLike`):
            The sample lengths in tokens, integers of at least 1, `[samples]`.
        max_length (`int`):
            Maximum number of tokens per row.
        overlong (`str`, *optional*, defaults to `"error"`):
            Action for samples longer than `max_length`. `"error"` raises an error, `"truncate"` cuts them, `"split"`
            makes several independent documents, and `"drop"` removes them. The plan counts them.
        truncation_side (`str`, *optional*, defaults to `"right"`):
            The side that `"truncate"` cuts off: `"right"` keeps the beginning of a sample, `"left"` its end.
        world_size (`int`, *optional*, defaults to 1):
            The number of ranks that share the rows.
        gradient_accumulation_steps (`int`, *optional*, defaults to 1):
            Rows per rank in an optimizer step.
        balance (`bool`, `PackingCost` or `PreTrainedConfig`, *optional*, defaults to `True`):
            The cost that is balanced between the rows of a step: that of a configuration, or with `True` that of
            Transformers' default `Qwen3_5TextConfig`. `False` turns balancing off; all ranks still get the same number of
            rows.
        seed (`int`, *optional*, defaults to 0):
            Seed of all random choices. The same arguments and seed give the same plan.

    Raises:
        `ValueError`: malformed lengths or arguments, a sample that is too long with `overlong="error"`, or too few
            documents to give each rank a row.

    Example:

    ```python
    >>> from transformers_packed import plan_packing
    >>> plan = plan_packing([5, 3, 8, 2, 6], max_length=8)
    >>> len(plan), plan.tokens, plan.fill
    (3, 24, 1.0)
    >>> sorted(sorted(plan.row(i)[0].tolist()) for i in range(len(plan)))
    [[0, 1], [2], [3, 4]]

    ```
    """
    check_settings(max_length, overlong, truncation_side)
    check_count("world_size", world_size)
    check_count("gradient_accumulation_steps", gradient_accumulation_steps)
    check_count("seed", seed, 0)
    if isinstance(balance, PackingCost):
        cost = balance
    else:
        cost = default_cost() if isinstance(balance, bool) else PackingCost.from_config(balance)
    rows_per_step = int(world_size) * int(gradient_accumulation_steps)
    balanced = balance is not False and rows_per_step > 1
    max_length = min(int(max_length), _LONGEST)

    given = _check_lengths(lengths)
    lengths, samples, starts = _cut_overlong(given, max_length, overlong, truncation_side)
    tokens = int(given.sum(dtype=np.int64))
    patterns = _find_rows(lengths, max_length, cost, rows_per_step, balanced)
    rng = np.random.default_rng(seed)
    taken, offsets = _deal(lengths, patterns, rng)
    longest = _longest_to_mix(lengths, cost) if balanced else max_length
    offsets = mix_rows(taken, lengths, offsets, max_length, longest, rng)
    plan = PackingPlan(
        row_offsets=offsets,
        samples=taken if samples is None else samples[taken],
        lengths=lengths[taken],
        starts=None if starts is None else starts[taken],
        max_length=max_length,
        cost=cost,
        balanced=balanced,
        seed=int(seed),
        world_size=int(world_size),
        gradient_accumulation_steps=int(gradient_accumulation_steps),
        overlong=overlong,
        input_samples=len(given),
        input_tokens=tokens,
        overlong_samples=int((given > max_length).sum()),
        lost_tokens=tokens - int(lengths.sum(dtype=np.int64)),
    )
    several = balanced and world_size > 1 and gradient_accumulation_steps > 1
    return plan._take(plan._share(np.arange(len(plan)))) if several else plan


def _check_lengths(lengths: ArrayLike) -> np.ndarray:
    """The lengths as int32 `[samples]`."""
    expected = "lengths as whole numbers of at least 1, one per sample"
    try:
        lengths = np.asarray(lengths)
    except (TypeError, ValueError) as error:
        raise input_error(expected, error) from error
    if lengths.size == 0:
        raise input_error(expected, "no sample")
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise input_error(expected, f"an array of {lengths.dtype} with shape {lengths.shape}")
    if lengths.min() < 1:
        short = np.flatnonzero(lengths < 1)
        got = f"{lengths[short[0]]} at sample {short[0]} ({len(short)} of {len(lengths)} samples are too short)"
        raise input_error(expected, got, "Remove empty samples.")
    if lengths.max() > _LONGEST:
        raise input_error(f"lengths up to {_LONGEST}", lengths.max())
    return lengths.astype(np.int32, copy=False)


def _cut_overlong(
    lengths: np.ndarray, max_length: int, overlong: str, truncation_side: str
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """The documents to pack: lengths, samples and starts (`None` for whole samples)."""
    long = lengths > max_length
    too_long = int(long.sum())
    if not too_long:
        return lengths, None, None
    if overlong == "error":
        at = lengths.argmax()
        got = f"{too_long} longer ones among {len(lengths)}, the longest (sample {at}) of {lengths[at]}"
        fix = 'Pass overlong="truncate", "split" or "drop", or raise max_length.'
        raise input_error(f"samples of at most {max_length} tokens", got, fix)
    if overlong == "truncate":
        kept = np.minimum(lengths, np.int32(max_length))
        return kept, None, lengths - kept if truncation_side == "left" else None
    index_type = _index_type(len(lengths))
    if overlong == "split":
        parts = -(-lengths // np.int32(max_length))
        samples: np.ndarray = np.repeat(np.arange(len(lengths), dtype=index_type), parts)
        starts = ranges(np.zeros(len(lengths), np.int64), parts) * max_length
        kept = np.minimum(lengths[samples] - starts, max_length).astype(np.int32)
        return kept, samples, starts.astype(np.int32)
    if too_long == len(lengths):
        raise input_error(f"a sample of at most {max_length} tokens", f"{too_long} samples, all longer")
    samples = np.flatnonzero(~long).astype(index_type)
    return lengths[samples], samples, None


def _find_rows(lengths: np.ndarray, max_length: int, cost: PackingCost, multiple: int, balanced: bool) -> Patterns:
    """The rows as patterns of lengths. Their number is a multiple of `multiple`."""
    counts = histogram(lengths)
    distinct = np.flatnonzero(counts)
    given = distinct.tolist(), counts[distinct].tolist(), max_length
    patterns = best_fit(*given)
    least = _round_up(number_of_rows(patterns), multiple)
    if least > len(lengths):
        spare = len(lengths) % multiple
        fix = f"Remove {spare} samples, or lower" if spare < len(lengths) else "Lower"
        expected = f"at least {least} documents, one per row with {multiple} rows per step"
        raise input_error(expected, len(lengths), f"{fix} world_size or gradient_accumulation_steps.")
    if balanced or number_of_rows(patterns) < least:
        each = cost.documents(np.arange(len(counts))).tolist()
        if balanced:
            most = _round_up(int(number_of_rows(patterns) * (1 + _EXTRA_ROWS)), multiple)
            patterns = even_out(*given, each, patterns, least, min(most, len(lengths) // multiple * multiple))
        patterns = open_rows(patterns, each, _round_up(number_of_rows(patterns), multiple))
    return patterns


def _longest_to_mix(lengths: np.ndarray, cost: PackingCost) -> int:
    """The longest document whose rows cost at most `_MIXED_COST` times the average cost of their tokens."""
    counts = histogram(lengths)
    each, tokens = cost.documents(np.arange(len(counts))), np.arange(len(counts))
    average = (counts @ each) / (counts @ tokens)
    return int(np.flatnonzero(each <= _MIXED_COST * average * tokens)[-1])


def _deal(lengths: np.ndarray, patterns: Patterns, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle the rows and assign documents of one length in random order. Returns documents and row offsets."""
    by_length = _shuffle_and_sort(lengths, rng)
    documents, numbers = zip(*patterns, strict=True)
    rows, sizes = np.array(numbers), np.array([len(row) for row in documents])
    lengths = np.concatenate(documents)
    first_row, first_document = offsets_of(rows), offsets_of(sizes)
    # Each document of a pattern stands for one document of its length per row of the pattern.
    position = np.argsort(lengths, kind="stable")
    first_choice = np.empty(len(lengths), np.int64)
    first_choice[position] = offsets_of(np.repeat(rows, sizes)[position])[:-1]

    order = rng.permutation(first_row[-1])
    pattern = np.repeat(np.arange(len(rows), dtype=np.int32), rows)[order]
    copy = order - first_row[pattern]
    offsets = offsets_of(sizes[pattern])
    taken = np.empty(offsets[-1], by_length.dtype)
    for first in range(0, len(pattern), _BLOCK):
        block = slice(first, first + _BLOCK)
        count = sizes[pattern[block]]
        index = ranges(first_document[pattern[block]], count)
        choice = first_choice[index] + np.repeat(copy[block], count)
        taken[offsets[first] : offsets[first] + len(index)] = by_length[choice]
    return taken, offsets


def _shuffle_and_sort(lengths: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The documents by ascending length, in random order within a length."""
    order: np.ndarray = np.arange(len(lengths), dtype=_index_type(len(lengths)))
    rng.shuffle(order)
    # numpy's stable sort is a radix sort for 16-bit keys.
    keys = lengths.astype(np.uint16) if lengths.max() < 1 << 16 else lengths
    return order[np.argsort(keys[order], kind="stable")]


def _index_type(number: int) -> type:
    return np.int32 if number <= _LONGEST else np.int64


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
