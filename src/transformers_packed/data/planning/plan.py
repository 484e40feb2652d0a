"""The plan: which documents stand in which packed row, for all epochs and ranks, and as a file."""

import json
import os
import zipfile
import zlib
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from ...errors import input_error
from .cost import PackingCost
from .rows import PADDED_BATCH, histogram, mean_of_longest, offsets_of, ranges, share_rows


_FORMAT, _FORMAT_VERSION = "transformers_packed.PackingPlan", 1
_ARRAYS = ("row_offsets", "samples", "lengths", "starts")
_BLOCK = 1 << 18


@dataclass(frozen=True, eq=False)
class PackingPlan:
    """Which documents stand in which packed row; made by [`plan_packing`].

    A document is a sample or, where one was cut, a part of it. The rows of an optimizer step stand together: row
    `(step * gradient_accumulation_steps + micro_step) * world_size + rank` is the one that `rank` computes in that
    micro step. Reading every `world_size`-th row, as `shard`, `DistributedSampler(shuffle=False)` and accelerate do,
    gives each rank its own rows. All arrays are read-only.

    Args:
        row_offsets (`np.ndarray`):
            int64 `[rows + 1]`: the documents of row `i` are `row_offsets[i]` up to `row_offsets[i + 1]`.
        samples (`np.ndarray`):
            int32 (int64 from 2**31 samples on) `[documents]`: the sample that each document is taken from.
        lengths (`np.ndarray`):
            int32 `[documents]`: its tokens.
        starts (`np.ndarray`, *optional*):
            int32 `[documents]`: the first of the sample's tokens that it holds; `None` means 0 everywhere.
        max_length (`int`):
            The most tokens of a row.
        cost (`PackingCost`):
            What a document costs.
        balanced (`bool`):
            Whether rows were made alike in cost.
        seed (`int`):
            The seed of all random choices.
        world_size, gradient_accumulation_steps (`int`):
            What the rows are arranged for; their number is a multiple of the product.
        overlong (`str`):
            What was done with samples of more than `max_length` tokens.
        input_samples, input_tokens (`int`):
            What was to be planned. This and the following count the whole dataset, in a shard, too.
        dropped_samples, dropped_tokens, truncated_samples, truncated_tokens, split_samples (`int`):
            What was left out, what was cut (`truncated_tokens` are lost), and the samples cut into several documents.
        rank (`int`, *optional*):
            The rank whose shard this is.
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
    dropped_samples: int = 0
    dropped_tokens: int = 0
    truncated_samples: int = 0
    truncated_tokens: int = 0
    split_samples: int = 0
    rank: int | None = None

    def __post_init__(self):
        for array in self._arrays().values():
            array.flags.writeable = False

    def __len__(self) -> int:
        return len(self.row_offsets) - 1

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The samples, first tokens and lengths of a row's documents, each `[documents in the row]`."""
        if not 0 <= index < len(self):
            raise IndexError(f"expected an index from 0 to {len(self) - 1}, got {index}")
        documents = slice(self.row_offsets[index], self.row_offsets[index + 1])
        return self.samples[documents], self._starts(documents), self.lengths[documents]

    def _starts(self, documents: slice) -> np.ndarray:
        return np.zeros_like(self.lengths[documents]) if self.starts is None else self.starts[documents]

    @property
    def steps(self) -> int:
        """Optimizer steps of one pass over the rows."""
        return len(self) // (self.world_size * self.gradient_accumulation_steps)

    @cached_property
    def tokens(self) -> int:
        """Tokens in all rows."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def fill(self) -> float:
        """The share of `len(plan) * max_length` that holds tokens."""
        return self.tokens / (len(self) * self.max_length)

    @property
    def documents_per_row(self) -> np.ndarray:
        """int64 `[rows]`."""
        return np.diff(self.row_offsets)

    @property
    def row_tokens(self) -> np.ndarray:
        """Tokens of each row, int64 `[rows]`."""
        return np.add.reduceat(self.lengths, self.row_offsets[:-1], dtype=np.int64)

    @property
    def row_cost(self) -> np.ndarray:
        """Each row's cost by `cost`, float64 `[rows]`."""
        return np.add.reduceat(self._cost_by_length[self.lengths], self.row_offsets[:-1])

    @cached_property
    def padding_avoided(self) -> float:
        """The share of padding in right-padded batches of 8 of these documents in random order (the expected value)."""
        return 1 - self.tokens / (len(self.lengths) * mean_of_longest(self.lengths))

    @cached_property
    def estimated_speedup(self) -> float:
        """What padded batches of 8 documents in random order cost, over what the rows cost, by `cost`."""
        each = self._cost_by_length
        padded = mean_of_longest(self.lengths, values=each)
        return float(padded * len(self.lengths) / (histogram(self.lengths) @ each))

    @cached_property
    def _cost_by_length(self) -> np.ndarray:
        return self.cost.documents(np.arange(self.lengths.max() + 1))

    def misfits(self, documents: slice, sample_tokens: np.ndarray) -> np.ndarray:
        """Which of some documents cannot be what `overlong` makes of their samples, bool `[documents]`.

        Args:
            documents (`slice`):
                Of `samples`, `lengths` and `starts`.
            sample_tokens (`np.ndarray`):
                The tokens that their samples really have, `[documents]`.
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
        """Where each sample's last document ends, int32 `[samples]`."""
        ends = np.zeros(self.input_samples, np.int32)
        np.maximum.at(ends, self.samples, self._starts(slice(None)) + self.lengths)
        return ends

    @property
    def imbalance(self) -> float:
        """How much more than the mean rank the slowest rank of a step costs; the mean over all steps."""
        ranks = self.row_cost.reshape(self.steps, self.gradient_accumulation_steps, self.world_size).sum(1)
        return float((ranks.max(1) / ranks.mean(1)).mean() - 1)

    def summary(self) -> str:
        """What the plan comes to, in a few lines."""
        low, middle, high = np.percentile(self.documents_per_row, (5, 50, 95))
        per_step = f"{self.world_size} ranks x {self.gradient_accumulation_steps}"
        lines = {
            "samples": f"{self.input_samples:,} with {self.input_tokens:,} tokens",
            "rows": f"{len(self):,} of at most {self.max_length:,} tokens, {self.fill:.2%} full",
            "steps": f"{self.steps:,} ({per_step} rows each)",
            "documents per row": f"{low:.0f} / {middle:.0f} / {high:.0f} (5 / 50 / 95 %)",
            "too long": self._fate_of_overlong(),
            "padding avoided": f"{self.padding_avoided:.1%} of padded batches of {PADDED_BATCH} in random order",
            "estimated speed-up": f"{self.estimated_speedup:.2f} x those batches, by the model's operations",
        }
        if self.rank is not None:
            lines["shard"] = f"of rank {self.rank}; samples and too long count the whole dataset"
        elif self.world_size > 1:
            lines["imbalance"] = f"slowest rank {self.imbalance:.2%} over the mean of its step"
        return "\n".join(f"{name:<20}{text}" for name, text in lines.items())

    def _fate_of_overlong(self) -> str:
        if self.truncated_samples:
            return f"{self.truncated_samples:,} samples truncated, {self.truncated_tokens:,} tokens lost"
        if self.dropped_samples:
            return f"{self.dropped_samples:,} samples dropped, {self.dropped_tokens:,} tokens lost"
        return f"{self.split_samples:,} samples split, no token lost" if self.split_samples else "none"

    def shard(self, rank: int, world_size: int) -> "PackingPlan":
        """The rows of one rank: every `world_size`-th, from row `rank` on.

        The shards of all ranks hold each row once and are equally long.

        Raises:
            `ValueError`: `rank` is out of range, the plan is for another number of ranks, or it is a shard already.
        """
        self._check_whole()
        if world_size != self.world_size:
            fix = f"Give world_size={world_size} to plan_packing."
            raise input_error(f"world_size={self.world_size}, which the rows are arranged for", world_size, fix)
        if not 0 <= rank < world_size:
            raise input_error(f"a rank from 0 to {world_size - 1}", rank)
        return replace(self._take(np.arange(rank, len(self), world_size)), world_size=1, rank=rank)

    def epoch_order(self, epoch: int) -> np.ndarray:
        """The order of the rows in an epoch, int64 `[rows]`.

        Epoch 0 has the plan's own order. In every other epoch the rows come in another random order, in which they are
        arranged in steps anew; the documents of a row stay together.
        """
        self._check_whole()
        if epoch < 0:
            raise input_error("an epoch from 0 on", epoch)
        if epoch == 0:
            return np.arange(len(self))
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self))
        return self._share(order) if self.balanced else order

    def shuffled(self, epoch: int) -> "PackingPlan":
        """The plan with its rows in the order of an epoch; see [`PackingPlan.epoch_order`]."""
        return self._take(self.epoch_order(epoch))

    def _share(self, order: np.ndarray) -> np.ndarray:
        return share_rows(order, self.row_cost, self.world_size, self.gradient_accumulation_steps)

    def _check_whole(self) -> None:
        if self.rank is not None:
            got, fix = f"the shard of rank {self.rank}", "Shuffle the whole plan, then take the shard."
            raise input_error("the whole plan, as all ranks have to choose alike", got, fix)

    def _take(self, rows: np.ndarray) -> "PackingPlan":
        sizes = self.documents_per_row[rows]
        offsets = offsets_of(sizes)
        given = {name: array for name, array in self._arrays().items() if name != "row_offsets"}
        taken = {name: np.empty(offsets[-1], array.dtype) for name, array in given.items()}
        for first in range(0, len(rows), _BLOCK):
            block = slice(first, first + _BLOCK)
            index = ranges(self.row_offsets[rows[block]], sizes[block])
            for name, array in given.items():
                taken[name][offsets[first] : offsets[first] + len(index)] = array[index]
        return replace(self, row_offsets=offsets, **taken)

    def _arrays(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name) for name in _ARRAYS if getattr(self, name) is not None}

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan to a file, an uncompressed npz without pickled objects; an existing file is replaced whole.

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
        """Read a plan that `save` wrote.

        Raises:
            `OSError`: the file cannot be read.
            `ValueError`: it holds no plan, one of another version, or a damaged one.
        """
        wanted, fix = "a file that PackingPlan.save wrote", "Plan again, and save the plan."
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            header = json.loads(arrays.pop("header").tobytes())
            found = header.pop("format"), header.pop("version")
        except OSError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise input_error(wanted, f"{path} ({error})", fix) from error
        if found != (_FORMAT, _FORMAT_VERSION):
            raise input_error(wanted, f"{path} of format {found[0]}, version {found[1]}", fix)
        try:
            header["cost"] = PackingCost(**header["cost"])
            plan = cls(**{"starts": None, **arrays, **header})
            plan._check_arrays()
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise input_error(wanted, f"{path}, which is damaged ({error})", fix) from error
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
            and len(self) % (self.world_size * self.gradient_accumulation_steps) == 0
        )
        if not sound:
            raise ValueError("its arrays contradict each other")
