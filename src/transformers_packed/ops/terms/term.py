"""The interface of a term, the product that terms share, and the terms that every layer has.

These are biases, and weights whose products run in the dtype of the layers: plain ones, and quantized ones that are
computed when needed.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Term:
    """A kind of summand in the outputs of layers with the same rows `[T, in]`.

    The forward and the backward each create an instance from the same plan.

    Args:
        plan (`Any`):
            What [`Term.take`] has found, without differentiable tensors.
        tensors (`Sequence[torch.Tensor]`):
            Differentiable tensors of the term.
        wanted (`Sequence[bool]`):
            Whether each of them needs a gradient.
        dtype (`torch.dtype`):
            Dtype of the products.
    """

    # Whether the forward reads the rows, and whether they must have two dimensions.
    reads_rows = by_row = True
    # Whether [`Term.add_rows`] can replace the rows in the backward.
    takes_pieces = False

    def __init__(self, plan: Any, tensors: Sequence[torch.Tensor], wanted: Sequence[bool], dtype: torch.dtype):
        self.plan, self.tensors, self.wanted, self.dtype = plan, tensors, wanted, dtype
        # What the backward needs besides the tensors. `prepare` sets it.
        self.kept: Sequence[Any] = ()

    @staticmethod
    def take(projections: Sequence[Any], weights: dict[int, Any]) -> tuple[Any, list[torch.Tensor]] | None:
        """Return the plan and the tensors of this term for these layers, or `None` if they have no such summand.

        Args:
            projections (`Sequence[Projection]`):
                The layers.
            weights (`dict[int, Any]`):
                Weights that no previous term has taken, by layer. Those that this term takes are removed.
        """
        raise NotImplementedError

    def prepare(self, rows: torch.Tensor | None, keep: bool) -> None:
        """Compute what the backward needs of the forward, before the products of the outputs.

        With `keep`, the term may keep the rows in a form of its own instead of needing them in the backward.
        """

    def forward(
        self, rows: torch.Tensor | None, outputs: list[torch.Tensor | None], known: Collection[int] = ()
    ) -> None:
        """Add this term to the outputs, `None` where nothing has been added. A bias `[out]` alone is not yet expanded.

        Outputs whose numbers are `known` stay as they are.
        """
        raise NotImplementedError

    def needs_rows(self) -> bool:
        """Whether the gradients of the tensors depend on the rows, if the term has not kept them."""
        return any(self.wanted)

    def input_gradient(
        self, gradients: Sequence[torch.Tensor | None], d_rows: torch.Tensor | None, wanted: bool
    ) -> torch.Tensor | None:
        """Return `d_rows`, the gradient of the rows up to now, plus that of this term. Without `wanted`, only prepare."""
        return d_rows

    def add_rows(self, rows: torch.Tensor) -> None:
        """Use the next rows of the forward, after [`Term.input_gradient`], if the rows come in pieces."""
        raise NotImplementedError

    def parameter_gradients(
        self, gradients: Sequence[torch.Tensor | None], rows: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the tensors, after [`Term.input_gradient`]."""
        raise NotImplementedError


def accumulated(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add `left @ right` to `total` in place, if there is one."""
    more = -left.shape[1] % 8
    if left.is_cuda and more:
        # Rows that are no multiples of 16 bytes have slow products.
        left, right = F.pad(left, (0, more)), F.pad(right, (0, 0, 0, more))
    return torch.mm(left, right) if total is None else total.addmm_(left, right)


def product(
    left: torch.Tensor, right: torch.Tensor, scale: float = 1.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return `scale * left @ right` in `dtype`. On a GPU, float32 results are not rounded to the factors' dtype first."""
    wide = left.is_cuda and dtype == torch.float32 and left.dtype in (torch.float16, torch.bfloat16)
    if scale == 1:
        result = torch.mm(left, right, out_dtype=torch.float32) if wide else torch.mm(left, right)
    elif wide:
        result = left.new_empty(left.shape[0], right.shape[1], dtype=torch.float32)
        torch.addmm(result, left, right, beta=0, alpha=scale, out_dtype=torch.float32, out=result)
    else:
        result = left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0, alpha=scale)
    return result if dtype in (None, result.dtype) else result.to(dtype)


class Bias(Term):
    """The biases of each layer, times the scales of their adapters."""

    reads_rows = by_row = False

    @staticmethod
    def take(projections, weights):
        plan, tensors = [], []
        for i, (_, bias, adapters) in enumerate(projections):
            if bias is None and not adapters:
                continue
            biases = [(1.0, bias), *((adapter.scale, adapter.bias) for adapter in adapters)]
            biases = [(scale, tensor) for scale, tensor in biases if tensor is not None]
            if biases:
                plan.append((i, [scale for scale, _ in biases]))
                tensors += [tensor for _, tensor in biases]
        return (plan, tensors) if plan else None

    def forward(self, rows, outputs, known=()):
        biases = iter(self.tensors)
        for i, scales in self.plan:
            own = list(zip(scales, biases, strict=False))
            if i not in known:
                first, *others = [_scaled(bias, scale).to(self.dtype) for scale, bias in own]
                outputs[i] = sum(others, first)

    def needs_rows(self):
        return False

    def parameter_gradients(self, gradients, rows):
        found, wide = [], torch.promote_types(self.dtype, torch.float32)
        for i, scales in self.plan:
            start, total = len(found), None
            wanted = self.wanted[start : start + len(scales)]
            if gradients[i] is not None and any(wanted):
                total = gradients[i].sum(0, dtype=wide)
            for scale, for_bias in zip(scales, wanted, strict=True):
                dtype = self.tensors[len(found)].dtype
                found.append(None if total is None or not for_bias else _scaled(total, scale).to(dtype))
        return found


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1 else x * scale


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

    def forward(self, rows, outputs, known=()):
        for i, weight in self.weights:
            if i in known:
                continue
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
