"""Mixture of experts: routing, and grouped matrix products over rows that are sorted by expert.

A row of these products is one choice of a token. `order` lists the choices `token * top_k + k` by expert. Kernels read
rows from their tokens and write them there directly where that is faster than a copy.

A tile has rows of one expert, and its size depends neither on the routing nor on measured times. No product is split
along the reduced dimension, and one program adds a token's choices in their order. So a token's result does not depend
on other tokens.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...autograd import save, saved
from ...terms import PIECE as _PIECE
from ...terms import DequantizedExperts
from . import KernelFunction, ceil_div, next_power_of_2


# Rows per tile, and elements of the reduced dimension per step.
_ROWS, _STEP = 128, 64


@triton.jit
def _route(logits_ptr, weights_ptr, index_ptr, E, TOP: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column, slot = tl.arange(0, WIDTH), tl.arange(0, SLOTS)
    logits = tl.load(logits_ptr + token * E + column, mask=column < E, other=0.0).to(tl.float32)
    # NaN is chosen first, as when sorting, and makes the weights NaN.
    logits = tl.where(logits != logits, float("inf"), logits)
    free = column < E
    chosen = tl.full((SLOTS,), float("-inf"), tl.float32)
    for k in tl.static_range(TOP):
        best = tl.max(tl.where(free, logits, float("-inf")), 0)
        expert = tl.min(tl.where(free & (logits == best), column, WIDTH), 0)
        free = free & (column != expert)
        chosen = tl.where(slot == k, best, chosen)
        tl.store(index_ptr + token * TOP + k, expert.to(tl.int64))
    weights = tl.exp(chosen - tl.max(chosen, 0))
    weights = weights / tl.sum(weights, 0)
    tl.store(weights_ptr + token * TOP + slot, weights.to(weights_ptr.dtype.element_ty), mask=slot < TOP)


@triton.jit
def _count_up_to(sorted_ptr, count, limit):
    """Return how many of the sorted values are at most `limit`, for each limit of a block."""
    low, high = tl.zeros_like(limit), tl.zeros_like(limit) + count
    # Enough to halve any range of 32-bit integers until it is empty.
    for _ in range(32):
        middle = (low + high) // 2
        up = (low < high) & (tl.load(sorted_ptr + middle, mask=low < high, other=0).to(tl.int32) <= limit)
        high = tl.where(up | (low >= high), high, middle)
        low = tl.where(up, middle + 1, low)
    return low


@triton.jit(do_not_specialize=["count"])
def _plan(sorted_ptr, ends_ptr, tiles_ptr, count, E, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    expert = tl.arange(0, WIDTH)
    ends = _count_up_to(sorted_ptr, count, expert)
    rows = ends - _count_up_to(sorted_ptr, count, expert - 1)
    tiles = tl.cumsum(tl.where(expert < E, (rows + ROWS - 1) // ROWS, 0), 0)
    tl.store(ends_ptr + expert, ends, mask=expert < E)
    tl.store(tiles_ptr + expert, tiles, mask=expert < E)


@triton.jit
def _tile(
    ends_ptr, tiles_ptr, E, FIRST, LAST, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the expert of this program's tile, the end of its rows, and the tile's first row and column of `N`.

    The first tile is that of expert `FIRST`. A tile without rows, or of expert `LAST` or later, starts at or after the
    end.
    """
    tile, experts = tl.program_id(0) // (N // COLUMNS), tl.arange(0, WIDTH)
    tile += tl.where(FIRST > 0, tl.load(tiles_ptr + tl.maximum(FIRST - 1, 0)), 0)
    tiles = tl.load(tiles_ptr + experts, mask=experts < E, other=2147483647)
    expert = tl.sum((tiles <= tile).to(tl.int32), 0)
    before = tl.maximum(expert - 1, 0)
    start = tl.where(expert > 0, tl.load(ends_ptr + before), 0)
    first = tl.where(expert > 0, tl.load(tiles_ptr + before), 0)
    end = tl.load(ends_ptr + expert, mask=expert < LAST, other=0)
    return expert, end, start + (tile - first) * ROWS, tl.program_id(0) % (N // COLUMNS) * COLUMNS


@triton.jit
def _store_rows(ptr, values, rows, inside, WIDTH: tl.constexpr):
    at = rows.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(ptr + at, values, mask=inside)


@triton.jit
def _rows_times_experts(
    a_desc, b_desc, down_desc, up_desc, y_ptr, low_ptr, order_ptr, ends_ptr, tiles_ptr, E, FIRST, LAST,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, TRANSPOSED: tl.constexpr, SCATTER: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    expert, end, row, column = _tile(ends_ptr, tiles_ptr, E, FIRST, LAST, N, ROWS, COLUMNS, WIDTH)
    if row >= end:
        return
    # Where the weights of the expert are.
    place = expert - FIRST
    rows = row + tl.arange(0, ROWS)
    inside = (rows < end)[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    if RANK:
        low = tl.zeros((ROWS, RANK), dtype=tl.float32)
    for k in range(0, K, STEP):
        a = a_desc.load([row, k])
        if TRANSPOSED:
            total = tl.dot(a, b_desc.load([place * N + column, k]).T, total)
        else:
            total = tl.dot(a, b_desc.load([place * K + k, column]), total)
        if RANK:
            low = tl.dot(a, down_desc.load([expert * RANK, k]).T, low)
    if RANK:
        rounded = low.to(y_ptr.dtype.element_ty)
        if TRANSPOSED:
            total = tl.dot(rounded, up_desc.load([expert * N + column, 0]).T, total)
        else:
            total = tl.dot(rounded, up_desc.load([expert * RANK, column]), total)
        if column == 0:
            _store_rows(low_ptr, rounded, rows, inside, RANK)
    to = rows.to(tl.int64)
    if SCATTER:
        to = tl.load(order_ptr + rows, mask=rows < end, other=0)
    at = to[:, None] * N + column + tl.arange(0, COLUMNS)[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate_up(
    x_ptr, w_desc, down_desc, up_desc, h_ptr, both_ptr, low_ptr, order_ptr, ends_ptr, tiles_ptr, E, FIRST, LAST,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, TOP: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    expert, end, row, column = _tile(ends_ptr, tiles_ptr, E, FIRST, LAST, N, ROWS, COLUMNS, WIDTH)
    if row >= end:
        return
    rows = row + tl.arange(0, ROWS)
    inside = (rows < end)[:, None]
    choices = tl.load(order_ptr + rows, mask=rows < end, other=0)
    x_at = x_ptr + (choices // TOP)[:, None] * K + tl.arange(0, STEP)[None, :]
    gate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    first, place = expert * 2 * N + column, (expert - FIRST) * 2 * N + column
    if RANK:
        low = tl.zeros((ROWS, RANK), dtype=tl.float32)
    for k in range(0, K, STEP):
        x = tl.load(x_at + k)
        gate = tl.dot(x, w_desc.load([place, k]).T, gate)
        up = tl.dot(x, w_desc.load([place + N, k]).T, up)
        if RANK:
            low = tl.dot(x, down_desc.load([expert * RANK, k]).T, low)
    if RANK:
        rounded = low.to(h_ptr.dtype.element_ty)
        gate = tl.dot(rounded, up_desc.load([first, 0]).T, gate)
        up = tl.dot(rounded, up_desc.load([first + N, 0]).T, up)
        if KEEP and column == 0:
            _store_rows(low_ptr, rounded, rows, inside, RANK)
    # Round to the saved values, from which the backward computes the product.
    gate, up = gate.to(h_ptr.dtype.element_ty), up.to(h_ptr.dtype.element_ty)
    columns = column + tl.arange(0, COLUMNS)[None, :]
    if KEEP:
        at = both_ptr + rows.to(tl.int64)[:, None] * 2 * N + columns
        tl.store(at, gate, mask=inside)
        tl.store(at + N, up, mask=inside)
    gate = gate.to(tl.float32)
    h = gate * tl.sigmoid(gate) * up.to(tl.float32)
    tl.store(h_ptr + rows.to(tl.int64)[:, None] * N + columns, h.to(h_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _gate_backward_rows(
    both_ptr, dh_ptr, d_both_ptr, order_ptr, weights_ptr, d_weights_ptr, end_ptr, N: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(end_ptr):
        return
    choice = tl.load(order_ptr + row)
    column = tl.arange(0, BLOCK)
    inside = column < N
    gate = tl.load(both_ptr + row * 2 * N + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * N + N + column, mask=inside, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + row * N + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights_ptr + choice).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    h = gate * sigmoid * up
    tl.store(d_weights_ptr + choice, tl.sum(h * dh, 0).to(d_weights_ptr.dtype.element_ty))
    dh *= weight
    d_gate = dh * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    at = d_both_ptr + row * 2 * N + column
    tl.store(at, d_gate.to(d_both_ptr.dtype.element_ty), mask=inside)
    tl.store(at + N, (dh * gate * sigmoid).to(d_both_ptr.dtype.element_ty), mask=inside)
    # The weighted product replaces the gradient that was read.
    tl.store(dh_ptr + row * N + column, (weight * h).to(dh_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _combine(
    rows_ptr, index_ptr, weights_ptr, shared_ptr, gate_ptr, y_ptr, E, N, TOP: tl.constexpr, WEIGHTED: tl.constexpr,
    SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP):
        choice = token * TOP + k
        row = tl.load(rows_ptr + choice * N + column, mask=column < N, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + choice).to(tl.float32)
        # The row of an expert on another device was never written.
        total += tl.where(tl.load(index_ptr + choice) < E, row, 0.0)
    if SHARED:
        gate = tl.sigmoid(tl.load(gate_ptr + token).to(tl.float32))
        total += gate * tl.load(shared_ptr + token * N + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + column, total.to(y_ptr.dtype.element_ty), mask=column < N)


@triton.jit
def _shared_backward(dy_ptr, shared_ptr, gate_ptr, d_shared_ptr, d_gate_ptr, N, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at, inside = token * N + column, column < N
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(tl.load(gate_ptr + token).to(tl.float32))
    tl.store(d_shared_ptr + at, (dy * gate).to(d_shared_ptr.dtype.element_ty), mask=inside)
    d_gate = tl.sum(dy * shared, 0) * gate * (1.0 - gate)
    tl.store(d_gate_ptr + token, d_gate.to(d_gate_ptr.dtype.element_ty))


@triton.jit
def _gather(x_ptr, order_ptr, end_ptr, rows_ptr, N, TOP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(end_ptr):
        return
    token = tl.load(order_ptr + row) // TOP
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * N + column, mask=column < N)
    tl.store(rows_ptr + row * N + column, x, mask=column < N)


def _divisor(size: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides `size`."""
    return min(size & -size, most)


class Router(KernelFunction):
    """The weights `[T, top_k]` and the experts `[T, top_k]` with the highest logits `[T, E]`."""

    def forward(ctx, logits, top_k):
        logits = logits.contiguous()
        tokens, number = logits.shape
        weights = logits.new_empty(tokens, top_k)
        index = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
        if tokens:
            sizes = (next_power_of_2(n) for n in (number, top_k))
            _route[(tokens,)](logits, weights, index, number, top_k, *sizes, num_warps=1)
        ctx.save_for_backward(logits, index)
        ctx.mark_non_differentiable(index)
        return weights, index

    def backward(ctx, d_weights, _):
        logits, index = ctx.saved_tensors
        # The probabilities over their sum are the softmax of the chosen logits.
        weights = torch.softmax(logits.gather(1, index).float(), -1)
        d_chosen = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
        return torch.zeros_like(logits).scatter_(1, index, d_chosen.to(logits.dtype)), None


class _Plan:
    """The rows of each expert, as tensors on the device. The host never knows them."""

    def __init__(self, order, ends, tiles, top_k):
        self.order, self.ends, self.tiles, self.top_k = order, ends, tiles, top_k
        self.width = next_power_of_2(len(ends))

    @classmethod
    def of(cls, index: torch.Tensor, number: int) -> "_Plan":
        ids, order = index.flatten().clamp(max=number).to(torch.int16).sort(stable=True)
        ends, tiles = torch.empty(2, number, dtype=torch.int32, device=index.device)
        _plan[(1,)](ids, ends, tiles, len(order), number, _ROWS, next_power_of_2(number))
        return cls(order, ends, tiles, index.shape[1])

    def rows_times_experts(self, rows, weight, factors=None, *, transposed: bool, scatter: bool = False):
        """Multiply each row by its expert's weight `[N, K]` (`transposed`) or `[K, N]`, plus the `_Factors` of an adapter.

        `scatter` returns the products in the order of the choices. The second result is the product with the first
        factor `[S, rank]`.
        """
        number, n, k = weight.shape if transposed else (weight.shape[0], *weight.shape[:0:-1])
        columns = _divisor(n, 256)
        y = rows.new_empty(len(self.order), n)
        a = TensorDescriptor.from_tensor(rows, [_ROWS, _STEP])
        low, rank, down, up = self._adapter(rows, factors, columns, transposed)
        for first, last, b in _pieces(weight, rows.dtype, [columns, _STEP] if transposed else [_STEP, columns]):
            _rows_times_experts[self.grid(last - first, n // columns)](
                a, b, down, up, y, low, self.order, self.ends, self.tiles, number, first, last, n, k, rank, transposed,
                scatter, _ROWS, columns, _STEP, self.width, num_warps=8, num_stages=4,
            )  # fmt: skip
            del b
        return y, low

    def _adapter(self, rows, factors, columns: int, transposed: bool):
        """Return memory for the product with the first factor, the rank, and the descriptors of both factors."""
        if factors is None:
            return None, 0, None, None
        first, second = factors.forward() if transposed else factors.backward()
        rank = first.shape[1]
        return (
            rows.new_empty(len(self.order), rank),
            rank,
            TensorDescriptor.from_tensor(first.flatten(0, 1), [rank, _STEP]),
            TensorDescriptor.from_tensor(second.flatten(0, 1), [columns, rank] if transposed else [rank, columns]),
        )

    def grid(self, experts: int, columns: int) -> tuple[int]:
        """Programs for the most tiles that any routing can have of this number of experts."""
        return ((len(self.order) // _ROWS + experts) * columns,)

    def gate_up(self, x, weight, factors, keep: bool):
        """Return `silu(gate) * up` of each row, and, if `keep`, gate and up and the product with the first factor."""
        number, n, k = weight.shape
        n //= 2
        columns = _divisor(n, 128)
        h = x.new_empty(len(self.order), n)
        both = x.new_empty(len(self.order), 2 * n) if keep else None
        low, rank, down, up = self._adapter(x, factors, columns, True)
        for first, last, w in _pieces(weight, x.dtype, [columns, _STEP]):
            _gate_up[self.grid(last - first, n // columns)](
                x, w, down, up, h, both, low, self.order, self.ends, self.tiles, number, first, last, n, k, rank,
                self.top_k, keep, _ROWS, columns, _STEP, self.width, num_warps=8, num_stages=4,
            )  # fmt: skip
            del w
        return h, both, low

    def gate_backward(self, both, dh, weights):
        """Return the gradients of gate and up, and of the weights. `dh` then holds the weighted products."""
        d_both, d_weights = torch.empty_like(both), torch.zeros_like(weights)
        n = dh.shape[1]
        _gate_backward_rows[(len(both),)](
            both, dh, d_both, self.order, weights, d_weights, self.ends[-1:], n, next_power_of_2(n)
        )
        return d_both, d_weights

    def gathered(self, x):
        """Return the rows of the tokens `[T, N]` of all choices, by expert: `[S, N]`."""
        n = x.shape[1]
        rows, block = x.new_empty(len(self.order), n), min(next_power_of_2(n), 2048)
        _gather[(len(rows), ceil_div(n, block))](x, self.order, self.ends[-1:], rows, n, self.top_k, block)
        return rows

    def weight_gradient(self, d_rows, rows, dtype):
        """Return the sum of the outer products of an expert's rows, `[E, out, in]`. On a GPU, the sums are float32."""
        return F.grouped_mm(d_rows.t(), rows, offs=self.ends).to(dtype)


def _sum_of_choices(rows, index, weights, number, dtype, shared=None, gate=None):
    """Add the rows `[T * top_k, N]` of each token's choices, times their weights if there are any.

    `shared` `[T, N]`, times the sigmoid of `gate` `[T, 1]`, is added if it is given.
    """
    n = rows.shape[1]
    y, block = rows.new_empty(len(index), n, dtype=dtype), min(next_power_of_2(n), 2048)
    _combine[(len(index), ceil_div(n, block))](
        rows, index, weights, shared, gate, y, number, n, index.shape[1], weights is not None, shared is not None, block
    )  # fmt: skip
    return y


def _pieces(weight, dtype, block: list[int]):
    """Yield the first expert, the last one, excluded, and the descriptor of their weights: all, or some quantized ones.

    A caller that deletes the descriptor frees the weights before the next ones are computed.
    """
    number, *sizes = weight.shape
    if not isinstance(weight, DequantizedExperts):
        yield 0, number, _described(weight.to(dtype), block)
        return
    step = max(1, _PIECE // math.prod(sizes))
    for first in range(0, number, step):
        last = min(first + step, number)
        yield first, last, _described(weight.compute(first, last).to(dtype), block)


def _described(x, block: list[int]):
    """Return the descriptor of `x`, contiguous and from a multiple of 16 bytes on, as descriptors require."""
    x = x.contiguous()
    return TensorDescriptor.from_tensor((x if x.data_ptr() % 16 == 0 else x.clone()).flatten(0, 1), block)


class _Factors:
    """An adapter's matrices by expert, in the dtype of the products: `down` `[E, rank, in]` and `up` `[E, out, rank]`.

    `up` includes the scale. The rank is filled up with zeros to a power of two from 16 on.
    """

    def __init__(self, down, up, scale: float, dtype):
        self.matrices, self.scale, self.rank = (down, up), scale, down.shape[1]
        more = max(16, next_power_of_2(self.rank)) - self.rank
        self.down = F.pad(down.to(dtype), (0, 0, 0, more)).contiguous()
        self.up = F.pad((up * scale).to(dtype), (0, more)).contiguous()

    @classmethod
    def of(cls, matrices, scales, dtype) -> list["_Factors | None"]:
        """Return the factors of the adapters of both weights, `None` for a weight without one."""
        pairs = zip((matrices[:2], matrices[2:]), scales, strict=True)
        return [None if down is None else cls(down, up, scale, dtype) for (down, up), scale in pairs]

    def forward(self):
        return self.down, self.up

    def backward(self):
        return self.up.transpose(1, 2).contiguous(), self.down

    def narrow(self, plan, rows):
        """Return the product of the rows with the first matrix, `[S, rank]`."""
        return F.grouped_mm(rows, self.down.transpose(1, 2), offs=plan.ends)

    def gradients(self, plan, d_rows, low, rows, d_low):
        """Return the gradients of both matrices from the rows' gradients, and from those of the narrow products."""
        down, up = self.matrices
        d_up = plan.weight_gradient(d_rows, low, torch.float32)[..., : self.rank] * self.scale
        d_down = plan.weight_gradient(d_low, rows, down.dtype)[:, : self.rank]
        return d_down, d_up.to(up.dtype)


def _either(quantized, *weights):
    """Return the quantized weights, and the others where there are none."""
    return [x if q is None else q for q, x in zip(quantized, weights, strict=True)]


def _shared_gradients(dy, shared, gate):
    """Return the gradients of the shared expert's output and of its gate."""
    d_shared, d_gate, n = torch.empty_like(shared), torch.empty_like(gate), shared.shape[1]
    _shared_backward[(len(shared),)](dy.contiguous(), shared, gate, d_shared, d_gate, n, next_power_of_2(n))
    return d_shared, d_gate


class Experts(KernelFunction):
    """The weighted sum of the experts' outputs for tokens `[T, hidden]`, plus that of the shared expert if it is given.

    `options` are the dtype of all products, the scales of the adapters of both weights, whether gradients are enabled,
    and both weights if they are quantized. The last tensors are the matrices of these adapters, or `None`.
    """

    def forward(ctx, x, index, weights, gate_up, down, shared, gate, options, *matrices):
        dtype, scales, keep, ctx.quantized = options
        ctx.dtype, ctx.like, ctx.scales = dtype, x.dtype, scales
        first_weight, second_weight = _either(ctx.quantized, gate_up, down)
        index, weights, number = index.contiguous(), weights.contiguous(), first_weight.shape[0]
        shared, gate = (None if t is None else t.contiguous() for t in (shared, gate))
        rows, low, both, order = x.to(dtype).contiguous(), None, None, (None, None, None)
        if len(rows):
            plan = _Plan.of(index, number)
            first, second = _Factors.of(matrices, scales, dtype)
            keep = keep and any(ctx.needs_input_grad)
            h, both, low = plan.gate_up(rows, first_weight, first, keep)
            order = plan.order, plan.ends, plan.tiles
        save(ctx, rows, index, weights, gate_up, down, shared, gate, *matrices, low, both, *order)
        if not len(rows):
            return torch.empty_like(x)
        y, _ = plan.rows_times_experts(h, second_weight, second, transposed=True, scatter=True)
        return _sum_of_choices(y, index, weights, number, x.dtype, shared, gate)

    def backward(ctx, dy):
        x, index, weights, gate_up, down, shared, gate, *matrices, low, both, order, ends, tiles = saved(ctx)
        for_x, _, for_weights, for_gate_up, for_down, *for_shared, _ = ctx.needs_input_grad[:8]
        for_matrices = ctx.needs_input_grad[8:]
        if order is None:
            inputs = x.to(ctx.like), None, weights, gate_up, down, shared, gate, None, *matrices
            wanted = zip(inputs, ctx.needs_input_grad, strict=True)
            return tuple(torch.zeros_like(x) if for_x else None for x, for_x in wanted)
        dx = d_gate_up = d_down = None
        found = [None] * 4
        d_shared, d_gate = _shared_gradients(dy, shared, gate) if any(for_shared) else (None, None)
        first_weight, second_weight = _either(ctx.quantized, gate_up, down)
        number, dtype = first_weight.shape[0], ctx.dtype
        first, second = _Factors.of(matrices, ctx.scales, dtype)
        plan = _Plan(order, ends, tiles, index.shape[1])
        dy = plan.gathered(dy.to(dtype).contiguous())
        dh, d_low = plan.rows_times_experts(dy, second_weight, second, transposed=False)
        d_both, d_weights = plan.gate_backward(both, dh, weights)
        if for_down:
            d_down = plan.weight_gradient(dy, dh, down.dtype)
        if any(for_matrices[2:]):
            # `dy` has no weights, so the other factor has them, as `dh` does now.
            found[2:] = second.gradients(plan, dy, second.narrow(plan, dh), dh, d_low)
        del dh, dy
        if for_x or any(for_matrices[:2]):
            rows, d_low = plan.rows_times_experts(d_both, first_weight, first, transposed=False, scatter=True)
            dx = _sum_of_choices(rows, index, None, number, ctx.like) if for_x else None
            del rows
        if for_gate_up or any(for_matrices[:2]):
            rows = plan.gathered(x)
            d_gate_up = plan.weight_gradient(d_both, rows, gate_up.dtype) if for_gate_up else None
            if any(for_matrices[:2]):
                found[:2] = first.gradients(plan, d_both, low, rows, d_low)
        found = [x if wanted else None for x, wanted in zip(found, for_matrices, strict=True)]
        d_weights = d_weights if for_weights else None
        return dx, None, d_weights, d_gate_up, d_down, d_shared, d_gate, None, *found
