"""Document boundaries of a packed row.

A packed row concatenates several documents into one row of batch size 1. Kernels take the boundaries in different
formats: FlashAttention and flash-linear-attention take cumulative lengths, `causal_conv1d` and Mamba kernels take a
document index per token, and position-based masks take position ids that restart. [`SequenceBoundaries`] derives all
these formats from one value. It is built once per batch and passed to every layer. Its host copy lets layers read
document lengths without a host sync.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch

from .boundary_checks import (
    check_cumulative,
    check_document_numbers,
    check_host_copy,
    check_integers,
    check_lengths,
    check_padding_mask,
    check_row,
    check_tokens,
    describe,
    position_rows,
    restarts_in,
    short,
)
from .errors import input_error, unsupported


T = TypeVar("T")
# The kinds of a row that has all tokens of its documents, which are separate on it, and of a shard of a row.
WHOLE, PART = "a whole row", "a part of a row"
# Images and videos: their value in `mm_token_type_ids`, and their columns of pixels and grids.
VISION_KINDS = {
    "image": (1, "pixel_values", "image_grid_thw"),
    "video": (2, "pixel_values_videos", "video_grid_thw"),
}
TOKEN_TYPES = "mm_token_type_ids"
# Tokens per chunk in all implementations of the gated delta rule.
CHUNK_SIZE = 64
# The keyword arguments that carry document boundaries: those of FlashAttention, of a layer, and of a model.
FLASH_KEYWORDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
LAYER_KEYWORDS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "max_length_q", "max_length_k")
PACKING_KEYWORDS = (*LAYER_KEYWORDS, "padding_tokens", "parent_of")


class Derived:
    """What has been derived from boundaries. Copies of them with the same values share it.

    FSDP2 with mixed precision copies each dataclass among the arguments of a layer. If every copy derived its index
    tensors again, each layer would copy them to the GPU.
    """

    def __init__(self):
        self.values: dict[str, Any] = {}


class derived_property(Generic[T]):
    """A property of boundaries that is computed once, also for their copies."""

    def __init__(self, make: Callable[[Any], T]):
        self.make, self.__doc__ = make, make.__doc__

    def __get__(self, boundaries: Any, owner: type | None = None) -> T:
        if boundaries is None:
            return self  # type: ignore[return-value]
        return boundaries.derived(self.make.__qualname__, lambda: self.make(boundaries))


@dataclass(frozen=True, eq=False)
class SequenceBoundaries:
    """The document boundaries of one packed row of `T` tokens in `N` documents.

    Use the constructors `from_lengths`, `from_cu_seqlens`, `from_seq_idx`, `from_position_ids` and
    `from_attention_mask`. They validate their input and raise a `ValueError` that describes the problem.

    Args:
        cu_seqlens (`torch.IntTensor` of shape `[N+1]`):
            Cumulative document lengths on the compute device: starts at 0, ends at `T`, strictly increasing, int32.
        host (`torch.IntTensor` of shape `[N+1]`, *optional*):
            The same values on the host. Read them as `cu_seqlens_cpu`, which creates and checks a missing copy.
        padding_tokens (`int`, *optional*, defaults to 0):
            Number of tail padding tokens. They form the last document of the row.
        length (`int`, *optional*):
            `T`. Required without `host`, because `torch.compile` cannot read it from `cu_seqlens`.
        shared (`Derived`, *optional*):
            Results that copies share. A copy with other values needs one of its own.

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
    host: torch.Tensor | None = None
    padding_tokens: int = 0
    length: int | None = None
    shared: Derived | None = field(default=None, repr=False, kw_only=True)

    # What rows of this class are, and what to do where only whole rows of separate documents are supported.
    kind: ClassVar[str] = WHOLE
    instead: ClassVar[str] = ""
    # The functions that compute ops on rows of this class, by the name of the op (`ops.dispatch.for_rows`).
    forms: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init_subclass__(cls) -> None:
        # Ops would compute the rows of a class that says nothing as whole ones, and mix their documents.
        if "kind" not in vars(cls):
            raise TypeError(
                f"expected the kind of row that {cls.__name__} stands for, got none. Set its attribute kind."
            )
        cls.forms = {}

    def __post_init__(self):
        # torch.compile cannot make one, and boundaries in its graphs need none.
        if self.shared is None and not torch.compiler.is_compiling():
            object.__setattr__(self, "shared", Derived())

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int] | torch.Tensor, *, device: torch.device | str | None = None
    ) -> "SequenceBoundaries":
        """Build boundaries from document lengths.

        Args:
            lengths (`Sequence[int]` or `torch.Tensor` of shape `[N]`):
                Document lengths in tokens, in row order. Integers of at least 1.
            device (`torch.device` or `str`, *optional*):
                Device of `cu_seqlens`. Defaults to the device of `lengths`, or to the CPU.
        """
        lengths = torch.as_tensor(lengths)
        device = lengths.device if device is None else torch.device(device)
        check_integers("lengths", lengths, "[N] with N >= 1", ndim=1)
        lengths = lengths.to("cpu", torch.int64)
        check_lengths(lengths)
        host = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(lengths, dim=0, out=host[1:])
        return cls._checked(host, device)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: torch.Tensor,
        *,
        total_length: int | None = None,
        cu_seqlens_cpu: torch.Tensor | None = None,
    ) -> "SequenceBoundaries":
        """Build boundaries from cumulative document lengths, an int32 or int64 tensor `[N+1]`.

        Args:
            cu_seqlens (`torch.Tensor` of shape `[N+1]`):
                Starts at 0, strictly increasing.
            total_length (`int`, *optional*):
                Number of tokens `T` in the row. The last entry must equal it.
            cu_seqlens_cpu (`torch.Tensor` of shape `[N+1]`, *optional*):
                The same values on the host. Without it, a tensor on a device costs one host sync.
        """
        cu_seqlens = torch.as_tensor(cu_seqlens)
        check_integers("cu_seqlens", cu_seqlens, "[N+1] with N >= 1", ndim=1, minimum_size=2)
        host = cu_seqlens
        if cu_seqlens_cpu is not None:
            host = cu_seqlens_cpu
            check_host_copy(host, cu_seqlens)
        return cls._checked(host.to("cpu", torch.int64), cu_seqlens.device, total_length, cu_seqlens)

    @classmethod
    def from_seq_idx(cls, seq_idx: torch.Tensor) -> "SequenceBoundaries":
        """Build boundaries from a document index per token, a non-negative, non-decreasing integer tensor `[1, T]`."""
        check_row("seq_idx", seq_idx)
        row = seq_idx[0].to("cpu", torch.int64)
        steps = row.diff()
        check_document_numbers(row, steps)
        return cls._from_starts(steps != 0, seq_idx.device)

    @classmethod
    def from_position_ids(cls, position_ids: torch.Tensor) -> "SequenceBoundaries":
        """Build boundaries from position ids. A document starts at each id that is not the previous id plus 1.

        `position_ids` is an integer tensor `[1, T]`, or `[3, 1, T]` or `[4, 1, T]` as in Qwen3.5: time, height and
        width, after the text positions if there are four rows. Three rows with images that restart raise a `ValueError`,
        because positions of images do not count on.
        """
        rows = position_rows(position_ids)
        if rows is None:
            expected = "a position_ids tensor [1, T], [3, 1, T] or [4, 1, T]"
            raise input_error(expected, describe(position_ids), "Pass cu_seqlens or seq_idx instead.")
        check_row("position_ids", rows[0])
        starts, complete = restarts_in(rows.to("cpu"))
        if bool(starts.any()) and not complete:
            expected, fix = "cu_seq_lens_q or seq_idx for documents with images", "Pass them beside position_ids."
            raise input_error(expected, "position_ids of images that restart", fix)
        return cls._from_starts(starts[0], rows.device)

    @classmethod
    def from_attention_mask(cls, attention_mask: torch.Tensor) -> "SequenceBoundaries":
        """Build boundaries from a padding mask `[B, L]` of 0 and 1. The real tokens of each row become one document.

        [`~SequenceBoundaries.pack`] lays out the tokens in this way. A row without real tokens raises a `ValueError`.
        """
        lengths = check_padding_mask(attention_mask).to("cpu").sum(dim=1)
        if bool((lengths == 0).any()):
            got = f"only padding in row {int((lengths == 0).nonzero()[0])}"
            raise input_error("at least one real token in each row", got, "Drop that row.")
        return cls.from_lengths(lengths, device=attention_mask.device)

    @classmethod
    def from_kwargs(cls, kwargs: Mapping[str, Any], total_length: int) -> "SequenceBoundaries | None":
        """Build boundaries from the packing keywords in `kwargs`, or return `None` if there are none.

        The row has `total_length` tokens. A `boundaries` keyword is returned unchanged. Malformed or contradictory
        keywords, or keywords of another row length, raise a `ValueError`. Values of device tensors are compared only
        with the environment variable `TRANSFORMERS_PACKED_VALIDATE=1`, because this needs a host sync.
        """
        if kwargs.get("boundaries") is not None:
            return kwargs["boundaries"]
        given = {name: kwargs[name] for name in LAYER_KEYWORDS if kwargs.get(name) is not None}
        padding, seq_idx = kwargs.get("padding_tokens"), given.get("seq_idx")
        cumulative = {name: tensor for name, tensor in given.items() if name.startswith("cu_")}
        if cumulative:
            boundaries = cls._from_cumulative(cumulative, padding or 0, total_length)
        elif seq_idx is not None:
            check_tokens("seq_idx", seq_idx, total_length)
            boundaries = cls.from_seq_idx(seq_idx)
        elif given or padding:
            alone = " and ".join([*given, *["padding_tokens"] * bool(padding)])
            expected = f"cu_seq_lens_q, cu_seqlens or seq_idx together with {alone}"
            raise input_error(
                expected, "no document boundaries", "Pass the batch of DataCollatorWithFlattening unchanged."
            )
        else:
            return None
        if seq_idx is not None and cumulative:
            check_tokens("seq_idx", seq_idx, total_length)
            if may_read(seq_idx):
                boundaries.check_same(cls.from_seq_idx(seq_idx), "seq_idx")
        boundaries._check_longest(given)
        return boundaries.with_padding(padding)

    @classmethod
    def _from_cumulative(cls, given: dict[str, torch.Tensor], padding: int, total_length: int) -> "SequenceBoundaries":
        """Build boundaries from cumulative lengths under one or several names, which must be the same."""
        (name, tensor), *others = given.items()
        for other_name, other in others:
            same = other is tensor or tensor.shape == other.shape
            if same and other is not tensor and may_read(tensor) and may_read(other):
                same = torch.equal(tensor.cpu().long(), other.cpu().long())
            if not same:
                expected = f"{name} and {other_name} that describe the same documents"
                raise input_error(expected, "different documents", "Pass only one of them.")
        if torch.compiler.is_compiling():
            return cls(tensor.to(torch.int32), None, padding, total_length)
        return cls.from_cu_seqlens(tensor, total_length=total_length)

    @classmethod
    def _from_starts(cls, is_start: torch.Tensor, device: torch.device) -> "SequenceBoundaries":
        """Build boundaries from `is_start` (host, bool `[T-1]`): whether a document starts at token 1, 2, ..., T-1."""
        starts = is_start.nonzero()[:, 0] + 1
        return cls._checked(torch.cat([torch.tensor([0]), starts, torch.tensor([is_start.numel() + 1])]), device)

    @classmethod
    def _checked(cls, host, device, total_length=None, given=None) -> "SequenceBoundaries":
        """Validate the int64 `host` copy and build the object. `given` is the caller's tensor, kept if it is int32."""
        check_cumulative(host, total_length)
        host = host.to(torch.int32)
        return cls(host.to(device, non_blocking=True) if given is None else given.to(torch.int32), host)

    @property
    def cu_seqlens_cpu(self) -> torch.Tensor:
        """int32 `[N+1]`: the values of `cu_seqlens` on the host."""
        if self.host is not None:
            return self.host
        length = self.length
        return self.derived(
            "host", lambda: SequenceBoundaries.from_cu_seqlens(self.cu_seqlens, total_length=length).host
        )

    @derived_property
    def lengths(self) -> list[int]:
        """Document lengths in tokens, as Python integers in row order."""
        return self.cu_seqlens_cpu.diff().tolist()

    @property
    def num_documents(self) -> int:
        """`N`, the number of documents in the row."""
        return self.cu_seqlens.numel() - 1

    @derived_property
    def total_length(self) -> int:
        """`T`, the number of tokens in the row."""
        return int(self.cu_seqlens_cpu[-1])

    @derived_property
    def max_length(self) -> int:
        """Length of the longest document, in tokens."""
        return max(self.lengths)

    @property
    def most_keys(self) -> int:
        """The most keys that a token of the row may attend to, also those of its document in other parts of the row."""
        return self.max_length

    @derived_property
    def seq_idx(self) -> torch.Tensor:
        """int32 `[1, T]`: the document index of each token. No host sync."""
        documents = torch.arange(self.num_documents, dtype=torch.int32, device=self.cu_seqlens.device)
        return documents.repeat_interleave(self.cu_seqlens.diff(), output_size=self.total_length)[None]

    @derived_property
    def position_ids(self) -> torch.Tensor:
        """int64 `[1, T]`: the position of each token in its document, from 0. No host sync."""
        tokens = torch.arange(self.total_length, device=self.cu_seqlens.device)
        return tokens[None] - self.cu_seqlens[:-1].long()[self.seq_idx.long()]

    @property
    def ends(self) -> torch.Tensor:
        """int64 `[N]`: the index of the last token of each document that ends in this row. No host sync."""
        return self.cu_seqlens[1:].long() - 1

    @property
    def final_tokens(self) -> torch.Tensor:
        """int64 `[N]`: the index of each document's last token, which no token follows. No host sync."""
        return self.ends

    @property
    def first_tokens(self) -> torch.Tensor:
        """int64 `[N]`: the index of each document's first token, which follows no token. No host sync."""
        return self.cu_seqlens[:-1].long()

    def next_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return for each token of `tokens` `[1, T, ...]` the next one in the row. That of the last one may be any."""
        return tokens.roll(-1, dims=1)

    def has_masked_targets(self, labels: Any, shift_labels: Any) -> bool:
        """Whether no target of these labels is in another document, because whoever made the row masked those."""
        return False

    def chunk_counts(self, size: int) -> tuple[torch.Tensor, int]:
        """The chunks of `size` tokens in each document, int32 `[N]`, and their total number. No host sync."""
        counts = (self.cu_seqlens.diff() + (size - 1)) // size
        return counts, sum(-(-length // size) for length in self.lengths)

    def real_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return `tokens` `[T, ...]` without the tail padding, for example to balance the load of experts."""
        return tokens[: len(tokens) - self.padding_tokens] if self.padding_tokens else tokens

    def with_padding(self, tokens: int | None) -> "SequenceBoundaries":
        """Return the same boundaries with the last document marked as padding of `tokens` tokens."""
        if not tokens or torch.compiler.is_compiling():
            return self
        if tokens != self.lengths[-1]:
            expected = f"padding_tokens of 0 or {self.lengths[-1]}, the length of the last document"
            raise input_error(expected, tokens, "Pass the collator's value.")
        return replace(self, padding_tokens=tokens, shared=Derived())

    def check_row(self, row: torch.Tensor, name: str, sizes: str) -> None:
        """Raise a `ValueError` unless `row` `[1, T, *sizes]` is one that these boundaries describe."""
        if row.shape[:2] != (1, self.total_length):
            expected = f"{name} [1, {self.total_length}, {sizes}], the row that the boundaries describe"
            raise input_error(expected, tuple(row.shape), "Make the boundaries from this row's lengths.")

    def check_kind(self, what: str, *others: str) -> None:
        """Raise a `ValueError` if `what` does not support this kind of row: a whole one, or one of `others`."""
        if self.kind not in (WHOLE, *others):
            raise unsupported(what, self.kind, self.instead)

    def _check_longest(self, given: Mapping[str, Any]) -> None:
        """Raise a `ValueError` if a keyword says that the longest document is shorter than it is."""
        for name, value in given.items():
            if name.startswith("max_") and may_read(value) and int(value) < self.max_length:
                raise input_error(f"{name} of at least {self.max_length}, the longest document", f"{int(value)}")

    def same_as(self, other: "SequenceBoundaries") -> bool:
        """Whether both objects describe the same documents (compared on the host)."""
        return torch.equal(self.cu_seqlens_cpu, other.cu_seqlens_cpu)

    def check_same(self, other: "SequenceBoundaries", name: str) -> None:
        """Raise a `ValueError` if `other`, built from the argument `name`, describes different documents."""
        if not self.same_as(other):
            expected = f"{name} with the {self.num_documents} documents that the other arguments describe"
            got = f"{other.num_documents} documents" + ", cut elsewhere" * (other.num_documents == self.num_documents)
            raise input_error(expected, got, "Leave one of them out.")

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return these boundaries with `cu_seqlens` on `device`: `self`, or a copy that is made once per device."""
        device = torch.device(device)
        if device == self.cu_seqlens.device:
            return self

        def moved():
            cu_seqlens = self.cu_seqlens.to(device, non_blocking=non_blocking)
            return replace(self, cu_seqlens=cu_seqlens, shared=Derived())

        return self.derived(f"to {device}", moved)

    def derived(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the cached result of `make()` under `name`, such as index tensors that all layers share."""
        values = self.__dict__.setdefault("_derived", {}) if self.shared is None else self.shared.values
        if name not in values:
            values[name] = make()
        return values[name]

    def kernel_kwargs(self) -> dict[str, Any]:
        """Return these boundaries under all names of `LAYER_KEYWORDS`, for kernels and layers of Transformers."""
        kwargs = dict.fromkeys(("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"), self.cu_seqlens)
        return kwargs | dict.fromkeys(("max_length_q", "max_length_k"), self.max_length) | {"seq_idx": self.seq_idx}

    def pack(self, padded: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Concatenate the real tokens of a padded batch. The inverse of [`~SequenceBoundaries.unpack`].

        Args:
            padded (`torch.Tensor` of shape `[N, L, ...]`):
                One document per row.
            attention_mask (`torch.Tensor` of shape `[N, L]`, *optional*):
                1 at real tokens. Without a mask, the batch must be padded on the right.

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
            expected = f"a padded batch [N, L, ...] with N = {self.num_documents} documents"
            raise input_error(expected, f"shape {tuple(padded.shape)}", "Pass one row per document.")
        slots = self._slots(padded.shape[1], attention_mask)
        return padded.flatten(0, 1).index_select(0, slots)[None]

    def unpack(
        self, packed: torch.Tensor, attention_mask: torch.Tensor | None = None, padding_value: float = 0
    ) -> torch.Tensor:
        """Unpack a packed row to a padded batch, one document per row. The inverse of [`~SequenceBoundaries.pack`].

        Args:
            packed (`torch.Tensor` of shape `[1, T, ...]`):
                The packed row.
            attention_mask (`torch.Tensor` of shape `[N, L]`, *optional*):
                1 at the places of real tokens. By default, documents are padded on the right to the longest one.
            padding_value (`float`, *optional*, defaults to 0):
                Value of the padding.

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
        if packed.ndim < 2 or packed.shape[:2] != (1, self.total_length):
            expected = f"a packed row [1, T, ...] with T = {self.total_length}"
            raise input_error(expected, f"shape {tuple(packed.shape)}", "Pass the row that these boundaries describe.")
        length = self.max_length if attention_mask is None else check_padding_mask(attention_mask).shape[1]
        slots = self._slots(length, attention_mask)
        padded = packed.new_full((self.num_documents * length, *packed.shape[2:]), padding_value)
        return padded.index_copy(0, slots, packed[0]).unflatten(0, (self.num_documents, length))

    def _slots(self, length: int, attention_mask: torch.Tensor | None) -> torch.Tensor:
        """int64 `[T]`: the index of each token in a flattened `[N, length]` batch."""
        if attention_mask is None:
            if length < self.max_length:
                raise input_error(
                    f"rows of at least {self.max_length} tokens, the longest document", length, "Pad the rows."
                )
            return (self.seq_idx.long() * length + self.position_ids)[0]
        mask, shape = check_padding_mask(attention_mask), (self.num_documents, length)
        if mask.shape != shape:
            raise input_error(f"an attention_mask of the batch's shape {list(shape)}", list(mask.shape))
        counts = mask.sum(dim=1).tolist()
        if counts != self.lengths:
            expected = f"an attention_mask whose rows hold {short(self.lengths)} real tokens"
            raise input_error(expected, short(counts), "Pass the mask that these boundaries were built from.")
        return mask.flatten().nonzero()[:, 0]


def may_read(value: Any) -> bool:
    """Whether the contents can be read without a host sync, or the user has allowed one."""
    if torch.compiler.is_compiling() or not isinstance(value, torch.Tensor):
        return not torch.compiler.is_compiling()
    return value.device.type == "cpu" or os.environ.get("TRANSFORMERS_PACKED_VALIDATE") == "1"
