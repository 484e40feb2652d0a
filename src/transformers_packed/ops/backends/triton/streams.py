"""Residuals of several streams: their gates, their gated mean, and the sum of each with a multiple of a row.

A program of the latter two computes a token: `S` rows of the streams and one row beside them, which it reads once.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from . import KernelFunction, ceil_div, next_power_of_2


# Columns per program of the mean, and elements per program of the gates.
_BLOCK = 1024


@triton.jit(do_not_specialize=["lows", "others"])
def _gates_forward(low_ptr, x_ptr, y_ptr, factor_ptr, lows, others, scale, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(lows, BLOCK)
    if block < blocks:
        at = block * BLOCK + tl.arange(0, BLOCK)
        low = tl.load(low_ptr + at, mask=at < lows, other=0.0).to(tl.float32) * scale
        tl.store(y_ptr + at, (low * tl.sigmoid(low)).to(y_ptr.dtype.element_ty), mask=at < lows)
    else:
        at = (block - blocks) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < others, other=0.0).to(tl.float32) * scale
        tl.store(factor_ptr + at, (2.0 * tl.sigmoid(x)).to(factor_ptr.dtype.element_ty), mask=at < others)


@triton.jit(do_not_specialize=["lows", "others"])
def _gates_backward(dy_ptr, dfactor_ptr, low_ptr, x_ptr, dlow_ptr, dx_ptr, lows, others, scale, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(lows, BLOCK)
    if block < blocks:
        at = block * BLOCK + tl.arange(0, BLOCK)
        low = tl.load(low_ptr + at, mask=at < lows, other=0.0).to(tl.float32) * scale
        dy = tl.load(dy_ptr + at, mask=at < lows, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(low)
        dlow = dy * scale * sigmoid * (1.0 + low * (1.0 - sigmoid))
        tl.store(dlow_ptr + at, dlow.to(dlow_ptr.dtype.element_ty), mask=at < lows)
    else:
        at = (block - blocks) * BLOCK + tl.arange(0, BLOCK)
        sigmoid = tl.sigmoid(tl.load(x_ptr + at, mask=at < others, other=0.0).to(tl.float32) * scale)
        dfactor = tl.load(dfactor_ptr + at, mask=at < others, other=0.0).to(tl.float32)
        dx = dfactor * (2.0 * scale) * sigmoid * (1.0 - sigmoid)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=at < others)


@triton.jit
def _mix_forward(gate_ptr, x_ptr, y_ptr, width, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for stream in tl.static_range(STREAMS):
        at = (row * STREAMS + stream) * width + column
        gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * tl.sigmoid(gate)
    tl.store(y_ptr + row * width + column, (total / STREAMS).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _mix_backward(dy_ptr, gate_ptr, x_ptr, dgate_ptr, dx_ptr, width, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dy = tl.load(dy_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32) / STREAMS
    for stream in tl.static_range(STREAMS):
        at = (row * STREAMS + stream) * width + column
        factor = tl.sigmoid(tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32))
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, (dy * factor).to(dx_ptr.dtype.element_ty), mask=inside)
        dgate = dy * x * factor * (1.0 - factor)
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_forward(x_ptr, row_ptr, factor_ptr, y_ptr, width, STREAMS: tl.constexpr, WIDTH: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    added = tl.load(row_ptr + token * width + column, mask=inside, other=0.0).to(tl.float32)
    for stream in tl.static_range(STREAMS):
        at = (token * STREAMS + stream) * width + column
        factor = tl.load(factor_ptr + token * STREAMS + stream).to(tl.float32)
        y = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) + factor * added
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_backward(
    dy_ptr, row_ptr, factor_ptr, drow_ptr, dfactor_ptr, width, STREAMS: tl.constexpr, WIDTH: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    inside = column < width
    added = tl.load(row_ptr + token * width + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for stream in tl.static_range(STREAMS):
        at = (token * STREAMS + stream) * width + column
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total += dy * tl.load(factor_ptr + token * STREAMS + stream).to(tl.float32)
        dfactor = tl.sum(dy * added, 0)
        tl.store(dfactor_ptr + token * STREAMS + stream, dfactor.to(dfactor_ptr.dtype.element_ty))
    tl.store(drow_ptr + token * width + column, total.to(drow_ptr.dtype.element_ty), mask=inside)


@lru_cache
def _tile(width: int) -> dict[str, int]:
    padded = next_power_of_2(width)
    return {"WIDTH": padded, "num_warps": min(max(4, padded // 512), 16)}


class StreamGates(KernelFunction):
    """`silu(low / streams)`, and `2 * sigmoid(x / streams)` unless `x` is `None`, in one kernel."""

    def forward(ctx, low, x, streams):
        low, x = low.contiguous(), None if x is None else x.contiguous()
        ctx.save_for_backward(low, x)
        ctx.streams = streams
        y, factor = torch.empty_like(low), None if x is None else torch.empty_like(x)
        _launch_gates(_gates_forward, (low, x, y, factor), low, x, streams)
        return y, factor

    def backward(ctx, dy, dfactor):
        low, x = ctx.saved_tensors
        dy, dlow = dy.contiguous(), torch.empty_like(low)
        dfactor, dx = (None, None) if x is None else (dfactor.contiguous(), torch.empty_like(x))
        _launch_gates(_gates_backward, (dy, dfactor, low, x, dlow, dx), low, x, ctx.streams)
        return dlow, dx, None


def _launch_gates(kernel, tensors, low, x, streams):
    """Run a kernel for blocks of `low`, and then for those of `x`, if there are any."""
    sizes = low.numel(), 0 if x is None else x.numel()
    if blocks := sum(ceil_div(size, _BLOCK) for size in sizes):
        kernel[(blocks,)](*(low if tensor is None else tensor for tensor in tensors), *sizes, 1 / streams, _BLOCK)


class MixStreams(KernelFunction):
    """The mean over the streams of `sigmoid(gate) * x`, both `[..., S, width]`."""

    def forward(ctx, gate, x):
        gate, x = gate.contiguous(), x.contiguous()
        dtype = torch.promote_types(gate.dtype, x.dtype)
        y = torch.empty(x.shape[:-2] + x.shape[-1:], dtype=dtype, device=x.device)
        ctx.save_for_backward(gate, x)
        _launch(_mix_forward, y, gate, x, y, streams=x.shape[-2])
        return y

    def backward(ctx, dy):
        gate, x = ctx.saved_tensors
        dy, dgate, dx = dy.contiguous(), torch.empty_like(gate), torch.empty_like(x)
        _launch(_mix_backward, dy, dy, gate, x, dgate, dx, streams=x.shape[-2])
        return dgate, dx


def _launch(kernel, row, *tensors, streams):
    """Run a kernel for each token and block of columns of `row` `[..., width]`."""
    width = row.shape[-1]
    if row.numel():
        kernel[row.numel() // width, ceil_div(width, _BLOCK)](*tensors, width, streams, _BLOCK)


class AddToStreams(KernelFunction):
    """`x + factor * row` for `x` `[..., S, width]`, `row` `[..., width]` and `factor` `[..., S]`."""

    def forward(ctx, x, row, factor):
        x, row, factor = x.contiguous(), row.contiguous(), factor.contiguous()
        dtype = torch.promote_types(x.dtype, torch.promote_types(row.dtype, factor.dtype))
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        ctx.dtype = x.dtype
        ctx.save_for_backward(row, factor)
        if x.numel():
            width = x.shape[-1]
            _add_forward[(row.numel() // width,)](x, row, factor, y, width, x.shape[-2], **_tile(width))
        return y

    def backward(ctx, dy):
        row, factor = ctx.saved_tensors
        dy, drow, dfactor = dy.contiguous(), torch.empty_like(row), torch.empty_like(factor)
        if dy.numel():
            width = row.shape[-1]
            call = dy, row, factor, drow, dfactor, width, factor.shape[-1]
            _add_backward[(row.numel() // width,)](*call, **_tile(width))
        return dy.to(ctx.dtype), drow, dfactor
