"""The plan: the documents of each packed row, for all epochs and ranks, and its file format."""

import json
import os
import zipfile
import zlib
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import count, input_error
from ..overlong import FATES
from .cost import PackingCost
from .rows import PADDED_BATCH, histogram, mean_of_longest, offsets_of, ranges, share_rows


_FORMAT, _FORMAT_VERSION = "transformers_packed.PackingPlan", 1
_ARRAYS = ("row_offsets", "samples", "lengths", "starts")
_BLOCK = 1 << 18


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """The assignment of documents to packed rows, made by [`plan_packing`].

    A document is a whole sample or a part of a cut sample. The rows of an optimizer step are adjacent: `rank` computes
    row `(step * gradient_accumulation_steps + micro_step) * world_size + rank` in that micro step. `shard`,
    `DistributedSampler(shuffle=False)` and accelerate read every `world_size`-th row, so each rank gets its own rows.
    All arrays are read-only. The counts of samples and tokens refer to the whole dataset, also in a shard.

    Args:
        row_offsets (`np.ndarray`):
            int64 `[rows + 1]`: row `i` has the documents from `row_offsets[i]` up to `row_offsets[i + 1]`.
        samples (`np.ndarray`):
            int32 (int64 from 2**31 samples on) `[documents]`: the sample of each document.
        lengths (`np.ndarray`):
            int32 `[documents]`: the number of tokens of each document.
        starts (`np.ndarray`, *optional*):
            int32 `[documents]`: the position of the document's first token in its sample. `None` means 0 everywhere.
        max_length (`int`):
            Maximum number of tokens per row.
        cost (`PackingCost`):
            The cost of a document.
        balanced (`bool`):
            Whether the rows are balanced in cost.
        seed (`int`):
            The seed of all random choices.
        world_size (`int`):
            The number of ranks.
        gradient_accumulation_steps (`int`):
            Rows per rank and step. The number of rows is a multiple of `world_size * gradient_accumulation_steps`.
        overlong (`str`):
            The action for samples longer than `max_length`.
        input_samples (`int`):
            Samples in the dataset.
        input_tokens (`int`):
            Tokens in the dataset.
        overlong_samples (`int`):
            Samples that were truncated, split into several documents, or dropped.
        lost_tokens (`int`):
            Tokens of the dataset that are in no row.
        rank (`int`, *optional*):
            The rank of a shard. `None` for a whole plan.
    """

    row_offsets: np.ndarray
    samples: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray | None
    max_length: int
    cost: PackingCost
    balanced: bool
    seed: int
    world_size: int
    gradient_accumulation_steps: int
    overlong: str
    input_samples: int
    input_tokens: int
    overlong_samples: int = 0
    lost_tokens: int = 0
    rank: int | None = None

    def __post_init__(self):
        for array in self._arrays().values():
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The samples, start positions and lengths of a row's documents, each `[documents in the row]`."""
        if not 0 <= index < len(self):
            raise IndexError(f"expected an index from 0 to {len(self) - 1}, got {index}")
        documents = slice(self.row_offsets[index], self.row_offsets[index + 1])
        return self.samples[documents], self._starts(documents), self.lengths[documents]

    def _starts(self, documents: slice | np.ndarray) -> np.ndarray:
        return np.zeros_like(self.lengths[documents]) if self.starts is None else self.starts[documents]

    @property
    def steps(self) -> int:
        """Optimizer steps per epoch."""
        return len(self) // self.rows_per_step

    @property
    def rows_per_step(self) -> int:
        """Rows of all ranks in an optimizer step."""
        return self.world_size * self.gradient_accumulation_steps

    @cached_property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """The fraction of `len(plan) * max_length` that holds tokens."""
        return self.tokens / (len(self) * self.max_length)

    @property
    def documents_per_row(self) -> np.ndarray:
        """Documents in each row, int64 `[rows]`."""
        return np.diff(self.row_offsets)

    @property
    def row_tokens(self) -> np.ndarray:
        """Tokens in each row, int64 `[rows]`."""
        return np.add.reduceat(self.lengths, self.row_offsets[:-1], dtype=np.int64)

    @property
    def row_cost(self) -> np.ndarray:
        """The cost of each row according to `cost`, float64 `[rows]`."""
        return np.add.reduceat(self._cost_by_length[self.lengths], self.row_offsets[:-1])

    @cached_property
    def padding_avoided(self) -> float:
        """The expected fraction of padding in right-padded batches of 8 of these documents in random order."""
        return 1 - self.tokens / (len(self.lengths) * mean_of_longest(self.lengths))

    @cached_property
    def estimated_speedup(self) -> float:
        """The cost of padded batches of 8 documents in random order divided by the cost of the rows."""
        each = self._cost_by_length
        padded = mean_of_longest(self.lengths, values=each)
        return float(padded * len(self.lengths) / (histogram(self.lengths) @ each))

    @cached_property
    def _cost_by_length(self) -> np.ndarray:
        return self.cost.documents(np.arange(self.lengths.max() + 1))

    def misfits(self, documents: slice, sample_tokens: np.ndarray) -> np.ndarray:
        """Whether documents contradict the actual lengths of their samples, bool `[documents]`.

        Args:
            documents (`slice`):
                A slice of `samples`, `lengths` and `starts`.
            sample_tokens (`np.ndarray`):
                The actual number of tokens of each document's sample, `[documents]`.
        """
        lengths, starts = self.lengths[documents], self._starts(documents)
        if self.overlong == "split":
            return self._planned_tokens[self.samples[documents]] != sample_tokens
        fits = (starts == 0) & (lengths == sample_tokens)
        if self.overlong == "truncate":
            at_an_end = (starts == 0) | (starts + lengths == sample_tokens)
            fits |= (sample_tokens > self.max_length) & (lengths == self.max_length) & at_an_end
        return ~fits

    @cached_property
    def _planned_tokens(self) -> np.ndarray:
        """The end of each sample's last document, int32 `[samples]`."""
        ends = np.zeros(self.input_samples, np.int32)
        np.maximum.at(ends, self.samples, self._starts(slice(None)) + self.lengths)
        return ends

    @property
    def imbalance(self) -> float:
        """The extra cost of a step's slowest rank relative to the mean rank, averaged over all steps."""
        ranks = self.row_cost.reshape(self.steps, self.gradient_accumulation_steps, self.world_size).sum(1)
        return float((ranks.max(1) / ranks.mean(1)).mean() - 1)

    @property
    def fingerprint(self) -> str:
        """What identifies the documents of each step and the order of the steps in all epochs.

        Plans with another `world_size` have the same fingerprint if they have the same documents in each step.
        """
        steps = np.repeat(np.arange(len(self)) // self.rows_per_step, self.documents_per_row)
        mixed = np.full(len(self.lengths), self.seed % 2**64, np.uint64)
        # Mixes the bits of each document like splitmix64. The sum does not depend on the order within a step.
        for part in (steps, self.samples, self._starts(slice(None)), self.lengths):
            mixed = (mixed ^ part.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        return f"{mixed.sum():016x}"

    def summary(self) -> str:
        """A summary of the plan in a few lines of text."""
        low, middle, high = np.percentile(self.documents_per_row, (5, 50, 95))
        per_step = f"{count(self.world_size, 'rank')} x {count(self.gradient_accumulation_steps, 'row')} each"
        lines = {
            "samples": f"{self.input_samples:,} with {self.input_tokens:,} tokens",
            "rows": f"{len(self):,} of at most {self.max_length:,} tokens, {self.fill:.2%} full",
            "steps": f"{self.steps:,} ({per_step})",
            "documents per row": f"{low:.0f} / {middle:.0f} / {high:.0f} (5 / 50 / 95 %)",
            "too long": self._fate_of_overlong(),
            "padding avoided": f"{self.padding_avoided:.1%} of padded batches of {PADDED_BATCH} in random order",
            "estimated speed-up": f"{self.estimated_speedup:.2f} x over those batches, by the model's operations",
        }
        if self.rank is not None:
            lines["shard"] = f"rank {self.rank}; samples and too long refer to the whole dataset"
        elif self.world_size > 1:
            lines["imbalance"] = f"slowest rank {self.imbalance:.2%} above the mean of its step"
        return "\n".join(f"{name:<20}{text}" for name, text in lines.items())

    def _fate_of_overlong(self) -> str:
        if not self.overlong_samples:
            return "none"
        lost = count(self.lost_tokens, "token") if self.lost_tokens else "no token"
        return f"{count(self.overlong_samples, 'sample')} {FATES[self.overlong]}, {lost} lost"

    def shard(self, rank: int, world_size: int) -> "PackingPlan":
        """The rows of one rank: every `world_size`-th row, starting with row `rank`.

        The shards of all ranks have equal length, and each row is in exactly one shard.

        Raises:
            `ValueError`: `rank` is out of range, the plan has another number of ranks, or it is already a shard.
        """
        self._check_whole()
        if world_size != self.world_size:
            fix = f"Pass world_size={world_size} to plan_packing."
            raise input_error(f"world_size={self.world_size}, which the rows are arranged for", world_size, fix)
        if not 0 <= rank < world_size:
            raise input_error(f"a rank from 0 to {world_size - 1}", rank)
        return replace(self._take(np.arange(rank, len(self), world_size)), world_size=1, rank=rank)

    def epoch_order(self, epoch: int) -> np.ndarray:
        """The order of the rows in an epoch, int64 `[rows]`.

        Epoch 0 keeps the order of the plan. Every other epoch shuffles the rows and assigns them to new steps. The
        documents of a row stay together.
        """
        self._check_whole()
        if epoch < 0:
            raise input_error("an epoch from 0 on", epoch)
        if epoch == 0:
            return np.arange(len(self))
        order = self._rows_of_steps()[np.random.default_rng((self.seed, epoch)).permutation(len(self))]
        return self._share(order) if self.balanced else order

    def _rows_of_steps(self) -> np.ndarray:
        """The rows, step after step, in an order that does not depend on which rank computes a row."""
        first = self.row_offsets[:-1]
        return np.lexsort((self._starts(first), self.samples[first], np.arange(len(self)) // self.rows_per_step))

    def shuffled(self, epoch: int) -> "PackingPlan":
        """The plan with its rows in the order of an epoch. See [`PackingPlan.epoch_order`]."""
        return self._take(self.epoch_order(epoch))

    def _share(self, order: np.ndarray) -> np.ndarray:
        return share_rows(order, self.row_cost, self.world_size, self.gradient_accumulation_steps)

    def _check_whole(self) -> None:
        if self.rank is not None:
            got, fix = f"the shard of rank {self.rank}", "Shuffle the whole plan, then take the shard."
            raise input_error("the whole plan, which all ranks have to shuffle alike", got, fix)

    def _take(self, rows: np.ndarray) -> "PackingPlan":
        sizes = self.documents_per_row[rows]
        offsets = offsets_of(sizes)
        given = {name: array for name, array in self._arrays().items() if name != "row_offsets"}
        taken: dict[str, Any] = {name: np.empty(offsets[-1], array.dtype) for name, array in given.items()}
        for first in range(0, len(rows), _BLOCK):
            block = slice(first, first + _BLOCK)
            index = ranges(self.row_offsets[rows[block]], sizes[block])
            for name, array in given.items():
                taken[name][offsets[first] : offsets[first] + len(index)] = array[index]
        return replace(self, row_offsets=offsets, **taken)

    def _arrays(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _ARRAYS if getattr(self, name) is not None}

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan to an uncompressed npz file without pickled objects. Replaces an existing file atomically.

        Raises:
            `OSError`: the file cannot be written, or `path` is a directory.
        """
        names = [field.name for field in fields(self) if field.name not in _ARRAYS]
        header = {"format": _FORMAT, "version": _FORMAT_VERSION, **{name: getattr(self, name) for name in names}}
        path = Path(path)
        if path.is_dir():
            raise IsADirectoryError(f"expected a file, got the directory {path}")
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                text = json.dumps(header, default=vars)
                np.savez(file, header=np.frombuffer(text.encode(), np.uint8), **self._arrays())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "PackingPlan":
        """Load a plan from a file written by `save`.

        Raises:
            `OSError`: the file cannot be read.
            `ValueError`: the file holds no plan, a plan of another version, or a damaged plan.
        """
        wanted, fix = "a file written by PackingPlan.save", "Plan again and save the new plan."
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            header = json.loads(arrays.pop("header").tobytes())
            found = header.pop("format"), header.pop("version")
            if found != (_FORMAT, _FORMAT_VERSION):
                raise ValueError(f"of format {found[0]}, version {found[1]}")
            header["cost"] = PackingCost(**header["cost"])
            plan = cls(**{"starts": None, **arrays, **header})
            plan._check_arrays()
        except OSError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise input_error(wanted, f"{path} ({error})", fix) from error
        return plan

    def _check_arrays(self) -> None:
        offsets, *documents = self._arrays().values()
        sound = (
            all(array.ndim == 1 and array.dtype.kind == "i" for array in (offsets, *documents))
            and len(offsets) > 1
            and offsets[0] == 0
            and (np.diff(offsets) > 0).all()
            and all(len(array) == offsets[-1] for array in documents)
            and self.lengths.min() > 0
            and all(array.min() >= 0 for array in documents)
            and self.samples.max() < self.input_samples
            and self.row_tokens.max() <= self.max_length
            and len(self) % self.rows_per_step == 0
        )
        if not sound:
            raise ValueError("its arrays contradict each other")
