"""Differentiable collectives between the ranks that hold the shards of a row.

Each collective sends one contiguous tensor, split along its first dimension, which gloo and NCCL both support.
Autograd skips the backward of an unused result, and the other ranks would then wait forever. A rank therefore passes
unused results to [`tie`].
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist


@torch.compiler.disable
def all_to_all(x: torch.Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Split `x` along `scatter_dim`, exchange the pieces, and concatenate the received ones along `gather_dim`.

    Args:
        x (`torch.Tensor`):
            Tensor of any dtype. The size of `scatter_dim` is a multiple of the group size.
        scatter_dim (`int`):
            Dimension to split, not negative.
        gather_dim (`int`):
            Dimension to concatenate, not negative, other than `scatter_dim`.
        group (`ProcessGroup`):
            Ranks that take part.

    Returns:
        `torch.Tensor`: with `P` ranks, `scatter_dim` is `P` times shorter and `gather_dim` is `P` times longer.
    """
    there = partial(_exchange, group, scatter_dim, gather_dim)
    return _Collective.apply(x, there, partial(_exchange, group, gather_dim, scatter_dim))


@torch.compiler.disable
def all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the `x` of all ranks along `dim`. The backward sums the gradients of all ranks for each part.

    Args:
        x (`torch.Tensor`):
            Tensor of any dtype, with the same shape on all ranks.
        dim (`int`):
            Dimension to concatenate, not negative.
        group (`ProcessGroup`):
            Ranks that take part.

    Returns:
        `torch.Tensor`: with `P` ranks, `dim` is `P` times longer.
    """
    return _Collective.apply(x, partial(_gather, group, dim), partial(_reduce_scatter, group, dim))


@torch.compiler.disable
def redistribute(
    x: torch.Tensor, given: Sequence[int], wanted: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Redistribute a tensor whose first dimension is split into one contiguous run per rank.

    Args:
        x (`torch.Tensor` of shape `[given[rank], ...]`):
            Run of this rank.
        given (`Sequence[int]`):
            Number of entries on each rank before the call.
        wanted (`Sequence[int]`):
            Number of entries on each rank after the call, with the same sum.
        group (`ProcessGroup`):
            Ranks that take part.

    Returns:
        `torch.Tensor` of shape `[wanted[rank], ...]`.
    """
    there, back = partial(_redistribute, group, given, wanted), partial(_redistribute, group, wanted, given)
    return _Collective.apply(x, there, back)


def tie(x: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
    """Return `x` in a graph that also runs the backward of `unused`, with zero gradients."""
    return _Tie.apply(x, *unused)


class _Collective(torch.autograd.Function):
    """`there(x)` with `back` as its backward. Both are linear, and each is the backward of the other."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.ways = back, there
        return there(x)

    @staticmethod
    def backward(ctx, gradient):
        return _Collective.apply(gradient, *ctx.ways), None, None


def _exchange(group: dist.ProcessGroup, scatter_dim: int, gather_dim: int, x: torch.Tensor) -> torch.Tensor:
    sent = torch.stack(x.chunk(dist.get_world_size(group), dim=scatter_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), dim=gather_dim)


def _gather(group: dist.ProcessGroup, dim: int, x: torch.Tensor) -> torch.Tensor:
    first = x.movedim(dim, 0).contiguous()
    gathered = first.new_empty(dist.get_world_size(group) * len(first), *first.shape[1:])
    dist.all_gather_into_tensor(gathered, first, group=group)
    return gathered.movedim(0, dim)


def _reduce_scatter(group: dist.ProcessGroup, dim: int, x: torch.Tensor) -> torch.Tensor:
    first = x.movedim(dim, 0).contiguous()
    own = first.new_empty(len(first) // dist.get_world_size(group), *first.shape[1:])
    dist.reduce_scatter_tensor(own, first, group=group)
    return own.movedim(0, dim)


def _redistribute(
    group: dist.ProcessGroup, given: Sequence[int], wanted: Sequence[int], x: torch.Tensor
) -> torch.Tensor:
    rank = dist.get_rank(group)
    received = x.new_empty(wanted[rank], *x.shape[1:])
    # Received entries are in the order of their ranks, which is the order of the whole tensor.
    sizes = _overlaps(rank, wanted, given), _overlaps(rank, given, wanted)
    dist.all_to_all_single(received, x.contiguous(), *sizes, group=group)
    return received


def _overlaps(run: int, runs: Sequence[int], others: Sequence[int]) -> list[int]:
    """Return the overlap of run `run` of one split with each run of another split."""
    start = sum(runs[:run])
    end, before, sizes = start + runs[run], 0, []
    for length in others:
        sizes.append(max(0, min(end, before + length) - max(start, before)))
        before += length
    return sizes


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *unused):
        # Do not keep the tensors alive.
        ctx.unused = [(other.shape, other.dtype, other.device) for other in unused]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        wanted = zip(ctx.unused, ctx.needs_input_grad[1:], strict=True)
        return gradient, *(
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in wanted
        )
