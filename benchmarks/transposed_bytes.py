"""Variants of the kernel that transposes weights in FP8 (`_transpose` of `ops/backends/triton/float8_blocks.py`), as parts of
`experts_products.py --fp8`.

The kernel loads single bytes, so each byte is a register while it is packed. `words` loads 4 bytes of a row as an integer, and
makes 4 integers of 4 columns from those of 4 rows by shifts.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from transformers_packed.ops.backends.triton.float8_blocks import BLOCK, _transpose


@triton.jit
def _transpose_words(w_ptr, t_ptr, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Transpose a tile of one of the matrices `[E, R, C]`. Both pointers are to integers of 4 bytes."""
    place = tl.program_id(0) // (R // ROWS)
    start = place.to(tl.int64) * (R // 4) * C
    quads = tl.program_id(0) % (R // ROWS) * (ROWS // 4) + tl.arange(0, ROWS // 4)
    words = tl.program_id(1) * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)
    at = w_ptr + start + quads[:, None] * C + words[None, :]
    first, second = tl.load(at), tl.load(at + C // 4)
    third, fourth = tl.load(at + 2 * (C // 4)), tl.load(at + 3 * (C // 4))
    for k in tl.static_range(4):
        low = ((first >> (8 * k)) & 255) | (((second >> (8 * k)) & 255) << 8)
        high = ((third >> (8 * k)) & 255) | (((fourth >> (8 * k)) & 255) << 8)
        column = 4 * words + k
        tl.store(t_ptr + start + column[:, None] * (R // 4) + quads[None, :], tl.trans(low | (high << 16)))


def _of_bytes(weights: torch.Tensor, out: torch.Tensor, warps: int) -> None:
    number, rows, columns = weights.shape
    grid = number * (rows // BLOCK), columns // BLOCK
    _transpose[grid](weights.view(torch.uint8), out.view(torch.int32), rows, columns, BLOCK, num_warps=warps)


def _of_words(weights: torch.Tensor, out: torch.Tensor, height: int, warps: int) -> None:
    number, rows, columns = weights.shape
    grid = number * (rows // height), columns // BLOCK
    tile = height, BLOCK
    _transpose_words[grid](weights.view(torch.int32), out.view(torch.int32), rows, columns, *tile, num_warps=warps)


def variants(weights: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the variants, each of which returns a copy `[E, C, R]` of weights `[E, R, C]` of one byte each, and a plain copy."""

    def run(write: Callable, *options: int) -> torch.Tensor:
        number, rows, columns = weights.shape
        out = torch.empty(number, columns, rows, dtype=weights.dtype, device=weights.device)
        write(weights, out, *options)
        return out

    return {
        "bytes, 4 warps": lambda: run(_of_bytes, 4),
        "words, 4 warps": lambda: run(_of_words, BLOCK, 4),
        "words, 256 rows": lambda: run(_of_words, 2 * BLOCK, 8),
        "a plain copy": weights.clone,
    }
