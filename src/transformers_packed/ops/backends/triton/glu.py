"""Elementwise products with an activation: `silu(gate) * up` of an MLP, and `x * sigmoid(gate)` after attention."""

import torch
import triton
import triton.language as tl

from ...autograd import first_order
from ...projection import Products, needs_rows, unflattened
from . import ceil_div, on_its_device


_BLOCK = 2048
# Elements of the product that the backward recomputes at a time if only adapters need it: 128 MiB in bfloat16.
_PIECE = 1 << 26


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

    The product may go through one linear layer, given by `structure` and `tensors` of [`flatten`]. The backward then
    recomputes the product, which is not saved.
    """

    @staticmethod
    @on_its_device
    def forward(ctx, gate, x, silu: bool, structure: tuple, *tensors):
        gate, x = gate.contiguous(), x.contiguous()
        ctx.silu, ctx.structure = silu, structure
        y = torch.empty_like(x)
        if y.numel():
            _gate_forward[(ceil_div(y.numel(), _BLOCK),)](gate, x, y, y.numel(), silu, _BLOCK)
        if not structure:
            ctx.save_for_backward(gate, x)
            return y
        products = Products(structure, tensors, x.dtype)
        (output,) = products.forward(y.view(-1, y.shape[-1]))
        ctx.save_for_backward(gate, x, *products.to_save())
        return unflattened(output, x.shape[:-1])

    @staticmethod
    @first_order()
    def backward(ctx, d_out):
        gate, x, *saved = ctx.saved_tensors
        wanted, found = ctx.needs_input_grad[4:], []
        again = needs_rows(ctx.structure, wanted)
        if ctx.structure:
            products, d_outs = Products.restore(ctx.structure, saved, x.dtype), [d_out.reshape(-1, d_out.shape[-1])]
            dy = products.input_gradient(d_outs, True, wanted)
            # The kernel reads an element of `dy` before it writes the same element of `dx`.
            dx = dy.view(x.shape)
        else:
            dy, dx = d_out.contiguous(), torch.empty_like(x)
        dgate, y, width = torch.empty_like(gate), None, x.shape[-1]
        length = _PIECE // width
        if again and x.numel() > _PIECE and not (wanted[0] or products.dropped):
            y = x.new_empty(length, width)
            for parts in zip(*(t.view(-1, width).split(length) for t in (dy, gate, x, dgate, dx)), strict=True):
                rows = y[: len(parts[0])]
                _launch_backward(*parts, rows, ctx.silu)
                products.add_stack_gradient(rows)
            y = None
        else:
            y = torch.empty_like(x) if again else None
            _launch_backward(dy, gate, x, dgate, dx, y, ctx.silu)
        if ctx.structure:
            found = products.parameter_gradients(d_outs, None if y is None else y.view(-1, width), wanted)
        return dgate, dx, None, None, *found


def _launch_backward(dy, gate, x, dgate, dx, y, silu):
    if x.numel():
        _gate_backward[(ceil_div(x.numel(), _BLOCK),)](
            dy, gate, x, dgate, dx, y, x.numel(), silu, y is not None, _BLOCK
        )
