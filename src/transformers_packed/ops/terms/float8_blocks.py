"""Frozen weights in float8 with a scale for each block, with one cast of the rows for all of them. See [`ops.float8_blocks`]."""

from typing import Any, NamedTuple

import torch

from ..dequantization import check_memory
from ..float8_blocks import cast_in_blocks, product_in_blocks
from .term import Term


class BlocksWeight(NamedTuple):
    """A frozen weight whose products run in float8, with a scale for each block of 128 x 128.

    Args:
        values (`torch.Tensor` of shape `[out, in]`):
            The weight in e4m3. Both sizes are multiples of 128.
        scale (`torch.FloatTensor` of shape `[out / 128, in / 128]`):
            Scales of the blocks.
        dtype (`torch.dtype`):
            Dtype around the products.
    """

    values: torch.Tensor
    scale: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def casts_input(self) -> bool:
        """Whether the input may have more precision than the products."""
        return True


class Float8Blocks(Term):
    """`x W^T` of all weights in blocks."""

    def __init__(self, plan, tensors, wanted, dtype):
        super().__init__(plan, tensors, wanted, dtype)
        self.cast: Any = None

    @staticmethod
    def take(projections, weights):
        plan = [(i, weight) for i, weight in weights.items() if isinstance(weight, BlocksWeight)]
        for i, _ in plan:
            del weights[i]
        return (plan, []) if plan else None

    def prepare(self, rows, keep):
        self.cast = _cast(rows)

    def forward(self, rows, outputs, known=()):
        for i, weight in self.plan:
            if i in known:
                continue
            y = _product(self.cast, weight, True, self.dtype)
            outputs[i] = y if outputs[i] is None else y + outputs[i]
        self.cast = None

    def input_gradient(self, gradients, d_rows, wanted):
        for i, weight in self.plan:
            if wanted and gradients[i] is not None:
                found = _product(_cast(gradients[i]), weight, False, self.dtype)
                d_rows = found if d_rows is None else d_rows.add_(found)
        return d_rows

    def parameter_gradients(self, gradients, rows):
        return []


def _kernels() -> Any:
    from ..backends.triton import float8_blocks

    return float8_blocks


def _cast(rows):
    return _kernels().cast_in_blocks(rows.contiguous()) if rows.is_cuda else cast_in_blocks(rows)


def _product(cast, weight, forward: bool, dtype):
    values, scale, _ = weight
    check_memory(values)
    if values.is_cuda:
        return _kernels().rows_times_weight(cast, values, scale, forward)
    values, scale = (values, scale) if forward else (values.t(), scale.t())
    rows, of_rows = cast
    return product_in_blocks(rows, of_rows, values, scale).to(dtype)
