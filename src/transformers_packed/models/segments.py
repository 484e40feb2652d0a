"""Checkpointed layers that compute a long row in segments of its tokens, so that a step needs the memory of a segment.

A layer computes the segments one after another, each under gradient checkpointing. What crosses a cut is handed on as
between processes that share a row: the last tokens for the window of the convolution, the state of a delta rule, and
the keys and values of the document. All else is per token. These tensors are outputs of one segment and inputs of the
next, so autograd carries their gradients back, and it computes the segments again from the last to the first.

A layer keeps its input, the states at the cuts, and keys and values. The activations in between are those of one segment at
a time. The ops of a layer find what crosses a cut in its boundaries, a [`RowSegment`], and compute it with the functions of
`parallel/mixers.py`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from transformers.utils import logging

from .. import ops
from ..boundaries import SequenceBoundaries
from ..errors import input_error, unsupported
from ..foreign import swapped
from ..ops.attention import attention_after_pieces
from ..ops.dispatch import for_rows, ran
from ..ops.invariance import is_batch_invariant
from ..parallel import mixers
from .releases import arguments_of_layer, checkpoint_of


logger = logging.get_logger(__name__)

# The smallest segment: a chunk of the delta rules, which is longer than the window of any convolution.
_SMALLEST = 64
# The fewest segments of a row, unless they would be smaller. `few_segments` raises it.
_fewest = 1
_NAME = "segment_tokens"


class Handed:
    """What the ops of a layer get from the segment before, and hand on to the next one, in the order of their calls."""

    def __init__(self, earlier: Iterable[Any]):
        self._earlier, self.later = iter(earlier), list[Any]()

    def take(self) -> Any:
        """Return what the same call handed on in the segment before, or `None` in the first segment."""
        return next(self._earlier, None)


def _alone(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that keeps no larger one in memory, as a view of that would."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


@dataclass(frozen=True, eq=False)
class RowSegment(SequenceBoundaries):
    """The boundaries of consecutive tokens of a packed row: those of the pieces of its documents.

    Args:
        tokens_before (`int`):
            Tokens of the first piece's document in earlier segments.
        goes_on (`bool`):
            Whether the document of the last piece continues in the next segment.
        positions (`torch.Tensor` of shape `[1, L]`):
            The int64 position of each token in its document.
        handed ([`Handed`], *optional*):
            What crosses the cuts, in one computation of one layer.
    """

    tokens_before: int = field(kw_only=True)
    goes_on: bool = field(kw_only=True)
    positions: torch.Tensor = field(kw_only=True)
    handed: Handed | None = None
    kind: ClassVar[str] = "a segment of a row"
    instead: ClassVar[str] = f"Leave out {_NAME}."

    @property
    def position_ids(self) -> torch.Tensor:
        return self.positions

    @property
    def most_keys(self) -> int:
        # The first piece goes on with a document.
        return self.tokens_before + self.max_length

    @property
    def states(self) -> Handed:
        assert self.handed is not None
        return self.handed

    def tail_before(self, tail: torch.Tensor, width: int) -> torch.Tensor:
        """Return the last `width` tokens of the segment before, and hand on those of this one."""
        earlier = self.states.take()
        self.states.later.append(_alone(tail))
        # The windows of the first segment include no earlier token.
        return tail if earlier is None else earlier


def _segments_of(row: SequenceBoundaries, size: int) -> list[tuple[slice, RowSegment]]:
    """Cut a row. All layers use the result, and what is derived from it."""

    def cut(start: int) -> tuple[slice, RowSegment]:
        end, cuts = min(start + size, row.total_length), row.cu_seqlens_cpu
        pieces = (cuts - start).clamp(0, end - start).unique()
        before, goes_on = start - int(cuts[cuts <= start][-1]), end not in cuts.tolist()
        known: dict[str, Any] = {"tokens_before": before, "goes_on": goes_on}
        known["positions"] = row.position_ids[:, start:end]
        cu_seqlens = pieces.to(row.cu_seqlens.device, non_blocking=True)
        return slice(start, end), RowSegment(cu_seqlens, pieces, **known)

    return row.derived(f"segments of {size}", lambda: [cut(start) for start in range(0, row.total_length, size)])


def check_size(size: object) -> None:
    """Raise a `ValueError` unless `size` is a number of tokens per segment."""
    if not isinstance(size, int) or size < _SMALLEST:
        raise input_error(f"{_NAME} of at least {_SMALLEST}", repr(size))


def cuts_rows(model: torch.nn.Module, length: int) -> bool:
    """Whether layers of a text model would now cut rows of this length."""
    if not model.training or not torch.is_grad_enabled():
        return False
    layers: Any = model.layers
    tokens = segment_tokens_of(layers)
    return tokens < math.inf and _size(tokens, length) < length


def segment_tokens_of(layers: Iterable[torch.nn.Module]) -> float:
    """Return the tokens of the smallest segments in which any of these layers trains a long row, or infinity."""
    functions: list[Any] = [checkpoint_of(layer) for layer in layers]
    return min((x.args[0] for x in functions if getattr(x, "func", None) is in_segments), default=math.inf)


def few_segments() -> AbstractContextManager:
    """Let layers that cut long rows cut short ones too meanwhile, so that each kind of a cut occurs and few others."""
    return swapped(globals(), _fewest=4)


def _size(asked: float, length: int) -> int:
    """Return the tokens per segment of a row with so many tokens."""
    return int(min(asked, max(_SMALLEST, -(-length // (_fewest * _SMALLEST)) * _SMALLEST)))


@torch.compiler.disable(reason="segments of rows differ in the lengths of their documents")
def in_segments(
    size: int, checkpoint: Callable, function: Callable, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run a layer on segments of a row, each by `checkpoint`.

    A row with no more tokens than a segment and a batch that stays padded are computed as they are.

    Args:
        size (`int`):
            Tokens per segment.
        checkpoint (`Callable`):
            `torch.utils.checkpoint.checkpoint` without reentrant autograd, or a function like it.
        function (`Callable`):
            The layer with its keyword arguments, as Transformers passes it to a checkpointing function.
        hidden_states (`torch.Tensor` of shape `[1, T, hidden]`):
            The input of the layer.

    Returns:
        `torch.Tensor` of shape `[1, T, hidden]`.

    Raises:
        `ValueError`: a longer row, or an argument of the layer, cannot be cut.
    """
    asked, size = size, _size(size, hidden_states.shape[1]) if hidden_states.ndim == 3 else size
    # Layers of vision towers take patches `[n, hidden]`.
    if hidden_states.ndim != 3 or hidden_states.shape[1] <= size:
        return checkpoint(function, hidden_states, *args, **kwargs)
    given = arguments_of_layer(function) | kwargs
    row = given.pop("boundaries", None)
    if row is None:
        # The check before the first step asks for few segments, and computes padded batches on purpose.
        if hidden_states.shape[1] > asked and _fewest == 1:
            logger.warning_once(f"{_NAME} has no effect on a batch that stays padded.")
        return checkpoint(function, hidden_states, *args, **kwargs)
    row.check_kind(_NAME)
    if args or is_batch_invariant():
        raise unsupported(_NAME, "more positional arguments of a layer" if args else "batch_invariant")
    outputs, handed = [], list[Any]()
    for (tokens, segment), x in zip(_segments_of(row, size), hidden_states.split(size, dim=1), strict=True):
        own = {name: _cut(name, value, tokens) for name, value in given.items()}
        # Others find the boundaries of what runs as those of a layer.
        output, handed = checkpoint(partial(_run, boundaries=segment), x, function, own, handed)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def _run(
    x: torch.Tensor, function: Callable, given: dict[str, Any], earlier: Sequence[Any], *, boundaries: RowSegment
):
    """Return the output of a segment, and what it hands on."""
    handed = Handed(earlier)
    return function(x, **given, boundaries=replace(boundaries, handed=handed)), handed.later


def _cut(name: str, value: Any, tokens: slice) -> Any:
    """Return the part of an argument of a layer for these tokens."""
    if name == "position_embeddings" and value is not None:
        return tuple(x[:, tokens] for x in value)
    if name == "position_ids" and value is not None:
        return value[..., tokens]
    # Trainers pass counts, which are scalars.
    if isinstance(value, torch.Tensor) and value.ndim:
        raise unsupported(_NAME, f"layers with {name}, a tensor", f"Leave out {_NAME}.")
    return value


for _form in (mixers.causal_conv1d, mixers.causal_conv1d_qkv):
    for_rows(RowSegment)(_form)


@for_rows(RowSegment)
def gated_delta_rule(*tensors, boundaries: RowSegment, initial_state=None, output_final_state=False, **options):
    """[`ops.gated_delta_rule`] of query, key, value, g and beta on a segment of a row."""
    return _by_pieces(ops.gated_delta_rule, boundaries, *tensors, **options), None


@for_rows(RowSegment)
def kimi_delta_rule(*tensors, boundaries: RowSegment, initial_state=None, output_final_state=False, **options):
    """[`ops.kimi_delta_rule`] of query, key, value, g and beta on a segment of a row."""
    return _by_pieces(ops.kimi_delta_rule, boundaries, *tensors, **options), None


def _by_pieces(rule: Callable, segment: RowSegment, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """Compute the pieces of cut documents alone, with their states, and the documents between them together.

    A call has states of all of its documents or of none, and those of many short documents would take more memory than the
    rest of the layer.
    """
    ran(rule.__name__, "states of segments")
    state, lengths = segment.states.take(), segment.lengths
    first, last = int(segment.tokens_before > 0), len(lengths) - segment.goes_on
    # The documents of each call. A single piece may be cut at both ends.
    groups = [range(first), range(first, last), range(max(first, last), len(lengths))]
    groups = [group for group in groups if group]
    sizes = [sum(lengths[i] for i in group) for group in groups]
    outputs = []
    for group, *rows in zip(groups, *(x.split(sizes, dim=1) for x in tensors), strict=True):
        own = segment.derived(f"{group}", partial(_documents, segment, group))
        begins_earlier, goes_on = group.start < first, group.stop > last
        states = {}
        if begins_earlier or goes_on:
            # Always both, because a kernel is compiled and tuned again if one of them is missing.
            states = {"initial_state": state if begins_earlier else _zero_state(*rows), "output_final_state": True}
        output, final = rule(*rows, boundaries=own, **states, **options)
        outputs.append(output)
    segment.states.later.append(final if segment.goes_on else None)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _documents(segment: RowSegment, group: range) -> SequenceBoundaries:
    lengths = segment.lengths[group.start : group.stop]
    return SequenceBoundaries.from_lengths(lengths, device=segment.cu_seqlens.device)


def _zero_state(query, key, value, *gates) -> torch.Tensor:
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    return value.new_zeros(1, value.shape[2], key.shape[-1], value.shape[-1], dtype=dtype)


@for_rows(RowSegment)
def attention(module, query, key, value, *, boundaries: RowSegment, impl: str = "auto", **options):
    """[`ops.attention`] on a segment of a row: query `[1, H, L, D]`, key and value `[1, HKV, L, D]`."""
    segment, own = boundaries, (_alone(key), _alone(value))
    earlier = segment.states.take() or []
    # Those of the last document, as separate tensors, so that no segment copies what earlier ones keep.
    begins_here = segment.num_documents > 1 or not segment.tokens_before
    segment.states.later.append([*([] if begins_here else earlier), own] if segment.goes_on else [])
    if earlier:
        # Without the documents before.
        begin = sum(k.shape[2] for k, _ in earlier) - segment.tokens_before
        earlier = [tuple(x[:, :, begin:] for x in earlier[0]), *earlier[1:]]
        output = _attention_after(earlier, begin > 0, segment, module, query, *own, impl, **options)
        if output is not None:
            return output, None
    key, value = (_joined(pieces) for pieces in zip(*earlier, own, strict=True))
    return mixers.attention_of_part(segment, module, query, key, value, impl, **options), None


def _attention_after(
    earlier, is_cut: bool, segment, module, query, key, value, impl, **options
) -> torch.Tensor | None:
    """Compute attention without joining keys, or return `None`. `is_cut`: the first earlier piece is no whole segment."""
    first = segment.lengths[0]
    (q, k, v), others = zip(*(x.split([first, x.shape[2] - first], dim=2) for x in (query, key, value)), strict=True)
    if is_cut:
        # All others have one length.
        k, v = (_joined(pieces) for pieces in zip(earlier[0], (k, v), strict=True))
    output = attention_after_pieces(module, q, k, v, earlier[is_cut:], impl=impl, **options)
    return None if output is None else mixers.with_other_documents(output, segment, module, others, impl, **options)


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate keys or values `[1, HKV, L, D]` with the tokens first, as kernels read them."""
    return torch.cat([x.transpose(1, 2) for x in pieces], dim=1).transpose(1, 2)
