"""Linear layers with a shared input, in one autograd function.

    y_i = x W_i^T          dx = sum_i dy_i W_i          dW_i = dy_i^T x

Separate layers each return a gradient of `x`, and autograd adds these gradients in extra kernels. Here, each matrix
product accumulates into the result of the previous one.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..errors import input_error
from .autograd import is_transformed
from .backends import triton


def check_layer(width: int, weight: torch.Tensor) -> None:
    """Raise an error if `weight` does not belong to a linear layer with `width` inputs."""
    if weight.ndim != 2 or weight.shape[1] != width:
        raise input_error(f"a weight [out, {width}] of the linear layer", tuple(weight.shape))


def can_share_input(hidden_states: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Whether [`shared_input_linears`] can replace the layers and is faster.

    It is not used on a CPU, where the saved additions hardly matter and the layers' order of additions is kept.
    """
    return triton.on_gpu(hidden_states) and not is_transformed() and triton.runs_uncast(hidden_states, *weights)


def shared_input_linears(hidden_states: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute `hidden_states @ weight.T` for each weight.

    Args:
        hidden_states (`torch.Tensor` of shape `[..., hidden]`):
            Shared input.
        *weights (`torch.Tensor` of shape `[out, hidden]`):
            Weights in the dtype of the input. `out` may differ between weights.

    Returns:
        `tuple` of `torch.Tensor` of shape `[..., out]`.
    """
    return _SharedInputLinears.apply(hidden_states, *weights)


class _SharedInputLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, *weights):
        ctx.save_for_backward(hidden_states, *weights)
        ctx.set_materialize_grads(False)
        return tuple(F.linear(hidden_states, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients):
        hidden_states, *weights = ctx.saved_tensors
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        d_rows, d_weights = None, []
        for gradient, weight, wanted in zip(gradients, weights, ctx.needs_input_grad[1:], strict=True):
            if gradient is None:
                d_weights.append(None)
                continue
            gradient = gradient.reshape(-1, weight.shape[0])
            d_weights.append(torch.mm(gradient.t(), rows) if wanted else None)
            if ctx.needs_input_grad[0]:
                d_rows = torch.mm(gradient, weight) if d_rows is None else d_rows.addmm_(gradient, weight)
        return None if d_rows is None else d_rows.view(hidden_states.shape), *d_weights
