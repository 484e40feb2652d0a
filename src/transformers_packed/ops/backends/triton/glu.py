"""Elementwise products with an activation: `silu(gate) * up` of an MLP, and `x * sigmoid(gate)` after attention."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ...autograd import first_order
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
def _gate_backward(
    dy_ptr, gate_ptr, x_ptr, dgate_ptr, dx_ptr, y_ptr, count, SILU: tl.constexpr, AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
    if AGAIN:
        tl.store(y_ptr + at, (x * activated).to(y_ptr.dtype.element_ty), mask=inside)


class GLU(torch.autograd.Function):
    """`x * sigmoid(gate)`, or `x * silu(gate)` with `silu=True`, for tensors `[..., width]`.

    The product may go through a linear layer with `weight` `[out, width]`. The backward then recomputes the product,
    which is not saved.
    """

    @staticmethod
    @on_its_device
    def forward(ctx, gate, x, weight, silu: bool):
        gate, x = gate.contiguous(), x.contiguous()
        ctx.save_for_backward(gate, x, weight)
        ctx.silu = silu
        y = torch.empty_like(x)
        if y.numel():
            _gate_forward[(ceil_div(y.numel(), _BLOCK),)](gate, x, y, y.numel(), silu, _BLOCK)
        return y if weight is None else F.linear(y, weight)

    @staticmethod
    @first_order()
    def backward(ctx, d_out):
        gate, x, weight = ctx.saved_tensors
        again = weight is not None and ctx.needs_input_grad[2]
        if weight is not None:
            d_out = d_out.reshape(-1, weight.shape[0])
        dy = d_out.contiguous() if weight is None else torch.mm(d_out, weight)
        dgate, dx = torch.empty_like(gate), torch.empty_like(x)
        y = torch.empty_like(x) if again else None
        if x.numel():
            grid = (ceil_div(x.numel(), _BLOCK),)
            _gate_backward[grid](dy, gate, x, dgate, dx, y, x.numel(), ctx.silu, again, _BLOCK)
        return dgate, dx, torch.mm(d_out.t(), y.reshape(-1, y.shape[-1])) if again else None, None
