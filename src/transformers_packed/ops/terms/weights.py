"""Weights whose products run in the dtype of the layers: plain ones, and quantized ones that are computed when needed."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .term import Term, accumulated, product


# Elements of the weights of quantized experts that are computed at a time. Fewer ones need more launches, with a rest in
# each, and every launch takes time on the host.
PIECE = 2**28


class Dequantized(NamedTuple):
    """A frozen weight that is computed when a product needs it.

    Args:
        shape (`torch.Size`):
            Shape of the weight, `[out, in]`.
        dtype (`torch.dtype`):
            Dtype of the products.
        compute (`Callable[[], torch.Tensor]`):
            Returns the weight `[out, in]` in any floating dtype.
    """

    shape: torch.Size
    dtype: torch.dtype
    compute: Callable[[], torch.Tensor]

    @property
    def casts_input(self) -> bool:
        """Whether the input may have more precision than the products."""
        return True


class DequantizedExperts(NamedTuple):
    """Frozen weights of experts that are computed when a product needs them, some experts at a time.

    Args:
        shape (`torch.Size`):
            Shape of the weights, `[E, out, in]`.
        dtype (`torch.dtype`):
            Dtype of the products.
        compute (`Callable[[int, int], torch.Tensor]`):
            Returns the weights `[last - first, out, in]` of the experts from `first` to before `last`, in any floating
            dtype.
    """

    shape: torch.Size
    dtype: torch.dtype
    compute: Callable[[int, int], torch.Tensor]


class Weights(Term):
    """`x W^T` of each weight that no other term takes."""

    by_row = False

    def __init__(self, plan, tensors, wanted, dtype):
        super().__init__(plan, tensors, wanted, dtype)
        tensors = iter(tensors)
        self.weights = [(i, next(tensors) if quantized is None else quantized) for i, quantized in plan]

    @staticmethod
    def take(projections, weights):
        if not weights:
            return None
        tensors = [weight for weight in weights.values() if isinstance(weight, torch.Tensor)]
        return [(i, None if isinstance(weight, torch.Tensor) else weight) for i, weight in weights.items()], tensors

    def forward(self, rows, outputs):
        for i, weight in self.weights:
            weight, y = self._cast(weight), outputs[i]
            # A bias is added by the product.
            alone = y is None or y.ndim == 1
            outputs[i] = F.linear(rows, weight, y) if alone else y.addmm_(rows, weight.t())

    def _cast(self, weight):
        weight = weight.compute() if isinstance(weight, Dequantized) else weight
        return weight if weight.dtype == self.dtype else weight.to(self.dtype)

    def input_gradient(self, gradients, d_rows, wanted):
        for i, weight in self.weights:
            if wanted and gradients[i] is not None:
                d_rows = accumulated(d_rows, gradients[i], self._cast(weight))
        return d_rows

    def parameter_gradients(self, gradients, rows):
        layers = [i for i, quantized in self.plan if quantized is None]
        return [
            product(gradients[i].t(), rows, dtype=weight.dtype) if for_weight and gradients[i] is not None else None
            for i, weight, for_weight in zip(layers, self.tensors, self.wanted, strict=True)
        ]
