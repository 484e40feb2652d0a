"""What crosses the cut between the shards of a row: three exchanges between the ranks of a group, with their gradients.

Each sends one contiguous tensor per call, laid out along its first dimension, which gloo and NCCL do alike. Autograd skips
the backward of a result that is not used. The other ranks would wait for it forever, so a rank passes results that it does
not use to [`tie`].
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist


@torch.compiler.disable
def all_to_all(x: torch.Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Cut `x` along `scatter_dim`, give each rank its piece, and join what the ranks gave along `gather_dim`.

    Args:
        x (`torch.Tensor`):
            Any dtype; `scatter_dim` is a multiple of the group's size.
        scatter_dim, gather_dim (`int`):
            Two different dimensions, not negative.
        group (`ProcessGroup`):
            The ranks that exchange.

    Returns:
        `torch.Tensor`: with `P` ranks `scatter_dim` is `P` times shorter and `gather_dim` `P` times longer.
    """
    there, back = (
        partial(_exchange, group, scatter_dim, gather_dim),
        partial(_exchange, group, gather_dim, scatter_dim),
    )
    return _Collective.apply(x, there, back)


@torch.compiler.disable
def all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """The `x` of all ranks, which have one shape, joined along `dim`. Backward sums what the ranks make of each part.

    Args:
        x (`torch.Tensor`):
            Any dtype.
        dim (`int`):
            Not negative.
        group (`ProcessGroup`):
            The ranks that exchange.

    Returns:
        `torch.Tensor`: with `P` ranks `dim` is `P` times longer.
    """
    return _Collective.apply(x, partial(_gather, group, dim), partial(_reduce_scatter, group, dim))


@torch.compiler.disable
def redistribute(
    x: torch.Tensor, given: Sequence[int], wanted: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Cut a tensor that lies over the ranks, a run of its first dimension on each, at other places.

    Args:
        x (`torch.Tensor` of shape `[given[rank], ...]`):
            This rank's run.
        given, wanted (`Sequence[int]`):
            How many entries each rank has, and how many it shall have; both add up to the same.
        group (`ProcessGroup`):
            The ranks that exchange.

    Returns:
        `torch.Tensor` of shape `[wanted[rank], ...]`.
    """
    there, back = partial(_redistribute, group, given, wanted), partial(_redistribute, group, wanted, given)
    return _Collective.apply(x, there, back)


def tie(x: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
    """`x`, in a graph that runs the backward of `unused` too, with gradients of zero."""
    return _Tie.apply(x, *unused)


class _Collective(torch.autograd.Function):
    """`there(x)`, whose gradient goes `back`; both are linear, and each the other's gradient."""

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
    # What a rank receives lies in the order of the ranks that it comes from, which is that of the whole.
    sizes = _overlaps(rank, wanted, given), _overlaps(rank, given, wanted)
    dist.all_to_all_single(received, x.contiguous(), *sizes, group=group)
    return received


def _overlaps(run: int, runs: Sequence[int], others: Sequence[int]) -> list[int]:
    """How much of the run number `run` of one cut lies in each run of the other."""
    start = sum(runs[:run])
    end, before, sizes = start + runs[run], 0, []
    for length in others:
        sizes.append(max(0, min(end, before + length) - max(start, before)))
        before += length
    return sizes


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *unused):
        # Not the tensors themselves, which nobody else may need any more.
        ctx.unused = [(other.shape, other.dtype, other.device) for other in unused]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        wanted = zip(ctx.unused, ctx.needs_input_grad[1:], strict=True)
        return gradient, *(
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in wanted
        )
