"""Linear layers that share their input, as one step of autograd.

    y_i = x W_i^T          dx = sum_i dy_i W_i          dW_i = dy_i^T x

Each layer alone would give autograd a gradient of `x` of its own to add up; here each product adds to the last one's
result. One step costs the host a fraction of one per layer.
"""

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from . import kernels


def can_share_input(hidden_states: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Whether [`shared_input_linears`] does what the layers do, and is worth it.

    No cast may stand between them and their input, as under autocast. On a CPU the host's time is no part of a step, and
    gradients keep the order of additions of the layers alone.
    """
    dtype, device = hidden_states.dtype, hidden_states.device
    if not kernels.on_gpu(hidden_states):
        return False
    if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) != dtype:
        return False
    return all(weight.dtype == dtype and weight.device == device for weight in weights)


def shared_input_linears(hidden_states: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`hidden_states @ weight.T` for each weight.

    Args:
        hidden_states (`torch.Tensor` of shape `[..., hidden]`):
            The input that they share.
        weights (`torch.Tensor` of shape `[out, hidden]`):
            In the dtype of the input; each may have another number of rows.

    Returns:
        `tuple` of `torch.Tensor` of shape `[..., out]`.
    """
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    shape = hidden_states.shape[:-1]
    return tuple(x.view(*shape, x.shape[1]) for x in _SharedInputLinears.apply(rows, *weights))


class _SharedInputLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, *weights):
        ctx.save_for_backward(rows, *weights)
        ctx.set_materialize_grads(False)
        return tuple(torch.mm(rows, weight.t()) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        rows, *weights = ctx.saved_tensors
        d_rows, d_weights = None, []
        for gradient, weight, wanted in zip(gradients, weights, ctx.needs_input_grad[1:], strict=True):
            d_weights.append(torch.mm(gradient.t(), rows) if wanted and gradient is not None else None)
            if gradient is None or not ctx.needs_input_grad[0]:
                continue
            d_rows = torch.mm(gradient, weight) if d_rows is None else d_rows.addmm_(gradient, weight)
        return d_rows, *d_weights
