"""Where the documents of a packed row start and end.

A packed row lays several documents end to end in one row of batch size 1. Every kernel wants that one fact in its own
spelling: FlashAttention and flash-linear-attention want cumulative lengths, `causal_conv1d` and Mamba kernels want a
document number per token, position-based masks want position ids that restart. [`SequenceBoundaries`] is the one value
behind all of them. It is built once per batch and handed down, and it keeps a copy on the host so that no layer has to
ask the device how long a document is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from .errors import input_error


# The columns of images and of videos: their value in `mm_token_type_ids`, pixels and grids.
VISION_KINDS = {
    "image": (1, "pixel_values", "image_grid_thw"),
    "video": (2, "pixel_values_videos", "video_grid_thw"),
}
TOKEN_TYPES = "mm_token_type_ids"


@dataclass(frozen=True, eq=False)
class SequenceBoundaries:
    """The document boundaries of one packed row of `T` tokens in `N` documents.

    Use the constructors `from_lengths`, `from_cu_seqlens`, `from_seq_idx`, `from_position_ids` and
    `from_attention_mask`; they check their input and raise a `ValueError` that says what was wrong with it.

    Args:
        cu_seqlens (`torch.IntTensor` of shape `[N+1]`):
            Cumulative document lengths on the compute device: starts at 0, ends at `T`, strictly increasing, int32.
        cu_seqlens_cpu (`torch.IntTensor` of shape `[N+1]`):
            The same values on the host.
        padding_tokens (`int`, *optional*, defaults to 0):
            How many tokens of tail padding the row has. They are the last document.

    Example:

    ```python
    >>> from transformers_packed import SequenceBoundaries
    >>> boundaries = SequenceBoundaries.from_lengths([3, 2])
    >>> boundaries.cu_seqlens.tolist(), boundaries.seq_idx.tolist(), boundaries.max_length
    ([0, 3, 5], [[0, 0, 0, 1, 1]], 3)
    >>> boundaries.position_ids.tolist()
    [[0, 1, 2, 0, 1]]

    ```
    """

    cu_seqlens: torch.Tensor
    cu_seqlens_cpu: torch.Tensor
    padding_tokens: int = 0

    # Whether these are of a part of a row, whose other parts are elsewhere (`parallel.RowShard`).
    is_shard: ClassVar[bool] = False

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | torch.Tensor, *, device: torch.device | str | None = None
    ) -> "SequenceBoundaries":
        """From the documents' lengths in tokens, in row order (a list, an array or a tensor `[N]` of integers >= 1).

        `device` is where `cu_seqlens` goes; by default the device of `lengths`, or the CPU.
        """
        call = "SequenceBoundaries.from_lengths"
        lengths = torch.as_tensor(lengths)
        device = lengths.device if device is None else torch.device(device)
        _check_integers(call, "lengths", lengths, shape="[N] with N >= 1", ndim=1, minimum_size=1)
        lengths = lengths.to("cpu", torch.int64)
        if bool((lengths < 1).any()):
            document = int((lengths < 1).nonzero()[0])
            raise input_error(
                "lengths of at least 1 (no document is empty)",
                f"{int(lengths[document])} at document {document}",
                "Leave empty documents out of the row.",
            )
        host = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(lengths, dim=0, out=host[1:])
        return cls._checked(call, host, device)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: torch.Tensor,
        *,
        total_length: int | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
    ) -> "SequenceBoundaries":
        """From cumulative lengths, an int32 or int64 tensor `[N+1]`.

        Args:
            cu_seqlens (`torch.Tensor` of shape `[N+1]`):
                Starts at 0, strictly increasing.
            total_length (`int`, *optional*):
                The number of tokens `T` of the row, which the last entry must equal.
            cu_seqlens_cpu (`torch.Tensor` of shape `[N+1]`, *optional*):
                The same values on the host. Without it, a tensor on a device costs one synchronisation here.
        """
        call = "SequenceBoundaries.from_cu_seqlens"
        if not isinstance(cu_seqlens, torch.Tensor):
            cu_seqlens = torch.as_tensor(cu_seqlens)
        _check_integers(call, "cu_seqlens", cu_seqlens, shape="[N+1] with N >= 1", ndim=1, minimum_size=2)
        if cu_seqlens_cpu is None:
            host = cu_seqlens
        else:
            host = cu_seqlens_cpu
            _check_integers(call, "cu_seqlens_cpu", host, shape="[N+1] with N >= 1", ndim=1, minimum_size=2)
            fix = "Pass a host copy of the same tensor, or leave it out."
            if host.device.type != "cpu" or host.shape != cu_seqlens.shape:
                raise input_error(
                    f"cu_seqlens_cpu on the CPU with shape {tuple(cu_seqlens.shape)}",
                    f"{tuple(host.shape)} on {host.device}",
                    fix,
                )
            if cu_seqlens.device.type == "cpu" and not torch.equal(host.long(), cu_seqlens.long()):
                raise input_error(
                    f"cu_seqlens_cpu with the values of cu_seqlens, {_short(cu_seqlens.tolist())}",
                    _short(host.tolist()),
                    fix,
                )
        return cls._checked(call, host.to("cpu", torch.int64), cu_seqlens.device, total_length, cu_seqlens)

    @classmethod
    def from_seq_idx(cls, seq_idx: torch.Tensor) -> "SequenceBoundaries":
        """From a document number per token, an integer tensor `[1, T]` that never decreases and is never negative."""
        call = "SequenceBoundaries.from_seq_idx"
        _check_integers(call, "seq_idx", seq_idx, shape="[1, T] with T >= 1", ndim=2, minimum_size=1)
        _check_one_row(call, "seq_idx", seq_idx.shape[0])
        row = seq_idx[0].to("cpu", torch.int64)
        steps = row.diff()
        if bool((steps < 0).any()) or int(row[0]) < 0:
            where = 0 if int(row[0]) < 0 else int((steps < 0).nonzero()[0]) + 1
            raise input_error(
                "seq_idx that is never negative and never goes back",
                f"{int(row[where])} at token {where}" + (f" after {int(row[where - 1])}" if where else ""),
                "Number the documents of a row 0, 1, 2, ... in the order in which they stand.",
            )
        return cls._from_starts(call, steps != 0, seq_idx.device)

    @classmethod
    def from_position_ids(cls, position_ids: torch.Tensor) -> "SequenceBoundaries":
        """From position ids: a document starts wherever an id is not the previous one plus 1.

        `position_ids` is an integer tensor `[1, T]`, or `[4, 1, T]` as Qwen3.5 takes it, where row 0 holds the text
        positions. The three-row form `[3, 1, T]` has no text row and says nothing about documents: a `ValueError`.
        """
        call = "SequenceBoundaries.from_position_ids"
        text_row = text_position_ids(position_ids) if isinstance(position_ids, torch.Tensor) else None
        if text_row is None:
            raise input_error(
                "a position_ids tensor [1, T], or [4, 1, T] whose row 0 holds the text positions",
                _describe(position_ids),
                "Pass cu_seqlens or seq_idx instead.",
            )
        _check_integers(call, "position_ids", text_row, shape="[1, T] with T >= 1", ndim=2, minimum_size=1)
        _check_one_row(call, "position_ids", text_row.shape[0])
        return cls._from_starts(call, text_row[0].diff().to("cpu") != 1, text_row.device)

    @classmethod
    def from_attention_mask(cls, attention_mask: torch.Tensor) -> "SequenceBoundaries":
        """From a padding mask `[B, L]` of 0 and 1: each row's real tokens become one document.

        This is the unpadding that [`~SequenceBoundaries.pack`] applies. A row without a real token is a `ValueError`.
        """
        call = "SequenceBoundaries.from_attention_mask"
        mask = _check_padding_mask(call, attention_mask).to("cpu")
        lengths = mask.sum(dim=1)
        if bool((lengths == 0).any()):
            raise input_error(
                "at least one real token in each row",
                f"only padding in row {int((lengths == 0).nonzero()[0])}",
                "Drop that row.",
            )
        return cls.from_lengths(lengths, device=attention_mask.device)

    @classmethod
    def _from_starts(cls, call: str, is_start: torch.Tensor, device: torch.device) -> "SequenceBoundaries":
        """`is_start` (host, bool `[T-1]`): whether a document starts at token 1, 2, ..., T-1."""
        starts = is_start.nonzero()[:, 0] + 1
        ends = torch.tensor([0]), starts, torch.tensor([is_start.numel() + 1])
        return cls._checked(call, torch.cat(ends), device)

    @classmethod
    def _checked(
        cls,
        call: str,
        host: torch.Tensor,
        device: torch.device,
        total_length: int | None = None,
        given: torch.Tensor | None = None,
    ) -> "SequenceBoundaries":
        """Check the int64 host copy and build the value; `given` is the caller's tensor, kept when it can be."""
        fix = "Give the cumulative document lengths [0, n_1, n_1 + n_2, ..., T] of one packed row."
        if int(host[0]) != 0:
            raise input_error("cu_seqlens that starts at 0", str(int(host[0])), fix)
        lengths = host.diff()
        if bool((lengths <= 0).any()):
            document = int((lengths <= 0).nonzero()[0])
            raise input_error(
                "strictly increasing cu_seqlens (no document is empty)",
                f"{int(host[document])} followed by {int(host[document + 1])} at document {document}",
                fix,
            )
        total = int(host[-1])
        if total_length is not None and total != total_length:
            fix += (
                " If the collator's were right, something cut them on the way to the model: an accelerate dispatcher (set"
                " `dispatch_batches=False`) or torch.nn.DataParallel (launch one process per GPU)."
            )
            if total < total_length:
                fix += " Or it put tokens before the row, as PEFT prompt learning does: use padded batches."
            raise input_error(f"cu_seqlens that ends at the row's {total_length} tokens", f"{total}", fix)
        if total > torch.iinfo(torch.int32).max:
            raise input_error("at most 2**31 - 1 tokens in a row", str(total), "Split the row.")
        host = host.to(torch.int32)
        return cls(host.to(device) if given is None else given.to(torch.int32), host)

    @cached_property
    def lengths(self) -> list[int]:
        """The documents' lengths in tokens, as Python ints in row order."""
        return self.cu_seqlens_cpu.diff().tolist()

    @property
    def num_documents(self) -> int:
        """`N`."""
        return self.cu_seqlens_cpu.numel() - 1

    @property
    def total_length(self) -> int:
        """`T`, the row's length in tokens."""
        return int(self.cu_seqlens_cpu[-1])

    @cached_property
    def max_length(self) -> int:
        """The longest document's length in tokens."""
        return max(self.lengths)

    @cached_property
    def seq_idx(self) -> torch.Tensor:
        """int32 `[1, T]`: the document number of each token. No synchronisation."""
        documents = torch.arange(self.num_documents, dtype=torch.int32, device=self.cu_seqlens.device)
        return documents.repeat_interleave(self.cu_seqlens.diff(), output_size=self.total_length)[None]

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """int64 `[1, T]`: each token's position in its own document, from 0. No synchronisation."""
        tokens = torch.arange(self.total_length, device=self.cu_seqlens.device)
        return tokens[None] - self.cu_seqlens[:-1].long()[self.seq_idx.long()]

    def chunk_counts(self, size: int) -> tuple[torch.Tensor, int]:
        """int32 `[N]`: how many chunks of `size` tokens each document has, and their number. No synchronisation."""
        counts = (self.cu_seqlens.diff() + (size - 1)) // size
        return counts, sum(-(-length // size) for length in self.lengths)

    def real_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens` `[T, ...]` without the tail padding, which is no load for experts to balance, say."""
        return tokens[: len(tokens) - self.padding_tokens] if self.padding_tokens else tokens

    def same_as(self, other: "SequenceBoundaries") -> bool:
        """Whether both describe the same documents (compared on the host)."""
        return torch.equal(self.cu_seqlens_cpu, other.cu_seqlens_cpu)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "SequenceBoundaries":
        """The same boundaries with `cu_seqlens` on `device`: `self` when it is there already, else always one object."""
        device = torch.device(device)
        if device == self.cu_seqlens.device:
            return self
        return self.derived(
            f"to {device}", lambda: replace(self, cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking))
        )

    def derived(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make()` returned when `name` was asked for first: index tensors that all layers of a model share."""
        values = self.__dict__.setdefault("_derived", {})
        if name not in values:
            values[name] = make()
        return values[name]

    def layer_kwargs(self) -> dict[str, Any]:
        """The keyword arguments under which the layers of a model receive these boundaries.

        Transformers' own names (`seq_idx`, `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`),
        `cu_seqlens` for the linear-attention block, and `boundaries`, this object with its host copy.
        """
        if torch.compiler.is_compiling():
            # All that a graph can hold; what the ops derive from it, they derive outside.
            return {"boundaries": self, "cu_seqlens": self.cu_seqlens}
        return {
            "boundaries": self,
            "cu_seqlens": self.cu_seqlens,
            "seq_idx": self.seq_idx,
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
        }

    def pack(self, padded: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Lay the real tokens of a padded batch end to end: the inverse of [`~SequenceBoundaries.unpack`].

        Args:
            padded (`torch.Tensor` of shape `[N, L, ...]`):
                One document per row.
            attention_mask (`torch.Tensor` of shape `[N, L]`, *optional*):
                1 at real tokens. By default the documents are taken to be padded on the right.

        Returns:
            `torch.Tensor` of shape `[1, T, ...]`, differentiable in `padded`.

        Example:

        ```python
        >>> import torch
        >>> from transformers_packed import SequenceBoundaries
        >>> boundaries = SequenceBoundaries.from_lengths([1, 3])
        >>> boundaries.pack(torch.tensor([[7, 0, 0], [1, 2, 3]])).tolist()
        [[7, 1, 2, 3]]

        ```
        """
        if padded.ndim < 2 or padded.shape[0] != self.num_documents:
            raise input_error(
                f"a padded batch [N, L, ...] with N = {self.num_documents} documents",
                f"shape {tuple(padded.shape)}",
                "Give one row per document.",
            )
        slots = self._slots("SequenceBoundaries.pack", padded.shape[1], attention_mask)
        return padded.flatten(0, 1).index_select(0, slots)[None]

    def unpack(
        self, packed: torch.Tensor, attention_mask: torch.Tensor | None = None, padding_value: float = 0
    ) -> torch.Tensor:
        """Give each document of a packed row its own padded row: the inverse of [`~SequenceBoundaries.pack`].

        Args:
            packed (`torch.Tensor` of shape `[1, T, ...]`):
                The packed row.
            attention_mask (`torch.Tensor` of shape `[N, L]`, *optional*):
                1 where the real tokens go. By default the documents are padded on the right to the longest one.
            padding_value (`float`, *optional*, defaults to 0):
                What the padding holds.

        Returns:
            `torch.Tensor` of shape `[N, L, ...]`, differentiable in `packed`.

        Example:

        ```python
        >>> import torch
        >>> from transformers_packed import SequenceBoundaries
        >>> boundaries = SequenceBoundaries.from_lengths([1, 3])
        >>> boundaries.unpack(torch.tensor([[7, 1, 2, 3]]), padding_value=-1).tolist()
        [[7, -1, -1], [1, 2, 3]]

        ```
        """
        call = "SequenceBoundaries.unpack"
        if packed.ndim < 2 or packed.shape[:2] != (1, self.total_length):
            raise input_error(
                f"a packed row [1, T, ...] with T = {self.total_length}",
                f"shape {tuple(packed.shape)}",
                "Pass the row that these boundaries describe.",
            )
        length = self.max_length
        if attention_mask is not None:
            attention_mask = _check_padding_mask(call, attention_mask)
            length = attention_mask.shape[1]
        slots = self._slots(call, length, attention_mask)
        padded = packed.new_full((self.num_documents * length, *packed.shape[2:]), padding_value)
        return padded.index_copy(0, slots, packed[0]).unflatten(0, (self.num_documents, length))

    def _slots(self, call: str, length: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """`[T]` int64: the place of each token in a flattened `[N, length]` batch."""
        if attention_mask is None:
            if length < self.max_length:
                raise input_error(
                    f"rows of at least {self.max_length} tokens, the longest document",
                    f"{length}",
                    "Pad the rows to the longest document.",
                )
            return (self.seq_idx.long() * length + self.position_ids)[0]
        mask = _check_padding_mask(call, attention_mask)
        if mask.shape != (self.num_documents, length):
            raise input_error(
                f"an attention_mask of the batch's shape [{self.num_documents}, {length}]",
                f"{list(mask.shape)}",
                "Pass the mask of this batch.",
            )
        counts = mask.sum(dim=1).tolist()
        if counts != self.lengths:
            raise input_error(
                f"an attention_mask whose rows hold {_short(self.lengths)} real tokens",
                _short(counts),
                "Pass the mask from which these boundaries were made.",
            )
        return mask.flatten().nonzero()[:, 0]


class DeferredBoundaries(SequenceBoundaries):
    """Boundaries in a graph that is being compiled, where nothing can be read from `cu_seqlens`.

    The host copy is made, and checked, when an op asks for it; ops on packed rows run outside the graph.
    """

    def __init__(self, cu_seqlens: torch.Tensor, total_length: int, padding_tokens: int = 0):
        cu_seqlens = cu_seqlens.to(torch.int32)
        for name, value in (("cu_seqlens", cu_seqlens), ("_length", total_length), ("padding_tokens", padding_tokens)):
            object.__setattr__(self, name, value)

    @property
    def cu_seqlens_cpu(self) -> torch.Tensor:
        checked = SequenceBoundaries.from_cu_seqlens(self.cu_seqlens, total_length=self._length)
        # From now on this object is like any other: its class says where to look for the host copy.
        object.__setattr__(self, "__class__", SequenceBoundaries)
        object.__setattr__(self, "cu_seqlens_cpu", checked.cu_seqlens_cpu)
        return checked.cu_seqlens_cpu


class DeviceBoundaries(SequenceBoundaries):
    """Boundaries that only the device knows, so that a CUDA graph serves any documents that are written there.

    `cu_seqlens` may be written to. Documents may be empty, and the last one has to be. What would be counted on the
    host is bounded instead.
    """

    def __init__(self, cu_seqlens: torch.Tensor, total_length: int):
        object.__setattr__(self, "cu_seqlens", cu_seqlens)
        object.__setattr__(self, "_length", total_length)

    @property
    def cu_seqlens_cpu(self) -> torch.Tensor:
        raise input_error(
            "ops that need no lengths on the host: the gated delta rule by flash-linear-attention or FlashQLA and "
            "attention by varlen_attn, in float16 or bfloat16 (or under autocast) and without attention dropout",
            "an implementation that reads them",
            'Load the model in bfloat16 with attn_implementation="sdpa" and install the kernels that '
            "`transformers-packed env` misses, or train without graphs.",
        )

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def total_length(self) -> int:
        return self._length

    @property
    def max_length(self) -> int:
        return self._length

    def chunk_counts(self, size: int) -> tuple[torch.Tensor, int]:
        counts = (self.cu_seqlens.diff() + (size - 1)) // size
        total = self._length // size + self.num_documents
        # Chunks that this row does not have belong to the empty document at its end, where kernels find nothing to do.
        counts[-1:] += total - counts.sum()
        return counts, total


def text_position_ids(position_ids: torch.Tensor) -> torch.Tensor | None:
    """The row `[B, T]` of `position_ids` that counts text tokens, or `None` where there is none (`[3, B, T]`)."""
    if position_ids.ndim == 2:
        return position_ids
    if position_ids.ndim == 3 and position_ids.shape[0] == 4:
        return position_ids[0]
    return None


def _check_integers(call: str, name: str, tensor: Any, *, shape: str, ndim: int, minimum_size: int) -> None:
    integral = isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.int32, torch.int64)
    if not integral or tensor.ndim != ndim or tensor.shape[-1] < minimum_size:
        raise input_error(
            f"{name} as an int32 or int64 tensor {shape}",
            _describe(tensor),
            "If the collator's was right, an accelerate dispatcher may have cut it: set `dispatch_batches=False`."
            if name == "cu_seqlens"
            else "Convert it first.",
        )


def _check_one_row(call: str, name: str, rows: int) -> None:
    if rows != 1:
        raise input_error(
            f"{name} of one packed row, batch size 1",
            f"{rows} rows",
            "Lay all documents end to end in one row, as DataCollatorWithFlattening does.",
        )


def _check_padding_mask(call: str, attention_mask: torch.Tensor) -> torch.Tensor:
    """The mask as bool `[B, L]`."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2:
        raise input_error("an attention_mask tensor [B, L]", _describe(attention_mask), "Pass the 2-D padding mask.")
    if attention_mask.dtype != torch.bool and bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        raise input_error(
            "an attention_mask of 0 and 1",
            f"values from {attention_mask.min().item()} to {attention_mask.max().item()}",
            "Mark real tokens with 1 and padding with 0.",
        )
    return attention_mask.bool()


def _describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...] ({len(values)} values)"
