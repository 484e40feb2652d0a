"""The interface of a term, and the product that terms share."""

from collections.abc import Sequence
from typing import Any

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

    def forward(self, rows: torch.Tensor | None, outputs: list[torch.Tensor | None]) -> None:
        """Add this term to the outputs, `None` where nothing has been added. A bias `[out]` alone is not yet expanded."""
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
