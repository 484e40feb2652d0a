"""The linear-attention block on a part of a row: the convolution's halo, and the gated delta rule by either method.

**States.** The rule is affine in its state: over a piece of a document the last state is `M S + U`, where `S` is the
state before the piece, `U` the last state without one, and `M` what the piece makes of the identity when its values are
zero. One call with values `[v, 0]` and the initial state `[0, I]` gives both, and an output `[o, r]` of which `o + r S`
is the output with `S`. Only a piece that began on an earlier rank needs that; only a last piece that goes on hands
`[U, M]` on, which all ranks gather, `heads * K * (V + K)` numbers each whatever the length. Each rank then folds what
stands before it.

**Heads.** Ranks exchange tokens for heads, each computes the whole row for its heads, and they exchange back.
"""

from typing import TYPE_CHECKING, Any

import torch

from .. import ops
from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..ops.dispatch import logger, record
from .collectives import all_gather, all_to_all, tie


if TYPE_CHECKING:
    from .shard import RowShard


def _with_halo(shard: "RowShard", x: torch.Tensor, width: int) -> tuple[torch.Tensor, SequenceBoundaries, int]:
    """`x` `[1, L, D]` behind the last tokens of its first document that stand on the rank before, how many those are, and
    the boundaries of both together."""
    wanted = width - 1
    if x.shape[1] < wanted:
        raise input_error(
            "causal_conv1d",
            expected=f"at least {wanted} tokens on each rank, as many as a window looks back",
            got=f"{x.shape[1]}",
            fix="Use longer rows, or fewer processes per row.",
        )
    tails = all_gather(x[:, x.shape[1] - wanted :], 0, shard.parallel.group)
    # The first rank has nothing before it: any tail will do, and nothing of it is kept.
    halo = tails[max(shard.rank - 1, 0)][None]
    kept = min(wanted, shard.tokens_before)

    def boundaries() -> SequenceBoundaries:
        first, *others = shard.lengths
        return SequenceBoundaries.from_lengths([first + kept, *others], device=x.device)

    # A slice's backward gives zeros to what was cut off: nothing flows into a document before.
    joined = torch.cat([halo[:, wanted - kept :], x], dim=1)
    return joined, shard.derived(f"halo of {kept}", boundaries), kept


def causal_conv1d(shard: "RowShard", hidden_states: torch.Tensor, weight: torch.Tensor, *args, **options: Any):
    """[`ops.causal_conv1d`] on a part of a row."""
    x, options["boundaries"], before = _with_halo(shard, hidden_states, weight.shape[-1])
    return ops.causal_conv1d(x, weight, *args, **options)[:, before:]


def convolved_query_key_value(
    shard: "RowShard", hidden_states: torch.Tensor, weight: torch.Tensor, *args, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[`ops.convolved_query_key_value`] on a part of a row."""
    x, options["boundaries"], before = _with_halo(shard, hidden_states, weight.shape[-1])
    return tuple(y[:, before:] for y in ops.convolved_query_key_value(x, weight, *args, **options))


def gated_delta_rule(
    shard: "RowShard", query, key, value, g, beta, *, boundaries, initial_state, output_final_state, **options: Any
) -> tuple[torch.Tensor, None]:
    """[`ops.gated_delta_rule`] on a part of a row, by the method that `shard.parallel` names."""
    tensors = query, key, value, g, beta
    if shard.parallel.gated_delta_rule == "heads":
        return _by_heads(shard, *tensors, **options), None
    if _has_fla(*tensors, **options):
        return _by_fla(shard, *tensors, **options), None
    return _by_states(shard, *tensors, **options), None


def _by_heads(shard: "RowShard", *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    size, group = shard.size, shard.parallel.group
    for x in tensors:
        if x.shape[2] % size:
            raise input_error(
                "gated_delta_rule",
                expected=f'numbers of key and value heads that are multiples of {size} for gated_delta_rule="heads"',
                got=f"{x.shape[2]}",
                fix='Use gated_delta_rule="state".',
            )
    whole = (all_to_all(x, 2, 1, group) for x in tensors)
    output = ops.gated_delta_rule(*whole, boundaries=shard.row, **options)[0]
    return all_to_all(output, 1, 2, group)


def _by_states(shard: "RowShard", query, key, value, g, beta, **options: Any) -> torch.Tensor:
    inputs = query, key, value, g, beta
    continued, lengths = shard.tokens_before > 0, shard.lengths
    first, last = lengths[0], lengths[-1]
    heads, key_dim, value_dim = value.shape[2], key.shape[-1], value.shape[-1]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32

    def call(start: int, end: int, *, initial_state=None, value=value):
        piece = (x[:, start:end] for x in (query, key, value, g, beta))
        return ops.gated_delta_rule(*piece, initial_state=initial_state, output_final_state=True, **options)

    total = shard.total_length
    outputs, summary, reading = [], None, None
    begin, end = 0, total
    if continued:
        # Values [v, 0] and the initial state [0, I].
        wide = torch.cat([value, value.new_zeros(*value.shape[:3], key_dim)], dim=-1)
        identity = torch.eye(key_dim, dtype=dtype, device=value.device).expand(1, heads, key_dim, key_dim)
        state = torch.cat([identity.new_zeros(1, heads, key_dim, value_dim), identity], dim=-1)
        output, state = call(0, first, initial_state=state, value=wide)
        output, reading = output.split([value_dim, key_dim], dim=-1)
        outputs.append(output)
        begin = first
        if shard.goes_on and len(lengths) == 1:
            summary = state
    if shard.goes_on and summary is None:
        # The document began here: what came before does not reach beyond it.
        end = total - last
    if begin < end:
        whole = shard.derived(
            "whole documents",
            lambda: SequenceBoundaries.from_lengths(
                lengths[continued : len(lengths) - (end < total)], device=value.device
            ),
        )
        documents = (x[:, begin:end] for x in inputs)
        outputs.append(ops.gated_delta_rule(*documents, boundaries=whole, **options)[0])
    if end < total:
        output, state = call(end, total)
        outputs.append(output)
        summary = torch.nn.functional.pad(state, (0, key_dim))
    if summary is None:
        # Nobody reads it.
        summary = value.new_zeros(1, heads, key_dim, value_dim + key_dim, dtype=dtype)

    # Every rank has to have the exchange in its backward, whichever of these is trained.
    summaries = all_gather(tie(summary.contiguous(), *inputs), 0, shard.parallel.group)
    if continued:
        # From where the document began: what other documents left behind may not even be finite.
        began = (shard.start - shard.tokens_before) // total
        state = summaries[began, ..., :value_dim]
        for rank in range(began + 1, shard.rank):
            update, transition = summaries[rank].split([value_dim, key_dim], dim=-1)
            state = transition @ state + update
        outputs[0] = (outputs[0].to(dtype) + torch.einsum("bthk,hkv->bthv", reading.to(dtype), state)).to(query.dtype)
    output = torch.cat(outputs, dim=1)
    return output if continued else tie(output, summaries)


def _has_fla(query, key, value, g, beta, **options: Any) -> bool:
    """Whether flash-linear-attention's own context parallelism serves: wherever its kernel would for a whole row."""
    if not query.is_cuda:
        return False
    from ..ops.kernels import verify_fla_gated_delta_rule

    return verify_fla_gated_delta_rule(query, key, value, g, beta, **options)[0]


def _by_fla(shard: "RowShard", query, key, value, g, beta, **options: Any) -> torch.Tensor:
    """State passing inside flash-linear-attention's kernels.

    On GPUs it has run in benchmarks/sequence_parallel.py; the tests that compare it with the whole row have not run there.
    """
    from inspect import unwrap

    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    record("gated_delta_rule", "fla with cp_context", [], logger.info)
    # It keeps index tensors by the identity of what it is given, so it is built once per row, from the whole row.
    row, group = shard.row, shard.parallel.group
    context = shard.derived(
        f"fla context {id(group)}", lambda: build_cp_context(row.cu_seqlens, group, cu_seqlens_cpu=row.cu_seqlens_cpu)
    )
    # Unwrapped, it is the Triton kernel and not what the package would hand the call to, which knows no other ranks.
    return unwrap(chunk_gated_delta_rule)(query, key, value, g, beta, cp_context=context, **options)[0]
