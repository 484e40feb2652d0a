"""Gradients that cannot be differentiated once more: an error where somebody asks for that, instead of constants.

torch's own `once_differentiable` stays silent where the gradient that comes in is a constant, as that of a loss is, and
where `torch.autograd.grad` differentiates the second time.
"""

from collections.abc import Callable
from functools import wraps

import torch

from ..errors import input_error


def first_order(
    fix: str = "Compute them on a CPU or with torch.func.grad: there the torch form runs, which has them.",
) -> Callable[[Callable], Callable]:
    """Decorator of the backward of a `torch.autograd.Function`: `create_graph=True` is a `ValueError`.

    Args:
        fix (`str`, *optional*):
            Where gradients of second order are to be had; by default that is so for a kernel with a torch form.
    """

    def decorate(backward: Callable) -> Callable:
        @wraps(backward)
        def run(ctx, *gradients):
            # Autograd has gradients on in a backward only when that is recorded.
            if torch.is_grad_enabled():
                raise input_error("first-order gradients", "create_graph=True", fix)
            return backward(ctx, *gradients)

        run.first_order = True
        return run

    return decorate


def is_transformed() -> bool:
    """Whether a transform of `torch.func` runs, which would want autograd functions to be written in another way."""
    return torch._C._are_functorch_transforms_active()
