"""The short causal convolution of a gated-delta-rule layer with all that follows it: SiLU, the split into queries, keys
and values, and the unit length of queries and keys.

    a_t = sum_s weight[:, W - 1 - s] * x_{t - s}    over shifts s that stay inside the document
    y_t = silu(a_t)                                 q_t, k_t: y_t / sqrt(|y_t|^2 + eps) for each head

A program takes the channels of one head and a tile of tokens. Where a document begins is told by each token's position
in its document: shift `s` is inside if the position is at least `s`. Forward reads `x` once (its shifted tiles are in
the cache) and writes the three results, each contiguous; backward reads `x` and the three gradients and writes that of
`x`. It makes `a` again, at each of the tokens that a token reaches, which costs less than to store it.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from . import on_its_device


# Tokens of a tile; tiles of a program of the backward, which adds up the gradient of the weight in registers.
_TOKENS = 32
_TILES = 8


@triton.jit
def _convolve(x_ptr, stride, weight_ptr, column, token, position, W: tl.constexpr):
    """`a` `[tokens, channels]` at `token`, with `position` -1 where there is none."""
    total = tl.zeros((token.shape[0], column.shape[0]), tl.float32)
    for shift in tl.static_range(W):
        weight = tl.load(weight_ptr + column * W + (W - 1 - shift)).to(tl.float32)
        inside = (position >= shift)[:, None]
        at = (token - shift)[:, None] * stride + column[None, :]
        total += weight[None, :] * tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["length"])
def _forward(
    x_ptr, stride, weight_ptr, position_ptr, q_ptr, k_ptr, v_ptr, length, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr, W: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    # One dimension, heads first: the others of a grid end at 65,535.
    heads: tl.constexpr = 2 * KEY_HEADS + VALUE_HEADS
    head = tl.program_id(0) % heads
    token = (tl.program_id(0) // heads).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = head * DIM + tl.arange(0, DIM)
    position = tl.load(position_ptr + token, mask=token < length, other=-1)
    a = _convolve(x_ptr, stride, weight_ptr, column, token, position, W)
    y = a * tl.sigmoid(a)
    inside = (token < length)[:, None]
    if head < 2 * KEY_HEADS:
        y *= tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
        at = token[:, None] * (KEY_HEADS * DIM) + column[None, :]
        if head < KEY_HEADS:
            tl.store(q_ptr + at, y.to(q_ptr.dtype.element_ty), mask=inside)
        else:
            tl.store(k_ptr + at - KEY_HEADS * DIM, y.to(k_ptr.dtype.element_ty), mask=inside)
    else:
        at = token[:, None] * (VALUE_HEADS * DIM) + (column - 2 * KEY_HEADS * DIM)[None, :]
        tl.store(v_ptr + at, y.to(v_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _slope(
    x_ptr, stride, weight_ptr, dq_ptr, dk_ptr, dv_ptr, head, column, token, position, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The gradient of `a` at `token`; 0 where `position` is negative."""
    a = _convolve(x_ptr, stride, weight_ptr, column, token, position, W)
    sigmoid = tl.sigmoid(a)
    inside = (position >= 0)[:, None]
    if head < 2 * KEY_HEADS:
        at = token[:, None] * (KEY_HEADS * DIM) + column[None, :]
        if head < KEY_HEADS:
            dy = tl.load(dq_ptr + at, mask=inside, other=0.0).to(tl.float32)
        else:
            dy = tl.load(dk_ptr + at - KEY_HEADS * DIM, mask=inside, other=0.0).to(tl.float32)
        y = a * sigmoid
        r = tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
        dy = r * (dy - y * r * r * tl.sum(dy * y, 1)[:, None])
    else:
        at = token[:, None] * (VALUE_HEADS * DIM) + (column - 2 * KEY_HEADS * DIM)[None, :]
        dy = tl.load(dv_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return dy * sigmoid * (1.0 + a * (1.0 - sigmoid))


@triton.jit(do_not_specialize=["length"])
def _backward(
    x_ptr, stride, weight_ptr, position_ptr, dq_ptr, dk_ptr, dv_ptr, dx_ptr, dweight_ptr, length, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr, W: tl.constexpr, TOKENS: tl.constexpr,
    TILES: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    heads: tl.constexpr = 2 * KEY_HEADS + VALUE_HEADS
    head = tl.program_id(0) % heads
    program = (tl.program_id(0) // heads).to(tl.int64)
    column = head * DIM + tl.arange(0, DIM)
    channels = heads * DIM
    taps = tl.arange(0, TAPS)
    dweight = tl.zeros((DIM, TAPS), tl.float32)
    for tile in range(TILES):
        token = (program * TILES + tile) * TOKENS + tl.arange(0, TOKENS)
        here = tl.load(position_ptr + token, mask=token < length, other=-1)
        dx = tl.zeros((TOKENS, DIM), tl.float32)
        for shift in tl.static_range(W):
            # The token `shift` later sees this one, if it is that far inside its document.
            later = token + shift
            position = tl.load(position_ptr + later, mask=later < length, other=-1)
            position = tl.where(position >= shift, position, -1)
            da = _slope(
                x_ptr, stride, weight_ptr, dq_ptr, dk_ptr, dv_ptr, head, column, later, position, eps,
                KEY_HEADS, VALUE_HEADS, DIM, W,
            )  # fmt: skip
            dx += da * tl.load(weight_ptr + column * W + (W - 1 - shift)).to(tl.float32)[None, :]
            x = tl.load(x_ptr + token[:, None] * stride + column[None, :], mask=(here >= 0)[:, None], other=0.0)
            tap = tl.sum(da * x.to(tl.float32), 0)
            dweight += tl.where((taps == W - 1 - shift)[None, :], tap[:, None], 0.0)
        at = token[:, None] * channels + column[None, :]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=(here >= 0)[:, None])
    at = (program * channels + column)[:, None] * W + taps[None, :]
    tl.store(dweight_ptr + at, dweight, mask=(taps < W)[None, :])


class ConvolvedQueryKeyValue(torch.autograd.Function):
    """Of `x` `[T, channels]`, `weight` `[channels, W]` and `position` `[T]` int32."""

    @staticmethod
    @on_its_device
    def forward(ctx, x, weight, position, key_heads: int, value_heads: int, dim: int, eps: float):
        x = x if x.stride(1) == 1 else x.contiguous()
        weight = weight.contiguous()
        length = len(x)
        q, k = (x.new_empty(length, key_heads, dim) for _ in range(2))
        v = x.new_empty(length, value_heads, dim)
        ctx.save_for_backward(x, weight, position)
        ctx.heads, ctx.eps = (key_heads, value_heads, dim, weight.shape[1], _TOKENS), eps
        grid = ((2 * key_heads + value_heads) * triton.cdiv(length, _TOKENS),)
        _forward[grid](x, x.stride(0), weight, position, q, k, v, length, eps, *ctx.heads)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        x, weight, position = ctx.saved_tensors
        dq, dk, dv = (gradient.contiguous() for gradient in (dq, dk, dv))
        key_heads, value_heads, _, width, tokens = ctx.heads
        dx = x.new_empty(x.shape)
        programs = triton.cdiv(len(x), tokens * _TILES)
        dweight = x.new_empty(programs, *weight.shape, dtype=torch.float32)
        grid = ((2 * key_heads + value_heads) * programs,)
        _backward[grid](
            x, x.stride(0), weight, position, dq, dk, dv, dx, dweight, len(x), ctx.eps, *ctx.heads,
            _TILES, triton.next_power_of_2(width),
        )  # fmt: skip
        return dx, dweight.sum(0).to(weight.dtype), None, None, None, None, None
