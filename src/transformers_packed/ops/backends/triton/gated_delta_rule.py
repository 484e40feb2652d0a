"""The decay and the learning rate of the gated delta rule, computed from their projections.

    g = -exp(A_log) * softplus(a + dt_bias)        beta = sigmoid(b)

Each program computes tiles of whole tokens. A fixed number of programs accumulates the gradients of `A_log` and
`dt_bias` in registers, and a second sum adds their results. The order of additions is therefore deterministic.
"""

import torch
import triton
import triton.language as tl

from . import KernelFunction, ceil_div, next_power_of_2
from .norm import programs_for


_TOKENS = 64


@triton.jit
def softplus(x):
    """Compute `log(1 + e^x)` without overflow. The quotient corrects the rounding error of a small second term."""
    small = tl.exp(-tl.abs(x))
    kept = (1.0 + small) - 1.0
    log = tl.where(kept == 0.0, small, tl.log(1.0 + small) * small / tl.where(kept == 0.0, 1.0, kept))
    return tl.maximum(x, 0.0) + log


@triton.jit(do_not_specialize=["length"])
def _decay_forward(
    a_ptr, b_ptr, a_log_ptr, dt_ptr, g_ptr, beta_ptr, length, a_stride, b_stride, heads,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    head = tl.arange(0, HEADS)[None, :]
    inside = (token < length) & (head < heads)
    x = tl.load(a_ptr + token * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(dt_ptr + head, mask=head < heads, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr + head, mask=head < heads, other=0.0).to(tl.float32))
    tl.store(g_ptr + token * heads + head, -rate * softplus(x), mask=inside)
    beta = tl.sigmoid(tl.load(b_ptr + token * b_stride + head, mask=inside, other=0.0).to(tl.float32))
    tl.store(beta_ptr + token * heads + head, beta.to(beta_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "tiles"])
def _decay_backward(
    dg_ptr, dbeta_ptr, a_ptr, b_ptr, a_log_ptr, dt_ptr, g_ptr, da_ptr, db_ptr, sums_ptr, length, a_stride, b_stride,
    heads, tiles, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEADS)[None, :]
    dt = tl.load(dt_ptr + head, mask=head < heads, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log_ptr + head, mask=head < heads, other=0.0).to(tl.float32))
    d_a_log = tl.zeros((HEADS,), tl.float32)
    d_dt = tl.zeros((HEADS,), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        token = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
        inside = (token < length) & (head < heads)
        at = token * heads + head
        dg = tl.load(dg_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(a_ptr + token * a_stride + head, mask=inside, other=0.0).to(tl.float32) + dt
        da = -dg * rate * tl.sigmoid(x)
        tl.store(da_ptr + at, da.to(da_ptr.dtype.element_ty), mask=inside)
        d_dt += tl.sum(da, 0)
        # g is proportional to exp(A_log), so its derivative with respect to A_log is g.
        d_a_log += tl.sum(dg * tl.load(g_ptr + at, mask=inside, other=0.0), 0)
        beta = tl.sigmoid(tl.load(b_ptr + token * b_stride + head, mask=inside, other=0.0).to(tl.float32))
        dbeta = tl.load(dbeta_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(db_ptr + at, (dbeta * beta * (1.0 - beta)).to(db_ptr.dtype.element_ty), mask=inside)
    column = tl.arange(0, HEADS)
    at = tl.program_id(0) * 2 * heads + column
    tl.store(sums_ptr + at, d_a_log, mask=column < heads)
    tl.store(sums_ptr + at + heads, d_dt, mask=column < heads)


class GatedDeltaGates(KernelFunction):
    """Compute float32 `g`, and `beta`, from `a` and `b` `[tokens, heads]`, `A_log` and `dt_bias` `[heads]`."""

    def forward(ctx, a, b, a_log, dt_bias):
        a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (a, b))
        a_log, dt_bias = a_log.contiguous(), dt_bias.contiguous()
        length, heads = a.shape
        g = torch.empty(length, heads, dtype=torch.float32, device=a.device)
        beta = torch.empty(length, heads, dtype=b.dtype, device=b.device)
        ctx.tile = {"TOKENS": _TOKENS, "HEADS": next_power_of_2(heads)}
        grid = (ceil_div(length, _TOKENS),)
        _decay_forward[grid](a, b, a_log, dt_bias, g, beta, length, a.stride(0), b.stride(0), heads, **ctx.tile)
        ctx.save_for_backward(a, b, a_log, dt_bias, g)
        return g, beta

    def backward(ctx, dg, dbeta):
        a, b, a_log, dt_bias, g = ctx.saved_tensors
        dg, dbeta = dg.contiguous(), dbeta.contiguous()
        length, heads = a.shape
        da, db = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (a, b))
        tiles = ceil_div(length, _TOKENS)
        programs = programs_for(tiles, a.device)
        sums = torch.empty(programs, 2, heads, dtype=torch.float32, device=a.device)
        _decay_backward[(programs,)](
            dg, dbeta, a, b, a_log, dt_bias, g, da, db, sums, length, a.stride(0), b.stride(0), heads, tiles, **ctx.tile
        )  # fmt: skip
        d_a_log, d_dt = sums.sum(0)
        return da, db, d_a_log.to(a_log.dtype), d_dt.to(dt_bias.dtype)
