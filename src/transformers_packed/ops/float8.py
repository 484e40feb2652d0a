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

from collections.abc import Sequence
from typing import Any

import torch

from .backends import triton


# Sizes of operands of products in float8 have to be multiples of this.
MULTIPLE = 16
DTYPE = torch.float8_e4m3fn
_INFINITY = 0x7F800000


def verify(rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether products of `rows` and `weight` can run in float8 and return `dtype`."""
    if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
        return False, f"needs weights with multiples of {MULTIPLE} as sizes, not {tuple(weight.shape)}"
    if not rows.is_cuda:
        return True, ""
    if dtype != torch.bfloat16:
        return False, f"needs bfloat16 around products in float8 (bf16=True, or a model in bfloat16), not {dtype}"
    if torch.version.hip or torch.cuda.get_device_capability(rows.device) < (8, 9):
        return False, "needs an NVIDIA GPU of compute capability 8.9 or later for products in float8"
    return not triton.problem(), triton.problem()


class Float8Layers:
    """The products in float8 of layers with the same rows `[T, in]`, and their gradients.

    Args:
        weights (`Sequence[torch.Tensor]` of shape `[out, in]`):
            Weights in any floating dtype, or [`QuantizedWeight`] that are stored in float8.
        dtype (`torch.dtype`):
            Dtype of the outputs and of the gradient of the rows.
    """

    def __init__(self, weights: Sequence[Any], dtype: torch.dtype):
        self.weights, self.dtype = weights, dtype
        self.sizes = [weight.shape[0] for weight in weights]
        # Scales of the rows, scales of the weights' rows, and the cast rows if they are kept. A backward sets those of
        # the forward.
        self.kept: list[torch.Tensor | None] = [None, None, None]
        # The transposed gradients of the outputs, if the weights need gradients.
        self.columns: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor | None, keep: bool, cast: tuple | None = None) -> list[torch.Tensor]:
        """Return the outputs `[T, out]` for `rows`, or for the rows `cast` with their scales.

        `keep` keeps the cast rows for the gradients of the weights.
        """
        cast, scale = _cast_rows(rows) if cast is None else cast
        outputs, scales = [], []
        for weight in self.weights:
            cast_weight, weight_scale = _stored(weight) or _cast_rows(weight)
            outputs.append(_product(cast, cast_weight, scale, weight_scale, self.dtype))
            scales.append(weight_scale)
        self.kept = [scale, torch.cat(scales) if len(scales) > 1 else scales[0], cast if keep else None]
        return outputs

    def input_gradient(
        self, gradients: Sequence[torch.Tensor | None], for_rows: bool, for_weights: bool
    ) -> torch.Tensor | None:
        """Return the gradient of the rows if it is wanted, and prepare [`Float8Layers.weight_gradients`]."""
        row_scale, weight_scales, _ = self.kept
        tokens, device = len(row_scale), row_scale.device
        gradients = [
            row_scale.new_zeros(tokens, size) if gradient is None else gradient
            for gradient, size in zip(gradients, self.sizes, strict=True)
        ]
        if for_weights:
            cast, scale = self._cast_gradients(gradients)
        elif for_rows:
            cast, scale = _cast_rows(*gradients, factor=weight_scales)
        if not for_rows:
            return None
        # The weights once more, transposed and side by side.
        weight = torch.empty(self.weights[0].shape[1], sum(self.sizes), dtype=DTYPE, device=device)
        for one, s, out in zip(
            self.weights, weight_scales.split(self.sizes), weight.split(self.sizes, 1), strict=True
        ):
            stored = _stored(one)
            _transposed(*((one, s) if stored is None else (stored[0], None)), out)
        return _product(cast, weight, scale, None, self.dtype)

    def _cast_gradients(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cast the gradients by row, and their transpose, which is kept, by column."""
        row_scale, weight_scales, _ = self.kept
        tokens, total, device = len(row_scale), sum(self.sizes), row_scale.device
        rows, columns = torch.zeros(tokens + total, dtype=torch.int32, device=device).split([tokens, total])
        scale, self.column_scale = (torch.empty(n, dtype=torch.float32, device=device) for n in (tokens, total))
        cast = torch.empty(tokens, total, dtype=DTYPE, device=device)
        self.columns = self.new_columns(total)
        parts = [
            (_with_whole_rows(gradient), row_scale, factor, rows, largest)
            for gradient, factor, largest in zip(
                gradients, weight_scales.split(self.sizes), columns.split(self.sizes), strict=True
            )
        ]
        for part in parts:
            _add_maxima(*part)
        outputs = (x.split(self.sizes, dim) for x, dim in ((cast, 1), (self.columns, 0), (self.column_scale, 0)))
        for part, q, t, column_scale in zip(parts, *outputs, strict=True):
            _cast_both(*part, q, scale, t, column_scale)
        return cast, scale

    def new_columns(self, size: int) -> torch.Tensor:
        """Return memory for a transpose of the rows, `[size, T]`, with `T` rounded up to a multiple of 16, at least 16."""
        tokens = max(len(self.kept[0]), 1)
        return torch.empty(size, -(-tokens // MULTIPLE) * MULTIPLE, dtype=DTYPE, device=self.kept[0].device)

    def weight_gradients(self, rows: torch.Tensor | None, columns: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the gradients `[out, in]`, after [`Float8Layers.input_gradient`].

        `rows` are those of the forward, if it did not keep them, or `columns` their transpose in float8.
        """
        scale, _, cast = self.kept
        if columns is None:
            columns = self.new_columns(self.weights[0].shape[1])
            _transposed(rows if cast is None else cast, scale if cast is None else None, columns)
        found = _product(self.columns, columns, self.column_scale, None, self.dtype)
        self.columns = None
        return [part.to(weight.dtype) for part, weight in zip(found.split(self.sizes), self.weights, strict=True)]


def _product(left, right, left_scale, right_scale, dtype):
    """Return `left @ right.T` of factors in float8, times the scales of the rows of both."""
    if right_scale is None:
        right_scale = torch.ones(len(right), dtype=torch.float32, device=right.device)
    if not left.is_cuda:
        # In float16, to which autocast would cast them, products of numbers up to 448 overflow.
        with torch.autocast("cpu", enabled=False):
            product = left.float() @ right.float().t()
        return (product * left_scale[:, None] * right_scale).to(dtype)
    scales = {"scale_a": left_scale[:, None], "scale_b": right_scale[None, :]}
    return torch._scaled_mm(left, right.t(), **scales, out_dtype=dtype, use_fast_accum=True)


def _stored(weight: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a weight that is stored in float8, and the scales of its rows."""
    return None if isinstance(weight, torch.Tensor) else weight.float8


def _with_whole_rows(x):
    return x if x.stride(1) == 1 else x.contiguous()


def _cast_rows(*parts, factor=None):
    """Cast the rows of tensors side by side, times `factor`, with one scale for each row."""
    parts = [_with_whole_rows(part) for part in parts]
    if len(parts) > 3:
        parts = [torch.cat(parts, 1)]
    if parts[0].is_cuda:
        from .backends.triton.float8 import cast_rows

        return cast_rows(*parts, factor=factor)
    x = torch.cat(parts, 1).float()
    x = x if factor is None else x * factor
    scale = _scale_of(_magnitude(x).amax(1))
    return (x / scale[:, None]).to(DTYPE), scale


def _transposed(x, scale, out):
    if x.is_cuda:
        from .backends.triton.float8 import transposed

        transposed(_with_whole_rows(x), scale, out)
        return
    x = x if scale is None else (x.float() / scale[:, None]).to(DTYPE)
    out[:, : len(x)] = x.t()
    out[:, len(x) :] = 0


def _add_maxima(x, row_factor, column_factor, rows, columns):
    if x.is_cuda:
        from .backends.triton.float8 import add_maxima

        add_maxima(x, row_factor, column_factor, rows, columns)
        return
    torch.maximum(rows, _magnitude(x.float() * column_factor).amax(1), out=rows)
    if len(x):
        torch.maximum(columns, _magnitude(x.float() * row_factor[:, None]).amax(0), out=columns)


def _cast_both(x, row_factor, column_factor, rows, columns, cast, row_scale, cast_columns, column_scale):
    if x.is_cuda:
        from .backends.triton.float8 import cast_both

        cast_both(x, row_factor, column_factor, rows, columns, cast, row_scale, cast_columns, column_scale)
        return
    row_scale.copy_(_scale_of(rows))
    cast.copy_((x.float() * column_factor / row_scale[:, None]).to(DTYPE))
    column_scale.copy_(_scale_of(columns))
    _transposed((x.float() * row_factor[:, None] / column_scale).to(DTYPE), None, cast_columns)


def _magnitude(x):
    """Return the bits of absolute values, which order as integers do. NaN counts as 0: it stays NaN in e4m3."""
    return x.abs().nan_to_num(0, posinf=float("inf")).view(torch.int32)


def _scale_of(bits):
    """Return the power of two by which numbers with magnitudes up to `bits` are at most 448, or NaN for infinity."""
    exponent = (((bits + 0x1FFFFF) >> 23) - 8).clamp(min=27)
    return (exponent << 23).view(torch.float32).masked_fill(bits >= _INFINITY, float("nan"))
