"""Dropout whose mask depends on a seed and the position alone, so that the backward recomputes it."""

import torch
import triton
import triton.language as tl

from . import ceil_div, on_its_device


_BLOCK = 1024


@triton.jit
def _dropped(x_ptr, seed_ptr, y_ptr, count, p, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    kept = tl.rand(tl.load(seed_ptr), at.to(tl.uint32)) >= p
    tl.store(y_ptr + at, tl.where(kept, x / (1.0 - p), 0.0).to(y_ptr.dtype.element_ty), mask=inside)


@on_its_device
def dropped(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """Zero each element of `x` with probability `p`, and divide the others by `1 - p`.

    Args:
        x (`torch.Tensor` of any shape):
            Input of any floating dtype.
        seed (`torch.LongTensor` without dimensions):
            Seed of the mask, on the device of `x`.
        p (`float`):
            Probability.
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        _dropped[(ceil_div(x.numel(), _BLOCK),)](x, seed, y, x.numel(), p, _BLOCK)
    return y
