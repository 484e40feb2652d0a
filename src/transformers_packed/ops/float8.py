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

Nothing is cached. Casting a weight again for each forward and backward takes less than 1 % of a step of 16,384 tokens,
needs no memory, and cannot miss a change of the weight.
"""

from collections.abc import Sequence

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
            Weights in any floating dtype.
        dtype (`torch.dtype`):
            Dtype of the outputs and of the gradient of the rows.
        kept (`Sequence[torch.Tensor | None]`, *optional*):
            What the instance of the forward kept.
    """

    def __init__(self, weights: Sequence[torch.Tensor], dtype: torch.dtype, kept: Sequence = (None, None, None)):
        self.weights, self.dtype = weights, dtype
        self.sizes = [len(weight) for weight in weights]
        # Scales of the rows, scales of the weights' rows, and the cast rows if they are kept.
        self.kept = list(kept)

    def forward(self, rows: torch.Tensor, keep: bool) -> list[torch.Tensor]:
        """Return the outputs `[T, out]`. `keep` keeps the cast rows for the gradients of the weights."""
        cast, scale = _cast_rows(rows)
        outputs, scales = [], []
        for weight in self.weights:
            cast_weight, weight_scale = _cast_rows(weight)
            outputs.append(_product(cast, cast_weight, scale, weight_scale, self.dtype))
            scales.append(weight_scale)
        self.kept = [scale, torch.cat(scales) if len(scales) > 1 else scales[0], cast if keep else None]
        return outputs

    def input_gradient(
        self, gradients: Sequence[torch.Tensor | None], for_rows: bool, for_weights: bool
    ) -> torch.Tensor | None:
        """Return the gradient of the rows if it is wanted, and prepare [`Float8Layers.weight_gradients`]."""
        row_scale, weight_scales, _ = self.kept
        tokens, total, device = len(row_scale), sum(self.sizes), row_scale.device
        # The largest numbers of each row and of each output. Without a gradient, an output adds zeros.
        maxima = torch.zeros(tokens + total, dtype=torch.int32, device=device)
        largest = maxima[:tokens] if for_rows else None
        scale = torch.empty(tokens if for_rows else 0, dtype=torch.float32, device=device)
        column_scale = torch.empty(total if for_weights else 0, dtype=torch.float32, device=device)
        new = torch.zeros if any(gradient is None for gradient in gradients) else torch.empty
        cast = new(tokens, total, dtype=torch.uint8, device=device).view(DTYPE) if for_rows else None
        padded = -(-tokens // MULTIPLE) * MULTIPLE
        self.columns = new(total, padded, dtype=torch.uint8, device=device).view(DTYPE) if for_weights else None
        self.column_scale = column_scale
        if for_weights and new is torch.zeros:
            column_scale.fill_(1)
        found, start = [], 0
        for gradient, size in zip(gradients, self.sizes, strict=True):
            part, start = slice(start, start + size), start + size
            if gradient is not None:
                gradient = gradient if gradient.stride(1) == 1 else gradient.contiguous()
                of_columns = maxima[tokens:][part] if for_weights else None
                found.append((gradient, row_scale, weight_scales[part], largest, of_columns, part))
        for *arguments, _ in found:
            _add_maxima(*arguments)
        for *arguments, part in found:
            outputs = (cast[:, part], scale) if for_rows else (None, None)
            outputs += (self.columns[part], column_scale[part]) if for_weights else (None, None)
            _cast_both(*arguments, *outputs)
        if not for_rows:
            return None
        # The weights once more, transposed and side by side.
        weight = torch.empty(self.weights[0].shape[1], total, dtype=DTYPE, device=device)
        for one, s, out in zip(
            self.weights, weight_scales.split(self.sizes), weight.split(self.sizes, 1), strict=True
        ):
            _transposed(one, s, out)
        return _product(cast, weight, scale, None, self.dtype)

    def weight_gradients(self, rows: torch.Tensor | None) -> list[torch.Tensor]:
        """Return the gradients `[out, in]`, after [`Float8Layers.input_gradient`].

        `rows` are those of the forward, if it did not keep them.
        """
        scale, _, cast = self.kept
        rows, scale = (rows, scale) if cast is None else (cast, None)
        columns = torch.empty(rows.shape[1], self.columns.shape[1], dtype=DTYPE, device=rows.device)
        _transposed(rows, scale, columns)
        found = _product(self.columns, columns, self.column_scale, None, self.dtype)
        self.columns = None
        return [part.to(weight.dtype) for part, weight in zip(found.split(self.sizes), self.weights, strict=True)]


def _product(left, right, left_scale, right_scale, dtype):
    """Return `left @ right.T` of factors in float8, times the scales of the rows of both."""
    if right_scale is None:
        right_scale = torch.ones(len(right), dtype=torch.float32, device=right.device)
    if not left.is_cuda:
        product = left.float() @ right.float().t()
        return (product * left_scale[:, None] * right_scale).to(dtype)
    scales = {"scale_a": left_scale[:, None], "scale_b": right_scale[None, :]}
    return torch._scaled_mm(left, right.t(), **scales, out_dtype=dtype, use_fast_accum=True)


def _cast_rows(x):
    x = x if x.stride(1) == 1 else x.contiguous()
    if x.is_cuda:
        from .backends.triton.float8 import cast_rows

        return cast_rows(x)
    x = x.float()
    scale = _scale_of(_magnitude(x).amax(1))
    return _rounded(x / scale[:, None]), scale


def _transposed(x, scale, out):
    if x.is_cuda:
        from .backends.triton.float8 import transposed

        transposed(x, scale, out)
        return
    x = x if scale is None else _rounded(x.float() / scale[:, None])
    out[:, : len(x)] = x.t()
    out[:, len(x) :] = 0


def _add_maxima(x, row_factor, column_factor, rows, columns):
    if x.is_cuda:
        from .backends.triton.float8 import add_maxima

        add_maxima(x, row_factor, column_factor, rows, columns)
        return
    if rows is not None:
        torch.maximum(rows, _magnitude(x.float() * column_factor).amax(1), out=rows)
    if columns is not None and len(x):
        torch.maximum(columns, _magnitude(x.float() * row_factor[:, None]).amax(0), out=columns)


def _cast_both(x, row_factor, column_factor, rows, columns, cast, row_scale, cast_columns, column_scale):
    if x.is_cuda:
        from .backends.triton.float8 import cast_both

        cast_both(x, row_factor, column_factor, rows, columns, cast, row_scale, cast_columns, column_scale)
        return
    if rows is not None:
        row_scale.copy_(_scale_of(rows))
        cast.copy_(_rounded(x.float() * column_factor / row_scale[:, None]))
    if columns is not None:
        column_scale.copy_(_scale_of(columns))
        _transposed(_rounded(x.float() * row_factor[:, None] / column_scale), None, cast_columns)


def _magnitude(x):
    # Bits of absolute values order as integers do, with NaN above infinity.
    return x.view(torch.int32) & 0x7FFFFFFF


def _scale_of(bits):
    """Return the power of two by which numbers with magnitudes up to `bits` are at most 448, or NaN."""
    exponent = (((bits + 0x1FFFFF) >> 23) - 8).clamp(min=27)
    return (exponent << 23).view(torch.float32).masked_fill(bits >= _INFINITY, float("nan"))


def _rounded(x):
    # NaN stands for infinities too, which e4m3 lacks.
    return x.to(DTYPE)
