"""The state-space duality scan of Mamba-2, in chunks of tokens that begin anew in each document.

With the steps `dt`, the cumulative sums `c` of `dt * A` inside a chunk, and the state `S` `[N, P]` before the chunk:

    y_t = sum_s (C_t . B_s) exp(c_t - c_s) dt_s x_s + exp(c_t) C_t S + D x_t     over s <= t of the chunk
    S'  = exp(c_last) S + sum_s exp(c_last - c_s) dt_s B_s x_s^T

`_steps` computes `dt` and `c`. `_states` goes through the chunks of a document, forward for the states before the
chunks, and backward for the gradients of the states after them. All other kernels compute the chunks independently.
The backward computes the states again, so only inputs, steps and sums are saved.

A tile has 64 of the `H * P` columns of `x`: one head, a part of a head, or several small heads of one group. So
no group of `B` and `C` is copied to its heads. No product transposes a tile that was computed: some versions of triton
compile such products for Hopper GPUs wrongly. Tiles that are needed in both orientations are computed twice.
"""

import torch
import triton
import triton.language as tl

from ....boundaries import SequenceBoundaries
from . import KernelFunction, ceil_div, next_power_of_2
from .gated_delta_rule import softplus


# Tokens per chunk, columns of `x` and of `B` per tile, and heads per program of the steps.
_CHUNK, _COLUMNS, _STATES, _HEADS = 64, 64, 64, 32


@triton.jit
def _chunk(chunk_ptr, chunk, L: tl.constexpr):
    """Return the first token of a chunk, the number of its tokens, and the index of each."""
    index = tl.arange(0, L)
    start = tl.load(chunk_ptr + 2 * chunk).to(tl.int64)
    return start, tl.load(chunk_ptr + 2 * chunk + 1), index


@triton.jit
def _rows(ptr, start, size, stride, column, limit, L: tl.constexpr):
    """Load the columns `[L, columns]` below `limit` of a chunk's tokens, zero elsewhere."""
    index = tl.arange(0, L)
    inside = (index < size)[:, None] & (column < limit)[None, :]
    return tl.load(ptr + (start + index)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _columns(ptr, start, size, stride, column, limit, L: tl.constexpr):
    """Load the same transposed, `[columns, L]`."""
    index = tl.arange(0, L)
    inside = (column < limit)[:, None] & (index < size)[None, :]
    return tl.load(ptr + (start + index)[None, :] * stride + column[:, None], mask=inside, other=0.0)


@triton.jit
def _weighted(
    x, step_ptr, sum_ptr, start, size, first_column, TO_END: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
    L: tl.constexpr, COLUMNS: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Return a tile of tokens times what of each reaches the end of the chunk, or what reaches it from the start."""
    index, head = tl.arange(0, L), first_column // P + tl.arange(0, SMALL)
    at = (start + index)[:, None] * H + head[None, :]
    inside = (index < size)[:, None] & (head < H)[None, :]
    sums = tl.load(sum_ptr + at, mask=inside, other=0.0)
    if TO_END:
        end = tl.load(sum_ptr + (start + size - 1) * H + head, mask=head < tl.where(size > 0, H, 0), other=0.0)
        weight = tl.exp(end[None, :] - sums) * tl.load(step_ptr + at, mask=inside, other=0.0)
    else:
        weight = tl.exp(sums)
    weight = tl.where(inside, weight, 0.0)
    if SMALL == 1:
        weighted = x.to(tl.float32) * weight
    else:
        # One number for each token and head, not for each column.
        weighted = (x.to(tl.float32).reshape(L, SMALL, COLUMNS // SMALL) * weight[:, :, None]).reshape(L, COLUMNS)
    return weighted.to(x.dtype)


@triton.jit
def _at_end(
    ptr, start, size, first_column, H: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, SMALL: tl.constexpr
):
    """Load a number of the heads of a tile for the last token of a chunk, `[1, COLUMNS]`, or one if it is of one head.

    It is 0 for an empty chunk, which keeps the state.
    """
    if SMALL == 1:
        return tl.load(ptr + (start + size - 1) * H + first_column // P, mask=size > 0, other=0.0)
    else:
        head = (first_column + tl.arange(0, COLUMNS)) // P
        inside = head < tl.where(size > 0, H, 0)
        return tl.load(ptr + (start + size - 1) * H + head, mask=inside, other=0.0)[None, :]


@triton.jit
def _decay(later, earlier, causal):
    """Return `exp(later - earlier)` where `causal`, else 0, without an overflow elsewhere."""
    return tl.exp(tl.where(causal, later - earlier, float("-inf")))


@triton.jit
def _steps(
    dt_ptr, dt_stride, a_ptr, bias_ptr, chunk_ptr, step_ptr, sum_ptr, low, high, H: tl.constexpr, L: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (H + HEADS - 1) // HEADS
    head = tl.program_id(0) % tiles * HEADS + tl.arange(0, HEADS)
    start, size, index = _chunk(chunk_ptr, tl.program_id(0) // tiles, L)
    dt = _rows(dt_ptr, start, size, dt_stride, head, H, L).to(tl.float32)
    dt += tl.load(bias_ptr + head, mask=head < H, other=0.0).to(tl.float32)[None, :]
    step = tl.minimum(tl.maximum(softplus(dt), low), high)
    # A comparison loses NaN.
    step = tl.where(dt == dt, step, dt)
    inside = (index < size)[:, None] & (head < H)[None, :]
    step = tl.where(inside, step, 0.0)
    a = tl.load(a_ptr + head, mask=head < H, other=0.0).to(tl.float32)
    at = (start + index)[:, None] * H + head[None, :]
    tl.store(step_ptr + at, step, mask=inside)
    tl.store(sum_ptr + at, tl.cumsum(step * a[None, :], 0), mask=inside)


@triton.jit(do_not_specialize=["length"])
def _steps_backward(
    dt_ptr, dt_stride, a_ptr, bias_ptr, chunk_ptr, step_ptr, dstep_ptr, dsum_ptr, ddt_ptr, sums_ptr, length, low, high,
    H: tl.constexpr, PARTS: tl.constexpr, L: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (H + HEADS - 1) // HEADS
    chunk = tl.program_id(0) // tiles
    head = tl.program_id(0) % tiles * HEADS + tl.arange(0, HEADS)
    start, size, index = _chunk(chunk_ptr, chunk, L)
    dstep = tl.zeros((L, HEADS), tl.float32)
    dsum = tl.zeros((L, HEADS), tl.float32)
    for part in range(PARTS):
        dstep += _rows(dstep_ptr, part * length + start, size, H, head, H, L)
        dsum += _rows(dsum_ptr, part * length + start, size, H, head, H, L)
    # A step counts in all later sums of its chunk.
    later = tl.cumsum(dsum, 0, reverse=True)
    a = tl.load(a_ptr + head, mask=head < H, other=0.0).to(tl.float32)
    step = _rows(step_ptr, start, size, H, head, H, L)
    dt = _rows(dt_ptr, start, size, dt_stride, head, H, L).to(tl.float32)
    dt += tl.load(bias_ptr + head, mask=head < H, other=0.0).to(tl.float32)[None, :]
    free = softplus(dt)
    ddt = (dstep + later * a[None, :]) * tl.sigmoid(dt)
    ddt = tl.where((free < low) | (free > high), 0.0, ddt)
    inside = (index < size)[:, None] & (head < H)[None, :]
    ddt = tl.where(inside, ddt, 0.0)
    tl.store(ddt_ptr + (start + index)[:, None] * H + head[None, :], ddt.to(ddt_ptr.dtype.element_ty), mask=inside)
    at = chunk.to(tl.int64) * 2 * H + head
    tl.store(sums_ptr + at, tl.sum(later * step, 0), mask=head < H)
    tl.store(sums_ptr + at + H, tl.sum(ddt, 0), mask=head < H)


@triton.jit
def _states(
    row_ptr, row_stride, x_ptr, x_stride, step_ptr, sum_ptr, cu_ptr, offset_ptr, state_ptr, H: tl.constexpr,
    P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, BACKWARD: tl.constexpr, L: tl.constexpr,
    COLUMNS: tl.constexpr, STATES: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = H * P // COLUMNS
    down: tl.constexpr = (N + STATES - 1) // STATES
    first_column = tl.program_id(0) % across * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    n = tl.program_id(0) // across % down * STATES + tl.arange(0, STATES)
    group = first_column // (H * P // G)
    document = tl.program_id(0) // (across * down)
    first, last = tl.load(offset_ptr + document), tl.load(offset_ptr + document + 1)
    begin, stop = tl.load(cu_ptr + document).to(tl.int64), tl.load(cu_ptr + document + 1)
    state = tl.zeros((STATES, COLUMNS), tl.float32)
    for i in range(first, last):
        chunk = i
        if BACKWARD:
            chunk = first + last - 1 - i
        at = (tl.cast(chunk, tl.int64) * N + n)[:, None] * (H * P) + column[None, :]
        tl.store(state_ptr + at, state.to(state_ptr.dtype.element_ty), mask=(n < N)[:, None])
        # Computed, not loaded, so that the loads of the next chunk can begin early.
        start = begin + (chunk - first) * L
        size = tl.minimum(tl.maximum(stop - start, 0), L)
        end = _at_end(sum_ptr, start, size, first_column, H, P, COLUMNS, SMALL)
        x = _rows(x_ptr, start, size, x_stride, column, H * P, L)
        weighted = _weighted(x, step_ptr, sum_ptr, start, size, first_column, not BACKWARD, H, P, L, COLUMNS, SMALL)
        row = _columns(row_ptr + group * N, start, size, row_stride, n, N, L)
        state = tl.dot(row, weighted, state * tl.exp(end), input_precision="ieee")


@triton.jit
def _state(ptr, chunk, n, column, N: tl.constexpr, WIDTH: tl.constexpr):
    """Load a tile `[states, columns]` of the state of a chunk."""
    at = (chunk.to(tl.int64) * N + n)[:, None] * WIDTH + column[None, :]
    return tl.load(ptr + at, mask=(n < N)[:, None], other=0.0)


@triton.jit
def _output(
    x_ptr, x_stride, b_ptr, b_stride, c_ptr, c_stride, d_ptr, step_ptr, sum_ptr, chunk_ptr, state_ptr, y_ptr,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr,
    STATES: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = H * P // COLUMNS
    first_column = tl.program_id(0) % across * COLUMNS
    chunk = tl.program_id(0) // across
    column = first_column + tl.arange(0, COLUMNS)
    group = first_column // (H * P // G)
    start, size, index = _chunk(chunk_ptr, chunk, L)
    scores = tl.zeros((L, L), tl.float32)
    carried = tl.zeros((L, COLUMNS), tl.float32)
    for first in range(0, N, STATES):
        n = first + tl.arange(0, STATES)
        c = _rows(c_ptr + group * N, start, size, c_stride, n, N, L)
        b = _columns(b_ptr + group * N, start, size, b_stride, n, N, L)
        scores = tl.dot(c, b, scores, input_precision="ieee")
        carried = tl.dot(c, _state(state_ptr, chunk, n, column, N, H * P), carried, input_precision="ieee")
    x = _rows(x_ptr, start, size, x_stride, column, H * P, L)
    causal = (index[:, None] >= index[None, :]) & (index < size)[:, None]
    total = tl.zeros((L, COLUMNS), tl.float32)
    for i in range(SMALL):
        head = first_column // P + i
        mine = (column // P == head)[None, :]
        sums = tl.load(sum_ptr + (start + index) * H + head, mask=index < size, other=0.0)
        step = tl.load(step_ptr + (start + index) * H + head, mask=index < size, other=0.0)
        weights = scores * _decay(sums[:, None], sums[None, :], causal) * step[None, :]
        total = tl.dot(weights.to(x.dtype), tl.where(mine, x, 0.0).to(x.dtype), total, input_precision="ieee")
        skip = tl.load(d_ptr + head).to(tl.float32)
        total += tl.where(mine, carried * tl.exp(sums)[:, None] + skip * x.to(tl.float32), 0.0)
    at = (start + index)[:, None] * (H * P) + column[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=(index < size)[:, None])


@triton.jit(do_not_specialize=["length"])
def _gradient_of_x(
    x_ptr, x_stride, b_ptr, b_stride, c_ptr, c_stride, d_ptr, step_ptr, sum_ptr, chunk_ptr, state_ptr, dstate_ptr,
    dy_ptr, dx_ptr, dstep_ptr, dsum_ptr, dskip_ptr, pairs_ptr, length, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, PARTS: tl.constexpr, L: tl.constexpr, COLUMNS: tl.constexpr, STATES: tl.constexpr,
    SMALL: tl.constexpr,
):  # fmt: skip
    across: tl.constexpr = H * P // COLUMNS
    first_column = tl.program_id(0) % across * COLUMNS
    chunk = tl.program_id(0) // across
    column = first_column + tl.arange(0, COLUMNS)
    group = first_column // (H * P // G)
    start, size, index = _chunk(chunk_ptr, chunk, L)
    # Rows of this tile are the earlier tokens s, its columns the later ones t.
    scores = tl.zeros((L, L), tl.float32)
    carried = tl.zeros((L, COLUMNS), tl.float32)
    returned = tl.zeros((L, COLUMNS), tl.float32)
    kept = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, N, STATES):
        n = first + tl.arange(0, STATES)
        b = _rows(b_ptr + group * N, start, size, b_stride, n, N, L)
        scores = tl.dot(b, _columns(c_ptr + group * N, start, size, c_stride, n, N, L), scores, input_precision="ieee")
        dstate = _state(dstate_ptr, chunk, n, column, N, H * P)
        returned = tl.dot(b, dstate, returned, input_precision="ieee")
        state = _state(state_ptr, chunk, n, column, N, H * P)
        c = _rows(c_ptr + group * N, start, size, c_stride, n, N, L)
        carried = tl.dot(c, state, carried, input_precision="ieee")
        kept += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0)
    x = _rows(x_ptr, start, size, x_stride, column, H * P, L)
    dy = _rows(dy_ptr, start, size, H * P, column, H * P, L)
    dy_columns = _columns(dy_ptr, start, size, H * P, column, H * P, L)
    causal = (index[None, :] >= index[:, None]) & (index < size)[None, :]
    dx = tl.zeros((L, COLUMNS), tl.float32)
    dscores = tl.zeros((L, L), tl.float32)
    part = first_column % P // COLUMNS
    for i in range(SMALL):
        head = first_column // P + i
        mine = (column // P == head)[None, :]
        sums = tl.load(sum_ptr + (start + index) * H + head, mask=index < size, other=0.0)
        step = tl.load(step_ptr + (start + index) * H + head, mask=index < size, other=0.0)
        end = tl.load(sum_ptr + (start + size - 1) * H + head, mask=size > 0, other=0.0)
        decay = _decay(sums[None, :], sums[:, None], causal)
        weights = (scores * decay).to(x.dtype)
        my_x, my_dy = tl.where(mine, x, 0.0).to(x.dtype), tl.where(mine, dy, 0.0).to(x.dtype)
        pairs = decay * step[:, None] * tl.dot(my_x, dy_columns, input_precision="ieee")
        dscores += pairs
        pairs *= scores
        from_end = tl.where(index < size, tl.exp(end - sums), 0.0)
        from_state = tl.where(mine, returned, 0.0) * from_end[:, None]
        my_x, my_dy = my_x.to(tl.float32), my_dy.to(tl.float32)
        written = my_x * from_state * step[:, None]
        unit = tl.dot(weights, my_dy.to(x.dtype), from_state, input_precision="ieee")
        skip = tl.load(d_ptr + head).to(tl.float32)
        dx += unit * step[:, None] + my_dy * skip
        # The sums of later tokens, those of earlier ones, and the sum at the end of the chunk.
        dsum = tl.sum(pairs, 0) + tl.exp(sums) * tl.sum(my_dy * carried, 1)
        dsum -= tl.sum(pairs, 1) + tl.sum(written, 1)
        # A sum over one dimension after the other would crash triton 3.6 for Blackwell GPUs.
        at_end = tl.sum(written) + tl.exp(end) * tl.sum(tl.where(column // P == head, kept, 0.0), 0)
        dsum += tl.where(index == size - 1, at_end, 0.0)
        at = (part * length + start + index) * H + head
        tl.store(dsum_ptr + at, dsum, mask=index < size)
        tl.store(dstep_ptr + at, tl.sum(my_x * unit, 1), mask=index < size)
        tl.store(dskip_ptr + (chunk.to(tl.int64) * PARTS + part) * H + head, tl.sum(my_x * my_dy))
    at = (start + index)[:, None] * (H * P) + column[None, :]
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=(index < size)[:, None])
    at = tl.program_id(0).to(tl.int64) * L * L + index[:, None] * L + index[None, :]
    tl.store(pairs_ptr + at, dscores)


@triton.jit
def _gradient_of_group(
    x_ptr, x_stride, pair_ptr, pair_stride, dscores_ptr, step_ptr, sum_ptr, chunk_ptr, state_ptr, out_ptr,
    H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, KEYS: tl.constexpr, L: tl.constexpr,
    COLUMNS: tl.constexpr, STATES: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """The gradient of `B` if `KEYS`, with x and `pair` = C, else of `C`, with dy in place of x and `pair` = B."""
    down: tl.constexpr = (N + STATES - 1) // STATES
    n = tl.program_id(0) % down * STATES + tl.arange(0, STATES)
    group = tl.program_id(0) // down % G
    chunk = tl.program_id(0) // (down * G)
    start, size, index = _chunk(chunk_ptr, chunk, L)
    total = tl.zeros((L, STATES), tl.float32)
    for block in range(H * P // G // COLUMNS):
        first_column = group * (H * P // G) + block * COLUMNS
        column = first_column + tl.arange(0, COLUMNS)
        x = _rows(x_ptr, start, size, x_stride, column, H * P, L)
        weighted = _weighted(x, step_ptr, sum_ptr, start, size, first_column, KEYS, H, P, L, COLUMNS, SMALL)
        at = (chunk.to(tl.int64) * N + n)[None, :] * (H * P) + column[:, None]
        state = tl.load(state_ptr + at, mask=(n < N)[None, :], other=0.0)
        total = tl.dot(weighted, state, total, input_precision="ieee")
    # Rows are the tokens of the result, columns their partners. The gradient in memory has earlier tokens as rows.
    rows, columns = L, 1
    if not KEYS:
        rows, columns = 1, L
    at = (chunk * G + group).to(tl.int64) * L * L + index[:, None] * rows + index[None, :] * columns
    pair = _rows(pair_ptr + group * N, start, size, pair_stride, n, N, L)
    total = tl.dot(tl.load(dscores_ptr + at).to(pair.dtype), pair, total, input_precision="ieee")
    at = (start + index)[:, None] * (G * N) + group * N + n[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(index < size)[:, None] & (n < N)[None, :])


def size_of_heads(heads: int, dim: int, groups: int) -> int:
    """Return the smallest size to which heads are padded: a tile has whole heads of one group, or an even part of one.

    Narrower tiles are no way out: triton 3.6 computes products of 16 columns wrongly on Hopper GPUs.
    """
    size = max(8, next_power_of_2(dim)) if dim < _COLUMNS else ceil_div(dim, _COLUMNS) * _COLUMNS
    while heads // groups * size % _COLUMNS:
        size *= 2
    return size


def chunks_of(boundaries: SequenceBoundaries) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the start and the size of each chunk, int32 `[chunks, 2]`, each document's first chunk and token, `[N+1]`."""
    device, starts = boundaries.cu_seqlens.device, boundaries.cu_seqlens[:-1]
    counts, total = boundaries.chunk_counts(_CHUNK)
    offsets = torch.zeros(len(counts) + 1, dtype=torch.int32, device=device)
    torch.cumsum(counts, 0, out=offsets[1:])
    numbers = torch.arange(len(counts), device=device)
    document = numbers.repeat_interleave(counts, output_size=total)
    start = starts[document] + (torch.arange(total, device=device) - offsets[document]) * _CHUNK
    size = (boundaries.cu_seqlens[1:][document] - start).clamp(0, _CHUNK)
    return torch.stack([start, size], dim=1).to(torch.int32), offsets, boundaries.cu_seqlens.contiguous()


class SSD(KernelFunction):
    """The scan of `x` `[T, H * P]`, `dt` `[T, H]`, `a`, `d` and `bias` `[H]`, `b` and `c` `[T, G * N]`.

    `chunks`, `offsets` and `cu` are those of [`chunks_of`]. `sizes` are `(H, P, G, N)`, with `P` of [`size_of_heads`].
    """

    def forward(ctx, x, dt, a, b, c, d, bias, limit, chunks, offsets, cu, sizes):
        x, dt, b, c = (z if z.stride(1) == 1 else z.contiguous() for z in (x, dt, b, c))
        a, d, bias = (z.contiguous() for z in (a, d, bias))
        heads, dim, groups, states = sizes
        step, sums = (torch.empty(len(x), heads, dtype=torch.float32, device=x.device) for _ in range(2))
        ctx.steps = {"H": heads, "L": _CHUNK, "HEADS": min(_HEADS, next_power_of_2(heads))}
        ctx.tile = dict(zip("HPGN", sizes, strict=True)) | {"L": _CHUNK, "COLUMNS": _COLUMNS}
        ctx.tile["STATES"] = min(_STATES, max(16, next_power_of_2(states)))
        ctx.tile["SMALL"] = max(1, _COLUMNS // dim)
        # Tiles of several heads and of float32 take more registers and shared memory.
        few = x.dtype != torch.float32 and ctx.tile["SMALL"] == 1
        ctx.launch = {"num_warps": 8 if x.dtype == torch.float32 else 4, "num_stages": 3 if few else 2}
        ctx.limit = limit
        grid = (len(chunks) * ceil_div(heads, ctx.steps["HEADS"]),)
        _steps[grid](dt, dt.stride(0), a, bias, chunks, step, sums, *limit, **ctx.steps)
        state = _run_states(ctx, b, x, step, sums, len(chunks), offsets, cu, False)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _output[(len(chunks) * (heads * dim // _COLUMNS),)](
            x, x.stride(0), b, b.stride(0), c, c.stride(0), d, step, sums, chunks, state, y, **ctx.tile,
            **ctx.launch,
        )  # fmt: skip
        ctx.save_for_backward(x, dt, a, b, c, d, bias, step, sums, chunks, offsets, cu)
        return y

    def backward(ctx, dy):
        x, dt, a, b, c, d, bias, step, sums, chunks, offsets, cu = ctx.saved_tensors
        heads, dim, groups, states = (ctx.tile[name] for name in "HPGN")
        dy = dy.contiguous()
        state = _run_states(ctx, b, x, step, sums, len(chunks), offsets, cu, False)
        dstate = _run_states(ctx, c, dy, step, sums, len(chunks), offsets, cu, True)
        length, parts = len(x), max(1, dim // _COLUMNS)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dstep, dsum = (torch.empty(parts, length, heads, dtype=torch.float32, device=x.device) for _ in range(2))
        dskip = torch.empty(len(chunks) * parts, heads, dtype=torch.float32, device=x.device)
        across = heads * dim // _COLUMNS
        # The gradient of the scores C_t . B_s of a chunk, from each tile of the heads that share them.
        sizes = len(chunks) * groups, across // groups, _CHUNK, _CHUNK
        pairs = torch.empty(sizes, dtype=torch.float32, device=x.device)
        _gradient_of_x[(len(chunks) * across,)](
            x, x.stride(0), b, b.stride(0), c, c.stride(0), d, step, sums, chunks, state, dstate, dy, dx, dstep, dsum,
            dskip, pairs, length, PARTS=parts, **ctx.tile, num_warps=8, num_stages=2,
        )  # fmt: skip
        dscores = pairs.sum(1)
        db, dc = (torch.empty(z.shape, dtype=z.dtype, device=z.device) for z in (b, c))
        grid = (len(chunks) * groups * ceil_div(states, ctx.tile["STATES"]),)
        for keys, rows, pair, passed, out in ((True, x, c, dstate, db), (False, dy, b, state, dc)):
            _gradient_of_group[grid](
                rows, rows.stride(0), pair, pair.stride(0), dscores, step, sums, chunks, passed, out, KEYS=keys,
                **ctx.tile, **ctx.launch,
            )  # fmt: skip
        ddt = torch.empty(dt.shape, dtype=dt.dtype, device=dt.device)
        totals = torch.empty(len(chunks), 2, heads, dtype=torch.float32, device=x.device)
        grid = (len(chunks) * ceil_div(heads, ctx.steps["HEADS"]),)
        _steps_backward[grid](
            dt, dt.stride(0), a, bias, chunks, step, dstep, dsum, ddt, totals, length, *ctx.limit, PARTS=parts,
            **ctx.steps,
        )  # fmt: skip
        da, dbias = totals.sum(0)
        dd = dskip.sum(0)
        return dx, ddt, da.to(a.dtype), db, dc, dd.to(d.dtype), dbias.to(bias.dtype), *(None,) * 5


def _run_states(ctx, row, x, step, sums, chunks: int, offsets, cu, backward: bool) -> torch.Tensor:
    """Return the states before the chunks, or the gradients of those after them, `[chunks, N, H * P]`."""
    heads, dim, states = (ctx.tile[name] for name in "HPN")
    state = torch.empty(chunks, states, heads * dim, dtype=x.dtype, device=x.device)
    tiles = heads * dim // _COLUMNS * ceil_div(states, ctx.tile["STATES"])
    _states[(tiles * (len(offsets) - 1),)](
        row, row.stride(0), x, x.stride(0), step, sums, cu, offsets, state, BACKWARD=backward, **ctx.tile,
        **ctx.launch,
    )  # fmt: skip
    return state
