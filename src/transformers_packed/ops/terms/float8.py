"""Weights whose three products run in float8, with one cast of the rows for all of them. See [`ops.float8`]."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..float8 import DTYPE, MULTIPLE, add_maxima, cast_both, cast_rows, product, transposed, with_whole_rows
from .term import Term


class Float8Weight(NamedTuple):
    """A weight whose products run in float8.

    Args:
        values (`torch.Tensor` of shape `[out, in]`):
            The weight in any floating dtype, or a frozen weight that is stored in e4m3.
        scale (`torch.FloatTensor` of shape `[out]`, *optional*):
            Scales of the rows of a stored weight.
        stored_for (`torch.dtype`, *optional*):
            Dtype around the products with a stored weight.
    """

    values: torch.Tensor
    scale: torch.Tensor | None = None
    stored_for: torch.dtype | None = None

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored_for or self.values.dtype

    @property
    def casts_input(self) -> bool:
        """Whether the input may have more precision than the products."""
        return self.scale is not None


class Float8Experts(NamedTuple):
    """Frozen weights of experts whose products run in float8, with a scale for each block. See [`ops.float8_blocks`].

    Args:
        shape (`torch.Size`):
            Shape of the weights, `[E, out, in]`, in multiples of 128.
        dtype (`torch.dtype`):
            Dtype around the products.
        stored (`Callable[[], Sequence[torch.Tensor]]`):
            Returns the weights in e4m3, and the scales `[E, out / 128, in / 128]` of their blocks in float32.
    """

    shape: torch.Size
    dtype: torch.dtype
    stored: Callable[[], Sequence[torch.Tensor]]


class Float8(Term):
    """`x W^T` of all weights in float8."""

    def __init__(self, plan, tensors, wanted, dtype):
        super().__init__(plan, tensors, wanted, dtype)
        tensors = iter(tensors)
        self.weights = [Float8Weight(next(tensors)) if stored is None else stored for _, stored in plan]
        self.sizes = [len(weight.values) for weight in self.weights]
        # The rows and their scales, which another kernel may have cast for the forward, and those of each weight.
        self.cast: tuple[torch.Tensor, torch.Tensor] | None = None
        self.factors: list[tuple[torch.Tensor, torch.Tensor]] = []
        # The transposed rows, if another kernel writes them to `new_columns` in the backward.
        self.row_columns: torch.Tensor | None = None
        # The transposed gradients of the outputs, if the weights need gradients.
        self.columns: torch.Tensor | None = None

    @staticmethod
    def take(projections, weights):
        mine = {i: weight for i, weight in weights.items() if isinstance(weight, Float8Weight)}
        if not mine:
            return None
        for i in mine:
            del weights[i]
        plan = [(i, weight if weight.scale is not None else None) for i, weight in mine.items()]
        return plan, [weight.values for weight in mine.values() if weight.scale is None]

    def prepare(self, rows, keep):
        if self.cast is None:
            self.cast = cast_rows(rows)
        cast, scale = self.cast
        self.factors = [cast_rows(weight.values) if weight.scale is None else weight[:2] for weight in self.weights]
        scales = [of_weight for _, of_weight in self.factors]
        # Scales of the rows, scales of the weights' rows, and the cast rows if the gradients of weights need them.
        keep = keep and any(self.wanted)
        self.kept = [scale, torch.cat(scales) if len(scales) > 1 else scales[0], cast if keep else None]

    def forward(self, rows, outputs, known=()):
        cast, scale = self.cast
        for i, _ in self.plan:
            # The cast of a weight is freed before the next product.
            values, of_weight = self.factors.pop(0)
            if i in known:
                continue
            y = product(cast, values, scale, of_weight, self.dtype)
            outputs[i] = y if outputs[i] is None else y + outputs[i]

    def needs_rows(self):
        return any(self.wanted) and self.kept[2] is None

    def input_gradient(self, gradients, d_rows, wanted):
        row_scale, weight_scales, _ = self.kept
        gradients = [
            row_scale.new_zeros(len(row_scale), size) if gradients[i] is None else gradients[i]
            for (i, _), size in zip(self.plan, self.sizes, strict=True)
        ]
        if any(self.wanted):
            cast, scale = self._cast_gradients(gradients)
        elif wanted:
            cast, scale = cast_rows(*gradients, factor=weight_scales)
        if not wanted:
            return d_rows
        # The weights once more, transposed and side by side.
        width, device = self.weights[0].shape[1], row_scale.device
        together = torch.empty(width, sum(self.sizes), dtype=DTYPE, device=device)
        parts = zip(self.weights, weight_scales.split(self.sizes), together.split(self.sizes, 1), strict=True)
        for weight, of_weight, out in parts:
            transposed(weight.values, of_weight if weight.scale is None else None, out)
        found = product(cast, together, scale, None, self.dtype)
        return found if d_rows is None else d_rows.add_(found)

    def _cast_gradients(self, gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cast the gradients by row, and their transpose, which is kept, by column."""
        row_scale, weight_scales, _ = self.kept
        tokens, total, device = len(row_scale), sum(self.sizes), row_scale.device
        rows, columns = torch.zeros(tokens + total, dtype=torch.int32, device=device).split([tokens, total])
        scale, self.column_scale = (torch.empty(n, dtype=torch.float32, device=device) for n in (tokens, total))
        cast = torch.empty(tokens, total, dtype=DTYPE, device=device)
        self.columns = self.new_columns(total)
        parts = [
            (with_whole_rows(gradient), row_scale, factor, rows, largest)
            for gradient, factor, largest in zip(
                gradients, weight_scales.split(self.sizes), columns.split(self.sizes), strict=True
            )
        ]
        for part in parts:
            add_maxima(*part)
        outputs = (x.split(self.sizes, dim) for x, dim in ((cast, 1), (self.columns, 0), (self.column_scale, 0)))
        for part, (q, t, column_scale) in zip(parts, zip(*outputs, strict=True), strict=True):
            cast_both(*part, q, scale, t, column_scale)
        return cast, scale

    def new_columns(self, size: int) -> torch.Tensor:
        """Return memory for a transpose of the rows, `[size, T]`, with `T` rounded up to a multiple of 16, at least 16."""
        tokens = max(len(self.kept[0]), 1)
        return torch.empty(size, -(-tokens // MULTIPLE) * MULTIPLE, dtype=DTYPE, device=self.kept[0].device)

    def parameter_gradients(self, gradients, rows):
        if self.columns is None:
            return [None] * len(self.tensors)
        scale, _, cast = self.kept
        columns = self.row_columns
        if columns is None:
            columns = self.new_columns(self.weights[0].shape[1])
            transposed(rows if cast is None else cast, scale if cast is None else None, columns)
        found = product(self.columns, columns, self.column_scale, None, self.dtype).split(self.sizes)
        self.columns = None
        trained = [(i, part) for (i, stored), part in zip(self.plan, found, strict=True) if stored is None]
        return [
            part.to(tensor.dtype) if wanted and gradients[i] is not None else None
            for (i, part), tensor, wanted in zip(trained, self.tensors, self.wanted, strict=True)
        ]
