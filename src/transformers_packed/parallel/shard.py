"""One rank's part of a packed row: a contiguous run of its tokens, with the boundaries of the whole row."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Self
from zlib import crc32

import torch

from ..boundaries import PACKING_KEYWORDS, PART, SequenceBoundaries, derived_property
from ..errors import input_error, unsupported
from ..ops.cross_entropy import shift_labels
from .collectives import all_gather
from .groups import SequenceParallel
from .vision import TOKEN_TYPES, VisionShard, cut_vision


@dataclass(frozen=True, eq=False)
class RowShard(SequenceBoundaries):
    """The boundaries of the tokens `[rank * T / P, (rank + 1) * T / P)` of a packed row of `T` tokens.

    As [`SequenceBoundaries`], it describes the pieces of documents on this rank. Pass it to a model in place of the
    boundaries of a whole row. The ops compute cut documents together with the other ranks.

    Args:
        cu_seqlens (`torch.IntTensor`):
            Cumulative lengths of the pieces.
        host (`torch.IntTensor`):
            The same values on the host.
        row ([`SequenceBoundaries`]):
            Boundaries of the whole row.
        rank (`int`):
            Index of this part.
        size (`int`):
            Number of parts.
        parallel ([`SequenceParallel`], *optional*):
            The processes that hold the other parts.
        vision (`dict`, *optional*):
            A [`VisionShard`] for each of `"image"` and `"video"` in the row.
        checksum (`int`, *optional*):
            Checksum of the row's tokens, which is the same on all ranks of the row.
    """

    row: SequenceBoundaries = field(kw_only=True)
    rank: int = 0
    size: int = 1
    kind: ClassVar[str] = PART
    instead: ClassVar[str] = "Train without sequence parallelism."
    parallel: SequenceParallel | None = None
    vision: dict[str, VisionShard] = field(default_factory=dict)
    checksum: int = 0

    @property
    def most_keys(self) -> int:
        return self.row.most_keys

    @classmethod
    def cut(
        cls, row: SequenceBoundaries, rank: int, size: int, parallel: SequenceParallel | None = None
    ) -> "RowShard":
        """Return part `rank` of `size` parts of `row`. Raise a `ValueError` if `size` does not divide its length."""
        if row.total_length % size:
            fix = f"Pad it: DataCollatorWithFlattening(pad_to_multiple_of={size}, pad_token_id=...)."
            raise input_error(f"a row whose length is a multiple of {size}", f"{row.total_length} tokens", fix)
        length = row.total_length // size
        pieces = (row.cu_seqlens_cpu - rank * length).clamp(0, length).unique()
        device = row.cu_seqlens.device
        return cls(pieces.to(device, non_blocking=True), pieces, row=row, rank=rank, size=size, parallel=parallel)

    @property
    def start(self) -> int:
        """Index of this part's first token in the row."""
        return self.rank * self.total_length

    @derived_property
    def tokens_before(self) -> int:
        """Number of tokens of the first piece's document in earlier parts."""
        starts = self.row.cu_seqlens_cpu
        return self.start - int(starts[starts <= self.start][-1])

    @derived_property
    def goes_on(self) -> bool:
        """Whether the document of the last piece continues in the next part."""
        return int(self.start + self.total_length) not in self.row.cu_seqlens_cpu.tolist()

    @derived_property
    def longest_cut_piece(self) -> int:
        """Length of the longest piece of a cut document in any part of the row. The same on all ranks."""
        pieces = [0]
        for start, end in pairwise(self.row.cu_seqlens_cpu.tolist()):
            ends = [start, *range((start // self.total_length + 1) * self.total_length, end, self.total_length), end]
            pieces += [b - a for a, b in pairwise(ends)] if len(ends) > 2 else []
        return max(pieces)

    @property
    def is_cut_in_long_pieces(self) -> bool:
        """Whether a piece of a cut document exceeds a quarter of its part, in any part. The same on all ranks."""
        return 4 * self.longest_cut_piece > self.total_length

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 `[1, T / P]`: the position of each token in its document, from 0."""
        return self.of_row(self.row.position_ids)

    def of_row(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor whose last dimension holds the row's tokens."""
        return x[..., self.start : self.start + self.total_length]

    def real_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Gather `tokens` `[T / P, ...]` to the whole row `[T, ...]` without tail padding. All ranks must call it."""
        return self.row.real_tokens(all_gather(tokens, 0, self.processes.group))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        moved = super().to(device, non_blocking)
        return moved if moved is self else replace(moved, row=self.row.to(device, non_blocking))

    @property
    def ends(self) -> torch.Tensor:
        """int64: the index of the last token of each document that ends in this part. No host sync."""
        ends = super().ends
        return ends[: len(ends) - self.goes_on]

    @property
    def first_tokens(self) -> torch.Tensor:
        """int64: the index of the first token of each document that begins in this part. No host sync."""
        return super().first_tokens[int(self.tokens_before > 0) :]

    def next_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return for each token of `tokens` `[1, T / P, ...]` the next one in the row. All ranks must call it."""
        first = all_gather(tokens[:, :1], 1, self.processes.group)
        at = (self.rank + 1) % self.size
        return torch.cat([tokens[:, 1:], first[:, at : at + 1]], dim=1)

    def tail_before(self, tail: torch.Tensor, width: int) -> torch.Tensor:
        """Return the last `width` tokens of the previous part for those of this one. All ranks must call it."""
        if tail.shape[1] < width:
            expected = f"at least {width} tokens on each rank, for the window of the convolution"
            raise input_error(expected, tail.shape[1], "Use longer rows, or fewer processes per row.")
        return all_gather(tail, 0, self.processes.group)[max(self.rank - 1, 0)][None]

    def has_masked_targets(self, labels: Any, shift_labels: Any) -> bool:
        """Raise a `ValueError` if there is no `shift_labels` with `labels`: the last target is in another part."""
        if labels is not None and shift_labels is None:
            fix = "Cut the batch with transformers_packed.parallel.shard_batch."
            raise input_error("shift_labels in addition to labels for a shard of a row", "labels alone", fix)
        return True

    def vision_features(self, kind: str, features: torch.Tensor) -> torch.Tensor:
        """Exchange the features of this rank's frames for the features of its tokens."""
        if kind not in self.vision:
            raise input_error(f"a row cut together with its {kind}s", f"a part without {kind}s", "Use shard_batch.")
        return self.vision[kind].exchange(features, self.processes)

    @property
    def processes(self) -> SequenceParallel:
        """The processes of `parallel`. Raise a `ValueError` if it is `None`."""
        if self.parallel is None:
            raise input_error("a shard with a process group", "one without", "Pass parallel= to shard_batch.")
        return self.parallel


def gather_loss_tensors(*tensors: torch.Tensor, boundaries: RowShard) -> tuple[torch.Tensor, ...]:
    """Gather tensors with one entry per token, such as log-probabilities and labels, to the whole row. Differentiable.

    Every rank receives the same tensors and computes the loss of the row from them and `boundaries.row`, for example
    per document. As in data parallelism, the mean of the gradients over all processes (DDP, FSDP) is then the gradient
    of the mean loss of the rows. All ranks must call this function and use the same outputs.

    Args:
        *tensors (`torch.Tensor` of shape `[1, T / P, ...]`):
            Tensors of this rank's part, for example log-probabilities and `shift_labels`.
        boundaries ([`RowShard`]):
            Boundaries of the part.

    Returns:
        `tuple` of `torch.Tensor` of shape `[1, T, ...]`, without the row's tail padding.

    Raises:
        `ValueError`: a tensor does not have the length of the part, or `boundaries.parallel` is `None`.
    """
    for x in tensors:
        if x.shape[:2] != (1, boundaries.total_length):
            expected = f"tensors [1, {boundaries.total_length}, ...] of a shard of the row"
            raise input_error(expected, f"shape {tuple(x.shape)}", "Pass the boundaries of these tensors' batch.")
    return tuple(boundaries.real_tokens(x[0])[None] for x in tensors)


# Batch columns whose last dimension has one entry per token.
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
    """Select one rank's part of a batch from [`DataCollatorWithFlattening`].

    Tail padding, a separate document, extends the row to a multiple of `size`. Labels are shifted on the whole row,
    and the target of each document's last token is -100. Then all columns are cut.

    Args:
        batch (`dict`):
            `input_ids` `[1, T]` with `cu_seq_lens_q`, `cu_seqlens` or `seq_idx`, or with `position_ids` that restart.
            Images and videos require `mm_token_type_ids` and position ids of all dimensions. The collator returns
            these with `model=`.
        rank (`int`):
            Index of the part.
        size (`int`):
            Number of parts.
        parallel ([`SequenceParallel`], *optional*):
            The processes that hold the other parts. Without it, a model cannot compute the result.
        pad_token_id (`int`, *optional*, defaults to 0):
            Token id of the padding.
        minimum (`int`, *optional*, defaults to 1):
            Minimum number of tokens per rank, reached by more padding. A model needs the width of its convolution's
            window minus 1.
        token_columns (`tuple`, *optional*):
            Other columns of the batch with one value per token.

    Returns:
        `dict`: `input_ids`, `position_ids`, `labels` and `shift_labels` of `T' / P` tokens, and `boundaries`, a
            [`RowShard`]. `labels` equals `shift_labels`, for code that checks whether a batch has labels. Images and
            videos are reduced to the frames that this rank computes.

    Raises:
        `ValueError`: the batch is not one packed row, or a column cannot be cut.

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
    batch, row = _settled(batch)
    length = row.total_length
    names = [name for name in (*_TOKEN_COLUMNS, *token_columns) if name in batch]
    for name in names:
        if batch[name].shape[-1] != length:
            expected = f"{name} with one entry for each of the row's {length} tokens"
            raise input_error(expected, f"shape {tuple(batch[name].shape)}", "Labels per document cannot be cut.")
    if "shift_labels" not in batch and "labels" in batch:
        batch["shift_labels"] = shift_labels(batch["labels"])
        names.append("shift_labels")
    if "shift_labels" in batch:
        ends = row.cu_seqlens[1:].long() - 1
        batch["shift_labels"] = batch["shift_labels"].index_fill(1, ends, -100)
    padding = max(-length % size, minimum * size - length)
    if padding:
        row = _padded(batch, row, names, padding, pad_token_id)
    vision = cut_vision(batch, rank, size)
    if vision and batch["position_ids"].ndim != 3:
        expected = "position_ids [4, 1, T] with images or videos, computed on the whole row"
        got = f"shape {tuple(batch['position_ids'].shape)}"
        raise input_error(expected, got, "Pass model= to DataCollatorWithFlattening.")
    checksum = crc32(batch["input_ids"].cpu().contiguous().numpy().data, crc32(row.cu_seqlens_cpu.numpy().data))
    shard = replace(RowShard.cut(row, rank, size, parallel), vision=vision, checksum=checksum)
    for name in names:
        batch[name] = shard.of_row(batch[name]).contiguous()
    if "shift_labels" in batch:
        batch["labels"] = batch["shift_labels"]
    return batch | {"boundaries": shard}


def _settled(batch: dict[str, Any]) -> tuple[dict[str, Any], SequenceBoundaries]:
    """Return the batch with position ids in place of the packing keywords, and the boundaries of its row."""
    tokens = batch.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or len(tokens) != 1:
        got = "none" if tokens is None else f"shape {tuple(tokens.shape)}"
        raise input_error("input_ids [1, T] of one packed row", got, "Use DataCollatorWithFlattening.")
    if batch.get("parent_of") is not None:
        fix = "Train without sequence parallelism, or without shared prompts."
        raise unsupported("sequence parallelism", "shared prompts (parent_of)", fix)
    row = SequenceBoundaries.from_kwargs({name: batch.get(name) for name in PACKING_KEYWORDS}, tokens.shape[1])
    batch = {name: x for name, x in batch.items() if name not in PACKING_KEYWORDS}
    position_ids = batch.get("position_ids")
    if row is None:
        if position_ids is None:
            raise input_error("document boundaries", "none", "Return position_ids or cu_seqlens.")
        row = SequenceBoundaries.from_position_ids(position_ids)
    return batch | {"position_ids": row.position_ids if position_ids is None else position_ids}, row


def _padded(
    batch: dict[str, Any], row: SequenceBoundaries, names: list[str], padding: int, pad_token_id: int
) -> SequenceBoundaries:
    """Pad the columns `names` of a batch at the end, and return the boundaries of the longer row."""
    fillers = {"input_ids": pad_token_id, "labels": -100, "shift_labels": -100}
    for name in names:
        batch[name] = torch.nn.functional.pad(batch[name], (0, padding), value=fillers.get(name, 0))
    # Extend the padding document, or add one.
    documents = row.lengths[:-1] if row.padding_tokens else row.lengths
    counted = torch.arange(row.padding_tokens, row.padding_tokens + padding)
    batch["position_ids"][..., row.total_length :] = counted.to(batch["position_ids"].device)
    lengths = [*documents, row.padding_tokens + padding]
    return SequenceBoundaries.from_lengths(lengths, device=row.cu_seqlens.device).with_padding(lengths[-1])
