"""Products of frozen weights that are stored in float8 (e4m3) with a scale for each block of 128 x 128. Their bytes are used as
they are, and the rows are cast.

    y[t, n]  = sum_b s[t, b] S[n / 128, b] sum_k cast(x)[t, k] W[n, k]       for the columns k of block b
    dx[t, k] = sum_b s'[t, b] S[b, k / 128] sum_n cast(dy)[t, n] W[n, k]     for the columns n of block b

Each row has a scale for each block of 128 columns, by the rule of [`ops.float8`]. The sum over a block needs no scales, and
sums of blocks are added in float32, in the order of the blocks. So a row of the result depends on no other row, and the
forward is that of servers which quantize the inputs of such a checkpoint (`activation_scheme="dynamic"`), except that
scales of rows are powers of two.
"""

from typing import Any

import torch

from .backends import triton
from .float8 import DTYPE, magnitude, scale_of


# Rows and columns of a weight with one scale, and columns of a row with one.
BLOCK = 128


def verify(rows: torch.Tensor, weight: Any, dtype: torch.dtype) -> str:
    """Whether products of `rows` and a weight in blocks can run in float8 and return `dtype`."""
    if not rows.is_cuda:
        return ""
    if dtype != torch.bfloat16:
        return f"needs bfloat16 around products in float8 (bf16=True, or a model in bfloat16), not {dtype}"
    return problem_of_gpu(rows.device) or triton.problem()


def problem_of_gpu(device: torch.device | None = None) -> str:
    """Return why a GPU, by default the current one, cannot run products with weights in blocks, or an empty string."""
    # GPUs of compute capability 12 have less than half of the shared memory that the kernel uses.
    if torch.version.hip or not (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0):
        return "needs an NVIDIA GPU of compute capability 9.0 to 11.0 for products with weights in blocks of float8"
    return ""


def cast_in_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast the rows of `x` `[R, C]` to float8, and return the scales `[R, C / 128]` of their blocks."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    scale = scale_of(magnitude(blocks).amax(2))
    return (blocks / scale[..., None]).to(DTYPE).flatten(1), scale


def product_in_blocks(
    values: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    """Multiply rows by a weight, both in float8 with scales of blocks.

    Args:
        values (`torch.Tensor` of shape `[R, C]`), scale (`torch.Tensor` of shape `[R, C / 128]`):
            The rows, from [`cast_in_blocks`].
        weight (`torch.Tensor` of shape `[N, C]`), weight_scale (`torch.Tensor` of shape `[N / 128, C / 128]`):
            The weight.

    Returns:
        `torch.Tensor` of shape `[R, N]`, in float32.
    """
    total = torch.zeros(len(values), len(weight), device=values.device)
    parts = zip(values.split(BLOCK, 1), weight.split(BLOCK, 1), scale.t(), weight_scale.t(), strict=True)
    # In float16, to which autocast would cast them, products of numbers up to 448 overflow.
    with torch.autocast(values.device.type, enabled=False):
        for rows, columns, of_rows, of_columns in parts:
            factors = of_rows[:, None] * of_columns.repeat_interleave(BLOCK)
            total += rows.float() @ columns.float().t() * factors
    return total
