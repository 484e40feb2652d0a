"""The layers that mix tokens on a part of a row: the convolution, the delta rules and attention.

**Halo.** The window of the convolution includes tokens of the previous rank. This package's kernel takes them as a
separate tensor. For other kernels they are concatenated before the part.

**States.** The gated delta rule is affine in its state. The output of a piece of a document with an initial state `S`
is the output without `S` plus the output of `S` alone, with zero values. Each rank first computes the final state of its last
piece if that document continues. All ranks gather these states, `heads * K * (V + K)` numbers each for any length.
Each rank then computes its whole part with the usual kernel as if its first document began there. If the document
began on an earlier rank, the rank adds the contribution of the initial state to the first piece.

The final state of a piece that is cut at both ends is `M S + U`. Here, `U` is the final state without `S`, and `M` is
the final state for an identity as initial state and zero values. One call with values `[v, 0]` and the initial state
`[0, I]` returns both, and an output `[o, r]` such that `o + r S` is the output with `S`. All ranks send `[U, M]` (`M`
is zero on the rank where the document began), and each rank combines those before it.

Pieces of cut documents are computed twice, and a rank waits for the last piece of the previous one. If these pieces
are a large share and flash-linear-attention is available, its context parallelism computes the whole part instead. The
choice depends only on the row and the number of ranks. All ranks thus make the same choice, which they must, because
the methods exchange different tensors.

Kimi's delta rule is affine in its state too, and takes the same methods but for that context parallelism.

The convolutions and `attention_of_part` also compute segments of a row that one process computes one after another
(`models/segments.py`).

**Heads.** Ranks exchange tokens for heads, each computes the whole row for its heads, and they exchange back. For
attention, they may also gather all keys and values.
"""

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch

from .. import ops
from ..boundaries import SequenceBoundaries
from ..ops.attention import attention_of_last_queries, attention_with_earlier_keys, kernel_for_earlier_keys
from ..ops.backends import fla
from ..ops.convolution import slots_of, triton_qkv, verify_triton_qkv
from ..ops.dispatch import for_rows, ran
from .collectives import all_gather, all_to_all, tie
from .groups import attention_method, check_heads, check_linear_heads
from .shard import RowShard


class _WithEnds(torch.autograd.Function):
    """Return `x` `[1, L, ...]`, its first tokens and its last ones, without a copy of `x` in forward or backward.

    For two slices, autograd would fill two gradients of full size with zeros and add them.
    """

    @staticmethod
    def forward(ctx, x, first: int, last: int):
        return x.view_as(x), x[:, :first], x[:, len(x[0]) - last :]

    @staticmethod
    def backward(ctx, gradient, of_first, of_last):
        # The backward of the op created `gradient`, and nothing else uses it unless its graph is recorded. A gradient
        # that is not dense may be an expanded tensor.
        gradient = gradient.clone() if torch.is_grad_enabled() else gradient.contiguous()
        gradient[:, : of_first.shape[1]] += of_first
        gradient[:, gradient.shape[1] - of_last.shape[1] :] += of_last
        return gradient, None, None


def _halo(shard: Any, x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` and the last tokens of the part before this one, `[1, width - 1, D]`.

    The first part gets its own tokens, which no window includes.
    """
    x, _, tail = _WithEnds.apply(x, 0, min(width - 1, x.shape[1]))
    return x, shard.tail_before(tail, width - 1)


def _with_halo(shard: Any, x: torch.Tensor, width: int) -> tuple[torch.Tensor, SequenceBoundaries, int]:
    """Return `x` `[1, L, D]` after the halo of its first document, the boundaries of both, and the halo's length."""
    x, halo = _halo(shard, x, width)
    kept = min(width - 1, shard.tokens_before)

    def boundaries() -> SequenceBoundaries:
        first, *others = shard.lengths
        return SequenceBoundaries.from_lengths([first + kept, *others], device=x.device)

    # The backward of a slice is zero for the other tokens, so no gradient reaches a previous document.
    joined = torch.cat([halo[:, width - 1 - kept :], x], dim=1)
    return joined, shard.derived(f"halo of {kept}", boundaries), kept


@for_rows(RowShard)
def causal_conv1d(hidden_states, weight, *args, boundaries: Any, **options: Any):
    """[`ops.causal_conv1d`] on a part of a row."""
    x, options["boundaries"], before = _with_halo(boundaries, hidden_states, weight.shape[-1])
    return ops.causal_conv1d(x, weight, *args, **options)[:, before:]


@for_rows(RowShard)
def causal_conv1d_qkv(hidden_states, weight, bias, activation, *, boundaries: Any, impl: str, **heads):
    """[`ops.causal_conv1d_qkv`] on a part of a row."""
    call = weight, bias, activation
    if impl == "auto" and not verify_triton_qkv(hidden_states, *call, **heads):
        # The kernel takes the halo as a separate tensor, so neither the part nor the results are copied.
        ran("causal_conv1d_qkv", "triton")
        x, halo = _halo(boundaries, hidden_states, weight.shape[-1])
        slots = slots_of(boundaries, range(1), weight.shape[-1] - 1)
        return triton_qkv(x, *call, boundaries=boundaries, halo=(halo[0], slots), **heads)
    x, whole, before = _with_halo(boundaries, hidden_states, weight.shape[-1])
    return tuple(y[:, before:] for y in ops.causal_conv1d_qkv(x, *call, boundaries=whole, impl=impl, **heads))


@for_rows(RowShard)
def gated_delta_rule(
    *tensors, boundaries: RowShard, initial_state=None, output_final_state=False, impl: str = "auto", **options
):
    """[`ops.gated_delta_rule`] of query, key, value, g and beta on a part of a row, by the method of its `parallel`."""
    shard = boundaries
    if shard.processes.gated_delta_rule == "heads":
        return _by_heads(ops.gated_delta_rule, shard, *tensors, impl=impl, **options), None
    # Assume that flash-linear-attention takes twice the time of FlashQLA per token. Then two pieces of a quarter of
    # the part each cost as much as the part, and the total equals the cost of `cp_context` for the whole part.
    whole = shard.is_cut_in_long_pieces and impl == "auto"
    if whole and not fla.verify_gated_delta_rule(*tensors, **options):
        return _by_fla(shard, *tensors, **options), None
    return _by_states(ops.gated_delta_rule, shard, *tensors, impl=impl, **options), None


@for_rows(RowShard)
def kimi_delta_rule(*tensors, boundaries: RowShard, a_log, dt_bias, initial_state, output_final_state, **options):
    """[`ops.kimi_delta_rule`] of query, key, value, g and beta on a part of a row, by the method of its `parallel`."""
    by_heads = boundaries.processes.gated_delta_rule == "heads"
    if by_heads and a_log is not None and dt_bias is not None:
        # The parameters of the heads of this process.
        a_log, dt_bias = (x.chunk(boundaries.size)[boundaries.rank] for x in (a_log, dt_bias))
    method, options = _by_heads if by_heads else _by_states, options | {"a_log": a_log, "dt_bias": dt_bias}
    return method(ops.kimi_delta_rule, boundaries, *tensors, **options), None


def _by_heads(rule: Callable, shard: RowShard, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    group = shard.processes.group
    check_linear_heads(shard.size, tensors[1].shape[2], tensors[2].shape[2])
    whole = (all_to_all(x, 2, 1, group) for x in tensors)
    output = rule(*whole, boundaries=shard.row, **options)[0]
    return all_to_all(output, 1, 2, group)


def _by_states(rule: Callable, shard: RowShard, *inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    ran(rule.__name__, "states of cut documents")
    total, lengths, value = shard.total_length, shard.lengths, inputs[2]
    heads, key_dim, value_dim = value.shape[2], inputs[1].shape[-1], value.shape[-1]
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32

    def call(inputs, state):
        # All calls pass both states, because a kernel is compiled and tuned again if one of them is missing.
        states = {"initial_state": state, "output_final_state": True}
        return rule(*inputs, **states, **options)

    continued = shard.tokens_before > 0
    spans = continued and shard.goes_on and len(lengths) == 1
    if spans:
        # Values [v, 0] and the initial state [0, I].
        wide = torch.nn.functional.pad(value, (0, key_dim))
        identity = torch.eye(key_dim, dtype=dtype, device=value.device).expand(1, heads, key_dim, key_dim)
        state = torch.nn.functional.pad(identity, (value_dim, 0))
        both, summary = call((*inputs[:2], wide, *inputs[3:]), state)
        ends = inputs
    else:
        first, last = lengths[0] if continued else 0, lengths[-1] if shard.goes_on else 0
        inputs, begins, ends = zip(*(_WithEnds.apply(x, first, last) for x in inputs), strict=True)
        state = value.new_zeros(1, heads, key_dim, value_dim, dtype=dtype)
        if last:
            # The document began on this rank, so its state does not depend on earlier tokens.
            state = call(ends, state)[1]
        # The final state is unused if the last document ends on this rank.
        summary = torch.nn.functional.pad(state, (0, key_dim))

    # Every rank must run the exchange in its backward, regardless of which inputs require gradients.
    summaries = all_gather(tie(summary.contiguous(), *ends), 0, shard.processes.group)
    if not spans:
        # Treat the pieces as documents.
        own = shard.derived("pieces", lambda: SequenceBoundaries(shard.cu_seqlens, shard.host))
        output = rule(*inputs, boundaries=own, **options)[0]
    if not continued:
        return tie(output, summaries)
    # Start on the rank where the document began, because states of other documents may not be finite.
    began = (shard.start - shard.tokens_before) // total
    state = summaries[began, ..., :value_dim]
    for rank in range(began + 1, shard.rank):
        update, transition = summaries[rank].split([value_dim, key_dim], dim=-1)
        state = transition @ state + update
    if spans:
        output, reading = both.split([value_dim, key_dim], dim=-1)
        return (output.to(dtype) + torch.einsum("bthk,hkv->bthv", reading.to(dtype), state)).to(value.dtype)
    query, key, value, g, beta = begins
    return _AddToStart.apply(output, call((query, key, torch.zeros_like(value), g, beta), state[None])[0])


class _AddToStart(torch.autograd.Function):
    """Add `correction` `[1, n, ...]` to the first `n` tokens of `output`, in place."""

    @staticmethod
    def forward(ctx, output, correction):
        ctx.length = correction.shape[1]
        ctx.mark_dirty(output)
        output[:, : ctx.length] += correction
        return output

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient[:, : ctx.length]


def _by_fla(shard: RowShard, query, key, value, g, beta, **options: Any) -> torch.Tensor:
    """Compute the rule by the context parallelism of flash-linear-attention."""
    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    ran("gated_delta_rule", "fla with cp_context")
    # The package caches index tensors by the identity of its inputs, so build the context once per row.
    cu_seqlens, host, group = shard.row.cu_seqlens, shard.row.cu_seqlens_cpu, shard.processes.group
    name = f"fla context {id(group)}"
    context = shard.derived(name, lambda: build_cp_context(cu_seqlens, group, cu_seqlens_cpu=host))
    # The unwrapped function is the Triton kernel. The wrapper may dispatch to a kernel without context parallelism.
    return unwrap(chunk_gated_delta_rule)(query, key, value, g, beta, cp_context=context, **options)[0]


class _WithGroups:
    """An attention layer with another number of query heads per key head, for attention functions."""

    def __init__(self, module: torch.nn.Module, num_key_value_groups: int):
        self._module, self.num_key_value_groups = module, num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@for_rows(RowShard)
def attention(module, query, key, value, *, boundaries: RowShard, impl: str = "auto", **options):
    """[`ops.attention`] on a part of a row: query `[1, H, L, D]`, key and value `[1, HKV, L, D]`."""
    shard = boundaries
    size, heads, kv_heads = shard.size, query.shape[1], key.shape[1]
    # With "gather", the rank after the cut of a long document has most of the work and needs a kernel for earlier
    # keys.
    gather_is_even = not shard.is_cut_in_long_pieces and kernel_for_earlier_keys(module, query, **options) is not None
    if attention_method(size, heads, kv_heads, shard.processes.attention, gather_is_even) == "gather":
        return _attention_by_gather(shard, module, query, key, value, impl, **options), None
    check_heads(size, heads, kv_heads)
    return _attention_by_heads(shard, module, query, key, value, impl=impl, **options), None


def _attention_by_heads(shard: RowShard, module, query, key, value, **options: Any) -> torch.Tensor:
    size, group = shard.size, shard.processes.group
    if key.shape[1] < size:
        # Each rank gets the key head of its query heads. The gradients of the copies are summed.
        key, value = (x.repeat_interleave(size // x.shape[1], dim=1) for x in (key, value))
    module = _WithGroups(module, query.shape[1] // key.shape[1])
    query, key, value = (all_to_all(x, 1, 2, group) for x in (query, key, value))
    output = ops.attention(module, query, key, value, None, boundaries=shard.row, **options)[0]
    return all_to_all(output, 1, 2, group)


def _attention_by_gather(shard: RowShard, module, query, key, value, impl: str, **options: Any) -> torch.Tensor:
    # One exchange for keys and values. The used keys start with the first document, which may begin on an earlier
    # rank.
    both = all_gather(torch.cat([key, value], dim=-1), 2, shard.processes.group)
    used = both[:, :, shard.start - shard.tokens_before : shard.start + shard.total_length]
    key, value = used.split([key.shape[-1], value.shape[-1]], dim=-1)
    return attention_of_part(shard, module, query, key, value, impl, **options)


def attention_of_part(shard: Any, module, query, key, value, impl: str, **options: Any) -> torch.Tensor:
    """Compute attention `[1, L, H, D]` of a part whose keys and values begin with the document of its first token."""
    before = shard.tokens_before
    if not before:
        return ops.attention(module, query, key, value, None, boundaries=_pieces(shard, 0), impl=impl, **options)[0]
    if query.is_cuda:
        # Compute all pieces at once if a kernel supports it.
        lengths = {"boundaries": _pieces(shard, 0), "keys": _keys(shard)}
        output = attention_with_earlier_keys(module, query, key, value, **lengths, **options)
        if output is not None:
            return output
    ran("attention", "mask of earlier keys")
    first = shard.lengths[0]
    own = query[:, :, :first], *(x[:, :, : before + first] for x in (key, value))
    output = attention_of_last_queries(module, *own, **options)
    others = query[:, :, first:], *(x[:, :, before + first :] for x in (key, value))
    return with_other_documents(output, shard, module, others, impl, **options)


def with_other_documents(output: torch.Tensor, shard: Any, module, others, impl: str, **options: Any) -> torch.Tensor:
    """Return the attention of a part, given that of its first document, and query, key and value of the others."""
    if shard.num_documents == 1:
        return output
    query, key, value = others
    rest = ops.attention(module, query, key, value, None, boundaries=_pieces(shard, 1), impl=impl, **options)[0]
    return torch.cat([output, rest], dim=1)


def _pieces(shard: Any, begin: int) -> SequenceBoundaries:
    """Return the boundaries of a row of only the pieces from `begin` on."""
    lengths, device = shard.lengths[begin:], shard.cu_seqlens.device
    return shard.derived(f"pieces from {begin}", lambda: SequenceBoundaries.from_lengths(lengths, device=device))


def _keys(shard: Any) -> SequenceBoundaries:
    """Return the boundaries of the keys. Those of the first piece include the earlier tokens of its document."""
    first, *others = shard.lengths
    lengths = [shard.tokens_before + first, *others]
    return shard.derived("keys", lambda: SequenceBoundaries.from_lengths(lengths, device=shard.cu_seqlens.device))
