"""The linear-attention block on a part of a row: the convolution's halo, and the gated delta rule by either method.

**Halo.** The tokens of the rank before that the convolution's window reaches: this package's kernel takes them by
themselves, for others they are put before the part.

**States.** The rule is affine in its state: over a piece of a document its output with a state `S` before it is the one
without plus what `S` alone makes, with values of zero. So each rank computes its whole part as if its first document
began there, with the kernel that serves any row, and adds to the first piece, if that began on an earlier rank, what the
state before it makes. That state is the last one of the rank before, which every rank computes of its last piece, if that
goes on, before all else, and all ranks gather, `heads * K * (V + K)` numbers each whatever the length.

A piece that goes on at both ends knows its last state only as `M S + U`, where `U` is the last state without `S`, and `M`
what the piece makes of the identity when its values are zero. One call with values `[v, 0]` and the initial state `[0, I]`
gives both, and an output `[o, r]` of which `o + r S` is the output with `S`. All hand `[U, M]` on (`M` is zero where the
document began), and each rank folds what stands before it.

Pieces of cut documents are computed twice, and a rank waits for the last piece of the one before. So where they are a
large share, and flash-linear-attention is there, its own context parallelism takes the whole part instead. That is
decided from the row and the number of ranks, and so alike on all of them: what they exchange is not the same.

**Heads.** Ranks exchange tokens for heads, each computes the whole row for its heads, and they exchange back.
"""

from inspect import unwrap
from typing import Any

import torch

from .. import ops
from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..ops.backends import fla
from ..ops.convolution import check_channels, check_heads, triton_qkv, verify_triton_qkv
from ..ops.dispatch import logger, record
from ..ops.gated_delta_rule import check_call
from .collectives import all_gather, all_to_all, tie
from .shard import RowShard


class _WithEnds(torch.autograd.Function):
    """`x` `[1, L, ...]`, its first tokens and its last ones, without a copy of `x` in forward or backward.

    Of two slices autograd would fill two gradients of the whole with zeros, and add them up.
    """

    @staticmethod
    def forward(ctx, x, first: int, last: int):
        return x.view_as(x), x[:, :first], x[:, len(x[0]) - last :]

    @staticmethod
    def backward(ctx, gradient, of_first, of_last):
        # The backward of the op made it, and nobody else has it, but for a graph of it. What is not dense may be one
        # number for many.
        gradient = gradient.clone() if torch.is_grad_enabled() else gradient.contiguous()
        gradient[:, : of_first.shape[1]] += of_first
        gradient[:, gradient.shape[1] - of_last.shape[1] :] += of_last
        return gradient, None, None


def _halo(shard: RowShard, x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`x`, and of the rank before the last `[1, width - 1, D]`. The first rank gets its own, which no position reaches."""
    wanted = width - 1
    if x.shape[1] < wanted:
        expected = f"at least {wanted} tokens on each rank, as many as a window looks back"
        raise input_error(expected, x.shape[1], "Use longer rows, or fewer processes per row.")
    x, _, tail = _WithEnds.apply(x, 0, wanted)
    tails = all_gather(tail, 0, shard.processes.group)
    return x, tails[max(shard.rank - 1, 0)][None]


def _with_halo(shard: RowShard, x: torch.Tensor, width: int) -> tuple[torch.Tensor, SequenceBoundaries, int]:
    """`x` `[1, L, D]` behind those tokens of its halo that its first document has, how many those are, and the boundaries
    of both together."""
    x, halo = _halo(shard, x, width)
    kept = min(width - 1, shard.tokens_before)

    def boundaries() -> SequenceBoundaries:
        first, *others = shard.lengths
        return SequenceBoundaries.from_lengths([first + kept, *others], device=x.device)

    # A slice's backward gives zeros to what was cut off: nothing flows into a document before.
    joined = torch.cat([halo[:, width - 1 - kept :], x], dim=1)
    return joined, shard.derived(f"halo of {kept}", boundaries), kept


def causal_conv1d(
    hidden_states: torch.Tensor, weight: torch.Tensor, *args, boundaries: RowShard, **options: Any
) -> torch.Tensor:
    """[`ops.causal_conv1d`] on a part of a row."""
    check_channels(hidden_states, weight)
    x, options["boundaries"], before = _with_halo(boundaries, hidden_states, weight.shape[-1])
    return ops.causal_conv1d(x, weight, *args, **options)[:, before:]


def causal_conv1d_qkv(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
    *,
    boundaries: RowShard,
    impl: str = "auto",
    **heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[`ops.causal_conv1d_qkv`] on a part of a row."""
    check_heads(hidden_states, weight, **heads)
    call = weight, bias, activation
    if impl == "auto" and verify_triton_qkv(hidden_states, *call, **heads)[0]:
        # Its kernel takes the halo by itself: the part is not copied, nor are the results.
        record("causal_conv1d_qkv", "triton", [], logger.info)
        x, halo = _halo(boundaries, hidden_states, weight.shape[-1])
        return triton_qkv(x, *call, boundaries=boundaries, halo=halo[0], **heads)
    x, whole, before = _with_halo(boundaries, hidden_states, weight.shape[-1])
    return tuple(y[:, before:] for y in ops.causal_conv1d_qkv(x, *call, boundaries=whole, impl=impl, **heads))


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    boundaries: RowShard,
    initial_state: None = None,
    output_final_state: bool = False,
    impl: str = "auto",
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """[`ops.gated_delta_rule`] on a part of a row, by the method that the shard's `parallel` names."""
    check_call(key, value, boundaries, initial_state, output_final_state)
    shard, tensors = boundaries, (query, key, value, g, beta)
    if shard.processes.gated_delta_rule == "heads":
        return _by_heads(shard, *tensors, impl=impl, **options), None
    # flash-linear-attention is taken to need twice FlashQLA's time for a token. Then two pieces of a quarter of the part each
    # cost as much as the part, and both together what `cp_context` needs for the whole part.
    whole = shard.is_cut_in_long_pieces and impl == "auto"
    if whole and fla.verify_gated_delta_rule(*tensors, **options)[0]:
        return _by_fla(shard, *tensors, **options), None
    return _by_states(shard, *tensors, impl=impl, **options), None


def _by_heads(shard: RowShard, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    size, group = shard.size, shard.processes.group
    for x in tensors:
        if x.shape[2] % size:
            expected = f'numbers of key and value heads that are multiples of {size} for gated_delta_rule="heads"'
            raise input_error(expected, x.shape[2], 'Use gated_delta_rule="state".')
    whole = (all_to_all(x, 2, 1, group) for x in tensors)
    output = ops.gated_delta_rule(*whole, boundaries=shard.row, **options)[0]
    return all_to_all(output, 1, 2, group)


def _by_states(shard: RowShard, *inputs: torch.Tensor, **options: Any) -> torch.Tensor:
    record("gated_delta_rule", "states of cut documents", [], logger.info)
    total, lengths, value = shard.total_length, shard.lengths, inputs[2]
    heads, key_dim, value_dim = value.shape[2], inputs[1].shape[-1], value.shape[-1]
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32

    def call(query, key, value, g, beta, state):
        # All calls have both states: with one of them missing a kernel is compiled and tuned anew.
        states = {"initial_state": state, "output_final_state": True}
        return ops.gated_delta_rule(query, key, value, g, beta, **states, **options)

    continued = shard.tokens_before > 0
    spans = continued and shard.goes_on and len(lengths) == 1
    if spans:
        # Values [v, 0] and the initial state [0, I].
        wide = torch.nn.functional.pad(value, (0, key_dim))
        identity = torch.eye(key_dim, dtype=dtype, device=value.device).expand(1, heads, key_dim, key_dim)
        state = torch.nn.functional.pad(identity, (value_dim, 0))
        both, summary = call(*inputs[:2], wide, *inputs[3:], state)
        ends = inputs
    else:
        first, last = lengths[0] * continued, lengths[-1] * shard.goes_on
        inputs, begins, ends = zip(*(_WithEnds.apply(x, first, last) for x in inputs), strict=True)
        state = value.new_zeros(1, heads, key_dim, value_dim, dtype=dtype)
        if last:
            # The document began here: what came before does not reach beyond it.
            state = call(*ends, state)[1]
        # Nobody reads the state of a last document that ends here.
        summary = torch.nn.functional.pad(state, (0, key_dim))

    # Every rank has to have the exchange in its backward, whichever of these is trained.
    summaries = all_gather(tie(summary.contiguous(), *ends), 0, shard.processes.group)
    if not spans:
        # The pieces as if they were documents.
        own = shard.derived("pieces", lambda: SequenceBoundaries(shard.cu_seqlens, shard.host))
        output = ops.gated_delta_rule(*inputs, boundaries=own, **options)[0]
    if not continued:
        return tie(output, summaries)
    # From where the document began: what other documents left behind may not even be finite.
    began = (shard.start - shard.tokens_before) // total
    state = summaries[began, ..., :value_dim]
    for rank in range(began + 1, shard.rank):
        update, transition = summaries[rank].split([value_dim, key_dim], dim=-1)
        state = transition @ state + update
    if spans:
        output, reading = both.split([value_dim, key_dim], dim=-1)
        return (output.to(dtype) + torch.einsum("bthk,hkv->bthv", reading.to(dtype), state)).to(value.dtype)
    query, key, value, g, beta = begins
    return _AddToStart.apply(output, call(query, key, torch.zeros_like(value), g, beta, state[None])[0])


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
    """State passing inside flash-linear-attention's kernels."""
    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    record("gated_delta_rule", "fla with cp_context", [], logger.info)
    # It keeps index tensors by the identity of what it is given, so it is built once per row, from the whole row.
    cu_seqlens, host, group = shard.row.cu_seqlens, shard.row.cu_seqlens_cpu, shard.processes.group
    name = f"fla context {id(group)}"
    context = shard.derived(name, lambda: build_cp_context(cu_seqlens, group, cu_seqlens_cpu=host))
    # Unwrapped, it is the Triton kernel and not what the package would hand the call to, which knows no other ranks.
    return unwrap(chunk_gated_delta_rule)(query, key, value, g, beta, cp_context=context, **options)[0]
