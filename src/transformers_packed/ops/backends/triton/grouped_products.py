"""Products of rows with the matrices of their experts. The rows are sorted by expert.

A row is one choice of a token. `order` lists the choices `token * top_k + k` by expert. Kernels read the rows of tokens
directly where that is faster than a copy.

A tile has rows of one expert, and its size depends neither on the routing nor on measured times. No product is split
along the reduced dimension, and one program adds a token's choices in their order. So a token's result does not depend
on other tokens.
"""

import math
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...terms import PIECE as _PIECE
from ...terms import DequantizedExperts
from . import ceil_div, next_power_of_2


# Rows per tile, and elements of the reduced dimension per step.
_ROWS, _STEP = 128, 64


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


@triton.jit(do_not_specialize=["count", "limit"])
def _place(
    sorted_order_ptr, ends_ptr, tiles_ptr, order_ptr, rows_ptr, table_ptr, count, limit, E, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the order and its inverse as 32-bit integers, and what [`_tile`] reads of each tile."""
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.load(sorted_order_ptr + item, mask=item < count, other=0)
    tl.store(order_ptr + item, choice.to(tl.int32), mask=item < count)
    tl.store(rows_ptr + choice, item, mask=item < count)
    if tl.program_id(0) * BLOCK < limit:
        experts = tl.arange(0, WIDTH)
        tiles = tl.load(tiles_ptr + experts, mask=experts < E, other=2147483647)
        expert = tl.sum((tiles[None, :] <= item[:, None]).to(tl.int32), 1)
        before = tl.maximum(expert - 1, 0)
        start = tl.where(expert > 0, tl.load(ends_ptr + before), 0)
        first = tl.where(expert > 0, tl.load(tiles_ptr + before), 0)
        at = table_ptr + 3 * item
        tl.store(at, expert, mask=item < limit)
        tl.store(at + 1, start + (item - first) * ROWS, mask=item < limit)
        tl.store(at + 2, tl.load(ends_ptr + expert, mask=expert < E, other=0), mask=item < limit)


@triton.jit
def _tiles_of(tiles_ptr, FIRST, LAST):
    """Return the first tile of expert `FIRST`, and the number of tiles until expert `LAST`, excluded."""
    first = tl.where(FIRST > 0, tl.load(tiles_ptr + tl.maximum(FIRST - 1, 0)), 0)
    return first, tl.load(tiles_ptr + LAST - 1) - first


@triton.jit
def _tile(table_ptr, number):
    """Return the expert of a tile, its first row, and the end of the expert's rows."""
    at = table_ptr + 3 * number
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _store_in_parts(ptr, values, inside, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr):
    if PARTS == 1:
        tl.store(ptr + tl.arange(0, COLUMNS)[None, :], values, mask=inside)
    else:
        left, right = tl.split(tl.permute(tl.reshape(values, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        _store_in_parts(ptr, left, inside, ROWS, COLUMNS // 2, PARTS // 2)
        _store_in_parts(ptr + COLUMNS // 2, right, inside, ROWS, COLUMNS // 2, PARTS // 2)


@triton.jit(do_not_specialize=["FIRST", "LAST"])
def _rows_times_experts(
    a, b_desc, low_ptr, up_desc, y_ptr, order_ptr, table_ptr, tiles_ptr, FIRST, LAST, N: tl.constexpr,
    K: tl.constexpr, RANK: tl.constexpr, TOP: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, PROGRAMS: tl.constexpr, PARTS: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """`a` describes sorted rows, or, if `TOP`, points to tokens. `TRANSPOSED` weights are `[N, K]`."""
    first, tiles = _tiles_of(tiles_ptr, FIRST, LAST)
    # `JOINED` is one loop over tiles and steps: the next tile is loaded while this one is stored.
    for tile in tl.range(tl.program_id(0), tiles * (N // COLUMNS), PROGRAMS, flatten=JOINED):
        expert, row, end = _tile(table_ptr, first + tile // (N // COLUMNS))
        column = tile % (N // COLUMNS) * COLUMNS
        # Where the weights of the expert are.
        place = expert - FIRST
        rows = row + tl.arange(0, ROWS)
        inside = (rows < end)[:, None]
        if TOP:
            tokens = tl.load(order_ptr + rows, mask=rows < end, other=0) // TOP
            a_at = a + tokens.to(tl.int64)[:, None] * K + tl.arange(0, STEP)[None, :]
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in range(0, K, STEP):
            if TOP:
                x = tl.load(a_at + k)
            else:
                x = a.load([row, k])
            if TRANSPOSED:
                total = tl.dot(x, b_desc.load([place * N + column, k]).T, total)
            else:
                total = tl.dot(x, b_desc.load([place * K + k, column]), total)
        if RANK:
            low = _load_rows(low_ptr, rows, inside, RANK)
            if TRANSPOSED:
                total = tl.dot(low, up_desc.load([expert * N + column, 0]).T, total)
            else:
                total = tl.dot(low, up_desc.load([expert * RANK, column]), total)
        y_at = y_ptr + rows.to(tl.int64)[:, None] * N + column
        _store_in_parts(y_at, total.to(y_ptr.dtype.element_ty), inside, ROWS, COLUMNS, PARTS)


@triton.jit
def _narrow_rows(
    a_ptr, factor_ptr, low_ptr, order_ptr, table_ptr, tiles_ptr, scale, E, K: tl.constexpr, RANK: tl.constexpr,
    TOP: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Multiply rows by their expert's factor, `[RANK, K]` if `TRANSPOSED`, else `[K, RANK]`, and by `scale`."""
    if tl.program_id(0) >= tl.load(tiles_ptr + E - 1):
        return
    expert, row, end = _tile(table_ptr, tl.program_id(0))
    rows = row + tl.arange(0, ROWS)
    inside = (rows < end)[:, None]
    at = rows.to(tl.int64)
    if TOP:
        at = (tl.load(order_ptr + rows, mask=rows < end, other=0) // TOP).to(tl.int64)
    steps, narrow = tl.arange(0, STEP), tl.arange(0, RANK)
    a_at = a_ptr + at[:, None] * K + steps[None, :]
    factor_at = factor_ptr + expert.to(tl.int64) * K * RANK
    if TRANSPOSED:
        factor_at += narrow[None, :] * K + steps[:, None]
    else:
        factor_at += steps[:, None] * RANK + narrow[None, :]
    low = tl.zeros((ROWS, RANK), dtype=tl.float32)
    for k in range(0, K, STEP):
        factor = tl.load(factor_at + (k if TRANSPOSED else k * RANK))
        low = tl.dot(tl.load(a_at + k, mask=inside, other=0.0), factor, low)
    at = rows.to(tl.int64)[:, None] * RANK + narrow[None, :]
    tl.store(low_ptr + at, (scale * low).to(low_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_rows(ptr, rows, inside, WIDTH: tl.constexpr):
    return tl.load(ptr + rows.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["FIRST", "LAST"])
def _gate_up(
    x_ptr, w_desc, low_ptr, up_desc, h_ptr, both_ptr, order_ptr, table_ptr, tiles_ptr, FIRST, LAST,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, TOP: tl.constexpr, KEEP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    first, tiles = _tiles_of(tiles_ptr, FIRST, LAST)
    if tl.program_id(0) >= tiles * (N // COLUMNS):
        return
    expert, row, end = _tile(table_ptr, first + tl.program_id(0) // (N // COLUMNS))
    column = tl.program_id(0) % (N // COLUMNS) * COLUMNS
    rows = row + tl.arange(0, ROWS)
    inside = (rows < end)[:, None]
    tokens = tl.load(order_ptr + rows, mask=rows < end, other=0) // TOP
    x_at = x_ptr + tokens.to(tl.int64)[:, None] * K + tl.arange(0, STEP)[None, :]
    gate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    place = (expert - FIRST) * 2 * N + column
    for k in range(0, K, STEP):
        x = tl.load(x_at + k)
        gate = tl.dot(x, w_desc.load([place, k]).T, gate)
        up = tl.dot(x, w_desc.load([place + N, k]).T, up)
    if RANK:
        low = _load_rows(low_ptr, rows, inside, RANK)
        gate = tl.dot(low, up_desc.load([expert * 2 * N + column, 0]).T, gate)
        up = tl.dot(low, up_desc.load([expert * 2 * N + column + N, 0]).T, up)
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
def _gate_gradients(both_ptr, dh_ptr, weights_at, row, column, N: tl.constexpr):
    """Return the weight of a row, its product `h` and that of `h` and its gradient, and the gradients of gate and up."""
    inside = column < N
    gate = tl.load(both_ptr + row * 2 * N + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * N + N + column, mask=inside, other=0.0).to(tl.float32)
    dh = tl.load(dh_ptr + row * N + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weights_at).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    h = gate * sigmoid * up
    d_weight = h * dh
    dh *= weight
    d_gate = dh * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return weight, h, d_weight, d_gate, dh * gate * sigmoid


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
    weight, h, d_weight, d_gate, d_up = _gate_gradients(both_ptr, dh_ptr, weights_ptr + choice, row, column, N)
    tl.store(d_weights_ptr + choice, tl.sum(d_weight, 0).to(d_weights_ptr.dtype.element_ty))
    at = d_both_ptr + row * 2 * N + column
    tl.store(at, d_gate.to(d_both_ptr.dtype.element_ty), mask=inside)
    tl.store(at + N, d_up.to(d_both_ptr.dtype.element_ty), mask=inside)
    # The weighted product replaces the gradient that was read.
    tl.store(dh_ptr + row * N + column, (weight * h).to(dh_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _combine(
    values_ptr, rows_ptr, index_ptr, weights_ptr, shared_ptr, gate_ptr, y_ptr, E, N, TOP: tl.constexpr,
    WEIGHTED: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP):
        choice = token * TOP + k
        at = tl.load(rows_ptr + choice).to(tl.int64) * N + column
        row = tl.load(values_ptr + at, mask=column < N, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + choice).to(tl.float32)
        # The row of an expert on another device was never written.
        total += tl.where(tl.load(index_ptr + choice) < E, row, 0.0)
    if SHARED:
        gate = tl.sigmoid(tl.load(gate_ptr + token).to(tl.float32))
        total += gate * tl.load(shared_ptr + token * N + column, mask=column < N, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * N + column, total.to(y_ptr.dtype.element_ty), mask=column < N)


@triton.jit
def _gather(x_ptr, order_ptr, end_ptr, rows_ptr, N, TOP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(end_ptr):
        return
    token = (tl.load(order_ptr + row) // TOP).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * N + column, mask=column < N)
    tl.store(rows_ptr + row * N + column, x, mask=column < N)


@triton.jit
def _narrow_gradient(
    a_ptr, low_ptr, out_ptr, order_ptr, ends_ptr, N: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    TOP: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the outer products of the rows of an expert and of narrow ones, `[N, RANK]`, or `[RANK, N]` if `TRANSPOSED`.

    If `TOP`, the rows are those of tokens. The narrow ones have `WIDTH` columns.
    """
    expert = tl.program_id(0) // (N // COLUMNS)
    column = tl.program_id(0) % (N // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    narrow = tl.arange(0, WIDTH)
    start = tl.where(expert > 0, tl.load(ends_ptr + tl.maximum(expert - 1, 0)), 0)
    end = tl.load(ends_ptr + expert)
    total = tl.zeros((COLUMNS, WIDTH), dtype=tl.float32)
    for row in range(start, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        inside = (rows < end)[:, None]
        at = rows.to(tl.int64)
        low = tl.load(low_ptr + at[:, None] * WIDTH + narrow[None, :], mask=inside, other=0.0)
        if TOP:
            at = (tl.load(order_ptr + rows, mask=rows < end, other=0) // TOP).to(tl.int64)
        a = tl.load(a_ptr + at[:, None] * N + column[None, :], mask=inside, other=0.0)
        total = tl.dot(a.T, low, total)
    at = expert.to(tl.int64) * N * RANK
    if TRANSPOSED:
        at += narrow[None, :] * N + column[:, None]
    else:
        at += column[:, None] * RANK + narrow[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=(narrow < RANK)[None, :])


def _divisor(size: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides `size`."""
    return min(size & -size, most)


class Plan:
    """The rows of each expert, as tensors on the device. The host never knows them.

    `order` is the choice of each row, `rows` the row of each choice, `ends` the end of each expert's rows, `tiles` that
    of its tiles, and `table` describes each tile.
    """

    def __init__(self, top_k, order, rows, ends, tiles, table):
        self.top_k, self.order, self.rows, self.ends, self.tiles, self.table = top_k, order, rows, ends, tiles, table
        self.programs, self.architecture = _hardware(order.device)

    @classmethod
    def of(cls, index: torch.Tensor, number: int) -> "Plan":
        ids, by_expert = index.flatten().clamp(max=number).to(torch.int16).sort(stable=True)
        count, width = len(by_expert), next_power_of_2(number)
        # The most tiles that any routing can have.
        limit = count // _ROWS + number
        integers = partial(torch.empty, dtype=torch.int32, device=index.device)
        order, rows, table = integers(count), integers(count), integers(limit, 3)
        ends, tiles = integers(number), integers(number)
        _plan[(1,)](ids, ends, tiles, count, number, _ROWS, width)
        grid = (ceil_div(max(count, limit), 128),)
        _place[grid](by_expert, ends, tiles, order, rows, table, count, limit, number, _ROWS, width, 128)
        return cls(index.shape[1], order, rows, ends, tiles, table)

    def tensors(self):
        return self.order, self.rows, self.ends, self.tiles, self.table

    def rows_times_experts(self, a, weight, factors=None, *, transposed: bool, of_tokens: bool = False):
        """Multiply each row by its expert's weight `[N, K]` (`transposed`) or `[K, N]`, plus the `Factors` of an adapter.

        `a` has the sorted rows, or, with `of_tokens`, those of the tokens. The second result is the product with the
        first factor, `[S, rank]`.
        """
        _, n, k = weight.shape if transposed else (weight.shape[0], *weight.shape[:0:-1])
        columns = _divisor(n, 256)
        y = a.new_empty(len(self.order), n)
        source = a if of_tokens else TensorDescriptor.from_tensor(a, [_ROWS, _STEP])
        low, rank, second = self._adapter(a, factors, columns, transposed, of_tokens)
        stages, parts, joined = _schedule(rank, self.architecture)
        for first, last, b in _pieces(weight, a.dtype, [columns, _STEP] if transposed else [_STEP, columns]):
            _rows_times_experts[(self.programs,)](
                source, b, low, second, y, self.order, self.table, self.tiles, first, last, n, k, rank,
                self.top_k * of_tokens, transposed, _ROWS, columns, _STEP, self.programs, parts, joined, num_warps=8,
                num_stages=stages,
            )  # fmt: skip
            del b
        return y, low

    def _adapter(self, a, factors, columns: int, transposed: bool, of_tokens: bool):
        """Return the product with the first factor, the rank, and the descriptor of the second factor."""
        if factors is None:
            return None, 0, None
        second, rank = factors.up if transposed else factors.down, factors.down.shape[1]
        block = [columns, rank] if transposed else [rank, columns]
        return self.narrow(a, factors, transposed, of_tokens), rank, _described(second, block)

    def narrow(self, a, factors, transposed: bool, of_tokens: bool = False):
        """Return the scaled product of each row with its expert's `down` (`transposed`) or `up`, `[S, rank]`."""
        factor, rank = factors.down if transposed else factors.up, factors.down.shape[1]
        low = a.new_empty(len(self.order), rank)
        _narrow_rows[(len(self.table),)](
            a, factor, low, self.order, self.table, self.tiles, factors.scale, len(self.ends), a.shape[1], rank,
            self.top_k * of_tokens, transposed, _ROWS, _STEP, num_warps=4, num_stages=4,
        )  # fmt: skip
        return low

    def gate_up(self, x, weight, factors, keep: bool, adapted: bool = True):
        """Return `silu(gate) * up` of each row, gate and up if `keep`, and the product with the first factor.

        Products in float8 need the first result as it is only if an adapter reads it too.
        """
        _, n, k = weight.shape
        n //= 2
        columns = _divisor(n, 128)
        h = x.new_empty(len(self.order), n)
        both = x.new_empty(len(self.order), 2 * n) if keep else None
        low, rank, second = self._adapter(x, factors, columns, True, True)
        for first, last, w in _pieces(weight, x.dtype, [columns, _STEP]):
            grid = (len(self.order) // _ROWS + last - first) * (n // columns)
            _gate_up[(grid,)](
                x, w, low, second, h, both, self.order, self.table, self.tiles, first, last, n, k, rank, self.top_k,
                keep, _ROWS, columns, _STEP, num_warps=8, num_stages=4,
            )  # fmt: skip
            del w
        return h, both, low

    def gate_backward(self, both, dh, weights, adapted=(True, True)):
        """Return the gradients of gate and up, and of the weights. `dh` then holds the weighted products.

        Products in float8 need the gradients as they are, and these products, only for adapters of both weights.
        """
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

    def narrow_gradient(self, a, low, like, *, transposed: bool = False, of_tokens: bool = False):
        """Return the sums of the outer products of an expert's rows and narrow rows `[S, width]`.

        The result has the shape and the dtype of `like`, `[E, N, rank]` or, if `transposed`, `[E, rank, N]`.
        """
        number, rank, n = like.shape if transposed else (like.shape[0], *like.shape[:0:-1])
        out, columns = torch.empty_like(like, memory_format=torch.contiguous_format), _divisor(n, 128)
        _narrow_gradient[(number * (n // columns),)](
            a, low, out, self.order, self.ends, n, rank, low.shape[1], self.top_k * of_tokens, transposed, 128,
            columns, num_warps=4, num_stages=3,
        )  # fmt: skip
        return out

    def sum_of_choices(self, values, index, weights, dtype, shared=None, gate=None):
        """Add the rows `values` `[S, N]` of each token's choices, times their weights if there are any.

        `shared` `[T, N]`, times the sigmoid of `gate` `[T, 1]`, is added if it is given.
        """
        n = values.shape[1]
        y, block = values.new_empty(len(index), n, dtype=dtype), min(next_power_of_2(n), 2048)
        _combine[(len(index), ceil_div(n, block))](
            values, self.rows, index, weights, shared, gate, y, len(self.ends), n, self.top_k, weights is not None,
            shared is not None, block,
        )  # fmt: skip
        return y


def _schedule(rank: int, architecture: int) -> tuple[int, int, bool]:
    """The steps that a loop over tiles loads ahead, the parts in which it stores a tile, and whether it joins its loops.

    Shared memory has room for the steps and for one part, and an adapter takes some of it.
    """
    stages, parts = {0: (4, 1), 16: (4, 1), 32: (4, 4)}.get(rank, (3, 4))
    # Triton cannot compile the joined loops of an adapter for Blackwell. With its product first, Hopper takes 1.5 times as long.
    return stages, parts, not rank or architecture < 10


@lru_cache
def _hardware(device: torch.device) -> tuple[int, int]:
    """The number of programs of a loop over all tiles, one for each processor, and the major compute capability."""
    if device.type != "cuda":
        # The interpreter has no processors. A few programs test the loop.
        return 3, 9
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major


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


class Factors:
    """An adapter's matrices by expert, in the dtype of the products: `down` `[E, rank, in]` and `up` `[E, out, rank]`.

    The rank is filled up with zeros to a power of two from 16 on. Products with the first of two factors are scaled.
    """

    def __init__(self, down, up, scale: float, dtype):
        self.scale, rank = float(scale), down.shape[1]
        more = max(16, next_power_of_2(rank)) - rank
        if more:
            down, up = F.pad(down, (0, 0, 0, more)), F.pad(up, (0, more))
        self.down, self.up = (x.to(dtype).contiguous() for x in (down, up))

    @classmethod
    def of(cls, matrices, scales, dtype) -> list["Factors | None"]:
        """Return the factors of the adapters of both weights, `None` for a weight without one."""
        pairs = zip((matrices[:2], matrices[2:]), scales, strict=True)
        return [None if down is None else cls(down, up, scale, dtype) for (down, up), scale in pairs]
