"""Linear layers whose three matrix products run in float8 (e4m3).

    y = x W^T        dx = dy W        dW = dy^T x

Each row of `x`, and each row of `W`, is cast with a scale of its own. A product takes scales only for its rows and
columns, not for the dimension that it sums over. So `dy` absorbs the scales of the other factor before it is cast, and
the casts of `x` and `W` serve both products in which they occur:

    dx[t] = s[t] sum_n cast(dy[t, n] * scale_W[n] / s[t]) cast(W)[n]
    dW[n] = c[n] sum_t cast(dy[t, n] * scale_x[t] / c[n]) cast(x)[t]

All scales are powers of two, so a cast rounds the mantissa to 3 bits, whatever the scale. Only numbers below 2**-14 of
the largest one of their row or column lose more. Outputs and gradients of the input therefore depend on no other row.
A gradient of a weight sums over all rows, and large gradients of one document can round smaller ones of another.

A frozen weight may be stored in float8, with any scale for each of its rows. Its bytes are used as they are.

Nothing else is cached. Casting a weight again for each forward and backward takes about 1 % of a step of 16,384 tokens,
needs no memory, and cannot miss a change of the weight.
"""

from typing import Any

import torch

from .backends import triton
from .invariance import VARIES, is_batch_invariant


# Sizes of operands of products in float8 have to be multiples of this.
MULTIPLE = 16
DTYPE = torch.float8_e4m3fn
_INFINITY = 0x7F800000


def verify(rows: torch.Tensor, weight: Any, dtype: torch.dtype) -> str:
    """Whether products of `rows` and `weight` can run in float8 and return `dtype`."""
    if is_batch_invariant():
        return VARIES
    if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
        return f"needs weights with multiples of {MULTIPLE} as sizes, not {tuple(weight.shape)}"
    if not rows.is_cuda:
        return ""
    if dtype != torch.bfloat16:
        return f"needs bfloat16 around products in float8 (bf16=True, or a model in bfloat16), not {dtype}"
    if torch.version.hip or torch.cuda.get_device_capability(rows.device) < (8, 9):
        return "needs an NVIDIA GPU of compute capability 8.9 or later for products in float8"
    return triton.problem()


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    left_scale: torch.Tensor,
    right_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `left @ right.T` of factors in float8, times the scales of the rows of both."""
    if right_scale is None:
        right_scale = torch.ones(len(right), dtype=torch.float32, device=right.device)
    if not left.is_cuda:
        # In float16, to which autocast would cast them, products of numbers up to 448 overflow.
        with torch.autocast("cpu", enabled=False):
            found = left.float() @ right.float().t()
        return (found * left_scale[:, None] * right_scale).to(dtype)
    scales = {"scale_a": left_scale[:, None], "scale_b": right_scale[None, :]}
    return torch._scaled_mm(left, right.t(), **scales, out_dtype=dtype, use_fast_accum=True)


def _kernels() -> Any:
    from .backends.triton import float8

    return float8


def with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """Return `x` with the elements of each row side by side in memory."""
    return x if x.stride(1) == 1 else x.contiguous()


def cast_rows(*parts: torch.Tensor, factor: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast the rows of tensors side by side, times `factor`, with one scale for each row."""
    whole = [with_whole_rows(part) for part in parts]
    if len(whole) > 3:
        whole = [torch.cat(whole, 1)]
    if whole[0].is_cuda:
        return _kernels().cast_rows(*whole, factor=factor)
    x = torch.cat(whole, 1).float()
    x = x if factor is None else x * factor
    scale = scale_of(magnitude(x).amax(1))
    return (x / scale[:, None]).to(DTYPE), scale


def float8_rows_of(weight: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the values `[..., out, in]` in e4m3 of a frozen weight of torchao, and the scales `[..., out, 1]` of its rows."""
    kind = type(weight)
    if kind.__name__ != "Float8Tensor" or not kind.__module__.startswith("torchao.") or weight.requires_grad:
        return None
    data, scale = weight.qdata, weight.scale
    rows = data.dtype == DTYPE and data.is_contiguous() and scale.shape == (*data.shape[:-1], 1)
    # With `act_quant_kwargs`, torchao would cast the input too, in evaluation as well.
    return (data, scale) if rows and scale.dtype == torch.float32 and weight.act_quant_kwargs is None else None


def transposed(x: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write the transpose of `x` to `out`, cast with the scales of the rows if they are given, and fill up with zeros."""
    if x.is_cuda:
        return _kernels().transposed(with_whole_rows(x), scale, out)
    x = x if scale is None else (x.float() / scale[:, None]).to(DTYPE)
    out[:, : len(x)] = x.t()
    out[:, len(x) :] = 0


def add_maxima(x, row_factor, column_factor, rows, columns) -> None:
    """Update the maxima, as bits, of `x * column_factor` in each row and of `x * row_factor[:, None]` in each column."""
    if x.is_cuda:
        return _kernels().add_maxima(x, row_factor, column_factor, rows, columns)
    torch.maximum(rows, magnitude(x.float() * column_factor).amax(1), out=rows)
    if len(x):
        torch.maximum(columns, magnitude(x.float() * row_factor[:, None]).amax(0), out=columns)


def cast_both(x, row_factor, column_factor, rows, columns, cast, row_scale, cast_columns, column_scale) -> None:
    """Write the casts of `x * column_factor` by row, and the transpose of `x * row_factor[:, None]` by column."""
    if x.is_cuda:
        return _kernels().cast_both(
            x, row_factor, column_factor, rows, columns, cast, row_scale, cast_columns, column_scale
        )
    row_scale.copy_(scale_of(rows))
    cast.copy_((x.float() * column_factor / row_scale[:, None]).to(DTYPE))
    column_scale.copy_(scale_of(columns))
    transposed((x.float() * row_factor[:, None] / column_scale).to(DTYPE), None, cast_columns)


def magnitude(x):
    """Return the bits of absolute values, which order as integers do. NaN counts as 0: it stays NaN in e4m3."""
    return x.abs().nan_to_num(0, posinf=float("inf")).view(torch.int32)


def scale_of(bits):
    """Return the power of two by which numbers with magnitudes up to `bits` are at most 448, or NaN for infinity."""
    exponent = (((bits + 0x1FFFFF) >> 23) - 8).clamp(min=27)
    return (exponent << 23).view(torch.float32).masked_fill(bits >= _INFINITY, float("nan"))
