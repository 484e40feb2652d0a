"""Elementwise products with an activation: `silu(gate) * up` of an MLP, and `x * sigmoid(gate)` after attention."""

import torch
import triton
import triton.language as tl

from ...terms import Float8, Products
from ...terms.products import unflattened
from . import KernelFunction, ceil_div, next_power_of_2
from .float8 import COLUMNS, ROWS, bits, cast_with_scales, inverse, packed_at, scale_of, store_transposed


_BLOCK = 2048
# Elements of the product that the backward recomputes at a time if only adapters need it: 128 MiB in bfloat16.
_PIECE = 1 << 26


@triton.jit
def _gated(gate_ptr, x_ptr, at, inside, SILU: tl.constexpr):
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(gate)
    if SILU:
        y *= gate
    return y.to(x_ptr.dtype.element_ty)


@triton.jit
def _gate_forward(gate_ptr, x_ptr, y_ptr, count, SILU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, _gated(gate_ptr, x_ptr, at, at < count, SILU), mask=at < count)


@triton.jit
def _gate_forward_float8(
    gate_ptr, x_ptr, y_ptr, q_ptr, scale_ptr, C, SILU: tl.constexpr, KEEP: tl.constexpr, BLOCK: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * C
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, C, BLOCK):
        column = start + tl.arange(0, BLOCK)
        y = _gated(gate_ptr, x_ptr, first + column, column < C, SILU)
        if KEEP:
            tl.store(y_ptr + first + column, y, mask=column < C)
        largest = tl.maximum(largest, tl.abs(y.to(tl.float32)))
    scale = scale_of(bits(tl.max(largest, 0)))
    tl.store(scale_ptr + tl.program_id(0), scale)
    # The second read of a row comes from the cache.
    for start in range(0, C, BLOCK):
        column = start + tl.arange(0, BLOCK)
        y = _gated(gate_ptr, x_ptr, first + column, column < C, SILU).to(tl.float32)
        tl.store(q_ptr + first + column, (y * inverse(scale)).to(tl.float8e4nv), mask=column < C)


@triton.jit
def _gate_gradients(dy_ptr, gate_ptr, x_ptr, dgate_ptr, dx_ptr, at, inside, SILU: tl.constexpr):
    """Store the gradients of the gate and of `x`, and return the product."""
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    if SILU:
        activated = gate * sigmoid
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    else:
        activated = sigmoid
        slope = sigmoid * (1.0 - sigmoid)
    tl.store(dx_ptr + at, (dy * activated).to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dgate_ptr + at, (dy * x * slope).to(dgate_ptr.dtype.element_ty), mask=inside)
    return (x * activated).to(x_ptr.dtype.element_ty)


@triton.jit
def _gate_backward(
    dy_ptr, gate_ptr, x_ptr, dgate_ptr, dx_ptr, y_ptr, count, SILU: tl.constexpr, AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = _gate_gradients(dy_ptr, gate_ptr, x_ptr, dgate_ptr, dx_ptr, at, at < count, SILU)
    if AGAIN:
        tl.store(y_ptr + at, y, mask=at < count)


@triton.jit(do_not_specialize=["R", "quads", "t_stride"])
def _gate_backward_float8(
    dy_ptr, gate_ptr, x_ptr, dgate_ptr, dx_ptr, scale_ptr, t_ptr, t_stride, R, quads, C, SILU: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    packed = tl.zeros((ROWS // 4, COLUMNS), tl.int32)
    for j in tl.static_range(4):
        row = start + tl.arange(0, ROWS // 4) * 4 + j
        at = row.to(tl.int64)[:, None] * C + column[None, :]
        inside = (row < R)[:, None] & (column < C)[None, :]
        y = _gate_gradients(dy_ptr, gate_ptr, x_ptr, dgate_ptr, dx_ptr, at, inside, SILU)
        packed = packed_at(cast_with_scales(y, scale_ptr, row, R), packed, j)
    store_transposed(t_ptr, t_stride, packed, start, column, quads, C, ROWS)


class GLU(KernelFunction):
    """`x * sigmoid(gate)`, or `x * silu(gate)` with `silu=True`, for tensors `[..., width]`.

    The product may go through one linear layer, given by `plan` and `tensors` of [`planned`]. The backward then
    recomputes the product, which is not saved.
    """

    def forward(ctx, gate, x, silu, plan, *tensors):
        gate, x, width = gate.contiguous(), x.contiguous(), x.shape[-1]
        ctx.silu = silu
        products = Products(ctx, plan, tensors, x.dtype)
        float8 = products.find(Float8)
        y = torch.empty_like(x) if float8 is None or products.reads_rows_beside(float8) else None
        if float8 is not None:
            cast = torch.empty(x.numel() // width, width, dtype=torch.float8_e4m3fn, device=x.device)
            scale = torch.empty(len(cast), dtype=torch.float32, device=x.device)
            _gate_forward_float8[(len(cast),)](
                gate, x, y, cast, scale, width, silu, y is not None, min(next_power_of_2(width), _BLOCK)
            )
            float8.cast = cast, scale
        elif y is not None and y.numel():
            _gate_forward[(ceil_div(y.numel(), _BLOCK),)](gate, x, y, y.numel(), silu, _BLOCK)
        rows = None if y is None else y.view(-1, width)
        products.prepare(rows)
        products.save(ctx, gate, x)
        return unflattened(products.forward(rows)[0], x.shape[:-1]) if plan.layers else y

    def backward(ctx, d_out):
        products, (gate, x) = Products.restored(ctx)
        d_outs, again = [d_out], products.needs_rows()
        if products.plan.layers:
            d_outs = [d_out.reshape(-1, d_out.shape[-1])]
            dy = products.input_gradient(d_outs)
            # The kernel reads an element of `dy` before it writes the same element of `dx`.
            dx = dy.view(x.shape)
        else:
            dy, dx = d_out.contiguous(), torch.empty_like(x)
        dgate, y, width, float8 = torch.empty_like(gate), None, x.shape[-1], products.find(Float8)
        length = _PIECE // width
        if again and x.numel() > _PIECE and products.takes_pieces:
            y = x.new_empty(length, width)
            for parts in zip(*(t.view(-1, width).split(length) for t in (dy, gate, x, dgate, dx)), strict=True):
                rows = y[: len(parts[0])]
                _launch_backward(*parts, rows, ctx.silu)
                products.add_rows(rows)
            y = None
        elif again and float8 is not None and not products.reads_rows_beside(float8):
            float8.row_columns = columns = float8.new_columns(width)
            _launch_backward_float8(dy, gate, x, dgate, dx, float8.kept[0], columns, ctx.silu)
        else:
            y = torch.empty_like(x) if again else None
            _launch_backward(dy, gate, x, dgate, dx, y, ctx.silu)
        found = products.parameter_gradients(d_outs, None if y is None else y.view(-1, width))
        return dgate, dx, None, None, *found


def _launch_backward(dy, gate, x, dgate, dx, y, silu):
    if x.numel():
        _gate_backward[(ceil_div(x.numel(), _BLOCK),)](
            dy, gate, x, dgate, dx, y, x.numel(), silu, y is not None, _BLOCK
        )


def _launch_backward_float8(dy, gate, x, dgate, dx, scale, columns, silu):
    width, columns = x.shape[-1], columns.view(torch.int32)
    _gate_backward_float8[ceil_div(columns.shape[1], ROWS // 4), ceil_div(width, COLUMNS)](
        dy, gate, x, dgate, dx, scale, columns, columns.stride(0), len(scale), columns.shape[1], width, silu, ROWS,
        COLUMNS, num_warps=8,
    )  # fmt: skip
