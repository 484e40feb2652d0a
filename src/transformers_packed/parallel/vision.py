"""Images and videos of a row that several ranks compute: each frame goes through the vision tower on one of them.

The tower looks at each frame of an image or video alone. So frames are distributed by their patches, whichever rank has
their tokens, and each rank then gets the features of its own tokens. A rank without a frame computes a blank one and
discards the result, because all ranks exchange the tower's gradients, and under FSDP its weights.
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
    """How many of a row's vision features each rank computes, and how many it has tokens for; both in the row's order."""

    computed: tuple[int, ...]
    used: tuple[int, ...]

    def exchange(self, features: torch.Tensor, parallel: SequenceParallel) -> torch.Tensor:
        """From the features `[n, hidden]` that this rank computed to those of its tokens. All ranks have to call it."""
        # Those of a blank frame stay here.
        return redistribute(features[: self.computed[parallel.rank]], self.computed, self.used, parallel.group)


def cut_vision(batch: dict[str, Any], rank: int, size: int) -> dict[str, VisionShard]:
    """Leave in a whole row's `batch` the pixels and grids of the frames that `rank` computes; grids count frames then.

    Args:
        batch (`dict`):
            With `pixel_values` `[patches, ...]` and `image_grid_thw` `[images, 3]`, the same of videos, or none of them,
            and `mm_token_type_ids` `[1, T]`, `T` a multiple of `size`.
        rank, size (`int`):
            Which of how many parts.

    Returns:
        `dict` from `"image"` and `"video"` to a [`VisionShard`], for those that the row has.

    Raises:
        `ValueError`: tokens and patches that do not belong together.
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
        # Patches for a token: those of a square.
        square = len(pixels) // max(sum(tokens), 1)
        side = isqrt(square)
        if sum(patches) != len(pixels) or side * side * sum(tokens) != len(pixels):
            got = f"{sum(tokens)} tokens and {len(pixels)} patches"
            raise input_error(f"{kind} tokens for the {sum(patches)} patches of {grid_name}", got)
        ends = [0, *accumulate(patches)]
        # A frame goes where its middle falls.
        owners = torch.tensor([(a + b) * size // (2 * len(pixels)) for a, b in zip(ends, ends[1:], strict=False)])
        computed = [sum(n for n, owner in zip(patches, owners, strict=True) if owner == r) for r in range(size)]
        found[kind] = VisionShard(tuple(n // square for n in computed), tuple(tokens))
        start = sum(computed[:rank])
        batch[pixels_name], batch[grid_name] = pixels[start : start + computed[rank]], frames[owners == rank]
        if not computed[rank]:
            batch[pixels_name] = pixels.new_zeros(square, *pixels.shape[1:])
            batch[grid_name] = grid.new_tensor([[1, side, side]])
    return found
