"""Backwards without a second derivative: an error when one is asked for, instead of gradients that are silently constant.

torch's own `once_differentiable` does not notice when the incoming gradient is a constant, as that of a loss is, or when
`torch.autograd.grad` differentiates the second time.
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
            How to get second-order gradients; the default is right for a kernel with a torch form.
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
    """Whether a transform of `torch.func` is active, which our autograd functions do not support."""
    return torch._C._are_functorch_transforms_active()
