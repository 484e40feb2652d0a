"""RMS norm of rows, optionally with a residual addition before it or a gate after it, and its gradient.

    s = x + residual        r = 1 / sqrt(mean(s^2) + eps)        y = s * r * (offset + weight) * silu(gate)

With the gate first, s = x * silu(gate), and y is not gated again. A sigmoid may take the place of silu. With a weight
for each of several groups, a row is one group of a token, and a program computes rows of one group.

Each program computes a tile of whole rows. The forward reads each input and writes each output once, and saves `r`,
one number per row. The backward recomputes the rest. A fixed number of programs accumulates the gradient of the weight
in registers, and a second sum adds their results. The order of additions is therefore deterministic.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ...terms.products import Products, unflattened
from . import KernelFunction, ceil_div, next_power_of_2, on_its_device


# Elements per tile, and backward programs per multiprocessor.
_TILE = 2048
_PROGRAMS = 4


@triton.jit(do_not_specialize=["rows"])
def _norm_forward(
    x_ptr, residual_ptr, gate_ptr, weight_ptr, y_ptr, sum_ptr, r_ptr, rows, width, gate_stride, eps,
    OFFSET: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, FIRST: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) % GROUPS
    row = (tl.program_id(0) // GROUPS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    at = (row * GROUPS + group)[:, None] * width + column[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        # Rounded to the storage dtype, so that the backward computes with the same numbers.
        stored = (x + tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, stored, mask=inside)
        x = stored.to(tl.float32)
    if GATE:
        gate_at = row[:, None] * gate_stride + group * width + column[None, :]
        gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
        if FIRST:
            x = x * gate * tl.sigmoid(gate)
    r = tl.rsqrt(tl.sum(x * x, 1) / width + eps)
    tl.store(r_ptr + row * GROUPS + group, r, mask=row < rows)
    weight_at = weight_ptr + group * width + column
    weight = OFFSET + tl.load(weight_at, mask=column < width, other=0.0).to(tl.float32)
    y = x * r[:, None] * weight[None, :]
    if GATE and not FIRST:
        y = y * tl.sigmoid(gate)
        if not SIGMOID:
            y = y * gate
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _norm_backward(
    dy_ptr, dsum_ptr, x_ptr, gate_ptr, weight_ptr, r_ptr, dx_ptr, dgate_ptr, dweight_ptr, y_ptr, rows, width, gate_stride,
    tiles, AGAIN: tl.constexpr, TRAINED: tl.constexpr, OFFSET: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    FIRST: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    group = program % GROUPS
    column = tl.arange(0, WIDTH)
    weight_at = weight_ptr + group * width + column
    weight = OFFSET + tl.load(weight_at, mask=column < width, other=0.0).to(tl.float32)
    # Sum over the rows of the tiles only at the end, because a sum across warps has to synchronize.
    dweight = tl.zeros((ROWS, WIDTH), tl.float32)
    for tile in range(program // GROUPS, tiles, tl.num_programs(0) // GROUPS):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = (row * GROUPS + group)[:, None] * width + column[None, :]
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row * GROUPS + group, mask=row < rows, other=0.0)
        normed = x * r[:, None]
        if GATE:
            gate_at = row[:, None] * gate_stride + group * width + column[None, :]
            gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
            factor = tl.sigmoid(gate)
            if SIGMOID:
                slope = factor * (1.0 - factor)
            else:
                # d silu = sigmoid * (1 + gate * (1 - sigmoid))
                slope = factor * (1.0 + gate * (1.0 - factor))
                factor = factor * gate
            if AGAIN:
                y = normed * weight[None, :] * factor
                tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
            if FIRST:
                normed *= factor
            else:
                dgate = dy * normed * weight[None, :] * slope
                tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
                dy = dy * factor
        if TRAINED:
            dweight += dy * normed
        dnormed = dy * weight[None, :]
        dx = r[:, None] * (dnormed - normed * (tl.sum(dnormed * normed, 1) / width)[:, None])
        if GATE and FIRST:
            tl.store(dgate_ptr + at, (dx * x * slope).to(dgate_ptr.dtype.element_ty), mask=inside)
            dx *= factor
        if RESIDUAL:
            dx += tl.load(dsum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if TRAINED:
        tl.store(dweight_ptr + program * width + column, tl.sum(dweight, 0), mask=column < width)


@lru_cache
def _tile(width: int) -> dict[str, int]:
    padded = next_power_of_2(width)
    return {"ROWS": max(1, _TILE // padded), "WIDTH": padded, "num_warps": min(max(4, padded // 256), 16)}


class RMSNorm(KernelFunction):
    """RMS norm of `x` `[..., width]` with `weight` `[width]`, and optional `residual` and `gate` `[..., width]`.

    With a residual, it returns the norm and the sum; with `stream`, the norm and `x`. With a gate, the norm
    `[..., heads, width]` may go through one linear layer with `heads * width` inputs, given by `plan` and `tensors` of
    [`planned`]. The norm is then not saved: the backward recomputes it. A `weight` `[heads, width]` has one for each
    head. With `first`, the gate comes before the norm.
    """

    def forward(ctx, x, weight, residual, gate, eps, offset, stream, first, sigmoid, plan, *tensors):
        # Under autocast, layer outputs have low precision, but the residual stream does not.
        ctx.shape, ctx.dtypes = x.shape, (x.dtype, x.dtype if residual is None else residual.dtype)
        given = x
        x, residual = (None if z is None else z.reshape(-1, z.shape[-1]).contiguous() for z in (x, residual))
        weight = weight.contiguous()
        width, groups = x.shape[1], weight.numel() // x.shape[1]
        rows = len(x) // groups
        if gate is not None:
            # Columns of a wider row are read where they are.
            gate = gate.reshape(rows, groups * width)
            gate = gate if gate.stride(1) == 1 else gate.contiguous()
        total = x
        if residual is not None:
            total = torch.empty(ctx.shape, dtype=torch.promote_types(*ctx.dtypes), device=x.device)
        # Allocate outputs in their final shape: autograd forbids in-place changes to views from a custom function.
        y = torch.empty(ctx.shape, dtype=total.dtype, device=x.device)
        r = torch.empty(len(x), dtype=torch.float32, device=x.device)
        tile = _tile(width)
        ctx.options = {"OFFSET": offset, "RESIDUAL": residual is not None, "GATE": gate is not None}
        ctx.options |= {"FIRST": first, "SIGMOID": sigmoid, "GROUPS": groups} | tile
        grid = (ceil_div(rows, tile["ROWS"]) * groups,)
        stride = width if gate is None else gate.stride(0)
        _norm_forward[grid](x, residual, gate, weight, y, total, r, rows, width, stride, eps, **ctx.options)
        products = Products(ctx, plan, tensors, y.dtype)
        rows = y.view(-1, ctx.shape[-2:].numel()) if plan.layers else None
        products.prepare(rows)
        products.save(ctx, total, weight, gate, r)
        if plan.layers:
            return unflattened(products.forward(rows)[0], ctx.shape[:-2])
        if residual is None:
            return (y, given) if stream else y
        return y, total

    def backward(ctx, d_out, dsum=None):
        products, (x, weight, gate, r) = Products.restored(ctx)
        x = x.view(-1, x.shape[-1])
        width, groups = x.shape[1], ctx.options["GROUPS"]
        rows = len(x) // groups
        dy, d_outs, layers = d_out, [d_out.reshape(-1, d_out.shape[-1])], products.plan.layers
        again = products.needs_rows()
        if layers:
            dy = products.input_gradient(d_outs)
        dy = dy.reshape(-1, width).contiguous()
        dsum = None if dsum is None else dsum.reshape(-1, width).contiguous()
        # With a linear layer, `dy` is not needed after the kernel, which reads each row of it before it writes `dx`.
        dx = dy if layers else torch.empty_like(x)
        dgate = None if gate is None else torch.empty(x.shape, dtype=gate.dtype, device=gate.device)
        y = torch.empty_like(x) if again else None
        tiles = ceil_div(rows, ctx.options["ROWS"])
        programs = max(1, programs_for(tiles * groups, x.device) // groups) * groups
        stride = width if gate is None else gate.stride(0)
        trained = ctx.needs_input_grad[1]
        dweight = torch.empty(programs, width, dtype=torch.float32, device=x.device) if trained else None
        options = ctx.options | {"RESIDUAL": dsum is not None}
        _norm_backward[(programs,)](
            dy, dsum, x, gate, weight, r, dx, dgate, dweight, y, rows, width, stride, tiles, again, trained,
            **options,
        )  # fmt: skip
        dx = dx.view(ctx.shape)
        dresidual = dx.to(ctx.dtypes[1]) if ctx.options["RESIDUAL"] else None
        dweight = dweight.view(-1, *weight.shape).sum(0).to(weight.dtype) if trained else None
        y = y.view(-1, ctx.shape[-2:].numel()) if again else None
        found = products.parameter_gradients(d_outs, y)
        dgate = None if gate is None else dgate.view(ctx.shape)
        return dx.to(ctx.dtypes[0]), dweight, dresidual, dgate, None, None, None, None, None, None, *found


@on_its_device
def normed_again(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Return the norm of [`RMSNorm`] without a gate once more, given `x` or the sum with the residual."""
    x = x.contiguous()
    width, groups = x.shape[-1], weight.numel() // x.shape[-1]
    y, rows, tile = torch.empty_like(x), x.numel() // weight.numel(), _tile(width)
    r = torch.empty(rows * groups, dtype=torch.float32, device=x.device)
    absent = dict.fromkeys(("RESIDUAL", "GATE", "FIRST", "SIGMOID"), False)
    options = {"OFFSET": offset, "GROUPS": groups} | absent | tile
    grid = (ceil_div(rows, tile["ROWS"]) * groups,)
    _norm_forward[grid](x, None, None, weight.contiguous(), y, x, r, rows, width, width, eps, **options)
    return y


@lru_cache
def programs_for(tiles: int, device: torch.device) -> int:
    """Return the number of programs that share `tiles` if each program accumulates a sum over its tiles."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return max(1, min(tiles, _PROGRAMS * multiprocessors))
