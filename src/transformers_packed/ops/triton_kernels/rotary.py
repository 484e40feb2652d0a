"""From the projections of an attention layer to its queries and keys: zero-centred RMS norm of each head, then rotary
positions on the first channels. The queries' projection holds each head's gate too, which is split off on the way.

A program takes one head of a tile of tokens: first the queries' heads, then the keys'. With the first `ROTARY` channels
in two halves, channel `c` and its partner `p` in the other half turn together:

    y_c = n_c * cos_c -+ n_p * sin_c        (- in the first half, + in the second)        n = x * r * (1 + weight)
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from . import ceil_div, on_its_device
from .norm import programs_for


_TOKENS = 8


@triton.jit
def _partner(column, ROTARY: tl.constexpr):
    """Of each channel its partner, and the sign of the partner's share; a channel that does not turn is its own."""
    half: tl.constexpr = ROTARY // 2
    partner = tl.where(column < half, column + half, tl.where(column < ROTARY, column - half, column))
    return partner, tl.where(column < half, -1.0, 1.0)


@triton.jit(do_not_specialize=["length"])
def _rotary_forward(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, gate_ptr, r_ptr, length, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, DIM)
    partner, sign = _partner(column, ROTARY)
    inside = (token < length)[:, None] & (column < DIM)[None, :]
    if head < Q_HEADS:
        weight_ptr = q_weight_ptr
        source = q_ptr + (token * (2 * Q_HEADS * DIM) + head * 2 * DIM)[:, None]
        target = q_out_ptr + (token * (Q_HEADS * DIM) + head * DIM)[:, None]
        gate = tl.load(source + DIM + column[None, :], mask=inside, other=0.0)
        tl.store(gate_ptr + (token * (Q_HEADS * DIM) + head * DIM)[:, None] + column[None, :], gate, mask=inside)
    else:
        weight_ptr = k_weight_ptr
        at = (token * (K_HEADS * DIM) + (head - Q_HEADS) * DIM)[:, None]
        source = k_ptr + at
        target = k_out_ptr + at
    x = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
    tl.store(r_ptr + token * (Q_HEADS + K_HEADS) + head, r, mask=token < length)
    n = x * r[:, None] * (1.0 + tl.load(weight_ptr + column).to(tl.float32))[None, :]
    other = tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
    other = other * r[:, None] * (1.0 + tl.load(weight_ptr + partner).to(tl.float32))[None, :]
    turns = inside & (column < ROTARY)[None, :]
    angle = token[:, None] * ROTARY + column[None, :]
    cos = tl.load(cos_ptr + angle, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)
    y = n * cos + other * sin * sign[None, :]
    tl.store(target + column[None, :], y.to(q_out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "tiles"])
def _rotary_backward(
    dq_ptr, dk_ptr, dgate_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, r_ptr, dq_in_ptr, dk_in_ptr,
    dweight_ptr, length, tiles,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    column = tl.arange(0, DIM)
    partner, sign = _partner(column, ROTARY)
    if head < Q_HEADS:
        weight_ptr = q_weight_ptr
    else:
        weight_ptr = k_weight_ptr
    weight = 1.0 + tl.load(weight_ptr + column).to(tl.float32)
    dweight = tl.zeros((DIM,), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        token = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        inside = (token < length)[:, None] & (column < DIM)[None, :]
        if head < Q_HEADS:
            out = (token * (Q_HEADS * DIM) + head * DIM)[:, None]
            gradient = dq_ptr + out
            at = (token * (2 * Q_HEADS * DIM) + head * 2 * DIM)[:, None]
            source = q_ptr + at
            target = dq_in_ptr + at
            gate = tl.load(dgate_ptr + out + column[None, :], mask=inside, other=0.0)
            tl.store(target + DIM + column[None, :], gate, mask=inside)
        else:
            at = (token * (K_HEADS * DIM) + (head - Q_HEADS) * DIM)[:, None]
            gradient = dk_ptr + at
            source = k_ptr + at
            target = dk_in_ptr + at
        dy = tl.load(gradient + column[None, :], mask=inside, other=0.0).to(tl.float32)
        other = tl.load(gradient + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        turns = inside & (column < ROTARY)[None, :]
        cos = tl.load(cos_ptr + token[:, None] * ROTARY + column[None, :], mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + token[:, None] * ROTARY + partner[None, :], mask=turns, other=0.0).to(tl.float32)
        # The partner's sign is the opposite one.
        dn = dy * cos - other * sin * sign[None, :]
        r = tl.load(r_ptr + token * (Q_HEADS + K_HEADS) + head, mask=token < length, other=0.0)[:, None]
        normed = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32) * r
        dweight += tl.sum(dn * normed, 0)
        dn *= weight[None, :]
        dx = r * (dn - normed * (tl.sum(dn * normed, 1) / DIM)[:, None])
        tl.store(target + column[None, :], dx.to(dq_in_ptr.dtype.element_ty), mask=inside)
    at = (tl.program_id(0) * (Q_HEADS + K_HEADS) + head) * DIM + column
    tl.store(dweight_ptr + at, dweight)


class NormedRotary(torch.autograd.Function):
    """Of queries with gates `[T, Q, 2, dim]`, keys `[T, K, dim]`, weights `[dim]`, `cos` and `sin` `[T, rotary]`."""

    @staticmethod
    @on_its_device
    def forward(ctx, q, k, q_weight, k_weight, cos, sin, eps: float):
        q, k, q_weight, k_weight, cos, sin = (x.contiguous() for x in (q, k, q_weight, k_weight, cos, sin))
        length, q_heads, _, dim = q.shape
        q_out, gate = (q.new_empty(length, q_heads, dim) for _ in range(2))
        k_out = torch.empty_like(k)
        r = torch.empty(length, q_heads + k.shape[1], dtype=torch.float32, device=q.device)
        ctx.sizes = (q_heads, k.shape[1], dim, cos.shape[1], _TOKENS)
        grid = (ceil_div(length, _TOKENS), q_heads + k.shape[1])
        _rotary_forward[grid](q, k, q_weight, k_weight, cos, sin, q_out, k_out, gate, r, length, eps, *ctx.sizes)
        ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin, r)
        return q_out, k_out, gate

    @staticmethod
    @once_differentiable
    def backward(ctx, dq_out, dk_out, dgate):
        q, k, q_weight, k_weight, cos, sin, r = ctx.saved_tensors
        dq_out, dk_out, dgate = (x.contiguous() for x in (dq_out, dk_out, dgate))
        dq, dk = torch.empty_like(q), torch.empty_like(k)
        q_heads, k_heads, dim = ctx.sizes[:3]
        tiles = ceil_div(len(q), _TOKENS)
        programs = programs_for(tiles, q.device)
        dweight = torch.empty(programs, q_heads + k_heads, dim, dtype=torch.float32, device=q.device)
        _rotary_backward[(programs, q_heads + k_heads)](
            dq_out, dk_out, dgate, q, k, q_weight, k_weight, cos, sin, r, dq, dk, dweight, len(q), tiles, *ctx.sizes
        )
        dweight = dweight.sum(0)
        dq_weight, dk_weight = dweight[:q_heads].sum(0), dweight[q_heads:].sum(0)
        return dq, dk, dq_weight.to(q_weight.dtype), dk_weight.to(k_weight.dtype), None, None, None
