"""Images and videos of a row on several ranks. Each frame goes through the vision tower on one rank.

The tower computes each frame of an image or video independently. Frames are therefore balanced over the ranks by their
number of patches, not by the position of their tokens. Each rank then receives the features of its own tokens. A rank
without a frame computes a blank one and discards the result, because all ranks exchange the gradients of the tower,
and under FSDP its weights.
"""

from dataclasses import dataclass
from itertools import accumulate
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
    for kind, (token_type, pixels_name, grid_name) in VISION_KINDS.items():
        pixels, grid = batch.get(pixels_name), batch.get(grid_name)
        if pixels is None and grid is None:
            continue
        if pixels is None or grid is None or TOKEN_TYPES not in batch:
            got = ", ".join(name for name in (pixels_name, grid_name, TOKEN_TYPES) if batch.get(name) is not None)
            raise input_error(f"{pixels_name}, {grid_name} and {TOKEN_TYPES} together", got)
        tokens = (batch[TOKEN_TYPES][0] == token_type).view(size, -1).sum(1).tolist()
        frames = grid.repeat_interleave(grid[:, 0], dim=0)
        frames[:, 0] = 1
        patches = frames.prod(1).tolist()
        # Number of patches per token, which form a square.
        square = len(pixels) // max(sum(tokens), 1)
        side = isqrt(square)
        if sum(patches) != len(pixels) or side * side * sum(tokens) != len(pixels):
            got = f"{sum(tokens)} tokens and {len(pixels)} patches"
            raise input_error(f"{kind} tokens for the {sum(patches)} patches of {grid_name}", got)
        ends = [0, *accumulate(patches)]
        # The middle of a frame determines its rank.
        owners = torch.tensor([(a + b) * size // (2 * len(pixels)) for a, b in zip(ends, ends[1:], strict=False)])
        computed = [sum(n for n, owner in zip(patches, owners, strict=True) if owner == r) for r in range(size)]
        found[kind] = VisionShard(tuple(n // square for n in computed), tuple(tokens))
        start = sum(computed[:rank])
        batch[pixels_name], batch[grid_name] = pixels[start : start + computed[rank]], frames[owners == rank]
        if not computed[rank]:
            batch[pixels_name] = pixels.new_zeros(square, *pixels.shape[1:])
            batch[grid_name] = grid.new_tensor([[1, side, side]])
    return found
