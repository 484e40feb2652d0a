"""Batch invariance: a token gets the same bits whatever else is in its row or batch.

A library chooses the kernel of a matrix product by its number of rows, and kernels differ in the order of their sums. While
[`batch_invariant`] is active, the sums do not depend on the number of rows:

* In half precision on NVIDIA GPUs from Hopper on, cuBLASLt may not split a sum into parts. All of its other kernels add in
  the same order, but for those of few rows or columns.
* Every other product runs in blocks of rows. The size of a block depends on the matrix alone, so one kernel computes each
  row, and its position in a block does not matter. The last block is filled up with zeros.

A product whose left factor is a transposed view, such as the gradient of a weight, is a sum over rows and stays as it is.

This replaces PyTorch's kernels of `mm` and `addmm`, so it includes layers that no op of this package computes. PyTorch's
products of scaled numbers in 8 or 4 bit, such as those of torchao's layers, raise an error. The ops ask
[`is_batch_invariant`] and choose implementations whose chunks begin anew in each document.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..errors import unsupported


# Of products with a scale for each row. Those of [`ops.float8_blocks`] have one kernel for any number of rows.
VARIES = (
    "is not batch invariant: PyTorch chooses the kernel of a product with a scale for each row by the number of rows"
)
# Rows of a block: as many as keep a GPU busy, within the elements of a buffer for the last block.
_MOST_ROWS, _LEAST_ROWS, _ELEMENTS = 4096, 256, 1 << 27
_ROWS_ON_CPU = 64
# Where cuBLASLt has other kernels too: products of vectors, and those with few columns that add to a matrix.
_ROWS_WITHOUT_SPLITS, _COLUMNS_OF_A_SUM = 128, 64
_HALF = torch.float16, torch.bfloat16
_DEVICES = "CPU", "CUDA"

# The kernels of PyTorch by name and device, and what replaces them while the mode is active.
_kernels: dict[tuple[str, str], Any] = {}
_library: torch.library.Library | None = None
# Where sums may not be split: the library of products, and what PyTorch allowed before, by name.
_before: tuple[Any, dict[str, tuple[bool, bool]]] | None = None


def is_batch_invariant() -> bool:
    """Whether [`batch_invariant`] is active."""
    return _library is not None


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Context manager: the forward of a model gives a document the same bits in every row and every batch.

    It applies to all threads of the process, and to the backward of what runs inside it. Documents that continue others (shared
    prompts and trees) have another order of sums than on their own. Ops that cannot be invariant raise a `ValueError`.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed import batch_invariant
    >>> rows, weight = torch.randn(100, 64), torch.randn(32, 64)
    >>> with batch_invariant():
    ...     torch.equal((rows @ weight.T)[:3], rows[:3] @ weight.T)
    True

    ```
    """
    before = is_batch_invariant()
    set_batch_invariant(True)
    try:
        yield
    finally:
        set_batch_invariant(before)


def set_batch_invariant(active: bool) -> None:
    """Activate or end what [`batch_invariant`] does, for the whole process."""
    global _library, _before
    if active == is_batch_invariant():
        return
    if not active:
        # PyTorch's own kernels come back when the library is collected.
        _library = None
        if _before is not None:
            torch.backends.cuda.preferred_blas_library(_before[0])
            _allow(_before[1])
            _before = None
        return
    # Kernels for older GPUs differ in the order of their sums without split sums too.
    hopper = torch.cuda.is_available() and not torch.version.hip and torch.cuda.get_device_capability() >= (9, 0)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # PyTorch warns once in a process that a kernel is replaced.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for device in _DEVICES:
            for name, in_blocks in _PRODUCTS.items():
                if (kernel := _kernel(name, device)) is not None:
                    product = _without_splits(name, kernel, in_blocks) if hopper and device == "CUDA" else in_blocks
                    library.impl(name, product, device, with_keyset=True)
            for name in _SCALED_PRODUCTS:
                if _kernel(name, device) is not None:
                    library.impl(name, partial(_refuse, name), device)
    if hopper:
        _before = torch.backends.cuda.preferred_blas_library(), _allowed()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        _allow(dict.fromkeys(_before[1], (False, False)))
    _library = library


def _allowed() -> dict[str, tuple[bool, bool]]:
    """Whether PyTorch may round partial sums to half precision, and whether it may split sums at all, by the setting's name."""
    products, names = torch.backends.cuda.matmul, [f"allow_{x}_reduced_precision_reduction" for x in ("fp16", "bf16")]
    return {name: (getattr(products, name), getattr(products, f"{name}_split_k", True)) for name in names}


def _allow(settings: dict[str, tuple[bool, bool]]) -> None:
    for name, value in settings.items():
        setattr(torch.backends.cuda.matmul, name, value)


def _kernel(name: str, device: str) -> Any:
    """Return PyTorch's own kernel, or `None` if this build has none."""
    if (name, device) not in _kernels:
        try:
            _kernels[name, device] = torch.library.get_kernel(f"aten::{name}", device)
        except RuntimeError:
            _kernels[name, device] = None
    return _kernels[name, device]


def _without_splits(name: str, kernel: Any, in_blocks: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """PyTorch's own kernel where cuBLASLt adds in one order. The host has no time for more than this on short rows."""
    at = 1 if name.startswith("addmm") else 0

    def product(keys, *args, **options):
        rows, matrix = args[at], args[at + 1]
        if not _is_row_major(rows):
            # A sum over many rows takes long if it may not be split.
            assert _before is not None
            _allow(_before[1])
            try:
                return kernel.call_boxed(keys, *args, **options)
            finally:
                _allow(dict.fromkeys(_before[1], (False, False)))
        if rows.shape[0] < _ROWS_WITHOUT_SPLITS or not _adds_in_one_order(matrix.shape[1], rows.dtype, at == 1):
            return in_blocks(keys, *args, **options)
        return kernel.call_boxed(keys, *args, **options)

    return product


def _adds_in_one_order(columns: int, dtype: torch.dtype, is_added: bool) -> bool:
    """Whether all kernels for such a product of many rows add in the same order."""
    return _before is not None and dtype in _HALF and columns >= (_COLUMNS_OF_A_SUM if is_added else 2)


def _rows_of_a_block(columns: int, dtype: torch.dtype, is_added: bool, on_gpu: bool) -> int:
    if not on_gpu:
        return _ROWS_ON_CPU
    if _adds_in_one_order(columns, dtype, is_added):
        return _ROWS_WITHOUT_SPLITS
    return min(_MOST_ROWS, max(_LEAST_ROWS, 1 << (_ELEMENTS // columns).bit_length() - 1))


def _in_blocks(name: str, keys, rows: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None, *args, **options):
    """Call the kernel `name` for blocks of rows, with results in `out`. `added` is the summand of each element, if any."""
    kernel = _kernel(name, "CUDA" if rows.is_cuda else "CPU")

    def call(out: torch.Tensor, rows: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
        kernel.call_boxed(keys, *([] if added is None else [added]), rows, *args, **options, out=out)
        return out

    number, columns = out.shape
    if not rows.numel() or not _is_row_major(rows):
        return call(out, rows, added)
    if not _is_row_major(out):
        result = torch.empty_like(out, memory_format=torch.contiguous_format)
        return out.copy_(_in_blocks(name, keys, rows, result, added, *args, **options))
    # A summand may also be one row for all.
    each = added if added is not None and added.ndim == 2 and added.shape[0] == number > 1 else None
    size = _rows_of_a_block(columns, rows.dtype, added is not None, rows.is_cuda)
    whole = number - number % size
    for start in range(0, whole, size):
        block = slice(start, start + size)
        call(out[block], rows[block], added if each is None else each[block])
    if whole < number:
        last, result = _like(size, rows, out)
        left = number - whole
        last[:left], last[left:] = rows[whole:], 0
        if each is not None:
            result[:left], added = each[whole:], result
        out[whole:] = call(result, last, added)[:left]
    return out


def _like(size: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """New tensors of `size` rows, as far apart in memory as those of `tensors`, which may decide about the kernel too."""
    return [torch.empty_strided((size, x.shape[1]), x.stride(), dtype=x.dtype, device=x.device) for x in tensors]


def _is_row_major(x: torch.Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1]


def _result(rows: torch.Tensor, matrix: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return rows.new_empty(rows.shape[0], matrix.shape[1], dtype=dtype)


def _mm(keys, rows, matrix, *dtype, out=None):
    out = _result(rows, matrix, *dtype) if out is None else out
    return _in_blocks("mm.dtype_out" if dtype else "mm.out", keys, rows, out, None, matrix, *dtype)


def _addmm(keys, added, rows, matrix, *dtype, out=None, **scales):
    out = _result(rows, matrix, *dtype) if out is None else out
    return _in_blocks("addmm.dtype_out" if dtype else "addmm.out", keys, rows, out, added, matrix, *dtype, **scales)


def _addmm_in_place(keys, added, *args, **scales):
    return _addmm(keys, added, *args, out=added, **scales)


def _refuse(name: str, *_: Any, **__: Any) -> torch.Tensor:
    raise unsupported("batch_invariant", f"torch.{name}, which {VARIES}", "Compute these layers in bfloat16.")


_SCALED_PRODUCTS = ("_scaled_mm", "_scaled_mm.out", "_scaled_mm_v2", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
_PRODUCTS: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(("mm", "mm.out", "mm.dtype", "mm.dtype_out"), _mm),
    **dict.fromkeys(("addmm", "addmm.out", "addmm.dtype", "addmm.dtype_out"), _addmm),
    "addmm_": _addmm_in_place,
}
