"""Casts to float8 (e4m3) of rows, and of their transpose.

A scale is the smallest power of two by which all numbers of a row or a column can be divided to be in the range of
e4m3. Dividing is then exact. A row or column with an infinity gets the scale NaN, and a NaN stays one in e4m3. Atomics
take maxima only, so results are reproducible.
"""

import torch
import triton
import triton.language as tl

from . import ceil_div, next_power_of_2, on_its_device


# Rows and columns per tile, and the tiles over whose rows one program takes maxima.
ROWS, COLUMNS, _TILES = 128, 128, 16
# Elements that a program casts at a time, and the rows of which these are if rows have factors.
_BLOCK, _TALL = 4096, 4


@triton.jit
def bits(x):
    """Return the bits of numbers that are not negative. They order as the numbers do."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def scale_of(bits):
    """Return the scale for numbers with magnitudes up to `bits`."""
    # The largest number, 448, is 1.75 * 2**8: a larger mantissa carries into the exponent. The least scale is 2**-100.
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 27)
    return tl.where(bits >= 0x7F800000, float("nan"), (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def inverse(scale):
    """Return `1 / scale`, exactly, for a power of two."""
    return (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def _load_tile(x_ptr, stride, row, R, column, C):
    inside = (row < R)[:, None] & (column < C)[None, :]
    return tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _store_tile(q_ptr, stride, q, row, R, column, C):
    inside = (row < R)[:, None] & (column < C)[None, :]
    tl.store(q_ptr + row.to(tl.int64)[:, None] * stride + column[None, :], q, mask=inside)


@triton.jit
def _load_part(x_ptr, stride, factor_ptr, row, R, column, C, FACTOR: tl.constexpr):
    x = _load_tile(x_ptr, stride, row, R, column, C).to(tl.float32)
    if FACTOR:
        x *= tl.load(factor_ptr + column, mask=column < C, other=0.0)[None, :]
    return x


@triton.jit
def _largest_of_rows(
    x_ptr, stride, factor_ptr, row, R, C, FACTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    largest = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, C, BLOCK):
        x = _load_part(x_ptr, stride, factor_ptr, row, R, start + tl.arange(0, BLOCK), C, FACTOR)
        largest = tl.maximum(largest, tl.abs(x))
    return tl.max(largest, 1)


@triton.jit
def _cast_part(
    x_ptr, stride, factor_ptr, q_ptr, q_stride, scale, row, R, C, FACTOR: tl.constexpr, BLOCK: tl.constexpr
):
    for start in range(0, C, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = _load_part(x_ptr, stride, factor_ptr, row, R, column, C, FACTOR)
        q = (x * inverse(scale)[:, None]).to(tl.float8e4nv)
        _store_tile(q_ptr, q_stride, q, row, R, column, C)


@triton.jit(do_not_specialize=["R"])
def _cast_rows(
    a_ptr, b_ptr, c_ptr, a_stride, b_stride, c_stride, A, B, C, factor_ptr, q_ptr, scale_ptr, R, PARTS: tl.constexpr,
    FACTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    largest = _largest_of_rows(a_ptr, a_stride, factor_ptr, row, R, A, FACTOR, ROWS, BLOCK)
    if PARTS > 1:
        part = _largest_of_rows(b_ptr, b_stride, factor_ptr + A, row, R, B, FACTOR, ROWS, BLOCK)
        largest = tl.maximum(largest, part)
    if PARTS > 2:
        part = _largest_of_rows(c_ptr, c_stride, factor_ptr + A + B, row, R, C, FACTOR, ROWS, BLOCK)
        largest = tl.maximum(largest, part)
    scale = scale_of(bits(largest))
    tl.store(scale_ptr + row, scale, mask=row < R)
    # The second read of the rows comes from the cache.
    width = A + B + C
    _cast_part(a_ptr, a_stride, factor_ptr, q_ptr, width, scale, row, R, A, FACTOR, BLOCK)
    if PARTS > 1:
        _cast_part(b_ptr, b_stride, factor_ptr + A, q_ptr + A, width, scale, row, R, B, FACTOR, BLOCK)
    if PARTS > 2:
        _cast_part(c_ptr, c_stride, factor_ptr + A + B, q_ptr + A + B, width, scale, row, R, C, FACTOR, BLOCK)


@triton.jit
def cast_with_scales(x, scale_ptr, row, R):
    """Cast rows with scales that are known."""
    scale = tl.load(scale_ptr + row, mask=row < R, other=1.0)
    return (x.to(tl.float32) * inverse(scale)[:, None]).to(tl.float8e4nv)


@triton.jit
def packed_at(q, packed, j: tl.constexpr):
    """Put float8 numbers at byte `j` of integers. To transpose these takes half as long as to transpose bytes."""
    return packed | (q.to(tl.uint8, bitcast=True).to(tl.int32) << (8 * j))


@triton.jit
def store_transposed(t_ptr, t_stride, packed, start, column, quads, C, ROWS: tl.constexpr):
    quad = start // 4 + tl.arange(0, ROWS // 4)
    at = t_ptr + column.to(tl.int64)[:, None] * t_stride + quad[None, :]
    # Rows are filled up to a multiple of 16, so 4 integers are stored together.
    inside = (column < C)[:, None] & (quad < tl.multiple_of(quads, 4))[None, :]
    tl.store(at, tl.trans(packed), mask=inside)


@triton.jit(do_not_specialize=["R"])
def _maxima(
    x_ptr, row_factor_ptr, column_factor_ptr, rows_ptr, columns_ptr, stride, R, C, TILES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_factor = tl.load(column_factor_ptr + column, mask=column < C, other=0.0)
    largest = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(TILES):
        row = (tl.program_id(0) * TILES + tile) * ROWS + tl.arange(0, ROWS)
        x = _load_tile(x_ptr, stride, row, R, column, C).to(tl.float32)
        in_row = tl.max(tl.abs(x * column_factor[None, :]), 1)
        tl.atomic_max(rows_ptr + row, bits(in_row), mask=row < R, sem="relaxed")
        row_factor = tl.load(row_factor_ptr + row, mask=row < R, other=0.0)
        largest = tl.maximum(largest, tl.abs(x * row_factor[:, None]))
    tl.atomic_max(columns_ptr + column, bits(tl.max(largest, 0)), mask=column < C, sem="relaxed")


@triton.jit(do_not_specialize=["R", "quads", "t_stride"])
def _cast_both(
    x_ptr, row_factor_ptr, column_factor_ptr, rows_ptr, columns_ptr, q_ptr, q_stride, row_scale_ptr, t_ptr, t_stride,
    column_scale_ptr, stride, R, quads, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    packed = tl.zeros((ROWS // 4, COLUMNS), tl.int32)
    column_factor = tl.load(column_factor_ptr + column, mask=column < C, other=0.0)
    column_scale = scale_of(tl.load(columns_ptr + column, mask=column < C, other=0))
    if tl.program_id(0) == 0:
        tl.store(column_scale_ptr + column, column_scale, mask=column < C)
    for j in tl.static_range(4):
        row = start + tl.arange(0, ROWS // 4) * 4 + j
        x = _load_tile(x_ptr, stride, row, R, column, C).to(tl.float32)
        row_scale = scale_of(tl.load(rows_ptr + row, mask=row < R, other=0))
        q = (x * column_factor[None, :] * inverse(row_scale)[:, None]).to(tl.float8e4nv)
        _store_tile(q_ptr, q_stride, q, row, R, column, C)
        if tl.program_id(1) == 0:
            tl.store(row_scale_ptr + row, row_scale, mask=row < R)
        row_factor = tl.load(row_factor_ptr + row, mask=row < R, other=0.0)
        q = (x * row_factor[:, None] * inverse(column_scale)[None, :]).to(tl.float8e4nv)
        packed = packed_at(q, packed, j)
    store_transposed(t_ptr, t_stride, packed, start, column, quads, C, ROWS)


@triton.jit(do_not_specialize=["R", "quads", "t_stride"])
def _transpose(
    x_ptr, scale_ptr, t_ptr, stride, t_stride, R, quads, C, SCALED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0) * ROWS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    packed = tl.zeros((ROWS // 4, COLUMNS), tl.int32)
    for j in tl.static_range(4):
        row = start + tl.arange(0, ROWS // 4) * 4 + j
        x = _load_tile(x_ptr, stride, row, R, column, C)
        if SCALED:
            x = cast_with_scales(x, scale_ptr, row, R)
        packed = packed_at(x, packed, j)
    store_transposed(t_ptr, t_stride, packed, start, column, quads, C, ROWS)


@on_its_device
def cast_rows(x: torch.Tensor, *more: torch.Tensor, factor: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows `[R, C]` of up to 3 tensors side by side in float8, times `factor` `[C]`, and their scales `[R]`."""
    parts = [x, *more]
    sizes = [part.shape[1] for part in parts]
    missing = [0] * (3 - len(parts))
    q = torch.empty(len(x), sum(sizes), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    strides = [part.stride(0) for part in parts]
    # With factors, several rows share the reads of these.
    tall = 1 if factor is None else _TALL
    block = min(next_power_of_2(max(sizes)), _BLOCK // tall)
    _cast_rows[(ceil_div(len(x), tall),)](
        *parts, *[None for _ in missing], *strides, *missing, *sizes, *missing, factor, q, scale, len(x), len(parts),
        factor is not None, tall, block, num_warps=max(tall * block // 512, 1),
    )  # fmt: skip
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
    _transpose[ceil_div(out.shape[1], ROWS // 4), ceil_div(columns, COLUMNS)](
        x, scale, out, x.stride(0), out.stride(0), rows, out.shape[1], columns, scale is not None, ROWS, COLUMNS,
        num_warps=8,
    )  # fmt: skip


@on_its_device
def add_maxima(x, row_factor, column_factor, rows, columns) -> None:
    """Update the maxima, as bits, of `x * column_factor` in each row and of `x * row_factor[:, None]` in each column."""
    tall = ROWS // 2
    _maxima[ceil_div(x.shape[0], tall * _TILES), ceil_div(x.shape[1], COLUMNS)](
        x, row_factor, column_factor, rows, columns, x.stride(0), *x.shape, _TILES, tall, COLUMNS, num_warps=8
    )  # fmt: skip


@on_its_device
def cast_both(x, row_factor, column_factor, rows, columns, q, row_scale, t, column_scale) -> None:
    """Write `x * column_factor` to `q` with the scale of each row, and `x * row_factor[:, None]` transposed to `t`.

    The scales are those of the maxima `rows` and `columns`.
    """
    t = t.view(torch.int32)
    quads = t.shape[1]
    _cast_both[ceil_div(quads, ROWS // 4), ceil_div(x.shape[1], COLUMNS)](
        x, row_factor, column_factor, rows, columns, q, q.stride(0), row_scale, t, t.stride(0), column_scale,
        x.stride(0), len(x), quads, x.shape[1], ROWS, COLUMNS, num_warps=8,
    )  # fmt: skip
