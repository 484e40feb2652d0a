"""The ops that mix tokens, for rows in which documents continue others ([`SharedPrompts`]).

Each document gives the outputs and gradients of the one that its ancestors and it are together, and depends on nothing
else. Documents that directly follow their parents form a run:

* **Attention.** The keys of a run are those of its ancestors and its own.
* **Convolution.** The window of a run's first tokens includes the last tokens of its ancestors.
* **Delta rules.** One call computes the paths of a level ([`paths_of`]). The state of a path starts as the state of its
  parent, from the level before. Inside a path, the state is read by tokens whose queries are the unit vectors.

All of these read parts of an ancestor once for each document that continues it. [`repeat_rows`] adds the gradients of
such copies in a fixed order, in float32. The ops of [`transformers_packed.ops`] call these functions for such rows.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from ..errors import unsupported
from ..shared_prompts import Copies, Layout, Level, SharedPrompts
from .attention import attention as attention_of_row
from .attention import attention_of_last_queries, attention_with_earlier_keys, implementation_of
from .autograd import first_order, is_transformed
from .convolution import causal_conv1d as convolve
from .convolution import causal_conv1d_qkv as convolve_qkv
from .convolution import slots_of, triton_qkv, verify_triton_qkv
from .dispatch import for_rows, ran
from .gated_delta_rule import gated_delta_rule as rule
from .indexed_attention import Index, attend_last
from .kimi_delta_rule import kimi_delta_rule as rule_by_channel


def repeat_rows(x: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Return `x[copies.rows]` for `x` `[T, ...]`. The gradients of the copies of a row are added in a fixed order."""
    return _with_copies(x, copies)[1]


def _with_copies(x: torch.Tensor, copies: Copies) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` and `x[copies.rows]`."""
    if is_transformed():
        return x, x.index_select(0, copies.rows)
    return _RepeatRows.apply(x, copies)


class _RepeatRows(torch.autograd.Function):
    """Return `x` as well, so that one op adds the gradients of the rows and of their copies."""

    @staticmethod
    def forward(ctx, x, copies):
        ctx.set_materialize_grads(False)
        ctx.copies, ctx.shape = copies, x.shape
        return x.view_as(x), x.index_select(0, copies.rows)

    @staticmethod
    @first_order("Train without shared prompts.")
    def backward(ctx, of_rows, of_copies):
        if of_copies is None:
            return of_rows, None
        wide = torch.promote_types(of_copies.dtype, torch.float32)
        # The backward of the op that used the rows created their gradient, and nothing else uses it.
        total = of_copies.new_zeros(ctx.shape) if of_rows is None else of_rows.contiguous()
        for rows, copies in ctx.copies.copies_of:
            gradient = of_copies.index_select(0, copies.flatten()).unflatten(0, copies.shape).sum(1, dtype=wide)
            if of_rows is not None:
                gradient += total.index_select(0, rows)
            total.index_copy_(0, rows, gradient.to(total.dtype))
        return total, None


@for_rows(SharedPrompts)
def attention(module, query, key, value, *, boundaries: SharedPrompts, impl: str = "auto", **options):
    """[`ops.attention`] on a row with shared prompts: query `[1, H, T, D]`, key and value `[1, HKV, T, D]`."""
    if implementation_of(module) == "flex_attention":
        raise unsupported(boundaries.kind, "flex_attention", "Use sdpa.")
    layout = boundaries.layout
    alone = layout.alone
    others: list[torch.Tensor] = []
    length = alone.total_length
    if layout.continued:
        runs, keys, copies = layout.rest
        pairs = [_with_copies(x[0].transpose(0, 1), copies) for x in (key, value)]
        (key, of_keys), (value, of_values) = ([x.transpose(0, 1)[None] for x in pair] for pair in pairs)
        others = _of_other_runs(module, query[:, :, length:], of_keys, of_values, runs, keys, options)
    q, k, v = (x[:, :, :length] for x in (query, key, value))
    output = attention_of_row(module, q, k, v, None, boundaries=alone, impl=impl, **options)[0]
    return torch.cat([output, *others], dim=1) if others else output, None


def _of_other_runs(module, query, key, value, runs, keys, options) -> list[torch.Tensor]:
    if query.is_cuda:
        output = attention_with_earlier_keys(module, query, key, value, boundaries=runs, keys=keys, **options)
        if output is not None:
            return [output]
    outputs = []
    starts = zip(*(x.cu_seqlens_cpu.tolist() for x in (runs, keys)), strict=True)
    for (start, k_start), (end, k_end) in pairwise(starts):
        rows = query[:, :, start:end], key[:, :, k_start:k_end], value[:, :, k_start:k_end]
        outputs.append(attention_of_last_queries(module, *rows, **options))
    return outputs


@for_rows(SharedPrompts)
def indexed_attention(module, query, key, value, index: Index, *, boundaries: SharedPrompts, **options):
    """[`ops.indexed_attention`] on a row with shared prompts: query `[1, H, T, D]`, key and value `[1, HKV, T, D]`."""
    keys, copies = boundaries.layout.keys
    key, value = (repeat_rows(x[0].transpose(0, 1), copies).transpose(0, 1)[None] for x in (key, value))
    of_keys = {name: getattr(index, name)[:, copies.rows] for name in ("key", "cos", "sin")}
    index = index._replace(**of_keys)
    starts = zip(*(x.cu_seqlens_cpu.tolist() for x in (boundaries.layout.runs, keys)), strict=True)
    outputs = []
    for (start, k_start), (end, k_end) in pairwise(starts):
        own, document = slice(start, end), slice(k_start, k_end)
        rows = query[:, :, own], key[:, :, document], value[:, :, document]
        outputs += [output for output, _ in attend_last(module, *rows, index.of(own, document), **options)]
    return torch.cat(outputs, dim=1), None


@for_rows(SharedPrompts)
def causal_conv1d(hidden_states, weight, *args, boundaries: SharedPrompts, **options):
    """[`ops.causal_conv1d`] on a row with shared prompts."""

    def function(x, boundaries):
        return (convolve(x, weight, *args, boundaries=boundaries, **options),)

    return _convolution(function, hidden_states, weight, boundaries.layout)[0]


@for_rows(SharedPrompts)
def causal_conv1d_qkv(
    hidden_states, weight, bias=None, activation="silu", *, boundaries: SharedPrompts, impl: str = "auto", **heads
):
    """[`ops.causal_conv1d_qkv`] on a row with shared prompts."""
    layout, call, width = boundaries.layout, (weight, bias, activation), weight.shape[-1] - 1
    on_triton = impl in ("auto", "triton") and not is_transformed()
    if width and layout.continued and on_triton and not verify_triton_qkv(hidden_states, *call, **heads):
        ran("causal_conv1d_qkv", "triton")
        x, tails = _with_copies(hidden_states[0], layout.tails(width))
        halo = tails, slots_of(layout.runs, layout.continued, width)
        return triton_qkv(x[None], *call, boundaries=boundaries, halo=halo, **heads)

    def function(x, boundaries):
        return convolve_qkv(x, *call, boundaries=boundaries, impl=impl, **heads)

    return _convolution(function, hidden_states, weight, layout)


def _convolution(function: Callable, x: torch.Tensor, weight: torch.Tensor, layout: Layout) -> tuple:
    """Convolve each run alone, then overwrite the tokens whose windows include tokens that it continues."""
    if weight.shape[-1] == 1 or not layout.continued:
        return function(x, layout.runs)
    boundaries, copies, own, tokens = layout.windows(weight.shape[-1] - 1)
    x, windows = _with_copies(x[0], copies)
    alone, continued = function(x[None], layout.runs), function(windows[None], boundaries)
    return tuple(y.index_copy(1, tokens, z.index_select(1, own)) for y, z in zip(alone, continued, strict=True))


def _by_levels(
    function: Callable, *inputs, boundaries, initial_state=None, output_final_state=False, no_decay=0.0, **options
):
    """Run a delta rule on query, key, value, g and beta. Where `g` is `no_decay`, it leaves the state as it is."""
    key_dim, normalizes = inputs[1].shape[-1], options.get("use_qk_l2norm_in_kernel", False)
    levels, sources, destinations = boundaries.layout.levels(key_dim)
    if sources is not None:
        inputs = tuple(repeat_rows(x[0], sources)[None] for x in inputs)
    parts = zip(*(x.split([level.length for level in levels], 1) for x in inputs), strict=True)
    outputs: list[torch.Tensor] = []
    states: torch.Tensor | None = None
    for level, rows in zip(levels, parts, strict=True):
        if level.states is not None:
            assert states is not None
            states = repeat_rows(states, level.states)
        if level.places is not None:
            rows = _with_reads(rows, level, no_decay, normalizes)
        output, states = function(
            *rows, boundaries=level.boundaries, initial_state=states, output_final_state=level.continued, **options
        )
        if level.places is not None:
            own, reads = (output[0].index_select(0, places) for places in level.places)
            # [reads, K, HV, V] -> [reads, HV, K, V]. The rule has divided queries by the root of their size.
            reads = reads.unflatten(0, (-1, key_dim)).transpose(1, 2) * key_dim**0.5
            output, states = own[None], torch.cat([states, reads.to(states.dtype)])
        outputs.append(output)
    output = torch.cat(outputs, dim=1)
    return output if destinations is None else repeat_rows(output[0], destinations)[None], None


def _with_reads(
    rows: tuple[torch.Tensor, ...], level: Level, no_decay: float, normalizes: bool
) -> tuple[torch.Tensor, ...]:
    """Insert the tokens that read states. With unit vectors as queries, their outputs are the rows of the state.

    They have no key and no rate, so they leave the state as it is.
    """
    assert level.places is not None
    own, reads = level.places
    shape = 1, level.boundaries.total_length
    query, *others = (
        x.new_full((*shape, *x.shape[2:]), fill).index_copy(1, own, x)
        for x, fill in zip(rows, (0.0, 0.0, 0.0, no_decay, 0.0), strict=True)
    )
    unit = torch.eye(query.shape[-1], dtype=query.dtype, device=query.device)
    # Normalization adds a small number to the squared length, which has to be smaller than its rounding.
    units = (unit * 2.0**15 if normalizes else unit).repeat(len(reads) // len(unit), 1)
    return query.index_copy(1, reads, units[None, :, None].expand(-1, -1, query.shape[2], -1)), *others


@for_rows(SharedPrompts)
def gated_delta_rule(*inputs: torch.Tensor, boundaries: SharedPrompts, **options: Any) -> tuple[torch.Tensor, None]:
    """[`ops.gated_delta_rule`] on a row with shared prompts: query, key, value, g and beta `[1, T, heads, ...]`."""
    return _by_levels(rule, *inputs, boundaries=boundaries, **options)


@for_rows(SharedPrompts)
def kimi_delta_rule(*inputs: torch.Tensor, boundaries: SharedPrompts, **options: Any) -> tuple[torch.Tensor, None]:
    """[`ops.kimi_delta_rule`] on a row with shared prompts: query, key, value, g and beta `[1, T, heads, ...]`."""
    # The layer's gate makes the decay from a projection.
    no_decay = 0.0 if options.get("a_log") is None else -3e4
    return _by_levels(rule_by_channel, *inputs, boundaries=boundaries, no_decay=no_decay, **options)
