"""The sum of the terms of layers with the same input, and its gradients."""

from collections.abc import Collection, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import torch

from ..autograd import save, saved
from .float8 import Float8, Float8Weight
from .float8_blocks import BlocksWeight, Float8Blocks
from .low_rank import Adapter, LowRank
from .term import Bias, Dequantized, Term, Weights


Kind = TypeVar("Kind", bound=Term)

# In the order of their additions. A term takes from a layer what no previous one has taken.
KINDS: tuple[type[Term], ...] = (Bias, Float8, Float8Blocks, LowRank, Weights)


class Projection(NamedTuple):
    """The parameters of a linear layer.

    Args:
        weight (`torch.Tensor` of shape `[out, in]`, [`Float8Weight`], [`BlocksWeight`] or [`Dequantized`]):
            Weight of the layer.
        bias (`torch.Tensor` of shape `[out]`, *optional*):
            Bias of the layer.
        adapters (`tuple[Adapter, ...]`, *optional*):
            Active adapters.
    """

    weight: torch.Tensor | Float8Weight | BlocksWeight | Dequantized
    bias: torch.Tensor | None = None
    adapters: tuple[Adapter, ...] = ()


class Plan(NamedTuple):
    """The terms of a number of layers, `(kind, plan, number of tensors)` each, and the number of all tensors."""

    layers: int
    terms: tuple[tuple[type[Term], Any, int], ...]
    size: int


def planned(projections: Sequence[Projection]) -> tuple[Plan, list[torch.Tensor]]:
    """Split layers into a plan without differentiable tensors, and these tensors."""
    weights = {i: projection.weight for i, projection in enumerate(projections)}
    terms, tensors = [], []
    for kind in KINDS:
        taken = kind.take(projections, weights)
        if taken is not None:
            terms.append((kind, taken[0], len(taken[1])))
            tensors += taken[1]
    return Plan(len(projections), tuple(terms), len(tensors)), tensors


class Products:
    """The outputs of layers for rows `[T, in]`, and their gradients, for use in an autograd function.

    The forward creates it, calls [`Products.prepare`], and saves it with [`Products.save`] before the outputs are computed.
    The backward gets it back from [`Products.restored`].

    Args:
        ctx (`torch.autograd.function.FunctionCtx`):
            Context of an autograd function whose last arguments are `tensors`.
        plan ([`Plan`]), tensors (`Sequence[torch.Tensor]`):
            The layers, from [`planned`].
        dtype (`torch.dtype`):
            Dtype of all products.
    """

    def __init__(self, ctx: Any, plan: Plan, tensors: Sequence[torch.Tensor], dtype: torch.dtype):
        self.plan, self.tensors, self.dtype = plan, tensors, dtype
        wanted, start, self.terms = ctx.needs_input_grad[len(ctx.needs_input_grad) - plan.size :], 0, []
        for kind, own, size in plan.terms:
            part = slice(start, start + size)
            self.terms.append(kind(own, tensors[part], wanted[part], dtype))
            start += size

    def save(self, ctx: Any, *others: torch.Tensor | None) -> None:
        """Save what the backward needs, and `others`."""
        ctx.products = self.plan, self.dtype, len(others), [len(term.kept) for term in self.terms]
        save(ctx, *others, *self.tensors, *chain.from_iterable(term.kept for term in self.terms))

    @classmethod
    def restored(cls, ctx: Any) -> tuple["Products", tuple[torch.Tensor | None, ...]]:
        """Return the instance of the forward, and the `others` that [`Products.save`] got."""
        plan, dtype, first, sizes = ctx.products
        tensors = saved(ctx)
        products = cls(ctx, plan, tensors[first : first + plan.size], dtype)
        kept = iter(tensors[first + plan.size :])
        for term, size in zip(products.terms, sizes, strict=True):
            term.kept = list(islice(kept, size))
        return products, tensors[:first]

    @property
    def by_row(self) -> bool:
        """Whether rows must have two dimensions."""
        return any(term.by_row for term in self.terms)

    def find(self, kind: type[Kind]) -> Kind | None:
        """Return the term of a kind, if the layers have it."""
        return next((term for term in self.terms if isinstance(term, kind)), None)

    def reads_rows_beside(self, other: Term | None) -> bool:
        """Whether a term but `other` reads the rows."""
        return any(term.reads_rows for term in self.terms if term is not other)

    def prepare(self, rows: torch.Tensor | None, keep: bool = False) -> None:
        """Compute what the backward needs besides the outputs.

        Args:
            rows (`torch.Tensor` of shape `[T, in]`, *optional*):
                Input of the layers. With `by_row` false, it may have any number of dimensions.
            keep (`bool`, *optional*, defaults to `False`):
                Whether terms may keep the rows in a form of their own, which [`Products.needs_rows`] then leaves out.
        """
        for term in self.terms:
            term.prepare(rows, keep)

    def forward(self, rows: torch.Tensor | None, known: Collection[int] = ()) -> list[Any]:
        """Return the outputs `[T, out]` for the rows of [`Products.prepare`], in the dtype of the products.

        Layers whose numbers are `known` are not computed.
        """
        outputs: list[Any] = [None] * self.plan.layers
        for term in self.terms:
            term.forward(rows, outputs, known)
        return outputs

    def needs_rows(self) -> bool:
        """Whether [`Products.parameter_gradients`] needs the rows of the forward."""
        return any(term.needs_rows() for term in self.terms)

    @property
    def takes_pieces(self) -> bool:
        """Whether [`Products.add_rows`] can replace the rows in the backward."""
        return all(term.takes_pieces for term in self.terms if term.needs_rows())

    def input_gradient(self, gradients: Sequence[torch.Tensor | None], wanted: bool = True) -> torch.Tensor | None:
        """Return the gradient of the rows if it is wanted, given those of the outputs `[T, out]`."""
        d_rows = None
        for term in self.terms:
            d_rows = term.input_gradient(gradients, d_rows, wanted)
        return d_rows

    def add_rows(self, rows: torch.Tensor) -> None:
        """Use the next piece of the rows `[N, in]`, after [`Products.input_gradient`]."""
        for term in self.terms:
            if term.needs_rows():
                term.add_rows(rows)

    def parameter_gradients(
        self, gradients: Sequence[torch.Tensor | None], rows: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the tensors, after [`Products.input_gradient`]."""
        return [found for term in self.terms for found in term.parameter_gradients(gradients, rows)]


def unflattened(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return `rows` `[T, out]` as `[*shape, out]`, not as a view: autograd forbids in-place changes to views."""
    return torch.ops.aten._unsafe_view.default(rows, (*shape, rows.shape[-1]))
