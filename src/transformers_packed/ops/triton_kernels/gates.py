"""Elementwise products with an activation: `silu(gate) * up` of an MLP, and `x * sigmoid(gate)` after attention."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from . import ceil_div, on_its_device


_BLOCK = 2048


@triton.jit
def _gate_forward(gate_ptr, x_ptr, y_ptr, count, SILU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(gate)
    if SILU:
        y *= gate
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward(dy_ptr, gate_ptr, x_ptr, dgate_ptr, dx_ptr, count, SILU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
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


class GatedProduct(torch.autograd.Function):
    """`x * sigmoid(gate)`, or with `silu` `x * silu(gate)`, of tensors of one shape."""

    @staticmethod
    @on_its_device
    def forward(ctx, gate, x, silu: bool):
        gate, x = gate.contiguous(), x.contiguous()
        y = torch.empty_like(x)
        ctx.save_for_backward(gate, x)
        ctx.silu = silu
        if y.numel():
            _gate_forward[(ceil_div(y.numel(), _BLOCK),)](gate, x, y, y.numel(), silu, _BLOCK)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate, x = ctx.saved_tensors
        dy = dy.contiguous()
        dgate, dx = torch.empty_like(gate), torch.empty_like(x)
        if dy.numel():
            _gate_backward[(ceil_div(dy.numel(), _BLOCK),)](dy, gate, x, dgate, dx, dy.numel(), ctx.silu, _BLOCK)
        return dgate, dx, None
