"""Packed rows over a map-style dataset: a plan of the whole dataset, and samples that are read on demand."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache as cached
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import GradientState
from torch.utils.data import DataLoader, RandomSampler
from tqdm.auto import tqdm
from transformers.utils import logging

from ..errors import input_error
from .overlong import Overlong, TruncationSide, check_settings, longest_tree
from .planning.plan import PackingPlan
from .planning.planner import plan_packing
from .planning.rows import offsets_of, ranges
from .samples import (
    ANSWERS,
    MASK,
    TURNS,
    check_sample,
    cut_sample,
    documents_of,
    has_items,
    is_tree,
    refuse_tree,
    some_samples,
    spread,
)
from .tables import columns_of, is_list, list_lengths, padded_lengths, suspects, table_lengths, with_lists
from .trees import as_packed, nodes_of, tokens_in


logger = logging.get_logger(__name__)

_PASS_BATCH = 64
# Samples that are read where reading all of them would take long.
_PROBED = 128
# Rows per block that pack_dataset writes.
_BLOCK_ROWS = 1 << 12
# Changes with the plans for the same data and arguments, so that a cached plan of another version is not used.
_PLANNER = 4


class PackingDataset(torch.utils.data.Dataset):
    """Packs samples into rows of at most `max_length` tokens, planned over the whole dataset.

    An item is a row: a list of samples with all their columns. `DataCollatorWithFlattening` concatenates them. The
    batch size counts rows, so a step with batch size 1 has at most `max_length` tokens. The dataset copies and writes
    nothing: it reads the samples of a row on demand. If the plan cuts a sample, every per-token column is cut.

    Tokens with an `attention_mask` of 0 are padding. They do not count, and the samples of a row do not have them.

    A tree or a group of samples (`data/trees.py`) is one sample of a row, unchanged. The plan takes it for a document of
    as many tokens as are computed for it. The collator then needs `model=model`.

    The plan assumes one row per process and micro step. Larger batches balance the ranks less well.

    `set_epoch` gives each epoch its own order of rows, in which the rows of a step cost the ranks about the same. Read
    the rows in this order: pass `train_sampling_strategy="sequential"` to `TrainingArguments`, or `shuffle=False` to a
    data loader. Trainer's default sampler draws rows at random. Each epoch then still visits every row once, but the
    rows of a step are not balanced between ranks. With such a sampler, `set_epoch` keeps the order of the plan,
    because accelerate does not set the epoch of a resumed run.

    Args:
        dataset (`Sequence`):
            Samples: mappings with `input_ids` and any other columns. A `datasets.Dataset`, a list, or a map-style
            dataset (`__getitem__` and `__len__`).
        max_length (`int`):
            Maximum number of tokens per row.
        length_column (`str`, *optional*):
            The column with the sample lengths in tokens, without padding. By default the lengths come from the table of
            a `datasets.Dataset` without decoding it, or from a pass over all samples, as for trees.
        overlong (`str`, *optional*, defaults to `"error"`):
            Action for samples longer than `max_length`: `"error"`, `"truncate"`, `"split"` or `"drop"`.
            `plan.summary()` counts them. Longer trees are an error with all but `"drop"`.
        truncation_side (`str`, *optional*, defaults to `"right"`):
            The side that `"truncate"` cuts off.
        world_size (`int`, *optional*, defaults to 1):
            The number of processes. Their rows in a step cost about the same.
        gradient_accumulation_steps (`int`, *optional*, defaults to 1):
            Batches of one row per optimizer step.
        balance (`bool`, `PackingCost` or `PreTrainedConfig`, *optional*, defaults to `True`):
            The cost of a row; see [`plan_packing`].
        seed (`int`, *optional*, defaults to 0):
            Seed of the plan and of the row order of each epoch.
        plan (`PackingPlan`, *optional*):
            A plan for this dataset. By default a new plan is made.
        cache (`bool` or path, *optional*, defaults to `False`):
            A directory that stores plans for later runs. `True` uses the directory of a `datasets.Dataset`'s own
            files. The key of a plan is the data (the dataset's fingerprint, or all lengths) and the arguments.
        num_proc (`int`, *optional*, defaults to 0):
            Number of processes that read the samples if a pass over them is needed.

    Raises:
        `ValueError`: bad arguments; samples that are empty or, by default, too long; a plan for other data. Reading a
            row raises it for a sample whose length differs from the plan.

    Example:

    ```python
    >>> from transformers_packed import DataCollatorWithFlattening, PackingDataset
    >>> samples = [{"input_ids": [n] * n} for n in (5, 3, 8, 2, 6)]
    >>> rows = PackingDataset(samples, max_length=8)
    >>> len(rows), sorted(sorted(len(sample["input_ids"]) for sample in row) for row in rows)
    (3, [[2, 6], [3, 5], [8]])
    >>> DataCollatorWithFlattening(on_leak="ignore")([rows[0]])["input_ids"].shape
    torch.Size([1, 8])

    ```
    """

    def __init__(
        self,
        dataset: Sequence[Mapping[str, Any]],
        max_length: int,
        *,
        length_column: str | None = None,
        overlong: Overlong = "error",
        truncation_side: TruncationSide = "right",
        world_size: int = 1,
        gradient_accumulation_steps: int = 1,
        balance: Any = True,
        seed: int = 0,
        plan: PackingPlan | None = None,
        cache: bool | str | os.PathLike = False,
        num_proc: int = 0,
    ):
        check_settings(max_length, overlong, truncation_side)
        if not has_items(dataset):
            got = type(dataset).__name__
            raise input_error("a dataset with indices and a length", got, "Pack a stream with IterablePackingDataset.")
        ranks = {"world_size": world_size, "gradient_accumulation_steps": gradient_accumulation_steps}
        if plan is None:
            options: dict[str, Any] = {"overlong": overlong, "truncation_side": truncation_side, **ranks}
            options |= {"balance": balance, "seed": seed}
            longest = longest_tree(max_length, overlong)
            lengths = cached(lambda: sample_lengths(dataset, length_column, num_proc, longest))
            path = _cache_path(cache, dataset, lengths, [length_column, max_length], options) if cache else None
            plan = None if path is None else _load(path)
            if plan is None:
                plan = plan_packing(lengths(), max_length, **options)
                if path is not None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    plan.save(path)
        wanted = {"input_samples": len(dataset), "max_length": max_length, **ranks, "rank": None}
        for name, value in wanted.items():
            if getattr(plan, name) != value:
                raise input_error(f"a plan with {name} {value}", getattr(plan, name), "Plan with the same arguments.")
        self.dataset = dataset
        self.plan = plan
        # In shared memory, for persistent workers.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._order: tuple[int, np.ndarray] = (0, np.empty(0, np.int64))

    @property
    def epoch(self) -> int:
        """The epoch that determines the order of the rows."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Order the rows for an epoch, also in the workers of a data loader."""
        # accelerate also calls this for a loader that shuffles by itself, but not in a resumed epoch. An order that
        # changes with the call would then lose rows and repeat others. The relevant call comes from the loader's own
        # `__iter__`, when accelerate's state has it as the active loader.
        loader = GradientState().active_dataloader
        shuffled = getattr(loader, "dataset", None) is self and shuffles(loader)
        self._epoch.fill_(0 if shuffled else epoch)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> list[Mapping[str, Any]]:
        """The samples of row `index` of the epoch."""
        plan, rows = self.plan, len(self.plan)
        if not -rows <= index < rows:
            raise IndexError(f"row {index} of {rows}")
        epoch = self.epoch
        if epoch:
            if self._order[0] != epoch:
                self._order = (epoch, plan.epoch_order(epoch))
            index = self._order[1][index]
        index %= rows
        documents = slice(plan.row_offsets[index], plan.row_offsets[index + 1])
        numbers, starts, lengths = (part.tolist() for part in plan.row(index))
        many = getattr(self.dataset, "__getitems__", None)
        read = many(numbers) if many else [self.dataset[number] for number in numbers]
        longest = longest_tree(plan.max_length, plan.overlong)
        samples = [as_packed(*part, longest) for part in zip(read, numbers, strict=True)]
        tokens = [total for _, total in samples]
        if tokens != lengths or plan.starts is not None:
            _check_documents(plan, documents, np.array(tokens))
        return [
            sample if length == total else cut_sample(sample, start, length)
            for (sample, total), start, length in zip(samples, starts, lengths, strict=True)
        ]


def _check_documents(plan: PackingPlan, documents: slice, sample_tokens: np.ndarray) -> None:
    """Raise a `ValueError` that names the first sample whose length differs from the plan."""
    wrong = np.flatnonzero(plan.misfits(documents, sample_tokens))
    if len(wrong):
        at = documents.start + wrong[0]
        start = 0 if plan.starts is None else plan.starts[at]
        expected = f"sample {plan.samples[at]} to have tokens {start} to {start + plan.lengths[at]}, as planned"
        fix = "Plan this dataset again: its lengths, or those in length_column, differ from the plan."
        raise input_error(expected, f"a sample of {sample_tokens[wrong[0]]} tokens", fix)


def pack_dataset(dataset: Any, max_length: int, **kwargs: Any) -> Any:
    """Write packed rows to a `datasets.Dataset`, for tools that read TRL's packed format.

    A row holds every per-token column, concatenated, and `seq_lengths`, the lengths of its documents. Columns without
    one value per token are dropped with a warning; for `labels` this is an error. [`PackingDataset`] with the same
    arguments returns the same rows without a second copy of the tokens.

    `DataCollatorWithFlattening` splits these rows by `seq_lengths`. Set `remove_unused_columns=False`, because
    `Trainer` otherwise removes this column.

    Args:
        dataset (`datasets.Dataset` or `Sequence`):
            Samples with `input_ids`.
        max_length (`int`):
            Maximum number of tokens per row.
        kwargs (`Any`, *optional*):
            Additional arguments of [`PackingDataset`].

    Returns:
        rows (`datasets.Dataset`): a dataset in memory. Columns keep their types; `seq_lengths` is int32.

    Raises:
        `ValueError`: as in [`PackingDataset`]. Also raised if a sample lacks `labels` or a column that has one value
            per token in most samples, or if their length differs from `input_ids`.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from transformers_packed import pack_dataset
    >>> rows = pack_dataset(Dataset.from_dict({"input_ids": [[1, 1, 1], [2], [3, 3]]}), max_length=4)
    >>> sorted(zip(rows["input_ids"], rows["seq_lengths"]))
    [([1, 1, 1, 2], [3, 1]), ([3, 3], [2])]

    ```
    """
    import datasets
    import pyarrow as pa

    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
        samples = list(dataset)
        for number, sample in enumerate(samples):
            # The table only gets the columns of the first sample.
            refuse_tree(number, sample)
        dataset = datasets.Dataset.from_list(samples)
    dataset = dataset.with_format(None)
    plan = PackingDataset(dataset, max_length, **kwargs).plan
    tree = _first_tree(dataset, table_lengths(dataset))
    if tree is not None:
        refuse_tree(tree, dataset[tree])
    if dataset._indices is not None:
        dataset = dataset.flatten_indices()
    lengths = sample_lengths(dataset)
    _check_documents(plan, slice(0, len(plan.samples)), lengths[plan.samples])
    padded = list_lengths(dataset.data.column("input_ids"))
    real = None if padded.sum() == lengths.sum() else _real_tokens(dataset.data.column(MASK), padded)
    columns = _per_token_columns(dataset, padded)
    values, kinds = {}, {}
    for name, table in columns.items():
        kinds[name] = table.type if pa.types.is_large_list(table.type) else pa.list_(table.type.value_type)
        value = table.cast(pa.large_list(table.type.value_type)).combine_chunks().flatten()
        if value.null_count:
            token = np.flatnonzero(value.is_null().to_numpy(zero_copy_only=False))[0]
            sample = np.searchsorted(offsets_of(padded), token, side="right") - 1
            raise _bad_column(name, sample, "a missing value among them")
        values[name] = value if real is None else value.filter(pa.array(real))
    first = offsets_of(lengths)[plan.samples] + (0 if plan.starts is None else plan.starts)
    blocks = []
    for begin in range(0, len(plan), _BLOCK_ROWS):
        rows = plan.row_offsets[begin : begin + _BLOCK_ROWS + 1]
        documents = slice(rows[0], rows[-1])
        sizes, rows = plan.lengths[documents], rows - rows[0]
        tokens, ends = pa.array(ranges(first[documents], sizes)), offsets_of(sizes)[rows]
        lists = {name: pa.LargeListArray.from_arrays(ends, value.take(tokens)) for name, value in values.items()}
        block = {name: array.cast(kinds[name]) for name, array in lists.items()}
        block["seq_lengths"] = pa.ListArray.from_arrays(rows.astype(np.int32), pa.array(sizes))
        blocks.append(pa.table(block))
    return datasets.Dataset(pa.concat_tables(blocks))


def _real_tokens(masks: Any, lengths: np.ndarray) -> np.ndarray:
    """Whether each token of a table is no padding, bool `[tokens]`. All tokens of a sample without a mask are real."""
    import pyarrow as pa

    given, real = pa.concat_arrays([chunk.flatten() for chunk in masks.chunks]), np.ones(lengths.sum(), bool)
    real[np.repeat(list_lengths(masks) >= 0, lengths)] = given.cast(pa.bool_()).to_numpy(zero_copy_only=False)
    return real


def _per_token_columns(dataset: Any, lengths: np.ndarray) -> dict[str, Any]:
    """The columns with one value per token. A column that has them only in most samples is an error."""
    columns, left_out = {}, []
    for name in dataset.column_names:
        column = dataset.data.column(name)
        sizes = list_lengths(column) if is_list(column) else None
        if name == MASK and column.null_count:
            # Rows have real tokens only.
            continue
        fits = np.zeros(len(lengths), bool) if sizes is None else sizes == lengths
        if fits.all():
            columns[name] = column
        elif name == "labels" or fits.mean() >= 0.5:
            sample = np.flatnonzero(~fits)[0]
            raise _bad_column(name, sample, "no list" if sizes is None or sizes[sample] < 0 else sizes[sample])
        else:
            left_out.append(name)
    if left_out:
        logger.warning_once(f"pack_dataset drops the columns without one value per token: {', '.join(left_out)}.")
    return columns


def _bad_column(name: str, sample: int, got: object) -> ValueError:
    fix = "Correct the sample, or remove the column."
    return input_error(f"{name} with one value per token in sample {sample}", got, fix)


def sample_lengths(
    dataset: Any, column: str | None = None, num_proc: int = 0, longest: int | None = None
) -> np.ndarray:
    """The tokens of each sample in a row, int64 `[samples]`: from `column`, from the table, or from a pass over the data.

    A tree of more than `longest` tokens is an error, but not with a `column`.
    """
    lengths = table_lengths(dataset)
    if lengths is not None and _first_tree(dataset, lengths) is not None:
        lengths = None
    if lengths is None and column is None:
        # A separate generator keeps the global random state, and with it the training run, unchanged.
        count = partial(_count_tokens, longest=longest)
        own: dict[str, Any] = {"collate_fn": count, "generator": torch.Generator()}
        counts = chain.from_iterable(DataLoader(dataset, batch_size=_PASS_BATCH, num_workers=num_proc, **own))
        lengths = np.fromiter(_progress(counts, len(dataset)), np.int64, len(dataset))
    if lengths is not None:
        _refuse_unusable(dataset, lengths, longest)
        if column is None:
            return lengths
    if not hasattr(dataset, "column_names"):
        return np.asarray([sample[column] for sample in _progress(dataset, len(dataset))])
    if column not in dataset.column_names:
        raise input_error(f"length_column as one of {dataset.column_names}", repr(column))
    given = np.asarray(dataset.with_format("numpy")[column])
    if lengths is not None and given.shape == lengths.shape and (given != lengths).any():
        sample = np.flatnonzero(given != lengths)[0]
        got = f"{given[sample]} for sample {sample}, which has {lengths[sample]}"
        fix = "Recompute the column, or do not pass length_column."
        raise input_error(f"the number of tokens of each sample in length_column {column!r}", got, fix)
    return given


def sampled_lengths(dataset: Any, masked: bool = False) -> np.ndarray:
    """The real tokens of all samples of a table, or of some evenly spaced samples of another dataset with items.

    With `masked`, tokens with an `attention_mask` of 0 count as well, as in the padded batches of these samples.
    """
    lengths = table_lengths(dataset)
    if lengths is None or _first_tree(dataset, lengths) is not None:
        samples = ((number, dataset[number]) for number in spread(len(dataset), _PROBED))
        return np.array(
            [len(x["input_ids"]) if masked and not is_tree(x) else tokens_in(x, number) for number, x in samples]
        )
    _refuse_unusable(dataset, lengths)
    return padded_lengths(dataset) if masked else lengths


def _first_tree(dataset: Any, lengths: np.ndarray | None) -> int | None:
    """The number of the first tree in a table, if no earlier sample has the length -1. Of groups, no length is known."""
    first = 0 if lengths is None else next(iter(np.flatnonzero(lengths < 0).tolist()), None)
    return first if first is not None and is_tree(dataset[first]) else None


def find_unusable(dataset: Any) -> ValueError | None:
    """Find a sample that cannot be used for training, and return its error.

    Checks all samples of a list. Of a table, checks what does not need decoding. Of these and other datasets with items,
    checks some evenly spaced samples. `None` if none is found, and for a stream.
    """
    dataset = dataset.dataset if isinstance(dataset, PackingDataset) else dataset
    if not has_items(dataset):
        return None
    numbers = range(len(dataset)) if isinstance(dataset, list | tuple) else spread(len(dataset), _PROBED)
    errors = (_error_of(dataset, number) for number in chain(suspects(dataset)[:_PROBED], numbers))
    return next(filter(None, errors), None)


def find_tree(dataset: Any) -> Mapping[str, Any] | None:
    """Find a tree or a group among the samples of a dataset or of its rows. `None` if none is found.

    Checks all samples of a list and of a table. Of other datasets, checks some evenly spaced samples, and of a stream
    none.
    """
    dataset = dataset.dataset if isinstance(dataset, PackingDataset) else dataset
    columns = columns_of(dataset)
    samples = dataset if isinstance(dataset, list | tuple) else some_samples(dataset, _PROBED)
    if columns is not None:
        # All lists in a column of a table have the same type.
        numbers = chain.from_iterable(
            with_lists(dataset, columns[name])[:1] for name in (TURNS, ANSWERS) if name in columns
        )
        samples = (dataset[number] for number in numbers)
    documents = chain.from_iterable(map(documents_of, samples))
    return next((sample for sample in documents if isinstance(sample, Mapping) and is_tree(sample)), None)


def _error_of(dataset: Any, number: int, longest: int | None = None) -> ValueError | None:
    """The error of a sample that cannot be used."""
    columns = columns_of(dataset)
    # A format may turn missing values into others.
    plain = dataset if columns is None else dataset.with_format(None, columns=list(columns))
    try:
        for sample in documents_of(plain[number]):
            for node in nodes_of([sample])[0]:
                check_sample(number, node)
            tokens_in(sample, number, longest)
    except ValueError as error:
        return error
    return None


def _refuse_unusable(dataset: Any, lengths: np.ndarray, longest: int | None = None) -> None:
    """Raise the error of the first sample with the length -1."""
    unusable = np.flatnonzero(lengths < 0)
    if len(unusable):
        number = int(unusable[0])
        got = f"another sample {number} in the second pass"
        raise _error_of(dataset, number, longest) or input_error("a dataset that returns the same samples again", got)


def _progress(iterable: Any, total: int) -> tqdm:
    return tqdm(iterable, total=total, desc="Sample lengths", unit=" samples", disable=None)


def _count_tokens(samples: list[Mapping[str, Any]], longest: int | None) -> list[int]:
    """The tokens of samples in a row, -1 for one that cannot be used. Its error would lose its type in a worker."""
    counts = []
    for sample in samples:
        try:
            counts.append(tokens_in(sample, longest=longest))
        except ValueError:
            counts.append(-1)
    return counts


def _cache_path(cache: Any, dataset: Any, lengths: Callable[[], np.ndarray], sizes: list, options: dict) -> Path:
    """The file of the plan for this data and these arguments."""
    if cache is True:
        files = getattr(dataset, "cache_files", None)
        if not files:
            wanted = "a datasets.Dataset on disk with cache=True"
            raise input_error(wanted, type(dataset).__name__, "Pass a directory as cache.")
        cache = Path(files[0]["filename"]).parent
    # The fingerprint changes with every transformation and avoids a pass over the samples.
    data = getattr(dataset, "_fingerprint", None)
    if data is None:
        data = hashlib.sha256(np.ascontiguousarray(lengths(), np.int64).tobytes()).hexdigest()
    options_text = {name: repr(value) for name, value in options.items()}
    key = json.dumps([_PLANNER, data, len(dataset), *sizes, options_text])
    return Path(cache) / f"packing-plan-{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"


def _load(path: Path) -> PackingPlan | None:
    try:
        return PackingPlan.load(path)
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning(f"PackingDataset: {path} is not used: {error}")
        return None


def shuffles(loader: Any) -> bool:
    """Whether a data loader draws its indices at random."""
    return isinstance(sampler_of(loader), RandomSampler)


def sampler_of(loader: Any) -> Any:
    """The sampler of a data loader, inside of those that make batches and those of accelerate, or `None` without one."""
    found, inside = None, loader
    while inside is not None:
        found, inside = inside, getattr(inside, "batch_sampler", None) or getattr(inside, "sampler", None)
    return None if found is loader else found
