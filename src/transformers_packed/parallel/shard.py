"""One rank's part of a packed row: a contiguous run of its tokens, and what it needs to know of the rest."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar
from zlib import crc32

import torch

from ..boundaries import PACKING_KEYWORDS, SequenceBoundaries
from ..errors import input_error
from .collectives import all_gather
from .groups import SequenceParallel
from .vision import TOKEN_TYPES, VisionShard, cut_vision


@dataclass(frozen=True, eq=False)
class RowShard(SequenceBoundaries):
    """The boundaries of the tokens `[rank * T / P, (rank + 1) * T / P)` of a packed row of `T` tokens.

    As [`SequenceBoundaries`] it describes the pieces of documents that this rank holds, and is handed to a model in
    their place. With [`ops_for`] its layers compute with the other ranks what crosses the cuts.

    Args:
        cu_seqlens, host:
            Cumulative lengths of the pieces.
        row ([`SequenceBoundaries`]):
            The whole row.
        rank, size (`int`):
            Which of how many parts.
        parallel ([`SequenceParallel`], *optional*):
            The processes that hold the other parts.
        vision (`dict`, *optional*):
            For `"image"` and `"video"`, where the row has them, a [`VisionShard`].
        checksum (`int`, *optional*):
            Of the row's tokens: all ranks that hold a part of it have the same.
    """

    row: SequenceBoundaries = None
    rank: int = 0
    size: int = 1
    is_shard: ClassVar[bool] = True
    parallel: SequenceParallel | None = None
    vision: dict[str, VisionShard] = field(default_factory=dict)
    checksum: int = 0

    @classmethod
    def cut(
        cls, row: SequenceBoundaries, rank: int, size: int, parallel: SequenceParallel | None = None
    ) -> "RowShard":
        """The part `rank` of `size` parts of `row`. A length that is not a multiple of `size` is a `ValueError`."""
        if row.total_length % size:
            fix = f"Pad it: DataCollatorWithFlattening(pad_to_multiple_of={size}, pad_token_id=...)."
            raise input_error(f"a row whose length is a multiple of {size}", f"{row.total_length} tokens", fix)
        length = row.total_length // size
        pieces = (row.cu_seqlens_cpu - rank * length).clamp(0, length).unique()
        device = row.cu_seqlens.device
        return cls(pieces.to(device, non_blocking=True), pieces, row=row, rank=rank, size=size, parallel=parallel)

    @property
    def start(self) -> int:
        """The place in the row of this part's first token."""
        return self.rank * self.total_length

    @cached_property
    def tokens_before(self) -> int:
        """How many tokens of the first piece's document stand in earlier parts."""
        starts = self.row.cu_seqlens_cpu
        return self.start - int(starts[starts <= self.start][-1])

    @cached_property
    def goes_on(self) -> bool:
        """Whether the last piece's document has more tokens in the next part."""
        return int(self.start + self.total_length) not in self.row.cu_seqlens_cpu.tolist()

    @cached_property
    def longest_cut_piece(self) -> int:
        """Tokens of the longest piece of a cut document that any part of the row has: all ranks say the same."""
        pieces = [0]
        for start, end in pairwise(self.row.cu_seqlens_cpu.tolist()):
            ends = [start, *range((start // self.total_length + 1) * self.total_length, end, self.total_length), end]
            pieces += [b - a for a, b in pairwise(ends)] if len(ends) > 2 else []
        return max(pieces)

    @property
    def is_cut_in_long_pieces(self) -> bool:
        """Whether some part has a piece of a cut document that is more than a quarter of the part; the same on all ranks."""
        return 4 * self.longest_cut_piece > self.total_length

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 `[1, T / P]`: each token's position in its own document, from 0."""
        return self.of_row(self.row.position_ids)

    def of_row(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor whose last dimension are the row's tokens."""
        return x[..., self.start : self.start + self.total_length]

    def real_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Those of the whole row, `[T / P, ...]` to `[T, ...]`, without its tail padding. All ranks have to call it."""
        return self.row.real_tokens(all_gather(tokens, 0, self.processes.group))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "RowShard":
        moved = super().to(device, non_blocking)
        return moved if moved is self else replace(moved, row=self.row.to(device, non_blocking))

    def layer_kwargs(self) -> dict[str, Any]:
        # The lengths of pieces are nothing that a layer could use alone.
        return {"boundaries": self}

    def vision_features(self, kind: str, features: torch.Tensor) -> torch.Tensor:
        """From the features of the frames that this rank computed to those of its tokens."""
        if kind not in self.vision:
            raise input_error(f"a row cut together with its {kind}s", f"a part without {kind}s", "Use shard_batch.")
        return self.vision[kind].exchange(features, self.processes)

    @property
    def processes(self) -> SequenceParallel:
        """`parallel`, which everything that the parts compute together needs."""
        if self.parallel is None:
            raise input_error("a shard that knows the other ranks", "one without", "Pass parallel= to shard_batch.")
        return self.parallel

    def check_whole(self, fix: str) -> None:
        raise input_error("a whole row", f"part {self.rank} of {self.size} of one", fix)


# Columns of a batch with one entry per token in their last dimension.
_TOKEN_COLUMNS = ("input_ids", "position_ids", "labels", "shift_labels", TOKEN_TYPES)


def shard_batch(
    batch: dict[str, Any],
    rank: int,
    size: int,
    *,
    parallel: SequenceParallel | None = None,
    pad_token_id: int = 0,
    minimum: int = 1,
    token_columns: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Cut the batch that [`DataCollatorWithFlattening`] made to one rank's part.

    The row's tail is padded to a multiple of `size` with a document of its own, labels are shifted on the whole row, and
    then all are cut. Targets that would lead from one document into the next are -100.

    Args:
        batch (`dict`):
            `input_ids` `[1, T]` with `cu_seq_lens_q`, `cu_seqlens` or `seq_idx`, or `position_ids` that restart. Images and
            videos come with `mm_token_type_ids` and the position ids of all dimensions: the collator needs `model=` for them.
        rank, size (`int`):
            Which of how many parts.
        parallel ([`SequenceParallel`], *optional*):
            The processes that hold the other parts; without it the result is only data.
        pad_token_id (`int`, *optional*, defaults to 0):
            The token of the padding.
        minimum (`int`, *optional*, defaults to 1):
            How many tokens each rank has at least, by more padding: one less than the convolution's window.
        token_columns (`tuple`, *optional*):
            Further columns of the batch with one value per token.

    Returns:
        `dict`: `input_ids`, `position_ids`, `labels` and `shift_labels` of `T' / P` tokens, and `boundaries`, a [`RowShard`].
        `labels` equal `shift_labels`, for code that asks whether a batch has any. Images and videos are reduced to the
        frames that this rank computes.

    Raises:
        `ValueError`: not one packed row, or columns that cannot be cut.

    Example:

    ```python
    >>> from transformers_packed import DataCollatorWithFlattening
    >>> from transformers_packed.parallel import shard_batch
    >>> collator = DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore")
    >>> batch = collator([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> part = shard_batch(batch, 1, 2)
    >>> part["input_ids"].tolist(), part["position_ids"].tolist(), part["labels"].tolist()
    ([[8, 9, 0]], [[0, 1, 0]], [[9, -100, -100]])
    >>> part["boundaries"].lengths, part["boundaries"].tokens_before
    ([2, 1], 0)

    ```
    """
    batch = dict(batch)
    tokens = batch.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or len(tokens) != 1:
        got = "none" if tokens is None else f"shape {tuple(tokens.shape)}"
        raise input_error("input_ids [1, T] of one packed row", got, "Use DataCollatorWithFlattening.")
    length = tokens.shape[1]
    padding_tokens = batch.get("padding_tokens") or 0
    row = SequenceBoundaries.from_kwargs({name: batch.pop(name, None) for name in PACKING_KEYWORDS}, length)
    if row is None:
        if "position_ids" not in batch:
            raise input_error("document boundaries", "none", "Return position_ids or cu_seqlens.")
        row = SequenceBoundaries.from_position_ids(batch["position_ids"])
    position_ids = batch.get("position_ids")
    batch["position_ids"] = row.position_ids if position_ids is None else position_ids
    names = [name for name in (*_TOKEN_COLUMNS, *token_columns) if name in batch]
    for name in names:
        if batch[name].shape[-1] != length:
            expected = f"{name} with one entry for each of the row's {length} tokens"
            raise input_error(expected, f"shape {tuple(batch[name].shape)}", "Labels of documents cannot be cut.")
    if "shift_labels" not in batch and "labels" in batch:
        batch["shift_labels"] = torch.nn.functional.pad(batch["labels"][..., 1:], (0, 1), value=-100)
        names.append("shift_labels")
    if "shift_labels" in batch:
        ends = row.cu_seqlens[1:].long() - 1
        batch["shift_labels"] = batch["shift_labels"].index_fill(1, ends, -100)

    padding = max(-length % size, minimum * size - length)
    if padding:
        fillers = {"input_ids": pad_token_id, "labels": -100, "shift_labels": -100}
        for name in names:
            batch[name] = torch.nn.functional.pad(batch[name], (0, padding), value=fillers.get(name, 0))
        counted = torch.arange(padding_tokens, padding_tokens + padding)
        batch["position_ids"][..., length:] = counted.to(batch["position_ids"].device)
        # The padding's document grows, or there is one now.
        documents = row.lengths[:-1] if padding_tokens else row.lengths
        lengths = [*documents, padding_tokens + padding]
        row = SequenceBoundaries.from_lengths(lengths, device=row.cu_seqlens.device).with_padding(lengths[-1])
    vision = cut_vision(batch, rank, size)
    if vision and batch["position_ids"].ndim != 3:
        expected = "position_ids [4, 1, T] beside images or videos, which only a whole row gives"
        got = f"shape {tuple(batch['position_ids'].shape)}"
        raise input_error(expected, got, "Pass model= to DataCollatorWithFlattening.")
    checksum = crc32(batch["input_ids"].cpu().contiguous().numpy(), crc32(row.cu_seqlens_cpu.numpy()))
    shard = replace(RowShard.cut(row, rank, size, parallel), vision=vision, checksum=checksum)
    for name in names:
        batch[name] = shard.of_row(batch[name]).contiguous()
    if "shift_labels" in batch:
        batch["labels"] = batch["shift_labels"]
    return batch | {"boundaries": shard}
