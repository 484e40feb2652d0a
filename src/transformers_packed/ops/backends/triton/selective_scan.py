"""The selective scan of Mamba, in chunks of tokens that begin anew in each document.

Each channel has a state `S` of `N` numbers, which decay independently:

    S_t = a_t S_{t-1} + dt_t x_t B_t        a_t = exp(dt_t A)        y_t = C_t . S_t + D x_t

`_states` walks through the tokens of all chunks at once, from states of zero, and writes the steps `dt`. `_pass` goes
through the chunks of a document: the decay of a whole chunk is that of the sum of its steps. `_output` walks through all
chunks again, from the states before them. A program is one warp and has the states of a few channels in registers.

The backward computes steps and states again, so only inputs are saved. With the gradient `g_t` of `S_t`, a decay has the
gradient `g_t a_t S_{t-1}` to its exponent, which needs the states in one order and their gradients in the other. But

    g_t a_t S_{t-1} - g_{t+1} a_{t+1} S_t = dy_t C_t a_t S_{t-1} - g_{t+1} a_{t+1} dt_t x_t B_t,

so sums of the right side over later tokens of the chunk give it, exactly also for small `a`. `_gradient_of_reads` walks
forward for the first term, and `_gradient_of_writes` backward for the second one and for these sums. Sums over channels
and chunks have a fixed order.
"""

import torch
import triton
import triton.language as tl

from . import KernelFunction, ceil_div, next_power_of_2
from .gated_delta_rule import softplus


# Numbers in the tile of a program, and those of a program of `_pass`.
_TILE, _PASSED = 512, 128
_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _place(chunk_ptr, D: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr):
    """Return the chunk, group and block of channels of a program, the chunk's first token and size, and the channels.

    Then the numbers of a state, the offsets of those of the channels in a row of all states, and which of them exist.
    """
    blocks: tl.constexpr = (D // G + BLOCK - 1) // BLOCK
    block = tl.program_id(0) % blocks
    group = tl.program_id(0) // blocks % G
    chunk = (tl.program_id(0) // (blocks * G)).to(tl.int64)
    start = tl.load(chunk_ptr + 2 * chunk).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < D // G
    size = tl.load(chunk_ptr + 2 * chunk + 1)
    channel = group * (D // G) + column
    n = tl.arange(0, STATES)
    exists = inside[:, None] & (n < N)[None, :]
    return chunk, group, block, start, size, channel, inside, n, channel[:, None] * N + n[None, :], exists


@triton.jit
def _load(ptr, token, stride, column, inside):
    """Load some columns of a token in float32, zero where there are none."""
    return tl.load(ptr + token * stride + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _states(
    x_ptr, x_stride, dt_ptr, dt_stride, a_ptr, row_ptr, row_stride, bias_ptr, chunk_ptr, step_ptr, total_ptr, state_ptr,
    D: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """The states after the chunks from states of zero, with `row` = B, and the steps and their totals.

    If `BACKWARD`, the gradients of the states before the chunks, with dy in place of x and `row` = C.
    """
    chunk, group, _, start, size, d, inside, n, at, exists = _place(chunk_ptr, D, G, N, BLOCK, STATES)
    a = tl.load(a_ptr + at, mask=exists, other=0.0).to(tl.float32) * _LOG2_E
    state = tl.zeros((BLOCK, STATES), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    bias = tl.load(bias_ptr + d, mask=inside, other=0.0).to(tl.float32)
    for i in range(size):
        if BACKWARD:
            token = start + size - 1 - i
            step = _load(step_ptr, token, D, d, inside)
        else:
            token = start + i
            step = softplus(_load(dt_ptr, token, dt_stride, d, inside) + bias)
            tl.store(step_ptr + token * D + d, step, mask=inside)
            total += step
        x = _load(x_ptr, token, x_stride, d, inside)
        row = _load(row_ptr + group * N, token, row_stride, n, n < N)
        decay = tl.exp2(step[:, None] * a)
        if BACKWARD:
            state = decay * (state + x[:, None] * row[None, :])
        else:
            state = decay * state + (step * x)[:, None] * row[None, :]
    tl.store(state_ptr + chunk * (D * N) + at, state, mask=exists)
    if not BACKWARD:
        tl.store(total_ptr + chunk * D + d, total, mask=inside)


@triton.jit
def _pass(
    a_ptr, total_ptr, offset_ptr, state_ptr, D: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """Replace what each chunk adds by the state before it, or if `BACKWARD` by the gradient of the state after it."""
    blocks: tl.constexpr = (D * N + BLOCK - 1) // BLOCK
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    document = tl.program_id(0) // blocks
    first, last = tl.load(offset_ptr + document), tl.load(offset_ptr + document + 1)
    inside = at < D * N
    a = tl.load(a_ptr + at, mask=inside, other=0.0).to(tl.float32) * _LOG2_E
    state = tl.zeros((BLOCK,), tl.float32)
    chunk = first.to(tl.int64)
    by = 1
    if BACKWARD:
        chunk = last.to(tl.int64) - 1
        by = -1
    exists = at < tl.where(first < last, D * N, 0)
    added = tl.load(state_ptr + chunk * (D * N) + at, mask=exists, other=0.0)
    total = tl.load(total_ptr + chunk * D + at // N, mask=exists, other=0.0)
    for i in range(first, last):
        # The loads for the next chunk begin before the store.
        exists = at < tl.where(i + 1 < last, D * N, 0)
        next_added = tl.load(state_ptr + (chunk + by) * (D * N) + at, mask=exists, other=0.0)
        next_total = tl.load(total_ptr + (chunk + by) * D + at // N, mask=exists, other=0.0)
        tl.store(state_ptr + chunk * (D * N) + at, state, mask=inside)
        state = tl.exp2(a * total) * state + added
        added = next_added
        total = next_total
        chunk += by


@triton.jit
def _output(
    x_ptr, x_stride, a_ptr, b_ptr, b_stride, c_ptr, c_stride, skip_ptr, chunk_ptr, step_ptr, state_ptr, y_ptr,
    D: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    chunk, group, _, start, size, d, inside, n, at, exists = _place(chunk_ptr, D, G, N, BLOCK, STATES)
    a = tl.load(a_ptr + at, mask=exists, other=0.0).to(tl.float32) * _LOG2_E
    state = tl.load(state_ptr + chunk * (D * N) + at, mask=exists, other=0.0)
    skip = tl.load(skip_ptr + d, mask=inside, other=0.0).to(tl.float32)
    for i in range(size):
        token = start + i
        step = _load(step_ptr, token, D, d, inside)
        x = _load(x_ptr, token, x_stride, d, inside)
        b = _load(b_ptr + group * N, token, b_stride, n, n < N)
        c = _load(c_ptr + group * N, token, c_stride, n, n < N)
        state = tl.exp2(step[:, None] * a) * state + (step * x)[:, None] * b[None, :]
        y = tl.sum(state * c[None, :], 1) + skip * x
        tl.store(y_ptr + token * D + d, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length"])
def _gradient_of_reads(
    x_ptr, x_stride, a_ptr, b_ptr, b_stride, c_ptr, c_stride, chunk_ptr, step_ptr, state_ptr, dstate_ptr, dy_ptr, dc_ptr,
    read_ptr, end_ptr, length, D: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
    STATES: tl.constexpr,
):  # fmt: skip
    """Write a part of the gradient of C, replace the states by their part of the gradient of A, and write the first term.

    `read` `[T, D]` is that term, summed over the states with the rates. `end` `[chunks, D]` is the same sum of the gradient
    to the exponent after a chunk.
    """
    chunk, group, block, start, size, d, inside, n, at, exists = _place(chunk_ptr, D, G, N, BLOCK, STATES)
    rate = tl.load(a_ptr + at, mask=exists, other=0.0).to(tl.float32)
    a = rate * _LOG2_E
    state = tl.load(state_ptr + chunk * (D * N) + at, mask=exists, other=0.0)
    da = tl.zeros((BLOCK, STATES), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(size):
        token = start + i
        step = _load(step_ptr, token, D, d, inside)
        x = _load(x_ptr, token, x_stride, d, inside)
        dy = _load(dy_ptr, token, D, d, inside)
        b = _load(b_ptr + group * N, token, b_stride, n, n < N)
        c = _load(c_ptr + group * N, token, c_stride, n, n < N)
        state *= tl.exp2(step[:, None] * a)
        total += step
        read = dy[:, None] * c[None, :] * state
        da += total[:, None] * read
        tl.store(read_ptr + token * D + d, tl.sum(rate * read, 1), mask=inside)
        state += (step * x)[:, None] * b[None, :]
        dc = tl.sum(dy[:, None] * state, 0)
        tl.store(dc_ptr + (block * length + token) * (G * N) + group * N + n, dc, mask=n < N)
    end = state * tl.load(dstate_ptr + chunk * (D * N) + at, mask=exists, other=0.0)
    tl.store(state_ptr + chunk * (D * N) + at, da + total[:, None] * end, mask=exists)
    tl.store(end_ptr + chunk * D + d, tl.sum(rate * end, 1), mask=inside)


@triton.jit(do_not_specialize=["length"])
def _gradient_of_writes(
    x_ptr, x_stride, dt_ptr, dt_stride, a_ptr, b_ptr, b_stride, c_ptr, c_stride, skip_ptr, bias_ptr, chunk_ptr, step_ptr,
    total_ptr, dstate_ptr, dy_ptr, read_ptr, end_ptr, dx_ptr, ddt_ptr, db_ptr, dskip_ptr, dbias_ptr, length,
    D: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Write all other gradients, and replace those of the states by the second part of the gradient of A."""
    chunk, group, block, start, size, d, inside, n, at, exists = _place(chunk_ptr, D, G, N, BLOCK, STATES)
    rate = tl.load(a_ptr + at, mask=exists, other=0.0).to(tl.float32)
    a = rate * _LOG2_E
    dstate = tl.load(dstate_ptr + chunk * (D * N) + at, mask=exists, other=0.0)
    da = tl.zeros((BLOCK, STATES), tl.float32)
    total = tl.load(total_ptr + chunk * D + d, mask=inside, other=0.0)
    later = tl.load(end_ptr + chunk * D + d, mask=inside, other=0.0)
    skip = tl.load(skip_ptr + d, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + d, mask=inside, other=0.0).to(tl.float32)
    dskip = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    for i in range(size):
        token = start + size - 1 - i
        step = _load(step_ptr, token, D, d, inside)
        x = _load(x_ptr, token, x_stride, d, inside)
        dy = _load(dy_ptr, token, D, d, inside)
        b = _load(b_ptr + group * N, token, b_stride, n, n < N)
        c = _load(c_ptr + group * N, token, c_stride, n, n < N)
        written = step * x
        unit = dstate * b[None, :]
        later += _load(read_ptr, token, D, d, inside) - written * tl.sum(rate * unit, 1)
        da -= (total * written)[:, None] * unit
        total -= step
        dstate += dy[:, None] * c[None, :]
        through = tl.sum(dstate * b[None, :], 1)
        ddt = (later + x * through) * tl.sigmoid(_load(dt_ptr, token, dt_stride, d, inside) + bias)
        dbias += ddt
        dskip += dy * x
        tl.store(dx_ptr + token * D + d, (step * through + skip * dy).to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(ddt_ptr + token * D + d, ddt.to(ddt_ptr.dtype.element_ty), mask=inside)
        db = tl.sum(written[:, None] * dstate, 0)
        tl.store(db_ptr + (block * length + token) * (G * N) + group * N + n, db, mask=n < N)
        dstate = tl.exp2(step[:, None] * a) * dstate
    tl.store(dstate_ptr + chunk * (D * N) + at, da, mask=exists)
    tl.store(dskip_ptr + chunk * D + d, dskip, mask=inside)
    tl.store(dbias_ptr + chunk * D + d, dbias, mask=inside)


class SelectiveScan(KernelFunction):
    """The scan of `x` and `dt` `[T, D]`, `a` `[D, N]`, `b` and `c` `[T, G * N]`, `d` and `bias` `[D]`.

    `chunks` and `offsets` are the first two of [`chunks_of`]. `groups` is `G`.
    """

    def forward(ctx, x, dt, a, b, c, d, bias, chunks, offsets, groups):
        x, dt, b, c = (z if z.stride(1) == 1 else z.contiguous() for z in (x, dt, b, c))
        a, d, bias = (z.contiguous() for z in (a, d, bias))
        channels, states = a.shape
        ctx.sizes = {"D": channels, "G": groups, "N": states}
        padded = next_power_of_2(states)
        block = min(max(1, _TILE // padded), next_power_of_2(channels // groups))
        ctx.tile = ctx.sizes | {"BLOCK": block, "STATES": padded, "num_warps": 1}
        ctx.parts = ceil_div(channels // groups, block)
        ctx.programs = (len(chunks) * groups * ctx.parts,)
        step, _, state = _run_states(ctx, x, dt, a, b, bias, chunks, offsets)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _output[ctx.programs](
            x, x.stride(0), a, b, b.stride(0), c, c.stride(0), d, chunks, step, state, y, **ctx.tile
        )  # fmt: skip
        ctx.save_for_backward(x, dt, a, b, c, d, bias, chunks, offsets)
        return y

    def backward(ctx, dy):
        x, dt, a, b, c, d, bias, chunks, offsets = ctx.saved_tensors
        dy = dy.contiguous()
        step, total, state = _run_states(ctx, x, dt, a, b, bias, chunks, offsets)
        dstate = torch.empty_like(state)
        _states[ctx.programs](
            dy, dy.stride(0), dt, dt.stride(0), a, c, c.stride(0), bias, chunks, step, total, dstate, BACKWARD=True,
            **ctx.tile,
        )  # fmt: skip
        _run_pass(ctx, a, total, offsets, dstate, True)
        dx, ddt = (torch.empty(z.shape, dtype=z.dtype, device=z.device) for z in (x, dt))
        parts = torch.empty(2, ctx.parts, *b.shape, dtype=torch.float32, device=x.device)
        read = torch.empty_like(step)
        end, dskip, dbias = (torch.empty_like(total) for _ in range(3))
        _gradient_of_reads[ctx.programs](
            x, x.stride(0), a, b, b.stride(0), c, c.stride(0), chunks, step, state, dstate, dy, parts[1], read, end,
            len(x), **ctx.tile,
        )  # fmt: skip
        _gradient_of_writes[ctx.programs](
            x, x.stride(0), dt, dt.stride(0), a, b, b.stride(0), c, c.stride(0), d, bias, chunks, step, total, dstate,
            dy, read, end, dx, ddt, parts[0], dskip, dbias, len(x), **ctx.tile,
        )  # fmt: skip
        db, dc = parts.sum(1)
        da = state.sum(0) + dstate.sum(0)
        dd, dbias = dskip.sum(0), dbias.sum(0)
        sums = (z.to(like.dtype) for z, like in ((da, a), (db, b), (dc, c), (dd, d), (dbias, bias)))
        return dx, ddt, *sums, *(None,) * 3


def _run_states(ctx, x, dt, a, b, bias, chunks, offsets) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the steps `[T, D]`, their totals `[chunks, D]`, and the states before the chunks `[chunks, D, N]`."""
    options = {"dtype": torch.float32, "device": x.device}
    step, total = torch.empty(x.shape, **options), torch.empty(len(chunks), x.shape[1], **options)
    state = torch.empty(len(chunks), *a.shape, **options)
    _states[ctx.programs](
        x, x.stride(0), dt, dt.stride(0), a, b, b.stride(0), bias, chunks, step, total, state, BACKWARD=False, **ctx.tile
    )  # fmt: skip
    _run_pass(ctx, a, total, offsets, state, False)
    return step, total, state


def _run_pass(ctx, a, total, offsets, state, backward: bool) -> None:
    grid = ((len(offsets) - 1) * ceil_div(a.numel(), _PASSED),)
    _pass[grid](
        a, total, offsets, state, D=ctx.sizes["D"], N=ctx.sizes["N"], BLOCK=_PASSED, BACKWARD=backward, num_warps=1
    )  # fmt: skip
