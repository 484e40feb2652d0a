"""Products of rows with a matrix, or with those of their experts, in float8. See [`ops.float8_blocks`] for the rule of scales.

A step of a product is a block of 128 columns, in which a row and a weight each have one scale. The tensor cores sum over the
block, and the result is added in float32, times both scales. A tile has one or two blocks of columns, one after the other, so
that registers hold the product of one.

Tensor cores read a weight in float8 along the reduced dimension only, which is the first one in the backward. So that gets
transposed copies of the bytes, of some experts at a time: a byte is read and one is written, where dequantizing writes two.

The scales of rows are `[C / 128, R]`: a step reads those of a tile's rows side by side.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...float8_blocks import BLOCK
from ...terms import PIECE as _PIECE
from . import ceil_div, next_power_of_2, on_its_device
from .float8 import bits, inverse, packed_at, scale_of
from .grouped_products import (
    _ROWS,
    Plan,
    _described,
    _gate_gradients,
    _hardware,
    _load_rows,
    _store_in_parts,
    _tile,
    _tiles_of,
)


# Rows that a program casts at a time, and blocks that a product loads ahead, for which shared memory has room.
_CAST, _STAGES = 32, 4
# Tiles of rows that programs share at a time.
_GROUP = 16


@triton.jit
def _cast_tile(x):
    """Cast the rows of `x` `[R, 128]` to float8, and return their scales `[R]`."""
    scale = scale_of(bits(tl.max(tl.abs(x), 1)))
    return (x * inverse(scale)[:, None]).to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=["R"])
def _cast_in_blocks(x_ptr, q_ptr, scale_ptr, R, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    inside = (row < R)[:, None]
    at = row.to(tl.int64)[:, None] * C + block * BLOCK + tl.arange(0, BLOCK)[None, :]
    q, scale = _cast_tile(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(q_ptr + at, q, mask=inside)
    tl.store(scale_ptr + block.to(tl.int64) * R + row, scale, mask=row < R)


@triton.jit
def _transpose(w_ptr, t_ptr, R: tl.constexpr, C: tl.constexpr, BLOCK: tl.constexpr):
    """Transpose a block of bytes of one of the matrices `[E, R, C]`. `t_ptr` points to integers of 4 bytes."""
    place = tl.program_id(0) // (R // BLOCK)
    row = tl.program_id(0) % (R // BLOCK) * BLOCK
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = place.to(tl.int64) * R * C
    packed = tl.zeros((BLOCK // 4, BLOCK), tl.int32)
    for j in tl.static_range(4):
        rows = row + tl.arange(0, BLOCK // 4) * 4 + j
        packed = packed_at(tl.load(w_ptr + start + rows[:, None] * C + column[None, :]), packed, j)
    quads = row // 4 + tl.arange(0, BLOCK // 4)
    tl.store(t_ptr + start // 4 + column[:, None] * (R // 4) + quads[None, :], tl.trans(packed))


@triton.jit
def _adapted(total, low, up_desc, expert, column, N: tl.constexpr, RANK: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Add the product with the second matrix of the expert's adapter, for a block of columns."""
    if TRANSPOSED:
        total = tl.dot(low, up_desc.load([expert * N + column, 0]).T, total)
    else:
        total = tl.dot(low, up_desc.load([expert * RANK, column]), total)
    return total


@triton.jit
def _tile_of_one_weight(tile, tiles, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Return the tile of rows and that of columns. Programs that run at a time share both, which stay in the cache."""
    group = tile // (GROUP * COLUMNS) * GROUP
    high = tl.minimum(tiles - group, GROUP)
    place = tile % (GROUP * COLUMNS)
    return group + place % high, place // high


@triton.jit(do_not_specialize=["COUNT", "FIRST", "LAST"])
def _rows_times_weights(
    a, a_scale_ptr, w_desc, w_scale_ptr, low_ptr, up_desc, y_ptr, order_ptr, table_ptr, tiles_ptr, COUNT, FIRST, LAST,
    N: tl.constexpr, K: tl.constexpr, RANK: tl.constexpr, TOP: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, JOINED: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """`a` describes sorted rows, or, if `TOP`, points to tokens. `COUNT` is how many there are.

    `w_desc` has weights `[N, K]`, whose scales are `[N, K]` if `TRANSPOSED`, else `[K, N]`. Without a table of tiles, there is
    one weight for all rows. With `WIDE`, a tile has two blocks of columns.
    """
    COLUMNS: tl.constexpr = 2 * BLOCK if WIDE else BLOCK
    if table_ptr is None:
        first, tiles = 0, (COUNT + ROWS - 1) // ROWS
    else:
        first, tiles = _tiles_of(tiles_ptr, FIRST, LAST)
    for tile in tl.range(tl.program_id(0), tiles * (N // COLUMNS), PROGRAMS, flatten=JOINED):
        if table_ptr is None:
            row, column = _tile_of_one_weight(tile, tiles, N // COLUMNS, GROUP)
            expert, row, end = 0, row * ROWS, COUNT
            column *= COLUMNS
        else:
            expert, row, end = _tile(table_ptr, first + tile // (N // COLUMNS))
            column = tile % (N // COLUMNS) * COLUMNS
        rows = row + tl.arange(0, ROWS)
        at = rows
        if TOP:
            at = tl.load(order_ptr + rows, mask=rows < end, other=0) // TOP
            a_at = a + at.to(tl.int64)[:, None] * K + tl.arange(0, BLOCK)[None, :]
        # Where the weights of the expert are, and the scales of the first block of columns, with the distances to that of the
        # next one and to that of the next step.
        w_at = (expert - FIRST) * N + column
        NEXT: tl.constexpr = K // BLOCK if TRANSPOSED else 1
        STEP: tl.constexpr = 1 if TRANSPOSED else N // BLOCK
        w_scale_at = w_scale_ptr + expert * (N // BLOCK) * (K // BLOCK) + column // BLOCK * NEXT
        total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        right = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for block in range(0, K // BLOCK):
            if TOP:
                x = tl.load(a_at + block * BLOCK)
            else:
                x = a.load([row, block * BLOCK])
            scale = tl.load(a_scale_ptr + block * COUNT + at, mask=rows < end, other=0.0)
            w_scale = tl.load(w_scale_at + block * STEP)
            w = w_desc.load([w_at, block * BLOCK]).T
            total += tl.dot(x, w) * (scale * w_scale)[:, None]
            if WIDE:
                w_scale = tl.load(w_scale_at + block * STEP + NEXT)
                w = w_desc.load([w_at + BLOCK, block * BLOCK]).T
                right += tl.dot(x, w) * (scale * w_scale)[:, None]
        inside = (rows < end)[:, None]
        if RANK:
            low = _load_rows(low_ptr, rows, inside, RANK)
            total = _adapted(total, low, up_desc, expert, column, N, RANK, TRANSPOSED)
            if WIDE:
                right = _adapted(right, low, up_desc, expert, column + BLOCK, N, RANK, TRANSPOSED)
        # In parts, because shared memory has no room for the whole beside the steps.
        y_at = y_ptr + rows.to(tl.int64)[:, None] * N + column
        _store_in_parts(y_at, total.to(y_ptr.dtype.element_ty), inside, ROWS, BLOCK, 2)
        if WIDE:
            _store_in_parts(y_at + BLOCK, right.to(y_ptr.dtype.element_ty), inside, ROWS, BLOCK, 2)


@triton.jit
def _store_cast(q_ptr, scale_ptr, x, row, block, ALL, C: tl.constexpr, BLOCK: tl.constexpr):
    """Store the blocks `x` `[blocks, 128]` of a row of `C` columns in float8. `ALL` is the number of rows."""
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    q, scale = _cast_tile(x.to(tl.float32))
    tl.store(q_ptr + row * C + column, q, mask=column < C)
    tl.store(scale_ptr + block.to(tl.int64) * ALL + row, scale, mask=block < C // BLOCK)


@triton.jit(do_not_specialize=["ALL"])
def _gate_forward_rows(
    both_ptr, h_ptr, q_ptr, scale_ptr, end_ptr, ALL, N: tl.constexpr, PLAIN: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write `silu(gate) * up` of a row in float8, and as it is if `PLAIN`."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(end_ptr):
        return
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < N
    gate = tl.load(both_ptr + row * 2 * N + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * N + N + column, mask=inside, other=0.0).to(tl.float32)
    h = (gate * tl.sigmoid(gate) * up).to(both_ptr.dtype.element_ty)
    if PLAIN:
        tl.store(h_ptr + row * N + column, h, mask=inside)
    _store_cast(q_ptr, scale_ptr, h, row, block, ALL, N, BLOCK)


@triton.jit(do_not_specialize=["ALL"])
def _gate_backward_rows(
    both_ptr, dh_ptr, d_both_ptr, q_ptr, scale_ptr, order_ptr, weights_ptr, d_weights_ptr, end_ptr, ALL,
    N: tl.constexpr, PLAIN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of gate and up in float8, and as they are if `PLAIN`. `WEIGHTED` products replace their gradient."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(end_ptr):
        return
    choice = tl.load(order_ptr + row)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = column < N
    weight, h, d_weight, d_gate, d_up = _gate_gradients(both_ptr, dh_ptr, weights_ptr + choice, row, column, N)
    tl.store(d_weights_ptr + choice, tl.sum(tl.sum(d_weight, 1), 0).to(d_weights_ptr.dtype.element_ty))
    d_gate, d_up = d_gate.to(both_ptr.dtype.element_ty), d_up.to(both_ptr.dtype.element_ty)
    if PLAIN:
        at = d_both_ptr + row * 2 * N + column
        tl.store(at, d_gate, mask=inside)
        tl.store(at + N, d_up, mask=inside)
    if WEIGHTED:
        tl.store(dh_ptr + row * N + column, (weight * h).to(dh_ptr.dtype.element_ty), mask=inside)
    # Blocks of the other half follow those of this one.
    q_at = q_ptr + row * N
    _store_cast(q_at, scale_ptr, d_gate, row, block, ALL, N, BLOCK)
    _store_cast(q_at + N, scale_ptr + N // BLOCK * ALL, d_up, row, block, ALL, N, BLOCK)


class CastRows(NamedTuple):
    """Rows `[R, C]` in float8, the scales `[C / 128, R]` of their blocks, the dtype of products, and the rows themselves if
    adapters read them.
    """

    values: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype
    plain: torch.Tensor | None

    @classmethod
    def empty(cls, rows: int, columns: int, like: torch.Tensor, plain: bool = False) -> "CastRows":
        values = like.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
        scale = like.new_empty(columns // BLOCK, rows, dtype=torch.float32)
        return cls(values, scale, like.dtype, like.new_empty(rows, columns) if plain else None)


@on_its_device
def cast_in_blocks(x: torch.Tensor) -> CastRows:
    """Cast the rows of `x` `[R, C]` as [`ops.float8_blocks`] does."""
    rows, columns = x.shape
    found = CastRows.empty(rows, columns, x)
    _cast_in_blocks[ceil_div(rows, _CAST), columns // BLOCK](
        x, found.values, found.scale, rows, columns, _CAST, BLOCK, num_warps=4
    )
    return found._replace(plain=x)


def transposed(weights: torch.Tensor) -> torch.Tensor:
    """Return a copy `[E, C, R]` of weights `[E, R, C]` of one byte each."""
    number, rows, columns = weights.shape
    out = torch.empty(number, columns, rows, dtype=weights.dtype, device=weights.device)
    grid = number * (rows // BLOCK), columns // BLOCK
    _transpose[grid](weights.view(torch.uint8), out.view(torch.int32), rows, columns, BLOCK, num_warps=8)
    return out


@on_its_device
def rows_times_weight(
    a: CastRows, values: torch.Tensor, scale: torch.Tensor, transposed_weight: bool = True
) -> torch.Tensor:
    """Multiply rows `[R, C]` by a weight `[N, C]` in float8, or by `[C, N]` without `transposed_weight`, in `a.dtype`."""
    values, scale = values.contiguous(), scale.contiguous()
    rows, k = a.values.shape
    n = values.numel() // k
    w = (values if transposed_weight else transposed(values[None])).view(n, k)
    y = torch.empty(rows, n, dtype=a.dtype, device=a.values.device)
    if not rows:
        return y
    programs, _ = _hardware(y.device)
    source = TensorDescriptor.from_tensor(a.values, [_ROWS, BLOCK])
    _rows_times_weights[(programs,)](
        source, a.scale, _described(w[None], [BLOCK, BLOCK]), scale, None, None, y, None, None, None, rows, 0, 1, n, k,
        0, 0, transposed_weight, _ROWS, n % (2 * BLOCK) == 0, BLOCK, programs, False, _GROUP, num_warps=8,
        num_stages=_STAGES,
    )  # fmt: skip
    return y


class Float8Plan(Plan):
    """A [`Plan`] for [`Float8Experts`]. Rows are tensors, or [`CastRows`] where a kernel has cast its result."""

    def rows_times_experts(self, a, weight, factors=None, *, transposed: bool, of_tokens: bool = False):
        _, n, k = weight.shape if transposed else (weight.shape[0], *weight.shape[:0:-1])
        a = a if isinstance(a, CastRows) else cast_in_blocks(a)
        y = torch.empty(len(self.order), n, dtype=a.dtype, device=a.values.device)
        source = a.values if of_tokens else TensorDescriptor.from_tensor(a.values, [_ROWS, BLOCK])
        low, rank, second = self._adapter(a.plain, factors, BLOCK, transposed, of_tokens)
        # Loops over tiles and blocks that are joined take half of the time with an adapter, and a little more without one. As for
        # other weights with an adapter, Triton may not compile them for Blackwell.
        joined = rank > 0 and self.architecture < 10
        values, scale = (x.contiguous() for x in weight.stored())
        for first, last, w in self._weights(values, transposed):
            _rows_times_weights[(self.programs,)](
                source, a.scale, w, scale, low, second, y, self.order, self.table, self.tiles, a.scale.shape[1], first,
                last, n, k, rank, self.top_k * of_tokens, transposed, _ROWS, n % (2 * BLOCK) == 0, BLOCK, self.programs,
                joined, _GROUP, num_warps=8, num_stages=_STAGES,
            )  # fmt: skip
            del w
        return y, low

    def _weights(self, values, as_stored: bool):
        """Yield the first expert, the last one, excluded, and the descriptor of their weights: all, or some transposed ones."""
        number = len(values)
        step = number if as_stored else max(1, _PIECE // math.prod(values.shape[1:]))
        for first in range(0, number, step):
            last = min(first + step, number)
            part = values[first:last]
            yield first, last, _described(part if as_stored else transposed(part), [BLOCK, BLOCK])

    def narrow(self, a, factors, transposed: bool, of_tokens: bool = False):
        return super().narrow(_plain(a), factors, transposed, of_tokens)

    def gate_up(self, x, weight, factors, keep: bool, adapted: bool = True):
        both, low = self.rows_times_experts(x, weight, factors, transposed=True, of_tokens=True)
        return self.gated(both, adapted), both if keep else None, low

    def gated(self, both, adapted: bool):
        """Return `silu(gate) * up` of each row in float8, and as it is if an adapter reads it."""
        rows, n = both.shape[0], both.shape[1] // 2
        h = CastRows.empty(rows, n, both, adapted)
        _gate_forward_rows[(rows,)](
            both, h.plain, h.values, h.scale, self.ends[-1:], rows, n, adapted, next_power_of_2(n // BLOCK), BLOCK
        )
        return h

    def gate_backward(self, both, dh, weights, adapted=(True, True)):
        d_weights, (rows, n) = torch.zeros_like(weights), dh.shape
        d_both = CastRows.empty(rows, 2 * n, both, adapted[0])
        _gate_backward_rows[(rows,)](
            both, dh, d_both.plain, d_both.values, d_both.scale, self.order, weights, d_weights, self.ends[-1:], rows,
            n, *adapted, next_power_of_2(n // BLOCK), BLOCK,
        )  # fmt: skip
        return d_both, d_weights

    def narrow_gradient(self, a, low, like, **options):
        return super().narrow_gradient(_plain(a), low, like, **options)


def _plain(a: torch.Tensor | CastRows) -> torch.Tensor | None:
    return a.plain if isinstance(a, CastRows) else a
