"""The short causal convolution of a gated delta rule layer, fused with the operations after it.

These are SiLU, the split into queries, keys and values, and the normalization of queries and keys to unit length.

    a_t = sum_s weight[:, W - 1 - s] * x_{t - s}    over shifts s that stay inside the document
    y_t = silu(a_t)                                 q_t, k_t: y_t / sqrt(|y_t|^2 + eps) for each head

Each program computes the channels of one head for several runs of tokens. It processes the runs token by token, with a
window of up to four tokens in registers. The forward therefore reads `x` and writes the three results about once. The
backward reads `x` and the three gradients and writes the gradient of `x` about once. The position of each token in its
document marks the document's start: shift `s` is inside the document if the position is at least `s`. Nothing connects
the channels of a value, so the values are divided into heads of the size of a key.

The windows of a document's first tokens may include earlier tokens that are elsewhere, a halo of `W - 1` tokens: in a
part of a row, tokens before the part, and in a row with shared prompts, those of a prompt. Each of the first `W - 1`
tokens of such a document has a slot: `W - 1` times the index of its halo, plus its index in the document. Kernels
without halos are compiled without code for them.
"""

import torch
import triton
import triton.language as tl

from . import KernelFunction, ceil_div, next_power_of_2


# Runs per program, one for each warp, and tokens per run.
_RUNS = 4
_TOKENS = 64


@triton.jit
def _in_head(runs, DIM: tl.constexpr, LANES: tl.constexpr):
    """Return the mask of these runs, without the lanes after the channels of a head."""
    if DIM == LANES:
        return runs[:, None]
    else:
        return runs[:, None] & (tl.arange(0, LANES) < DIM)[None, :]


@triton.jit
def _tap(weight_ptr, column, SHIFT: tl.constexpr, W: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr):
    """Load the weight `[1, channels]` of the token `SHIFT` positions earlier; 0 outside of the window."""
    if SHIFT < W:
        inside = tl.arange(0, LANES) < DIM
        return tl.load(weight_ptr + column * W + (W - 1 - SHIFT), mask=inside, other=0.0).to(tl.float32)[None, :]
    else:
        return tl.zeros((1, LANES), tl.float32)


@triton.jit
def _row(x_ptr, stride, column, token, length, DIM: tl.constexpr, LANES: tl.constexpr):
    """Load one token `[runs, channels]` of each run; 0 outside of the row."""
    inside = _in_head((token >= 0) & (token < length), DIM, LANES)
    return tl.load(x_ptr + token[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _slot(slot_ptr, token, length):
    """Load the slot of one token of each run; -1 for a token whose window is inside of the row."""
    return tl.load(slot_ptr + token, mask=(token >= 0) & (token < length), other=-1).to(tl.int64)


@triton.jit
def _earlier(
    x, halo_ptr, column, slot, channels, SHIFT: tl.constexpr, W: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr
):
    """Return the token `SHIFT` positions earlier: from the halo if it is there, else `x`."""
    index = slot % (W - 1)
    inside = _in_head((slot >= 0) & (index < SHIFT) & (SHIFT < W), DIM, LANES)
    at = (slot + (W - 1 - SHIFT))[:, None] * channels + column[None, :]
    return tl.where(inside, tl.load(halo_ptr + at, mask=inside, other=0.0).to(tl.float32), x)


@triton.jit
def _reaches(x, position, SHIFT: tl.constexpr, W: tl.constexpr):
    """Return `x` if the window of a token at `position` includes the token `SHIFT` positions earlier, else 0."""
    return tl.where((position >= SHIFT)[:, None] & (SHIFT < W), x, 0.0)


@triton.jit
def _part(
    head, q_ptr, k_ptr, v_ptr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Return the tensor that holds a head, the stride of tokens in it, and the columns of the head."""
    if head < KEY_HEADS:
        pointer = q_ptr
        first = head
    elif head < 2 * KEY_HEADS:
        pointer = k_ptr
        first = head - KEY_HEADS
    else:
        pointer = v_ptr
        first = head - 2 * KEY_HEADS
    stride = tl.where(head < 2 * KEY_HEADS, KEY_HEADS * DIM, VALUE_HEADS * DIM)
    return pointer, stride, first * DIM + tl.arange(0, LANES)


@triton.jit(do_not_specialize=["length"])
def _convolution_forward(
    x_ptr, stride, weight_ptr, position_ptr, slot_ptr, halo_ptr, q_ptr, k_ptr, v_ptr, length, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr,
    RUNS: tl.constexpr, TOKENS: tl.constexpr, HALO: tl.constexpr,
):  # fmt: skip
    # A grid with one dimension, because the others are limited to 65,535. Heads vary fastest.
    heads: tl.constexpr = 2 * KEY_HEADS + VALUE_HEADS
    head = tl.program_id(0) % heads
    column = head * DIM + tl.arange(0, LANES)
    y_ptr, y_stride, y_column = _part(head, q_ptr, k_ptr, v_ptr, KEY_HEADS, VALUE_HEADS, DIM, LANES)
    w0, w1 = _tap(weight_ptr, column, 0, W, DIM, LANES), _tap(weight_ptr, column, 1, W, DIM, LANES)
    w2, w3 = _tap(weight_ptr, column, 2, W, DIM, LANES), _tap(weight_ptr, column, 3, W, DIM, LANES)
    token = ((tl.program_id(0) // heads).to(tl.int64) * RUNS + tl.arange(0, RUNS)) * TOKENS
    x1 = _row(x_ptr, stride, column, token - 1, length, DIM, LANES)
    x2 = _row(x_ptr, stride, column, token - 2, length, DIM, LANES)
    x3 = _row(x_ptr, stride, column, token - 3, length, DIM, LANES)
    x0 = _row(x_ptr, stride, column, token, length, DIM, LANES)
    position = tl.load(position_ptr + token, mask=token < length, other=-1)
    for _ in range(TOKENS):
        # Prefetch the inputs of the next token while this one is computed.
        next_x = _row(x_ptr, stride, column, token + 1, length, DIM, LANES)
        next_position = tl.load(position_ptr + token + 1, mask=token + 1 < length, other=-1)
        if HALO:
            slot = _slot(slot_ptr, token, length)
            x1 = _earlier(x1, halo_ptr, column, slot, heads * DIM, 1, W, DIM, LANES)
            x2 = _earlier(x2, halo_ptr, column, slot, heads * DIM, 2, W, DIM, LANES)
            x3 = _earlier(x3, halo_ptr, column, slot, heads * DIM, 3, W, DIM, LANES)
        a = w0 * x0 + w1 * _reaches(x1, position, 1, W)
        a += w2 * _reaches(x2, position, 2, W) + w3 * _reaches(x3, position, 3, W)
        y = a * tl.sigmoid(a)
        if head < 2 * KEY_HEADS:
            y *= tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
        at = token[:, None] * y_stride + y_column[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=_in_head(token < length, DIM, LANES))
        x3 = x2
        x2 = x1
        x1 = x0
        x0 = next_x
        position = next_position
        token += 1


@triton.jit(do_not_specialize=["length"])
def _convolution_backward(
    x_ptr, stride, weight_ptr, position_ptr, slot_ptr, halo_ptr, dq_ptr, dk_ptr, dv_ptr, dx_ptr, dweight_ptr, dhalo_ptr,
    length, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DIM: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr,
    RUNS: tl.constexpr, TOKENS: tl.constexpr, HALO: tl.constexpr, TRAINED: tl.constexpr,
):  # fmt: skip
    heads: tl.constexpr = 2 * KEY_HEADS + VALUE_HEADS
    head = tl.program_id(0) % heads
    program = tl.program_id(0) // heads
    column = head * DIM + tl.arange(0, LANES)
    channels = heads * DIM
    dy_ptr, dy_stride, dy_column = _part(head, dq_ptr, dk_ptr, dv_ptr, KEY_HEADS, VALUE_HEADS, DIM, LANES)
    w0, w1 = _tap(weight_ptr, column, 0, W, DIM, LANES), _tap(weight_ptr, column, 1, W, DIM, LANES)
    w2, w3 = _tap(weight_ptr, column, 2, W, DIM, LANES), _tap(weight_ptr, column, 3, W, DIM, LANES)
    zeros = tl.zeros((RUNS, LANES), tl.float32)
    dw0 = zeros
    dw1 = zeros
    dw2 = zeros
    dw3 = zeros
    # Go backwards from the last token whose window includes the run. dx0 to dx2 are the partial sums of dx at the
    # token and at the two before it.
    token = (program.to(tl.int64) * RUNS + tl.arange(0, RUNS)) * TOKENS + TOKENS + 2
    dx0 = zeros
    dx1 = zeros
    dx2 = zeros
    x0 = _row(x_ptr, stride, column, token, length, DIM, LANES)
    x1 = _row(x_ptr, stride, column, token - 1, length, DIM, LANES)
    x2 = _row(x_ptr, stride, column, token - 2, length, DIM, LANES)
    x3 = _row(x_ptr, stride, column, token - 3, length, DIM, LANES)
    dy = _row(dy_ptr, dy_stride, dy_column, token, length, DIM, LANES)
    position = tl.load(position_ptr + token, mask=token < length, other=-1)
    for step in range(TOKENS + 3):
        next_x = _row(x_ptr, stride, column, token - 4, length, DIM, LANES)
        next_dy = _row(dy_ptr, dy_stride, dy_column, token - 1, length, DIM, LANES)
        next_position = tl.load(position_ptr + token - 1, mask=(token >= 1) & (token - 1 < length), other=-1)
        seen1 = x1
        seen2 = x2
        seen3 = x3
        if HALO:
            slot = _slot(slot_ptr, token, length)
            seen1 = _earlier(x1, halo_ptr, column, slot, channels, 1, W, DIM, LANES)
            seen2 = _earlier(x2, halo_ptr, column, slot, channels, 2, W, DIM, LANES)
            seen3 = _earlier(x3, halo_ptr, column, slot, channels, 3, W, DIM, LANES)
        seen1 = _reaches(seen1, position, 1, W)
        seen2 = _reaches(seen2, position, 2, W)
        seen3 = _reaches(seen3, position, 3, W)
        a = w0 * x0 + w1 * seen1 + w2 * seen2 + w3 * seen3
        sigmoid = tl.sigmoid(a)
        if head < 2 * KEY_HEADS:
            y = a * sigmoid
            r = tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
            dy = r * (dy - y * r * r * tl.sum(dy * y, 1)[:, None])
        da = dy * sigmoid * (1.0 + a * (1.0 - sigmoid))
        dx = dx0 + w0 * da
        dx0 = dx1 + w1 * _reaches(da, position, 1, W)
        dx1 = dx2 + w2 * _reaches(da, position, 2, W)
        dx2 = w3 * _reaches(da, position, 3, W)
        # The first three steps belong to the next run.
        if step >= 3:
            if TRAINED:
                dw0 += da * x0
                dw1 += da * seen1
                dw2 += da * seen2
                dw3 += da * seen3
            at = token[:, None] * channels + column[None, :]
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=_in_head(token < length, DIM, LANES))
        if HALO:
            # Before the first token of such a document, the partial sums of dx are complete and belong to the halo.
            first = (slot >= 0) & (slot % (W - 1) == 0)
            starts = first[:, None]
            if step >= 3:
                at = dhalo_ptr + (slot + (W - 2))[:, None] * channels + column[None, :]
                kept = _in_head(first, DIM, LANES)
                tl.store(at, dx0.to(dhalo_ptr.dtype.element_ty), mask=kept)
                if W > 2:
                    tl.store(at - channels, dx1.to(dhalo_ptr.dtype.element_ty), mask=kept)
                if W > 3:
                    tl.store(at - 2 * channels, dx2.to(dhalo_ptr.dtype.element_ty), mask=kept)
            dx0 = tl.where(starts, 0.0, dx0)
            dx1 = tl.where(starts, 0.0, dx1)
            dx2 = tl.where(starts, 0.0, dx2)
        x0 = x1
        x1 = x2
        x2 = x3
        x3 = next_x
        dy = next_dy
        position = next_position
        token -= 1
    if TRAINED:
        at = dweight_ptr + (program.to(tl.int64) * channels + column) * W + (W - 1)
        inside = tl.arange(0, LANES) < DIM
        tl.store(at, tl.sum(dw0, 0), mask=inside)
        if W > 1:
            tl.store(at - 1, tl.sum(dw1, 0), mask=inside)
        if W > 2:
            tl.store(at - 2, tl.sum(dw2, 0), mask=inside)
        if W > 3:
            tl.store(at - 3, tl.sum(dw3, 0), mask=inside)


class CausalConv1dQKV(KernelFunction):
    """The op for `x` `[T, channels]`, `weight` `[channels, W]`, and int32 `position` `[T]`.

    With halos, `halo` is `[halos * (W - 1), channels]` and `slot` int32 `[T]`.
    """

    def forward(ctx, x, weight, position, key_heads, value_heads, dim, eps, halo=None, slot=None):
        x = x if x.stride(1) == 1 else x.contiguous()
        weight = weight.contiguous()
        # A window of one token needs no halo.
        halo = halo.contiguous() if halo is not None and len(halo) else None
        length = x.shape[0]
        q, k = (x.new_empty(length, key_heads, dim) for _ in range(2))
        v = x.new_empty(length, value_heads, dim)
        ctx.save_for_backward(x, weight, position, slot, halo)
        lanes = next_power_of_2(dim)
        ctx.sizes = key_heads, value_heads, dim, lanes, weight.shape[1], _RUNS, _TOKENS, halo is not None
        ctx.eps = eps
        grid = ((2 * key_heads + value_heads) * ceil_div(length, _RUNS * _TOKENS),)
        _convolution_forward[grid](
            x, x.stride(0), weight, position, slot, halo, q, k, v, length, eps, *ctx.sizes, num_warps=_RUNS
        )
        return q, k, v

    def backward(ctx, dq, dk, dv):
        x, weight, position, slot, halo = ctx.saved_tensors
        dq, dk, dv = (gradient.contiguous() for gradient in (dq, dk, dv))
        key_heads, value_heads, _, _, _, runs, tokens, _ = ctx.sizes
        dx = x.new_empty(x.shape)
        dhalo = None if halo is None else torch.empty_like(halo)
        length = x.shape[0]
        programs = ceil_div(length, runs * tokens)
        trained = ctx.needs_input_grad[1]
        dweight = x.new_empty(programs, *weight.shape, dtype=torch.float32) if trained else None
        grid = ((2 * key_heads + value_heads) * programs,)
        _convolution_backward[grid](
            x, x.stride(0), weight, position, slot, halo, dq, dk, dv, dx, dweight, dhalo, length, ctx.eps, *ctx.sizes,
            trained, num_warps=runs,
        )  # fmt: skip
        dweight = dweight.sum(0).to(weight.dtype) if trained else None
        return dx, dweight, None, None, None, None, None, dhalo, None
