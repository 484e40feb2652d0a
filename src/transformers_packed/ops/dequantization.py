"""Values of weights that are stored in 4 bit by bitsandbytes, in float8 with a scale for each row by torchao, or in float8
with a scale for each block by Transformers.

    4 bit     y[i] = code[nibble i] * absmax[i // blocksize]
    float8    y[r, c] = values[r, c] * scale[r]
    blocks    y[r, c] = values[r, c] * scale[r // high, c // wide]

All products are computed in float32 and rounded once. With double quantization, `absmax` itself is stored in 8 bit:
`code2[absmax[b]] * absmax2[b // blocksize2] + offset`, with a rounding after the product and one after the sum. A byte has
two elements, the first one in its high bits.
"""

from typing import Any

import torch

from ..errors import input_error, shapes
from .backends import importable, triton
from .dispatch import Implementation, run, with_triton


# bitsandbytes' kernels for GPUs count elements in 32 bits.
MOST = 2**31
_LARGEST_BLOCK = 4096


def dequantize_4bit(
    packed: torch.Tensor, state: Any, first: int = 0, number: int | None = None, *, impl: str = "auto"
) -> torch.Tensor:
    """Compute some elements of a weight in NF4 or FP4.

    Args:
        packed (`torch.Tensor` of shape `[N / 2, 1]`, rounded up):
            The values of all `N` elements, in uint8.
        state (`bitsandbytes.functional.QuantState`):
            Scales, sizes, and the dtype of the result.
        first (`int`, *optional*, defaults to 0):
            The first element to compute.
        number (`int`, *optional*):
            How many elements to compute, by default all others.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (one launch), `"bitsandbytes"` (up to three launches) or `"reference"`. All compute the
            same bits, except that bitsandbytes' build for GPUs flushes products below `2**-126` to 0.

    Returns:
        `torch.Tensor` of shape `[number]`.

    Raises:
        `ValueError`: the weight does not have these elements, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from types import SimpleNamespace
    >>> from transformers_packed.ops.dequantization import dequantize_4bit
    >>> state = SimpleNamespace(absmax=torch.tensor([4.0]), code=torch.arange(16.0), blocksize=64, state2=None)
    >>> state.shape, state.dtype = torch.Size([1, 4]), torch.float32
    >>> dequantize_4bit(torch.tensor([[0x12], [0x3F]], dtype=torch.uint8), state, 1, impl="reference").tolist()
    [8.0, 12.0, 60.0]

    ```
    """
    total = state.shape.numel()
    number = total - first if number is None else number
    if not 0 <= first <= first + number <= total:
        raise input_error(f"elements from 0 to before {total:,}", f"{number:,} from {first:,} on")
    check_memory(packed)
    return run("dequantize_4bit", impl, FOUR_BIT, packed, state, first, number)


def check_memory(stored: torch.Tensor) -> None:
    """Raise a `ValueError` if the memory of stored values has been given up, which a kernel would read nevertheless."""
    if not torch.compiler.is_compiling() and stored.untyped_storage().nbytes() < stored.nbytes:
        got = "the backward of something inside of a layer whose weights are in host memory"
        raise input_error("a loss of the outputs of layers", got, "Leave the layers on the GPU for it.")


def dequantize_rows(
    values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, impl: str = "auto"
) -> torch.Tensor:
    """Multiply rows in float8 by their scales.

    Args:
        values (`torch.Tensor` of shape `[..., C]`):
            Rows in float8 (e4m3).
        scale (`torch.Tensor` of shape `[..., 1]`):
            Scales of the rows, in float32.
        dtype (`torch.dtype`):
            Dtype of the result.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (one launch) or `"reference"` (up to three launches). Both compute the same bits.

    Returns:
        `torch.Tensor` of shape `[..., C]`.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops.dequantization import dequantize_rows
    >>> values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(torch.float8_e4m3fn)
    >>> dequantize_rows(values, torch.tensor([[0.5], [2.0]]), torch.float32).tolist()
    [[0.5, 1.0], [6.0, 8.0]]

    ```
    """
    if scale.shape != (*values.shape[:-1], 1):
        raise input_error("values [..., C] and scales [..., 1]", shapes(values, scale))
    check_memory(values)
    return run("dequantize_rows", impl, ROWS, values, scale, dtype)


def dequantize_blocks(
    values: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype, *, impl: str = "auto"
) -> torch.Tensor:
    """Multiply the blocks of matrices in float8 by their scales.

    Args:
        values (`torch.Tensor` of shape `[..., R, C]`):
            The matrices in float8 (e4m3).
        scale (`torch.Tensor` of shape `[..., R / high, C / wide]`, rounded up):
            Scales of the blocks, in float32 or as powers of two in 8 bit (`torch.float8_e8m0fnu`).
        block (`tuple[int, int]`):
            Rows and columns of a block, `high` and `wide`. The last ones may have fewer.
        dtype (`torch.dtype`):
            Dtype of the result.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (one launch) or `"reference"`. Both compute the same bits.

    Returns:
        `torch.Tensor` of shape `[..., R, C]`.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops.dequantization import dequantize_blocks
    >>> values = torch.tensor([[1.0, 2.0, 3.0]]).to(torch.float8_e4m3fn)
    >>> dequantize_blocks(values, torch.tensor([[0.5, 2.0]]), (128, 2), torch.float32).tolist()
    [[0.5, 1.0, 6.0]]

    ```
    """
    number = tuple(map(triton.ceil_div, values.shape[-2:], block))
    if values.ndim < 2 or scale.shape != (*values.shape[:-2], *number):
        raise input_error(f"values [..., R, C] and {number} scales of blocks of {block}", shapes(values, scale))
    check_memory(values)
    return run("dequantize_blocks", impl, BLOCKS, values, scale, block, dtype)


def _reference(packed, state, first, number):
    pairs = packed.flatten()[first // 2 : (first + number + 1) // 2]
    nibbles = torch.stack((pairs >> 4, pairs & 15), 1).flatten()[first % 2 :][:number]
    block = torch.arange(first, first + number, device=packed.device) // state.blocksize
    absmax, inner = state.absmax[block], state.state2
    if inner is not None:
        absmax = inner.code[absmax.long()] * inner.absmax[block // inner.blocksize] + state.offset
    return (state.code[nibbles.long()] * absmax).to(state.dtype)


def _bitsandbytes(packed, state, first, number):
    from bitsandbytes.functional import QuantState, dequantize_4bit

    # Whole blocks, of scales too, may start before these elements and end after them. They are computed as one row,
    # because bitsandbytes' code for CPUs is wrong for rows that are no multiples of blocks.
    whole, inner = _whole(state), state.state2
    start, end = first // whole * whole, min(triton.ceil_div(first + number, whole) * whole, state.shape.numel())
    if inner is not None:
        scales = inner.absmax[start // whole : triton.ceil_div(end, whole)]
        inner = QuantState(scales, code=inner.code, blocksize=inner.blocksize, dtype=inner.dtype)
    absmax = state.absmax[start // state.blocksize : triton.ceil_div(end, state.blocksize)]
    options = {"quant_type": state.quant_type, "dtype": state.dtype, "offset": state.offset, "state2": inner}
    some = QuantState(absmax, torch.Size([end - start]), state.code, state.blocksize, **options)
    return dequantize_4bit(packed[start // 2 : (end + 1) // 2], some).flatten()[first - start :][:number]


def _whole(state):
    """Return the elements of a block of scales."""
    return state.blocksize * (1 if state.state2 is None else state.state2.blocksize)


def _verify_bitsandbytes(packed, state, first, number) -> str:
    if triton.on_gpu(packed) and number > MOST - 2 * _whole(state):
        return f"supports fewer than {MOST:,} elements at a time on a GPU"
    return importable("bitsandbytes", "bitsandbytes")


def _verify_triton(packed, state, first, number) -> str:
    if not triton.on_gpu(packed):
        return "needs CUDA tensors"
    inner, device = state.state2, packed.device
    scales = torch.float32 if inner is None else torch.uint8
    tensors = [(packed, torch.uint8), (state.absmax, scales), (state.code, torch.float32)]
    if inner is not None:
        tensors += [(x, torch.float32) for x in (inner.absmax, inner.code, state.offset)]
    for x, dtype in tensors:
        if x.dtype != dtype:
            return f"needs {dtype}, not {x.dtype}"
        if x.device != device or not x.is_contiguous():
            return "needs contiguous tensors on one device"
    if state.blocksize & (state.blocksize - 1) or not 2 <= state.blocksize <= _LARGEST_BLOCK:
        return f"supports blocks of powers of two up to {_LARGEST_BLOCK}, not {state.blocksize}"
    return triton.problem()


def _reference_rows(values, scale, dtype):
    return (values.float() * scale).to(dtype)


def _reference_blocks(values, scale, block, dtype):
    rows, columns = values.shape[-2:]
    each = scale.float().repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)
    return (values.float() * each[..., :columns]).to(dtype)


def _verify_blocks(values, scale, block, dtype) -> str:
    return _verify_float8(values, scale, torch.float32, torch.float8_e8m0fnu)


def _verify_rows(values, scale, dtype) -> str:
    return _verify_float8(values, scale, torch.float32)


def _verify_float8(values, scale, *scales: torch.dtype) -> str:
    if not triton.on_gpu(values):
        return "needs CUDA tensors"
    if values.dtype != torch.float8_e4m3fn or scale.dtype not in scales:
        return f"supports values in e4m3 and scales in float32, not {values.dtype} and {scale.dtype}"
    if values.is_cuda and torch.cuda.get_device_capability(values.device) < (8, 9):
        return "needs a GPU of compute capability 8.9 or later"
    return triton.problem()


FOUR_BIT = {
    "triton": Implementation(triton.late("dequantization", "dequantize_4bit"), _verify_triton),
    "bitsandbytes": Implementation(_bitsandbytes, _verify_bitsandbytes),
    "reference": Implementation(_reference),
}
ROWS = with_triton(triton.late("dequantization", "dequantize_rows"), _verify_rows, _reference_rows)
BLOCKS = with_triton(triton.late("dequantization", "dequantize_blocks"), _verify_blocks, _reference_blocks)
