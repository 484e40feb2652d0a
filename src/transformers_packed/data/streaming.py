"""Pack a stream: best fit over a bounded number of open rows, resumable at every row.

A sample goes into the open row that it fills best. If it fits in none and `buffer_size` rows are open, the fullest row
is closed (Csirik and Johnson, "Bounded space on-line bin packing: best is better than first", Algorithmica 31, 2001).
A sample costs two binary searches, independent of its length. Its tokens are copied only if the sample is cut.

The state of a stream holds the position in the source and the positions of the samples in open rows. It holds no
tokens; a resumed stream reads them again.
"""

import copy
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from transformers.utils import logging

from ..errors import input_error
from .overlong import FATES, Overlong, TruncationSide, check_count, check_settings, longest_tree, overlong_pieces
from .samples import cut_sample, has_items
from .trees import as_packed


logger = logging.get_logger(__name__)

_STATE_VERSION = 1
_SETTINGS = ("max_length", "buffer_size", "overlong", "truncation_side")
# An open row is one integer: free tokens in the high bits, serial number in the low bits. Sorting by it gives the
# search order.
_SERIAL_BITS = 40
_SERIAL = (1 << _SERIAL_BITS) - 1
# Samples between two saved states of the source. A resumed stream re-reads at most this many, in addition to those
# after its oldest open sample.
_SNAPSHOT_EVERY = 256


class IterablePackingDataset(torch.utils.data.IterableDataset):
    """Packs a stream of samples into rows of at most `max_length` tokens.

    An item is a row: a list of samples with all their columns. `DataCollatorWithFlattening` concatenates them. The
    batch size counts rows. Tokens with an `attention_mask` of 0 do not count, and the samples of a row do not have them.

    A tree or a group of samples (`data/trees.py`) is one sample of a row, unchanged. It counts with the tokens that are
    computed for it, and is longer than `max_length` only with `overlong="drop"`.

    The *workers* of a data loader share the samples: each worker reads and packs its part. `Trainer` and accelerate
    distribute the rows over the *processes*. Set `accelerator_config={"dispatch_batches": False}`, so that they do not
    cut batches, and do not pass `rank` and `world_size`. To give all processes the same number of rows, accelerate
    repeats the first rows of each worker in the last step. No other row is repeated. In a loop without accelerate,
    pass `rank` and `world_size`.

    Args:
        dataset (`Iterable`):
            Samples: mappings with `input_ids` (list, array or tensor) and any other columns. A `datasets`
            `IterableDataset` or `Dataset`, a list, or any object that supports repeated iteration.
        max_length (`int`):
            Maximum number of tokens per row.
        buffer_size (`int`, *optional*, defaults to 64):
            Number of open rows. More open rows give fuller rows and keep more samples in memory.
        overlong (`str`, *optional*, defaults to `"error"`):
            Action for samples longer than `max_length`: `"error"`, `"truncate"`, `"split"` into documents of
            `max_length` tokens, or `"drop"`. `counts` holds their number. The first such sample causes a warning.
        truncation_side (`str`, *optional*, defaults to `"right"`):
            The side that `"truncate"` cuts off, `"right"` or `"left"`.
        rank (`int`, *optional*):
            The rank of this process, in a loop without accelerate.
        world_size (`int`, *optional*):
            The number of processes, in a loop without accelerate.
        shard_by_worker (`bool`, *optional*):
            Whether each worker keeps only its share of the samples it reads. Defaults to `True`, except for the
            `IterableDataset` of `datasets`, which assigns shards to workers by itself. Pass `False` if your own
            dataset does the same.

    Raises:
        `ValueError`: bad arguments; a sample that is empty or, by default, too long. Errors of the source are raised
            unchanged, with a note that names the sample.

    Example:

    ```python
    >>> from transformers_packed import DataCollatorWithFlattening, IterablePackingDataset
    >>> samples = [{"input_ids": [n] * n} for n in (3, 4, 1, 2, 4)]
    >>> rows = IterablePackingDataset(samples, max_length=5)
    >>> [[len(sample["input_ids"]) for sample in row] for row in rows]
    [[4, 1], [3, 2], [4]]
    >>> DataCollatorWithFlattening(on_leak="ignore")([next(iter(rows))])["input_ids"].tolist()
    [[4, 4, 4, 4, 1]]

    ```
    """

    def __init__(
        self,
        dataset: Iterable,
        max_length: int,
        *,
        buffer_size: int = 64,
        overlong: Overlong = "error",
        truncation_side: TruncationSide = "right",
        rank: int | None = None,
        world_size: int | None = None,
        shard_by_worker: bool | None = None,
    ):
        check_settings(max_length, overlong, truncation_side)
        check_count("buffer_size", buffer_size)
        if isinstance(dataset, Iterator) or not (hasattr(dataset, "__iter__") or has_items(dataset)):
            fix = "Pass a list, a datasets dataset (IterableDataset.from_generator) or an object with __iter__."
            raise input_error("a dataset that can be read more than once", type(dataset).__name__, fix)
        if (rank is None) != (world_size is None) or rank is not None and not 0 <= rank < (world_size or 0):
            got, fix = f"rank={rank}, world_size={world_size}", "Pass neither in Trainer."
            raise input_error("rank and world_size with 0 <= rank < world_size, or neither", got, fix)
        own_shards = _is_hf_iterable(dataset)
        if own_shards and rank is not None:
            from datasets.distributed import split_dataset_by_node

            dataset = split_dataset_by_node(dataset, rank, world_size)
        self.dataset = dataset
        self.max_length, self.buffer_size = max_length, buffer_size
        self.overlong, self.truncation_side = overlong, truncation_side
        self.rank, self.world_size = rank, world_size
        self.shard_by_worker = not own_shards if shard_by_worker is None else shard_by_worker
        self._shard_by_rank = rank is not None and not own_shards
        # In shared memory, for persistent workers.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._epoch_offset = 0
        self._stream: _Stream | None = None
        self._loaded: dict | None = None
        self._resumed: tuple[int, dict[str, dict]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch set by `set_epoch`."""
        return int(self._epoch)

    @property
    def counts(self) -> dict[str, int]:
        """Samples truncated, split and dropped, and tokens cut off, by this process in the current pass."""
        return _new_counts() if self._stream is None else dict(self._stream.counts)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the source, which may shuffle by it. The packing itself is deterministic."""
        self._epoch.fill_(epoch + self._epoch_offset)

    def __iter__(self) -> Iterator[list]:
        shard, stride_shard = self._shards()
        state = self._state_of(shard)
        epoch = self.epoch if state is None else state["epoch"]
        self._epoch.fill_(epoch)
        self._stream = _Stream(self, shard, stride_shard, epoch)
        source = self._stream.source
        if hasattr(source, "set_epoch"):
            source.set_epoch(epoch)
        self._stream.start(state)
        return self._stream.rows()

    def state_dict(self) -> dict[str, Any]:
        """The position of the latest iteration in this process, as JSON types. Open rows are stored as positions."""
        if self._stream is None and self._loaded is not None:
            return copy.deepcopy(self._loaded)
        stream = self._stream or _Stream(self, *self._shards(), self.epoch)
        return stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at `state` in the next iteration, with the same rows as without the interruption.

        The samples of open rows are read again. A dataset with indices reads them by index. A source with an exact
        state of its own loads that state. Any other source is read from the beginning.
        """
        version, settings = state.get("version"), self._settings()
        if version != _STATE_VERSION:
            raise input_error(f"a state of version {_STATE_VERSION}", repr(version))
        if state["settings"] != settings:
            raise input_error(f"a state with the settings {settings}", state["settings"], "Pass the same arguments.")
        self._stream = None
        self._loaded = copy.deepcopy(state)

    def resume(self, epoch: int, states: dict[str, dict]) -> None:
        """Continue the readers of `epoch` at `states`, `{reader: state}`. `set_epoch` counts from 0 after a resume.

        For `PackingStateCallback`. A reader without a state starts from the beginning, and so do all other epochs.
        """
        for state in states.values():
            self.load_state_dict(state)
        self._loaded = None
        self._resumed = (epoch, states)
        self._epoch_offset = epoch
        self._epoch.fill_(epoch)

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SETTINGS}

    def _shards(self) -> tuple[list[int], tuple[int, int]]:
        """`[reader, number of readers]`, and the reader's share of the samples: first sample and stride."""
        info = torch.utils.data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        rank, world_size = (self.rank or 0, self.world_size or 1)
        first, stride = (rank, world_size) if self._shard_by_rank else (0, 1)
        if self.shard_by_worker:
            first, stride = first * workers + worker, stride * workers
        return [rank * workers + worker, world_size * workers], (first, stride)

    def _state_of(self, shard: list[int]) -> dict | None:
        state, self._loaded = self._loaded, None
        if state is None and self._resumed is not None and self._resumed[0] == self.epoch:
            state = self._resumed[1].get(str(shard[0]))
        if state is not None and state["shard"] != shard:
            expected = f"a state of reader {shard[0]} of {shard[1]} (processes x workers)"
            fix = (
                "Resume with the same numbers of both. StatefulDataLoader and PackingStateCallback keep the state of "
                "every worker."
            )
            raise input_error(expected, "a state of reader {} of {}".format(*state["shard"]), fix)
        return state


class _Stream:
    """One pass of one reader: its position, its open rows, and the closed rows that are not returned yet.

    An entry of a row is `(position, start, length, sample)`. Positions count the samples of this reader.
    """

    def __init__(self, dataset: IterablePackingDataset, shard: list[int], share: tuple[int, int], epoch: int):
        self.config = dataset
        self.longest_tree = longest_tree(dataset.max_length, dataset.overlong)
        self.source: Any = _clone(dataset.dataset) if _is_hf_iterable(dataset.dataset) else dataset.dataset
        self.shard = shard
        self.first, self.stride = share
        self.epoch = epoch
        self.position = 0
        self.index = 0
        self.exhausted = False
        self.open: dict[int, list[tuple]] = {}
        self.free: list[int] = []
        self.ready: deque[list[tuple]] = deque()
        self.serial = 0
        self.counts = _new_counts()
        # States of the source by position, oldest first. Without a state, a resumed stream reads from the beginning.
        self.snapshots: deque[tuple[int, Any]] = deque()
        self.keeps_snapshots = not has_items(self.source) and _has_exact_state(self.source)
        self.samples: Iterator = iter(())

    def start(self, state: dict | None) -> None:
        """Open the source. With a state, also read the samples of its rows again."""
        state = state or self.state_dict()
        self.position, self.exhausted, self.counts = state["position"], state["exhausted"], dict(state["counts"])
        needed = {position for row in state["open"] + state["ready"] for position, _, _ in row}
        samples = self._read_again(needed, state["source"])

        def restore(row):
            return [(at, start, length, self._cut(samples[at], at, start, length)) for at, start, length in row]

        self.ready.extend(map(restore, state["ready"]))
        for row in state["open"]:
            self.open[self.serial] = restore(row)
            free = self.config.max_length - sum(length for _, _, length in row)
            insort(self.free, (free << _SERIAL_BITS) | self.serial)
            self.serial += 1

    def rows(self) -> Iterator[list]:
        """Yield the rows. The state is complete at each `yield`: it holds every sample read and not yet returned."""
        max_length = self.config.max_length
        yield from self._hand_out()
        try:
            for read in self.samples:
                sample, length = as_packed(read, self._number, self.longest_tree)
                if 0 < length <= max_length:
                    self._place((self.position, 0, length, sample), length)
                else:
                    self._place_pieces(sample, length)
                self.position += 1
                if self.keeps_snapshots and self.position % _SNAPSHOT_EVERY == 0:
                    self._take_snapshot()
                yield from self._hand_out()
        except Exception as error:
            part = f"reader {self.shard[0]}'s part of " if self.stride < self.shard[1] else ""
            error.add_note(f"IterablePackingDataset: this happened at sample {self._number} of {part}the dataset.")
            raise
        # A source that raises StopIteration in `__getitem__` would end the stream early.
        end = self.first + self.position * self.stride
        if has_items(self.source) and end < len(self.source):
            raise RuntimeError(f"the dataset stopped at sample {end} of {len(self.source)}")
        self.exhausted = True
        # Close the fullest row first, as during reading.
        self.ready.extend(self.open.pop(row & _SERIAL) for row in self.free)
        self.free.clear()
        yield from self._hand_out()

    @property
    def _number(self) -> int:
        """The number of the sample at the current position in the dataset."""
        return self.first + self.position * self.stride if has_items(self.source) else self.index

    def _hand_out(self) -> Iterator[list]:
        while self.ready:
            yield [entry[3] for entry in self.ready.popleft()]

    def _place(self, entry: tuple, length: int) -> None:
        """Put an entry into the fullest open row that has room for it, or into a new row."""
        free = self.free
        at = bisect_left(free, length << _SERIAL_BITS)
        if at < len(free):
            row = free.pop(at)
            self.open[row & _SERIAL].append(entry)
        else:
            if len(free) == self.config.buffer_size:
                self.ready.append(self.open.pop(free.pop(0) & _SERIAL))
            row = (self.config.max_length << _SERIAL_BITS) | self.serial
            self.open[self.serial] = [entry]
            self.serial += 1
        row -= length << _SERIAL_BITS
        if row > _SERIAL:
            insort(free, row)
        else:
            self.ready.append(self.open.pop(row))

    def _place_pieces(self, sample: Any, length: int) -> None:
        config, counts = self.config, self.counts
        if length == 0 or config.overlong == "error":
            fix = 'Pass overlong="truncate", "split" or "drop".' if length else "Remove empty samples."
            raise input_error(f"samples of 1 to {config.max_length} tokens", length, fix)
        if not any(counts.values()):
            logger.warning_once(
                f"Some samples have more than {config.max_length} tokens, for example {length} "
                f"(overlong={config.overlong!r}). See `IterablePackingDataset.counts` for their number."
            )
        pieces = self._pieces(length)
        counts[FATES[config.overlong]] += 1
        counts["tokens_cut"] += length - sum(size for _, size in pieces)
        for start, size in pieces:
            self._place((self.position, start, size, cut_sample(sample, start, size)), size)

    def _pieces(self, length: int) -> list[tuple[int, int]]:
        config = self.config
        return overlong_pieces(length, config.max_length, config.overlong, config.truncation_side)

    def _cut(self, sample: Any, position: int, start: int, length: int) -> Any:
        number = self.first + position * self.stride
        sample, total = as_packed(sample, number, self.longest_tree)
        if (start, length) not in self._pieces(total):
            raise self._changed(f"sample {number} with {total} tokens")
        return sample if length == total else cut_sample(sample, start, length)

    def _read_again(self, needed: set[int], snapshot: list | None) -> dict[int, Any]:
        """Advance the source to `self.position`, and return the earlier samples that are `needed`."""
        source, first, stride, position = self.source, self.first, self.stride, self.position
        if has_items(source):
            self.samples = map(source.__getitem__, range(first + position * stride, len(source), stride))
            if needed and first + max(needed) * stride >= len(source):
                raise self._changed(f"{len(source)} samples")
            return {at: source[first + at * stride] for at in needed}
        begin = position if self.exhausted and not needed else 0
        if begin == position > 0:
            return {}
        if snapshot is not None:
            begin, source_state = snapshot
            # A copy, because the next pass starts from the beginning and must not see this state.
            source = _clone(source)
            source.load_state_dict(source_state)
            self.snapshots.append((begin, source_state))
        self.source = source
        self.samples = self._share(iter(source), first + (begin - 1) * stride + 1 if begin else 0)
        samples = {}
        for at in range(begin, position):
            try:
                sample = next(self.samples)
            except StopIteration:
                raise self._changed(f"only {at} samples for this reader") from None
            if at in needed:
                samples[at] = sample
        return samples

    def _share(self, samples: Iterator, index: int) -> Iterator:
        """This reader's share of the samples, starting with sample `index`."""
        self.index = index
        for sample in samples:
            if self.index % self.stride == self.first:
                yield sample
            self.index += 1

    def _changed(self, got: str) -> ValueError:
        return input_error("the dataset of the interrupted run", got, "Resume with the same data.")

    def _take_snapshot(self) -> None:
        oldest, snapshots = self._oldest(), self.snapshots
        snapshots.append((self.position, self.source.state_dict()))
        while len(snapshots) > 1 and snapshots[1][0] <= oldest:
            snapshots.popleft()

    def _oldest(self) -> int:
        return min((row[0][0] for row in chain(self.open.values(), self.ready)), default=self.position)

    def state_dict(self) -> dict[str, Any]:
        def positions(rows):
            return [[list(entry[:3]) for entry in row] for row in rows]

        oldest = self._oldest()
        snapshot = next(([at, state] for at, state in reversed(self.snapshots) if at <= oldest), None)
        return {
            "version": _STATE_VERSION,
            "settings": self.config._settings(),
            "epoch": self.epoch,
            "shard": self.shard,
            "position": self.position,
            "exhausted": self.exhausted,
            "open": positions(self.open.values()),
            "ready": positions(self.ready),
            "source": copy.deepcopy(snapshot),
            "counts": dict(self.counts),
        }


def _new_counts() -> dict[str, int]:
    return dict.fromkeys([*FATES.values(), "tokens_cut"], 0)


def _is_hf_iterable(dataset: Any) -> bool:
    kind = getattr(sys.modules.get("datasets"), "IterableDataset", None)
    return kind is not None and isinstance(dataset, kind)


def _clone(source: Any) -> Any:
    """A shallow copy with its own state and epoch."""
    clone = copy.copy(source)
    if hasattr(source, "__dict__"):
        # A copy of datasets' `IterableDataset` shares its attributes with the original.
        clone.__dict__ = dict(vars(source))
    if _is_hf_iterable(source):
        # Its epoch is in shared memory, where workers that set it at the same time would add up their changes.
        clone._epoch = copy.deepcopy(source._epoch)
    return clone


def _has_exact_state(source: Any) -> bool:
    """Whether the source's state restores every sample. The state of `datasets` lacks the shuffle buffer."""
    if not (hasattr(source, "state_dict") and hasattr(source, "load_state_dict")):
        return False
    stages = [getattr(source, "_ex_iterable", None)] if _is_hf_iterable(source) else []
    for stage in stages:
        stages += filter(None, (getattr(stage, "ex_iterable", None), *getattr(stage, "ex_iterables", ())))
    return all(type(stage).__name__ != "BufferShuffledExamplesIterable" for stage in stages)
