"""Values of weights with a scale for each group of columns of a row: whole numbers in 4 or 8 bit, and NVFP4.

    int4, int8    y[r, c] = (value[r, c] - zero[r, g]) * scale[r, g]
    nvfp4         y[r, c] = value[r, c] * (scale[r, g] * whole)

The group of a column is `g = c // (C / G)`, or `order[c]`. Products are computed in float32. They are rounded to
`Groups.rounded`, and then to the dtype of the result, as the libraries do that wrote the weights.
"""

from typing import NamedTuple

import torch

from ..errors import input_error
from .backends import triton
from .dequantization import check_memory
from .dispatch import run, with_triton


# Values of the codes of NVFP4 (e2m1) without their sign, which is the fourth bit.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# What stands for 0 in unsigned whole numbers without zeros.
MIDDLE = {"int4": 8, "int8": 128}


class Groups(NamedTuple):
    """A weight `[..., R, C]` with a scale for each group of columns of a row.

    Args:
        values (`torch.Tensor` of shape `[..., R, C / 2]` or `[..., R, C]`):
            Unsigned whole numbers or codes, in uint8. In 4 bit, a byte has two columns, the first one in its low bits.
        scale (`torch.Tensor` of shape `[..., R, G]`):
            Scales of the groups, in float32, float16, bfloat16, or float8 (e4m3) for NVFP4.
        code (`str`, *optional*, defaults to `"int4"`):
            `"int4"`, `"int8"` or `"nvfp4"`.
        rounded (`torch.dtype`, *optional*, defaults to `torch.float32`):
            Dtype of the products before that of the result.
        zero (`torch.Tensor` of shape `[..., R, G]`, *optional*):
            What stands for 0 in each group, in uint8. By default, this is 8 in 4 bit, and 128 in 8 bit.
        order (`torch.Tensor` of shape `[..., H, C]`, *optional*):
            Group of each column, in int32, for each `R / H` rows.
        whole (`torch.Tensor` of shape `[..., H]`, *optional*):
            Scale of each `R / H` rows, in float32.
        divided (`bool`, *optional*, defaults to `False`):
            Whether scales are divided by `whole` instead of multiplied by it.
    """

    values: torch.Tensor
    scale: torch.Tensor
    code: str = "int4"
    rounded: torch.dtype = torch.float32
    zero: torch.Tensor | None = None
    order: torch.Tensor | None = None
    whole: torch.Tensor | None = None
    divided: bool = False

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight."""
        *others, columns = self.values.shape
        return torch.Size((*others, columns * (1 if self.code == "int8" else 2)))


def dequantize_groups(groups: Groups, dtype: torch.dtype, *, impl: str = "auto") -> torch.Tensor:
    """Multiply the groups of a weight by their scales.

    Args:
        groups ([`Groups`]):
            The weight.
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
    >>> from transformers_packed.ops.grouped_dequantization import Groups, dequantize_groups
    >>> values, scale = torch.tensor([[0x98, 0x7A]], dtype=torch.uint8), torch.tensor([[0.5, 2.0]])
    >>> dequantize_groups(Groups(values, scale), torch.float32).tolist()
    [[0.0, 0.5, 4.0, -2.0]]
    >>> dequantize_groups(Groups(values, scale, "nvfp4"), torch.float32).tolist()
    [[-0.0, -0.25, -2.0, 12.0]]

    ```
    """
    (*others, rows, columns), scales, parts = groups.shape, groups.scale.shape, parts_of(groups)
    number = scales[-1] if groups.order is None else 1
    expected = {"scale": (*others, rows, scales[-1]), "zero": scales, "order": (*others, parts, columns)}
    expected["whole"] = (*others, parts)
    given = {"scale": groups.scale, "zero": groups.zero, "order": groups.order, "whole": groups.whole}
    found = {name: tuple(x.shape) for name, x in given.items() if x is not None}
    if columns % number or rows % parts or any(found[name] != expected[name] for name in found):
        need = "values [..., R, C], scales and zeros [..., R, G] with G a divisor of C, and parts [..., H] with H one of R"
        raise input_error(need, f"values {tuple(groups.values.shape)} and {found}")
    check_memory(groups.values)
    return run("dequantize_groups", impl, GROUPS, groups, dtype)


def parts_of(groups: Groups) -> int:
    """Return how many parts of the rows have an order or a scale of their own."""
    if groups.order is not None:
        return groups.order.shape[-2]
    return 1 if groups.whole is None else groups.whole.shape[-1]


def _reference(groups, dtype):
    values, scale, (*others, rows, columns) = groups.values, groups.scale.float(), groups.shape
    if groups.code != "int8":
        values = torch.stack((values & 15, values >> 4), -1).flatten(-2)
    if groups.whole is not None:
        whole = groups.whole.repeat_interleave(rows // parts_of(groups), -1)[..., None]
        scale = scale / whole if groups.divided else scale * whole
    if groups.order is None:
        group = torch.arange(columns, device=values.device) // (columns // scale.shape[-1])
    else:
        group = groups.order.long().repeat_interleave(rows // parts_of(groups), -2)
    group = group.expand(*others, rows, columns)
    if groups.code == "nvfp4":
        codes = torch.tensor(_E2M1, device=values.device)
        values = torch.cat((codes, -codes))[values.long()]
    elif groups.zero is None:
        values = values.float() - MIDDLE[groups.code]
    else:
        values = values.float() - groups.zero.float().gather(-1, group)
    return (values * scale.gather(-1, group)).to(groups.rounded).to(dtype)


def _verify(groups, dtype) -> str:
    if not triton.on_gpu(groups.values):
        return "needs CUDA tensors"
    if groups.values.dtype != torch.uint8 or groups.scale.dtype.itemsize > 4:
        return f"supports values in uint8 and scales in float32 at most, not {groups.values.dtype} and {groups.scale.dtype}"
    if groups.scale.dtype == torch.float8_e4m3fn and groups.values.is_cuda:
        if torch.cuda.get_device_capability(groups.values.device) < (8, 9):
            return "needs a GPU of compute capability 8.9 or later"
    return triton.problem()


GROUPS = with_triton(triton.late("dequantization", "dequantize_groups"), _verify, _reference)
