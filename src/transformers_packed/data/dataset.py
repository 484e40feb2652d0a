"""Packed rows over a dataset with indices: a plan of the whole dataset, and samples read when a row is asked for."""

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler
from tqdm.auto import tqdm
from transformers.utils import logging

from ..errors import input_error
from .packing_plan import PackingPlan
from .plan import plan_packing
from .rows import offsets_of, ranges
from .samples import check_settings, cut_sample


logger = logging.get_logger(__name__)

_CALL = "PackingDataset"
_PASS_BATCH = 64
# Rows that are written out at a time.
_BLOCK_ROWS = 1 << 12


class PackingDataset(torch.utils.data.Dataset):
    """Rows of samples that fill `max_length` tokens, planned over the whole dataset.

    An item is a row: the list of its samples, with all their columns, which `DataCollatorWithFlattening` lays end to
    end. A batch counts rows, so with a batch size of 1 a step has at most `max_length` tokens. Nothing is copied or
    written: a row's samples are read when it is asked for. Samples that the plan cuts are cut in every per-token
    column.

    The plan takes one row per process and micro step; with larger batches ranks are balanced less well.

    `set_epoch` gives every epoch another order of the rows, in which the rows of a step still cost the ranks about the
    same. That holds when rows are read in this order: pass `train_sampling_strategy="sequential"` to
    `TrainingArguments`, `shuffle=False` to a data loader. Trainer's default sampler draws rows at random: every row
    comes once per epoch all the same, but which rows meet in a step is left to chance. The order then stays that of
    the plan, since accelerate tells a dataset the epoch in some of these cases and not in others, such as a resumed
    run.

    Args:
        dataset (`Sequence`):
            Samples: mappings with `input_ids` and any other columns. A `datasets.Dataset`, a list, or a map-style
            dataset (`__getitem__` and `__len__`).
        max_length (`int`):
            Tokens of a row, at most.
        length_column (`str`, *optional*):
            The column that holds the samples' lengths in tokens. By default they come from the table of a
            `datasets.Dataset` without decoding it, and else from a pass over all samples.
        overlong (`str`, *optional*, defaults to `"error"`):
            What becomes of a sample longer than `max_length`: `"error"`, `"truncate"`, `"split"` or `"drop"`.
            `plan.summary()` says how many there were.
        truncation_side (`str`, *optional*, defaults to `"right"`):
            The side that `"truncate"` cuts off.
        world_size (`int`, *optional*, defaults to 1):
            The number of processes. Their rows of a step cost about the same.
        gradient_accumulation_steps (`int`, *optional*, defaults to 1):
            Batches of one row in an optimizer step.
        balance (`bool`, `PackingCost` or `PreTrainedConfig`, *optional*, defaults to `True`):
            What a row costs; see [`plan_packing`].
        seed (`int`, *optional*, defaults to 0):
            Of the plan and the orders of the epochs.
        plan (`PackingPlan`, *optional*):
            A plan for this dataset. Without one, one is made.
        cache (`bool` or path, *optional*, defaults to `False`):
            A directory that keeps plans for later runs; `True` is the directory of a `datasets.Dataset`'s own files.
            A plan is found again by the data (the dataset's fingerprint, or all lengths) and the arguments.
        num_proc (`int`, *optional*, defaults to 0):
            Processes that read the samples if a pass over them is needed.

    Raises:
        `ValueError`: bad arguments, samples that are empty or, by default, too long; a plan that does not fit.

    Example:

    ```python
    >>> from transformers_packed import DataCollatorWithFlattening, PackingDataset
    >>> samples = [{"input_ids": [n] * n} for n in (5, 3, 8, 2, 6)]
    >>> rows = PackingDataset(samples, max_length=8)
    >>> len(rows), sorted(sorted(len(sample["input_ids"]) for sample in row) for row in rows)
    (3, [[2, 6], [3, 5], [8]])
    >>> DataCollatorWithFlattening()([rows[0]])["input_ids"].shape
    torch.Size([1, 8])

    ```
    """

    def __init__(
        self,
        dataset: Sequence[Mapping[str, Any]],
        max_length: int,
        *,
        length_column: str | None = None,
        overlong: str = "error",
        truncation_side: str = "right",
        world_size: int = 1,
        gradient_accumulation_steps: int = 1,
        balance: Any = True,
        seed: int = 0,
        plan: PackingPlan | None = None,
        cache: bool | str | os.PathLike = False,
        num_proc: int = 0,
    ):
        check_settings(_CALL, max_length, overlong, truncation_side)
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise input_error(
                _CALL,
                expected="a dataset with indices and a length",
                got=type(dataset).__name__,
                fix="Pack a stream with IterablePackingDataset.",
            )
        self.dataset = dataset
        options = {
            "overlong": overlong,
            "truncation_side": truncation_side,
            "world_size": world_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "balance": balance,
            "seed": seed,
        }
        if plan is None:
            plan = _cached_plan(dataset, max_length, length_column, num_proc, cache, options)
        self._check_plan(plan, max_length, world_size, gradient_accumulation_steps)
        self.plan = plan
        # In shared memory, for workers that outlive an epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def epoch(self) -> int:
        """The epoch whose order the rows have."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Put the rows in the order of an epoch, in the workers of a data loader too."""
        # accelerate calls this for a loader that shuffles by itself before a run, but not when the run is resumed: an
        # order that came and went with it would lose rows and repeat others.
        if not _shuffles(sys._getframe(1).f_locals.get("self")):
            self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> list[Mapping[str, Any]]:
        """The samples of row `index` of the epoch."""
        plan = self.plan
        rows = len(plan)
        if not -rows <= index < rows:
            raise IndexError(f"{_CALL}: row {index} of {rows}")
        epoch = int(self._epoch)
        if epoch:
            if self._order is None or self._order[0] != epoch:
                self._order = (epoch, plan.epoch_order(epoch))
            index = self._order[1][index]
        begin, end = plan.row_offsets[index % rows], plan.row_offsets[index % rows + 1]
        numbers, lengths = plan.samples[begin:end].tolist(), plan.lengths[begin:end].tolist()
        samples = self._read(numbers)
        for place, length in enumerate(lengths):
            if len(samples[place]["input_ids"]) != length:
                start = 0 if plan.starts is None else int(plan.starts[begin + place])
                samples[place] = self._cut(samples[place], numbers[place], start, length)
        return samples

    def _read(self, numbers: list[int]) -> list[Mapping[str, Any]]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(numbers))
        return [self.dataset[number] for number in numbers]

    def _cut(self, sample: Mapping[str, Any], number: int, start: int, length: int) -> Mapping[str, Any]:
        total = len(sample["input_ids"])
        if total <= self.plan.max_length or start + length > total:
            raise input_error(
                _CALL,
                expected=f"sample {number} to hold tokens {start} to {start + length}, as planned",
                got=f"{total} tokens",
                fix="Plan for this dataset: its lengths, or those in length_column, are others.",
            )
        return cut_sample(sample, start, length)

    def _check_plan(self, plan: PackingPlan, max_length: int, world_size: int, accumulation: int) -> None:
        for name, want, got in (
            ("samples", len(self.dataset), plan.input_samples),
            ("max_length", max_length, plan.max_length),
            ("world_size", world_size, plan.world_size),
            ("gradient_accumulation_steps", accumulation, plan.gradient_accumulation_steps),
            ("rank", None, plan.rank),
        ):
            if want != got:
                raise input_error(
                    _CALL, expected=f"a plan with {name} {want}", got=f"{got}", fix="Plan with the same arguments."
                )


def pack_dataset(dataset: Any, max_length: int, **kwargs):
    """Write packed rows out as a `datasets.Dataset`, for tools that take TRL's packed format.

    A row holds every per-token column, joined, and `seq_lengths`, the lengths of its documents. Other columns have no
    place in it and are left out with a warning. The rows are those of [`PackingDataset`] with the same arguments, which
    needs no second copy of the tokens.

    `DataCollatorWithFlattening` takes such rows apart by their `seq_lengths`, which Trainer would remove from the
    dataset: pass it `remove_unused_columns=False`.

    Args:
        dataset (`datasets.Dataset` or `Sequence`):
            Samples with `input_ids`.
        max_length (`int`):
            Tokens of a row, at most.
        kwargs:
            Further arguments of [`PackingDataset`].

    Returns:
        `datasets.Dataset`: in memory, with the columns' own types; `seq_lengths` are int32.

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
        dataset = datasets.Dataset.from_list(list(dataset))
    dataset = dataset.with_format(None)
    plan = PackingDataset(dataset, max_length, **kwargs).plan
    if dataset._indices is not None:
        dataset = dataset.flatten_indices()
    lengths = arrow_lengths(dataset, "input_ids")
    tables = {name: dataset.data.column(name) for name in dataset.column_names}
    columns = {name: t for name, t in tables.items() if np.array_equal(arrow_lengths(dataset, name), lengths)}
    if left_out := sorted(tables.keys() - columns):
        logger.warning_once(
            f"pack_dataset: the columns {', '.join(left_out)} do not have one value per token and are left out."
        )

    values = {
        name: table.cast(pa.large_list(table.type.value_type)).combine_chunks().flatten()
        for name, table in columns.items()
    }
    first = offsets_of(lengths)[plan.samples] + (0 if plan.starts is None else plan.starts)
    blocks = []
    for begin in range(0, len(plan), _BLOCK_ROWS):
        rows = plan.row_offsets[begin : begin + _BLOCK_ROWS + 1]
        documents = slice(rows[0], rows[-1])
        tokens = pa.array(ranges(first[documents], plan.lengths[documents]))
        token_offsets = offsets_of(plan.lengths[documents])[rows - rows[0]]
        block = {
            name: _as_lists(columns[name].type, token_offsets, value.take(tokens)) for name, value in values.items()
        }
        sizes = pa.array(plan.lengths[documents])
        block["seq_lengths"] = _as_lists(pa.list_(pa.int32()), rows - rows[0], sizes)
        blocks.append(pa.table(block))
    return datasets.Dataset(pa.concat_tables(blocks))


def _as_lists(kind: Any, offsets: np.ndarray, values: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(offsets, values)
    return pa.ListArray.from_arrays(offsets.astype(np.int32), values)


def sample_lengths(dataset: Any, column: str | None = None, num_proc: int = 0) -> np.ndarray:
    """The samples' lengths in tokens, int64 `[samples]`: from `column`, from the table, or from a pass."""
    if column is not None:
        if hasattr(dataset, "column_names"):
            if column not in dataset.column_names:
                raise input_error(
                    _CALL,
                    expected="a length_column of the dataset",
                    got=f"{column!r}",
                    fix=f"Choose one of {dataset.column_names}.",
                )
            return np.asarray(dataset.with_format("numpy")[column])
        return np.asarray([sample[column] for sample in _progress(dataset, len(dataset))])
    lengths = arrow_lengths(dataset, "input_ids")
    if lengths is not None:
        return lengths
    # With a generator of its own it leaves the global one, and so what is drawn in training, as it was.
    loader = DataLoader(
        dataset, batch_size=_PASS_BATCH, num_workers=num_proc, collate_fn=_count_tokens, generator=torch.Generator()
    )
    lengths = np.empty(len(dataset), np.int64)
    done = 0
    with _progress(None, len(dataset)) as bar:
        for batch in loader:
            lengths[done : done + len(batch)] = batch
            done += len(batch)
            bar.update(len(batch))
    return lengths


def _progress(iterable: Any, total: int) -> tqdm:
    return tqdm(iterable, total=total, desc="Sample lengths", unit=" samples", disable=None)


def _count_tokens(samples: list[Mapping[str, Any]]) -> list[int]:
    return [len(sample["input_ids"]) for sample in samples]


def arrow_lengths(dataset: Any, name: str) -> np.ndarray | None:
    """List lengths of a column of a `datasets.Dataset` from the offsets in its table; `None` if it has none."""
    table = getattr(getattr(dataset, "data", None), "table", None)
    # A transform makes samples of the table's rows that nobody knows before it has run.
    if table is None or name not in table.column_names or dataset.format["type"] == "custom":
        return None
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column(name)
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if not any(is_kind(column.type) for is_kind in kinds) or column.null_count:
        return None
    lengths = np.concatenate([np.empty(0, np.int64), *(pc.list_value_length(c).to_numpy() for c in column.chunks)])
    indices = dataset._indices
    return lengths if indices is None else lengths[indices.column(0).to_numpy()]


def _cached_plan(
    dataset: Any, max_length: int, length_column: str | None, num_proc: int, cache: Any, options: dict
) -> PackingPlan:
    def lengths():
        return sample_lengths(dataset, length_column, num_proc)

    if not cache:
        return plan_packing(lengths(), max_length, **options)
    if cache is True:
        files = getattr(dataset, "cache_files", None)
        if not files:
            raise input_error(
                _CALL,
                expected="a datasets.Dataset that lies in files beside cache=True",
                got=type(dataset).__name__,
                fix="Pass a directory as cache.",
            )
        cache = Path(files[0]["filename"]).parent
    # The fingerprint changes with every transformation and spares the pass over the samples.
    data = getattr(dataset, "_fingerprint", None)
    known = None
    if data is None:
        known = lengths()
        data = hashlib.sha256(np.ascontiguousarray(known, np.int64).tobytes()).hexdigest()
    key = json.dumps([data, len(dataset), length_column, max_length, {k: repr(v) for k, v in options.items()}])
    path = Path(cache) / f"packing-plan-{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"
    if path.exists():
        try:
            return PackingPlan.load(path)
        except ValueError as error:
            logger.warning(f"{_CALL}: {path} is not used: {error}")
    plan = plan_packing(lengths() if known is None else known, max_length, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    plan.save(path)
    return plan


def _shuffles(loader: Any) -> bool:
    """Whether a data loader draws its indices at random, under whatever accelerate wraps around its sampler."""
    if not isinstance(loader, DataLoader):
        return False
    sampler = loader.batch_sampler
    while sampler is not None:
        if isinstance(sampler, RandomSampler):
            return True
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return False
