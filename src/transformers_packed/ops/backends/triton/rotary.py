"""Zero-centered RMS norm of each query and key head, then a rotary embedding of the first channels.

The projection of the queries also holds the gate of each head, which is split off. Each program computes one head of a
tile of tokens. The heads of the queries come first, then those of the keys. The rotary channels are loaded a second
time, as two halves that rotate together:

    y1 = n1 * cos1 - n2 * sin1        y2 = n2 * cos2 + n1 * sin2        n = x * r * (1 + weight)
"""

import torch
import triton
import triton.language as tl

from . import KernelFunction, ceil_div, next_power_of_2
from .norm import programs_for


_TOKENS = 8


@triton.jit
def _halves(pointer, inside, HALF: tl.constexpr):
    """Load both halves of the rotary channels of the rows at `pointer` `[tokens, columns]`."""
    first = tl.load(pointer, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(pointer + HALF, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _scales(weight_ptr, column, HALF: tl.constexpr):
    """Load `1 + weight` of both halves."""
    inside = column < HALF
    first = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    return 1.0 + first, 1.0 + tl.load(weight_ptr + HALF + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["length"])
def _rotary_forward(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, gate_ptr, r_ptr, length, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, DIM)[None, :]
    inside = (token < length)[:, None]
    if head < Q_HEADS:
        weight_ptr = q_weight_ptr
        source = q_ptr + (token * (2 * Q_HEADS * DIM) + head * 2 * DIM)[:, None]
        at = (token * (Q_HEADS * DIM) + head * DIM)[:, None]
        target = q_out_ptr + at
        gate = tl.load(source + DIM + column, mask=inside, other=0.0)
        tl.store(gate_ptr + at + column, gate, mask=inside)
    else:
        weight_ptr = k_weight_ptr
        at = (token * (K_HEADS * DIM) + (head - Q_HEADS) * DIM)[:, None]
        source = k_ptr + at
        target = k_out_ptr + at
    x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
    tl.store(r_ptr + token * (Q_HEADS + K_HEADS) + head, r, mask=token < length)
    r = r[:, None]
    y = x * r * (1.0 + tl.load(weight_ptr + column).to(tl.float32))
    tl.store(target + column, y.to(q_out_ptr.dtype.element_ty), mask=inside & (column >= 2 * HALF))
    turning = tl.arange(0, WIDTH)[None, :]
    inside = inside & (turning < HALF)
    w1, w2 = _scales(weight_ptr, turning, HALF)
    x1, x2 = _halves(source + turning, inside, HALF)
    cos1, cos2 = _halves(cos_ptr + token[:, None] * (2 * HALF) + turning, inside, HALF)
    sin1, sin2 = _halves(sin_ptr + token[:, None] * (2 * HALF) + turning, inside, HALF)
    n1 = x1 * r * w1
    n2 = x2 * r * w2
    tl.store(target + turning, (n1 * cos1 - n2 * sin1).to(q_out_ptr.dtype.element_ty), mask=inside)
    tl.store(target + HALF + turning, (n2 * cos2 + n1 * sin2).to(q_out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "tiles"])
def _rotary_backward(
    dq_ptr, dk_ptr, dgate_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, r_ptr, dq_in_ptr, dk_in_ptr,
    dweight_ptr, length, tiles,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    column = tl.arange(0, DIM)[None, :]
    turning = tl.arange(0, WIDTH)[None, :]
    if head < Q_HEADS:
        weight_ptr = q_weight_ptr
    else:
        weight_ptr = k_weight_ptr
    weight = 1.0 + tl.load(weight_ptr + column).to(tl.float32)
    w1, w2 = _scales(weight_ptr, turning, HALF)
    dweight = tl.zeros((TOKENS, DIM), tl.float32)
    dw1 = tl.zeros((TOKENS, WIDTH), tl.float32)
    dw2 = tl.zeros((TOKENS, WIDTH), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        token = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        exists = (token < length)[:, None]
        if head < Q_HEADS:
            out = (token * (Q_HEADS * DIM) + head * DIM)[:, None]
            gradient = dq_ptr + out
            at = (token * (2 * Q_HEADS * DIM) + head * 2 * DIM)[:, None]
            source = q_ptr + at
            target = dq_in_ptr + at
            gate = tl.load(dgate_ptr + out + column, mask=exists, other=0.0)
            tl.store(target + DIM + column, gate, mask=exists)
        else:
            at = (token * (K_HEADS * DIM) + (head - Q_HEADS) * DIM)[:, None]
            gradient = dk_ptr + at
            source = k_ptr + at
            target = dk_in_ptr + at
        # The other channels, then both halves of the rotary channels: the same computation except for the angle.
        r = tl.load(r_ptr + token * (Q_HEADS + K_HEADS) + head, mask=token < length, other=0.0)[:, None]
        straight = exists & (column >= 2 * HALF)
        normed = tl.load(source + column, mask=straight, other=0.0).to(tl.float32) * r
        dn = tl.load(gradient + column, mask=straight, other=0.0).to(tl.float32)
        inside = exists & (turning < HALF)
        normed1, normed2 = _halves(source + turning, inside, HALF)
        normed1 *= r
        normed2 *= r
        dy1, dy2 = _halves(gradient + turning, inside, HALF)
        cos1, cos2 = _halves(cos_ptr + token[:, None] * (2 * HALF) + turning, inside, HALF)
        sin1, sin2 = _halves(sin_ptr + token[:, None] * (2 * HALF) + turning, inside, HALF)
        dn1 = dy1 * cos1 + dy2 * sin2
        dn2 = dy2 * cos2 - dy1 * sin1
        dweight += dn * normed
        dw1 += dn1 * normed1
        dw2 += dn2 * normed2
        dn *= weight
        dn1 *= w1
        dn2 *= w2
        mean = ((tl.sum(dn * normed, 1) + tl.sum(dn1 * normed1 + dn2 * normed2, 1)) / DIM)[:, None]
        tl.store(target + column, (r * (dn - normed * mean)).to(dq_in_ptr.dtype.element_ty), mask=straight)
        target += turning
        tl.store(target, (r * (dn1 - normed1 * mean)).to(dq_in_ptr.dtype.element_ty), mask=inside)
        tl.store(target + HALF, (r * (dn2 - normed2 * mean)).to(dq_in_ptr.dtype.element_ty), mask=inside)
    to = dweight_ptr + (tl.program_id(0) * (Q_HEADS + K_HEADS) + head) * DIM
    column = tl.arange(0, DIM)
    tl.store(to + column, tl.sum(dweight, 0), mask=column >= 2 * HALF)
    turning = tl.arange(0, WIDTH)
    tl.store(to + turning, tl.sum(dw1, 0), mask=turning < HALF)
    tl.store(to + HALF + turning, tl.sum(dw2, 0), mask=turning < HALF)


class QKNormRope(KernelFunction):
    """The op for queries and gates `[T, Q, 2, dim]`, keys `[T, K, dim]`, weights `[dim]`, angles `[T, rotary]`."""

    def forward(ctx, q, k, q_weight, k_weight, cos, sin, eps):
        q, k, q_weight, k_weight, cos, sin = (x.contiguous() for x in (q, k, q_weight, k_weight, cos, sin))
        length, q_heads, _, dim = q.shape
        q_out, gate = (q.new_empty(length, q_heads, dim) for _ in range(2))
        k_out = torch.empty_like(k)
        r = torch.empty(length, q_heads + k.shape[1], dtype=torch.float32, device=q.device)
        half = cos.shape[1] // 2
        ctx.sizes = (q_heads, k.shape[1], dim, half, next_power_of_2(half), _TOKENS)
        grid = (ceil_div(length, _TOKENS), q_heads + k.shape[1])
        _rotary_forward[grid](q, k, q_weight, k_weight, cos, sin, q_out, k_out, gate, r, length, eps, *ctx.sizes)
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin, r)
        return q_out, k_out, gate

    def backward(ctx, dq_out, dk_out, dgate):
        q, k, q_weight, k_weight, cos, sin, r = ctx.saved_tensors
        dq_out, dk_out, dgate = (x.contiguous() for x in (dq_out, dk_out, dgate))
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        q_heads, k_heads, dim = ctx.sizes[:3]
        tiles = ceil_div(len(q), _TOKENS)
        programs = programs_for(tiles, q.device)
        dweight = torch.empty(programs, q_heads + k_heads, dim, dtype=torch.float32, device=q.device)
        _rotary_backward[(programs, q_heads + k_heads)](
            dq_out, dk_out, dgate, q, k, q_weight, k_weight, cos, sin, r, dq, dk, dweight, len(q), tiles, *ctx.sizes,
            num_warps=2,
        )  # fmt: skip
        dweight = dweight.sum(0)
        dq_weight, dk_weight = dweight[:q_heads].sum(0), dweight[q_heads:].sum(0)
        return dq, dk, dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype), None, None, None
