"""Array functions that the planner and the plan share."""

import numpy as np


# The size of the padded batches that packed rows are compared with.
PADDED_BATCH = 8
_BLOCK = 1 << 22


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """`[0, sizes[0], sizes[0] + sizes[1], ...]`, int64 `[len(sizes) + 1]`."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def ranges(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The concatenated ranges `starts[i], starts[i] + 1, ...` of `sizes[i]` numbers each, int64."""
    offsets = offsets_of(sizes)
    return np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1])


def histogram(lengths: np.ndarray) -> np.ndarray:
    """The number of documents of each length, int64 `[longest + 1]`. Does not copy all lengths to int64."""
    counts = np.zeros(int(lengths.max()) + 1, np.int64)
    for first in range(0, len(lengths), _BLOCK):
        counts += np.bincount(lengths[first : first + _BLOCK], minlength=len(counts))
    return counts


def mean_of_longest(lengths: np.ndarray, batch_size: int = PADDED_BATCH, values: np.ndarray | None = None) -> float:
    """The expected length of the longest document in batches of these documents in random order.

    Args:
        lengths (`np.ndarray`):
            Integers `[documents]`.
        batch_size (`int`, *optional*, defaults to 8):
            Documents per batch.
        values (`np.ndarray`, *optional*):
            `[longest + 1]`: return the expected value of `values[length of the longest]` instead.
    """
    # The longest of a batch has at most n tokens with probability (share of documents up to n) ** batch_size.
    share_up_to = np.cumsum(histogram(lengths)) / len(lengths)
    chance = np.diff(share_up_to ** min(batch_size, len(lengths)), prepend=0.0)
    return float(chance @ (np.arange(len(chance), dtype=np.float64) if values is None else values))


def share_rows(order: np.ndarray, cost: np.ndarray, world_size: int, accumulation: int) -> np.ndarray:
    """Arrange the rows of each step as `[micro step, rank]`, with about the same cost for each rank.

    In each micro step, the ranks with the highest cost so far get the cheapest rows. Micro steps take the rows of a
    step from the most expensive to the cheapest, which also balances the ranks within a step.

    Args:
        order (`np.ndarray`):
            int64 `[rows]`: the rows, step after step. Each step keeps its rows.
        cost (`np.ndarray`):
            float64 `[rows]`: the cost of each row.
        world_size (`int`):
            The number of ranks.
        accumulation (`int`):
            Rows per rank in a step.
    """
    if world_size == 1 or accumulation == 1:
        return order
    steps: np.ndarray = order.reshape(-1, accumulation * world_size)
    steps = np.take_along_axis(steps, np.argsort(-cost[steps], axis=1, kind="stable"), axis=1)
    steps = steps.reshape(-1, accumulation, world_size)
    arranged = np.empty_like(steps)
    so_far = np.zeros((len(steps), world_size))
    for micro_step in range(accumulation):
        ranks = np.argsort(so_far, axis=1, kind="stable")
        np.put_along_axis(arranged[:, micro_step], ranks, steps[:, micro_step], axis=1)
        so_far += cost[arranged[:, micro_step]]
    return arranged.reshape(-1)
