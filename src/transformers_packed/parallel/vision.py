"""Images and videos of a row on several ranks. Each frame goes through the vision tower on one rank.

The tower computes each frame of an image or video independently. Frames are therefore balanced over the ranks by their
number of patches, not by the position of their tokens. Each rank then receives the features of its own tokens. A rank
without a frame computes a blank one and discards the result, because all ranks exchange the gradients of the tower,
and under FSDP its weights.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isqrt
from typing import Any

import torch

from ..boundaries import TOKEN_TYPES, VISION_KINDS
from ..errors import input_error
from .collectives import redistribute
from .groups import SequenceParallel


@dataclass(frozen=True)
class VisionShard:
    """The number of vision features that each rank computes and the number that it uses, both in row order."""

    computed: tuple[int, ...]
    used: tuple[int, ...]

    def exchange(self, features: torch.Tensor, parallel: SequenceParallel) -> torch.Tensor:
        """Exchange features `[n, hidden]` of this rank's frames for those of its tokens. All ranks must call it."""
        # Drop the features of a blank frame.
        return redistribute(features[: self.computed[parallel.rank]], self.computed, self.used, parallel.group)


def cut_vision(batch: dict[str, Any], rank: int, size: int) -> dict[str, VisionShard]:
    """Reduce the pixels and grids in a whole row's `batch` to the frames that `rank` computes.

    The grids then have one entry per frame.

    Args:
        batch (`dict`):
            `pixel_values` `[patches, ...]` and `image_grid_thw` `[images, 3]`, the same columns for videos, or
            neither. Also `mm_token_type_ids` `[1, T]`, where `T` is a multiple of `size`.
        rank (`int`):
            Index of the part.
        size (`int`):
            Number of parts.

    Returns:
        `dict`: maps each of `"image"` and `"video"` in the row to a [`VisionShard`].

    Raises:
        `ValueError`: the numbers of tokens and patches do not match.
    """
    found = {}
    for kind, (token_type, *names) in VISION_KINDS.items():
        given = [name for name in (*names, TOKEN_TYPES) if batch.get(name) is not None]
        if set(given) <= {TOKEN_TYPES}:
            continue
        if len(given) < 3:
            raise input_error(f"{', '.join(names)} and {TOKEN_TYPES} together", ", ".join(given))
        tokens = (batch[TOKEN_TYPES][0] == token_type).view(size, -1).sum(1).tolist()
        found[kind], frames = _share(kind, batch, tokens, names, rank)
        batch.update(zip(names, frames, strict=True))
    return found


def _share(
    kind: str, batch: dict[str, Any], tokens: list[int], names: list[str], rank: int
) -> tuple[VisionShard, tuple[torch.Tensor, torch.Tensor]]:
    """Assign the frames of one kind to ranks, whose numbers of `tokens` are given.

    Returns the assignment, and the pixels and grids of `rank`.
    """
    pixels, grid, size = batch[names[0]], batch[names[1]], len(tokens)
    frames = grid.repeat_interleave(grid[:, 0], dim=0)
    frames[:, 0] = 1
    patches = frames.prod(1).tolist()
    # Number of patches per token, which form a square.
    square = len(pixels) // max(sum(tokens), 1)
    side = isqrt(square)
    if sum(patches) != len(pixels) or side * side * sum(tokens) != len(pixels):
        got = f"{sum(tokens)} tokens and {len(pixels)} patches"
        raise input_error(f"{kind} tokens for the {sum(patches)} patches of {names[1]}", got)
    ends = [0, *accumulate(patches)]
    # The middle of a frame determines its rank.
    owners = torch.tensor([(a + b) * size // (2 * len(pixels)) for a, b in pairwise(ends)])
    computed = torch.zeros(size, dtype=torch.int64).index_add(0, owners, torch.tensor(patches)).tolist()
    shard = VisionShard(tuple(n // square for n in computed), tuple(tokens))
    if not computed[rank]:
        return shard, (pixels.new_zeros(square, *pixels.shape[1:]), grid.new_tensor([[1, side, side]]))
    start = sum(computed[:rank])
    return shard, (pixels[start : start + computed[rank]], frames[owners == rank])
