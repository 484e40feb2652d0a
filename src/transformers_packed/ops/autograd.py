"""What an autograd function of this package asks PyTorch: autocast, transforms and second-order gradients.

Ops that support only first-order gradients raise an error for second-order ones. Without the error, these gradients would silently be constants. `once_differentiable` of PyTorch misses two cases: an
incoming gradient that is a constant, such as that of a loss, and a second differentiation by `torch.autograd.grad`.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from ..errors import input_error


def first_order(
    fix: str = "Compute second-order gradients on a CPU or with torch.func.grad, which run the PyTorch reference.",
) -> Callable[[Callable], Callable]:
    """Decorate the backward of a `torch.autograd.Function` so that `create_graph=True` raises a `ValueError`.

    Args:
        fix (`str`, *optional*):
            Advice on how to compute second-order gradients. The default suits a kernel with a PyTorch reference.
    """

    def decorate(backward: Callable) -> Callable:
        @wraps(backward)
        def run(ctx, *gradients):
            # Autograd enables gradients in a backward only if it records the backward.
            if torch.is_grad_enabled():
                raise input_error("first-order gradients", "create_graph=True", fix)
            return backward(ctx, *gradients)

        vars(run)["first_order"] = True
        return run

    return decorate


def save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """Save tensors for the backward, which gets them from [`saved`]. Hooks get them now, not after the forward.

    Gradient checkpointing computes a layer again until its hooks have all tensors that the layer saved. So the last
    product of a layer is not computed again if the function that runs it saves before.

    Args:
        ctx (`torch.autograd.function.FunctionCtx`):
            Context of an autograd function, in its forward.
        *tensors (`torch.Tensor`, *optional*):
            Inputs of the function, and what it has computed of them.
    """
    hooks = None if torch.compiler.is_compiling() else saved_tensor_hooks()
    # A node without a next one, as under no_grad, has no backward.
    if hooks is None or not ctx.next_functions:
        ctx.save_for_backward(*tensors)
        return
    pack, unpack = hooks
    ctx.packed = [x if x is None else partial(unpack, pack(_without_node(x))) for x in tensors]


def _without_node(x: torch.Tensor) -> torch.Tensor:
    """An alias of what the forward computed. As an output, the tensor itself gets the node that would then keep it."""
    return x if x.requires_grad or isinstance(x, torch.nn.Parameter) else x.detach()


def saved(ctx: Any) -> tuple[Any, ...]:
    """Return the tensors of [`save`], once in a backward."""
    packed = getattr(ctx, "packed", None)
    if packed is None:
        return ctx.saved_tensors
    found = tuple(load if load is None else load() for load in packed)
    free(ctx)
    return found


def free(ctx: Any) -> None:
    """Free the tensors of [`save`] in a backward, unless the graph is retained. A second backward then gets PyTorch's error."""
    if not retains_graph():
        ctx.packed = None


def detached(x: torch.Tensor) -> torch.Tensor:
    """Return `x` without its node. Changes in place count for both, which they do not by `detach` beneath autograd."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


def saved_tensor_hooks() -> tuple[Callable, Callable] | None:
    """Return the active hooks that pack and unpack saved tensors, such as those of gradient checkpointing, if any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def retains_graph() -> bool:
    """Whether the current backward keeps the graph for another one."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts inputs on the device of `tensor`, or `None` without autocast."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype of a product with `tensor`, to which autocast would cast it."""
    return autocast_dtype(tensor) or tensor.dtype


def is_transformed() -> bool:
    """Whether a `torch.func` transform is active. Autograd functions in this package do not support these."""
    return torch._C._are_functorch_transforms_active()
