"""Casts to float8 (e4m3) of rows, and of their transpose.

A scale is the smallest power of two by which all numbers of a row or a column can be divided to be in the range of
e4m3. Dividing is then exact. A row or column with an infinity or NaN gets the scale NaN. Maxima are taken of the bits
of absolute values, which order as integers do, so atomics leave the results reproducible.
"""

import torch
import triton
import triton.language as tl

from . import ceil_div, on_its_device


# Rows and columns per tile, and the tiles over whose rows one program takes maxima.
_ROWS, _COLUMNS, _TILES = 128, 128, 16


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_of(bits):
    """Return the scale for numbers with magnitudes up to `bits`."""
    # The largest number, 448, is 1.75 * 2**8: a larger mantissa carries into the exponent. The least scale is 2**-100.
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 27)
    return tl.where(bits >= 0x7F800000, float("nan"), (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def _inverse(scale):
    """Return `1 / scale`, exactly, for a power of two."""
    return (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _cast_rows(x_ptr, q_ptr, scale_ptr, stride, C, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + column, mask=column < C, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(_magnitude(x), 0))
    tl.store(scale_ptr + row, scale)
    tl.store(q_ptr + row * C + column, (x * _inverse(scale)).to(tl.float8e4nv), mask=column < C)


@triton.jit
def _packed(q, packed, j: tl.constexpr):
    """Put float8 numbers at byte `j` of integers. To transpose these takes half as long as to transpose bytes."""
    return packed | (q.to(tl.uint8, bitcast=True).to(tl.int32) << (8 * j))


@triton.jit
def _store_transposed(t_ptr, t_stride, packed, start, column, quads, C, ROWS: tl.constexpr):
    quad = start // 4 + tl.arange(0, ROWS // 4)
    at = t_ptr + column.to(tl.int64)[:, None] * t_stride + quad[None, :]
    # Rows are filled up to a multiple of 16, so 4 integers are stored together.
    inside = (column < C)[:, None] & (quad < tl.multiple_of(quads, 4))[None, :]
    tl.store(at, tl.trans(packed), mask=inside)


@triton.jit(do_not_specialize=["R"])
def _maxima(
    x_ptr, row_factor_ptr, column_factor_ptr, rows_ptr, columns_ptr, stride, R, C, FOR_ROWS: tl.constexpr,
    FOR_COLUMNS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    largest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * stride + column[None, :]
        x = tl.load(x_ptr + at, mask=(row < R)[:, None] & (column < C)[None, :], other=0.0).to(tl.float32)
        if FOR_ROWS:
            factor = tl.load(column_factor_ptr + column, mask=column < C, other=0.0)
            tl.atomic_max(rows_ptr + row, tl.max(_magnitude(x * factor[None, :]), 1), mask=row < R)
        if FOR_COLUMNS:
            factor = tl.load(row_factor_ptr + row, mask=row < R, other=0.0)
            largest = tl.maximum(largest, _magnitude(x * factor[:, None]))
    if FOR_COLUMNS:
        tl.atomic_max(columns_ptr + column, tl.max(largest, 0), mask=column < C)


@triton.jit(do_not_specialize=["R", "quads"])
def _cast_both(
    x_ptr, row_factor_ptr, column_factor_ptr, rows_ptr, columns_ptr, q_ptr, q_stride, row_scale_ptr, t_ptr, t_stride,
    column_scale_ptr, stride, R, quads, C, FOR_ROWS: tl.constexpr, FOR_COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    packed = tl.zeros((ROWS // 4, COLUMNS), tl.int32)
    if FOR_ROWS:
        column_factor = tl.load(column_factor_ptr + column, mask=column < C, other=0.0)
    if FOR_COLUMNS:
        column_scale = _scale_of(tl.load(columns_ptr + column, mask=column < C, other=0))
        inverse = _inverse(column_scale)
        if tl.program_id(0) == 0:
            tl.store(column_scale_ptr + column, column_scale, mask=column < C)
    for j in tl.static_range(4):
        row = start + tl.arange(0, ROWS // 4) * 4 + j
        inside = (row < R)[:, None] & (column < C)[None, :]
        wide = row.to(tl.int64)[:, None]
        x = tl.load(x_ptr + wide * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if FOR_ROWS:
            scale = _scale_of(tl.load(rows_ptr + row, mask=row < R, other=0))
            q = (x * column_factor[None, :] * _inverse(scale)[:, None]).to(tl.float8e4nv)
            tl.store(q_ptr + wide * q_stride + column[None, :], q, mask=inside)
            if tl.program_id(1) == 0:
                tl.store(row_scale_ptr + row, scale, mask=row < R)
        if FOR_COLUMNS:
            factor = tl.load(row_factor_ptr + row, mask=row < R, other=0.0)
            packed = _packed((x * factor[:, None] * inverse[None, :]).to(tl.float8e4nv), packed, j)
    if FOR_COLUMNS:
        _store_transposed(t_ptr, t_stride, packed, start, column, quads, C, ROWS)


@triton.jit(do_not_specialize=["R", "quads"])
def _transpose(
    x_ptr, scale_ptr, t_ptr, stride, t_stride, R, quads, C, SCALED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    packed = tl.zeros((ROWS // 4, COLUMNS), tl.int32)
    for j in tl.static_range(4):
        row = start + tl.arange(0, ROWS // 4) * 4 + j
        inside = (row < R)[:, None] & (column < C)[None, :]
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)
        if SCALED:
            scale = tl.load(scale_ptr + row, mask=row < R, other=1.0)
            x = (x.to(tl.float32) * _inverse(scale)[:, None]).to(tl.float8e4nv)
        packed = _packed(x, packed, j)
    _store_transposed(t_ptr, t_stride, packed, start, column, quads, C, ROWS)


@on_its_device
def cast_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows `[R, C]` in float8, and their scales `[R]`."""
    rows, columns = x.shape
    q = torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    warps = min(max(block // 1024, 1), 16)
    _cast_rows[(rows,)](x, q, scale, x.stride(0), columns, block, num_warps=warps)
    return q, scale


@on_its_device
def transposed(x: torch.Tensor, scale: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write the transpose of `x` `[R, C]` to `out` `[C, R or more]` and fill up with zeros.

    `x` is in float8 and `scale` is `None`, or the rows of `x` are cast with these scales `[R]`.
    """
    if scale is None:
        # Bytes, which are moved without a cast.
        x = x.view(torch.uint8)
    rows, columns = x.shape
    out = out.view(torch.int32)
    _transpose[ceil_div(out.shape[1], _ROWS // 4), ceil_div(columns, _COLUMNS)](
        x, scale, out, x.stride(0), out.stride(0), rows, out.shape[1], columns, scale is not None, _ROWS, _COLUMNS,
        num_warps=8,
    )  # fmt: skip


@on_its_device
def add_maxima(x, row_factor, column_factor, rows, columns) -> None:
    """Update the maxima, as bits, of `x * column_factor` in each row and of `x * row_factor[:, None]` in each column.

    `rows` or `columns` may be `None`.
    """
    tall = _ROWS // 2
    _maxima[ceil_div(x.shape[0], tall * _TILES), ceil_div(x.shape[1], _COLUMNS)](
        x, row_factor, column_factor, rows, columns, x.stride(0), *x.shape, rows is not None, columns is not None,
        _TILES, tall, _COLUMNS, num_warps=8,
    )  # fmt: skip


@on_its_device
def cast_both(x, row_factor, column_factor, rows, columns, q, row_scale, t, column_scale) -> None:
    """Write `x * column_factor` to `q` with the scale of each row, and `x * row_factor[:, None]` transposed to `t`.

    The scales are those of the maxima `rows` and `columns`. Either one may be `None`, with its outputs.
    """
    t = None if t is None else t.view(torch.int32)
    quads = ceil_div(len(x), 4) if t is None else t.shape[1]
    _cast_both[ceil_div(quads, _ROWS // 4), ceil_div(x.shape[1], _COLUMNS)](
        x, row_factor, column_factor, rows, columns, q, 0 if q is None else q.stride(0), row_scale, t,
        0 if t is None else t.stride(0), column_scale, x.stride(0), len(x), quads, x.shape[1], rows is not None,
        columns is not None, _ROWS, _COLUMNS, num_warps=8,
    )  # fmt: skip
