"""Weights in 4 bit, with scales in float32 or in 8 bit, in float8 with a scale for each row or block, and in 4 or 8 bit with a
scale for each group of columns of a row.

A program computes whole blocks of 4 bit, so it reads and computes each scale once.
"""

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from ...grouped_dequantization import MIDDLE, Groups, parts_of
from . import ceil_div, next_power_of_2, on_its_device


# Elements per program, of which a thread has as many as it stores at once in 16 bits.
_ELEMENTS = 2048
# Of a weight in float8, of which a thread loads 16 bytes, and the columns that most sizes of layers are multiples of.
_OF_FLOAT8, _COLUMNS, _ORDERED = 4096, 1024, 256
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
# A product and a sum in one operation would round once. bitsandbytes rounds twice.
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["first", "blocks"])
def _from_4bit(
    packed_ptr, absmax_ptr, code_ptr, inner_absmax_ptr, inner_code_ptr, offset_ptr, y_ptr, first, skip, number, bytes,
    blocks, SIZE: tl.constexpr, INNER: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    # `y` starts with element `skip` of the block `first`.
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = (block * SIZE - skip)[:, None] + tl.arange(0, SIZE)[None, :]
    block += first
    absmax = tl.load(absmax_ptr + block, mask=block < blocks, other=0)
    if INNER:
        scale = tl.load(inner_absmax_ptr + block // INNER, mask=block < blocks, other=0.0)
        absmax = tl.load(inner_code_ptr + absmax.to(tl.int32)) * scale + tl.load(offset_ptr)
    byte = (block * (SIZE // 2))[:, None] + tl.arange(0, SIZE // 2)[None, :]
    pair = tl.load(packed_ptr + byte, mask=byte < bytes, other=0).to(tl.int32)
    left = (tl.load(code_ptr + (pair >> 4)) * absmax[:, None]).to(y_ptr.dtype.element_ty)
    right = (tl.load(code_ptr + (pair & 15)) * absmax[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, tl.interleave(left, right), mask=(at >= 0) & (at < number))


@triton.jit(do_not_specialize=["number", "R", "HIGH", "WIDE", "high", "wide"])
def _from_float8(
    values_ptr, scale_ptr, y_ptr, number, R, C, HIGH, WIDE, high, wide, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    GROUP: tl.constexpr, EXPONENTS: tl.constexpr,
):  # fmt: skip
    # Blocks of `HIGH` rows and `WIDE` columns, of which a matrix of `R` rows has `high * wide`. `GROUP` columns have one scale.
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    first = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS // GROUP) * GROUP)[None, :, None]
    column = first + tl.arange(0, GROUP)[None, None, :]
    block = (row // R * high + row % R // HIGH) * wide + first // WIDE
    scale = tl.load(scale_ptr + block, mask=(row < number) & (first < C), other=0)
    if EXPONENTS:
        # Of powers of two. The least one is no normal number of float32, and the last one stands for NaN.
        bits = scale.to(tl.int32)
        bits = tl.where(bits == 0, 1 << 22, tl.where(bits == 255, 0x7FC00000, bits << 23))
        scale = bits.to(tl.float32, bitcast=True)
    inside = (row < number) & (column < C)
    values = tl.load(values_ptr + row * C + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * C + column, (values * scale).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _of_group(
    code, column, inside, scale_at, zero_at, order_at, whole, dtype: tl.constexpr, CODE: tl.constexpr,
    ORDERED: tl.constexpr, WHOLE: tl.constexpr, MIDDLE: tl.constexpr, ROUNDED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    group = tl.load(order_at + column, mask=inside, other=0) if ORDERED else column // SIZE
    scale = tl.load(scale_at + group, mask=inside, other=0.0).to(tl.float32)
    if WHOLE:
        scale = tl.div_rn(scale, whole) if WHOLE == 2 else scale * whole
    # Neither a number nor a code is converted: their bits are part of another number's.
    if CODE == "nvfp4":
        value = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    else:
        zero = MIDDLE
        if not MIDDLE:
            zero = tl.load(zero_at + group, mask=inside, other=0).to(tl.float32)
        value = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + zero)
    return (value * scale).to(ROUNDED).to(dtype)


@triton.jit(do_not_specialize=["number", "PART"])
def _from_groups(
    values_ptr, scale_ptr, zero_ptr, order_ptr, whole_ptr, y_ptr, number, PART, C, G,
    SIZE: tl.constexpr, CODE: tl.constexpr, ORDERED: tl.constexpr, WHOLE: tl.constexpr, MIDDLE: tl.constexpr,
    ROUNDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # `GROUP` columns have one scale, which a program loads once. Only an order has a scale for each column.
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None, None]
    first = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS // GROUP) * GROUP)[None, :, None]
    at = first + tl.arange(0, GROUP)[None, None, :]
    inside = (row < number) & (at < C)
    scale_at, zero_at, order_at, whole = scale_ptr + row * G, zero_ptr, order_ptr, 1.0
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    if CODE != "nvfp4" and not MIDDLE:
        zero_at = zero_ptr + row * G
    if ORDERED:
        order_at = order_ptr + (row // PART) * C
    if WHOLE:
        whole = tl.load(whole_ptr + row // PART, mask=row < number, other=1.0)
    if CODE == "int8":
        code = tl.load(values_ptr + row * C + at, mask=inside, other=0).to(tl.int32)
        column = at if ORDERED else first
        y = _of_group(
            code, column, (row < number) & (column < C), scale_at, zero_at, order_at, whole, dtype, CODE, ORDERED,
            WHOLE, MIDDLE, ROUNDED, SIZE,
        )  # fmt: skip
    else:
        pairs = first // 2 + tl.arange(0, GROUP // 2)[None, None, :]
        code = tl.load(values_ptr + row * (C // 2) + pairs, mask=(row < number) & (2 * pairs < C), other=0)
        code = code.to(tl.int32)
        column = 2 * pairs if ORDERED else first
        some = (row < number) & (column < C)
        left = _of_group(
            code & 15, column, some, scale_at, zero_at, order_at, whole, dtype, CODE, ORDERED, WHOLE, MIDDLE, ROUNDED,
            SIZE,
        )  # fmt: skip
        column = 2 * pairs + 1 if ORDERED else first
        right = _of_group(
            code >> 4, column, some, scale_at, zero_at, order_at, whole, dtype, CODE, ORDERED, WHOLE, MIDDLE, ROUNDED,
            SIZE,
        )  # fmt: skip
        y = tl.interleave(left, right)
    tl.store(y_ptr + row * C + at, y, mask=inside)


@on_its_device
def dequantize_4bit(packed: torch.Tensor, state: Any, first: int, number: int) -> torch.Tensor:
    """Return the elements `[number]` from `first` on, in the dtype of `state`."""
    y = torch.empty(number, dtype=state.dtype, device=packed.device)
    inner, scales = state.state2, (None, None, None)
    if inner is not None:
        scales = inner.absmax, inner.code, state.offset
    block, skip = divmod(first, state.blocksize)
    blocks = max(1, _ELEMENTS // state.blocksize)
    _from_4bit[(ceil_div(skip + number, blocks * state.blocksize),)](
        packed, state.absmax, state.code, *scales, y, block, skip, number, packed.numel(), state.absmax.numel(),
        state.blocksize, 0 if inner is None else inner.blocksize, blocks, **OPTIONS,
    )  # fmt: skip
    return y


@on_its_device
def dequantize_rows(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows `[..., C]` in float8 times their scales `[..., 1]`, in `dtype`."""
    return _of_float8(values, scale[..., None], 1, (1, values.shape[-1]), dtype)


@on_its_device
def dequantize_blocks(
    values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the blocks of the matrices `[..., R, C]` in float8 times their scales, in `dtype`."""
    return _of_float8(values, scale, values.shape[-2], block, dtype)


def _of_float8(values, scale, matrix: int, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    values, scale, columns = values.contiguous(), scale.contiguous(), values.shape[-1]
    exponents = scale.dtype == torch.float8_e8m0fnu
    scale = scale.view(torch.uint8) if exponents else scale
    y, width = torch.empty_like(values, dtype=dtype), min(next_power_of_2(columns), _COLUMNS)
    number, rows = prod(values.shape[:-1]), _OF_FLOAT8 // width
    # The largest power of two that divides the columns of a block.
    group = min(block[1] & -block[1], width)
    _from_float8[ceil_div(number, rows), ceil_div(columns, width)](
        values,
        scale,
        y,
        number,
        matrix,
        columns,
        *block,
        *scale.shape[-2:],
        rows,
        width,
        group,
        exponents,
        num_warps=8,
    )
    return y


@on_its_device
def dequantize_groups(groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight `[..., R, C]` in `dtype`."""
    parts = groups.values, groups.scale, groups.zero, groups.order, groups.whole
    tensors = [None if x is None else x.contiguous() for x in parts]
    *others, rows, columns = groups.shape
    number, each, ordered = prod(others) * rows, groups.scale.shape[-1], groups.order is not None
    elements = _OF_FLOAT8 if groups.code == "int8" else _ELEMENTS
    # Several rows have the same order.
    width = min(next_power_of_2(columns), _ORDERED if ordered else _COLUMNS)
    size, high = columns // each, elements // width
    y = groups.values.new_empty(groups.shape, dtype=dtype)
    _from_groups[ceil_div(number, high), ceil_div(columns, width)](
        *tensors,
        y,
        number,
        rows // parts_of(groups),
        columns,
        each,
        size,
        groups.code,
        ordered,
        0 if groups.whole is None else 1 + groups.divided,
        MIDDLE.get(groups.code, 0) if groups.zero is None else 0,
        _TYPES[groups.rounded],
        high,
        width,
        width if ordered else min(size & -size, width),
        num_warps=8,
    )
    return y
