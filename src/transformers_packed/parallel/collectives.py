"""What crosses the cut between the shards of a row: three exchanges between the ranks of a group, with their gradients.

Each sends one contiguous tensor per call, laid out along its first dimension, which gloo and NCCL do alike. Autograd runs
a backward only where the result was used, and a rank that leaves one out leaves the others waiting for ever: a result
that this rank has no use for must be given to [`tie`].
"""

from collections.abc import Sequence

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
    return _AllToAll.apply(x, scatter_dim, gather_dim, group)


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
    return _AllGather.apply(x, dim, group)


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
    return _Redistribute.apply(x, tuple(given), tuple(wanted), group)


def tie(x: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
    """`x`, in a graph that runs the backward of `unused` too, with gradients of zero."""
    return _Tie.apply(x, *unused)


def _exchange(x: torch.Tensor, scatter_dim: int, gather_dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    size = dist.get_world_size(group)
    sent = torch.stack(x.chunk(size, dim=scatter_dim))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), dim=gather_dim)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scatter_dim, gather_dim, group):
        ctx.arguments = gather_dim, scatter_dim, group
        return _exchange(x, scatter_dim, gather_dim, group)

    @staticmethod
    def backward(ctx, gradient):
        return _AllToAll.apply(gradient, *ctx.arguments), None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.arguments = dim, group
        first = x.movedim(dim, 0).contiguous()
        gathered = first.new_empty(dist.get_world_size(group) * len(first), *first.shape[1:])
        dist.all_gather_into_tensor(gathered, first, group=group)
        return gathered.movedim(0, dim)

    @staticmethod
    def backward(ctx, gradient):
        return _ReduceScatter.apply(gradient, *ctx.arguments), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.arguments = dim, group
        first = x.movedim(dim, 0).contiguous()
        own = first.new_empty(len(first) // dist.get_world_size(group), *first.shape[1:])
        dist.reduce_scatter_tensor(own, first, group=group)
        return own.movedim(0, dim)

    @staticmethod
    def backward(ctx, gradient):
        return _AllGather.apply(gradient, *ctx.arguments), None, None


def _overlaps(run: int, runs: Sequence[int], others: Sequence[int]) -> list[int]:
    """How much of the run number `run` of one cut lies in each run of the other."""
    start = sum(runs[:run])
    end, before, sizes = start + runs[run], 0, []
    for length in others:
        sizes.append(max(0, min(end, before + length) - max(start, before)))
        before += length
    return sizes


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, given, wanted, group):
        ctx.arguments = wanted, given, group
        rank = dist.get_rank(group)
        received = x.new_empty(wanted[rank], *x.shape[1:])
        # What a rank receives lies in the order of the ranks that it comes from, which is that of the whole.
        sizes = _overlaps(rank, wanted, given), _overlaps(rank, given, wanted)
        dist.all_to_all_single(received, x.contiguous(), *sizes, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        return _Redistribute.apply(gradient, *ctx.arguments), None, None, None


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
