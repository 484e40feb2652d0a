"""RMS norm, optionally with a residual addition before it, or with a gate and a linear layer after it."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from ..errors import input_error, shapes
from .backends import triton
from .dispatch import Call, Setting, run, with_triton
from .linear import apply_reference, as_projection, check_layer, verify_layer
from .recipes import remember_recipe
from .terms import Projection, planned


def rms_norm(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    stream: bool = False,
    offset: float = 1.0,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMS norm over the last dimension: `s / sqrt(mean(s^2) + eps) * (offset + weight)`.

    `s` is `hidden_states + residual`, the stream of a model with residuals.

    Args:
        hidden_states (`torch.Tensor` of shape `[..., width]`):
            Input of any floating dtype. The norm is computed in float32, or in float64 for float64 inputs.
        weight (`torch.Tensor` of shape `[width]`, or `[heads, width]`):
            Scale minus `offset`, for all rows or for each of the `heads` in hidden_states `[..., heads, width]`.
        eps (`float`, *optional*, defaults to 1e-6):
            Added to the mean square.
        residual (`torch.Tensor` of shape `[..., width]`, *optional*):
            Added to `hidden_states` before the norm.
        stream (`bool`, *optional*, defaults to `False`):
            Whether to also return `s` without a residual. If other layers take it from here, one kernel of the backward
            adds up both gradients of `hidden_states`.
        offset (`float`, *optional*, defaults to 1.0):
            1 for the zero-centered weights of Qwen3-Next and Qwen3.5, 0 for ordinary weights.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` or `"reference"`.

    Returns:
        `torch.Tensor`: normalized states `[..., width]` in the dtype of `hidden_states`. With a residual or `stream`, a
            tuple of the normalized states and `s`.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import rms_norm
    >>> normed, stream = rms_norm(torch.ones(1, 2), torch.zeros(2), residual=torch.full((1, 2), 2.0))
    >>> stream.tolist(), normed.round(decimals=4).tolist()
    ([[3.0, 3.0]], [[1.0, 1.0]])

    ```
    """
    _check(hidden_states, weight, "residual", residual)
    call = hidden_states, weight, eps, offset, residual, None, None
    return run("rms_norm", impl, IMPLEMENTATIONS, *call, stream=stream, gate_first=False, sigmoid=False)


def gated_rms_norm(
    hidden_states: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    gate_first: bool = False,
    activation: str = "silu",
    linear_weight: torch.Tensor | Projection | Callable[[torch.Tensor], torch.Tensor] | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Gated RMS norm over the last dimension, `x / sqrt(mean(x^2) + eps) * weight * silu(gate)`, and a linear layer.

    With `gate_first`, as in Mamba-2, `x` is `hidden_states * silu(gate)`, and the result is not gated again.

    Args:
        hidden_states (`torch.Tensor` of shape `[..., width]`, or `[..., heads, width]` with a linear layer):
            Input of any floating dtype. The norm is computed in float32, or in float64 for float64 inputs.
        gate (`torch.Tensor` of the shape of `hidden_states`):
            Gate of each element.
        weight (`torch.Tensor` of shape `[width]`, or `[heads, width]`):
            Scale, for all heads or for each.
        eps (`float`, *optional*, defaults to 1e-6):
            Added to the mean square.
        gate_first (`bool`, *optional*, defaults to `False`):
            Whether to gate before the norm.
        activation (`str`, *optional*, defaults to `"silu"`):
            `"silu"` or `"sigmoid"`, the function of the gate. With a sigmoid, as in Kimi Linear, the reference rounds
            only the result to the dtype of `hidden_states`, and the gate comes last.
        linear_weight (`torch.Tensor` of shape `[out, heads * width]`, [`Projection`] or `Callable`, *optional*):
            Weight of a linear layer on the concatenated heads, or the layer with its adapters. The backward then
            recomputes the norm. A function is called with the norm `[..., heads * width]`.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (with a linear layer, the norm is not saved for the backward) or `"reference"`.

    Returns:
        `torch.Tensor` of shape `[..., width]` in the dtype of `hidden_states`, or `[..., out]` with a linear layer.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import gated_rms_norm
    >>> gated_rms_norm(torch.ones(1, 2), torch.zeros(1, 2), torch.ones(2)).tolist()
    [[0.0, 0.0]]
    >>> x, gate = torch.ones(5, 2, 3), torch.zeros(5, 2, 3)
    >>> gated_rms_norm(x, gate, torch.ones(3), linear_weight=torch.ones(4, 6)).shape
    torch.Size([5, 4])

    ```
    """
    if activation not in ("silu", "sigmoid") or (gate_first and activation != "silu"):
        raise input_error('the activation "silu", or "sigmoid" without gate_first', f'"{activation}"')
    _check(hidden_states, weight, "gate", gate)
    if callable(linear_weight):
        kind = partial(gated_rms_norm, gate_first=gate_first, activation=activation)
        normed = kind(hidden_states, gate, weight, eps, impl=impl)
        return linear_weight(normed.flatten(-2))
    name = "gated_rms_norm"
    if linear_weight is not None:
        check_layer(hidden_states.shape[-2:].numel(), linear_weight)
        name += "_linear"
    call = hidden_states, weight, eps, 0.0, None, gate, linear_weight
    options = {"gate_first": gate_first, "sigmoid": activation == "sigmoid"}
    return run(name, impl, IMPLEMENTATIONS, *call, stream=False, **options)


def _check(hidden_states: torch.Tensor, weight: torch.Tensor, name: str, other: torch.Tensor | None) -> None:
    fits = weight.shape in (hidden_states.shape[-1:], hidden_states.shape[-2:])
    if not fits or (other is not None and other.shape != hidden_states.shape):
        expected = f"hidden_states and {name} [..., width] and weight [width]"
        raise input_error(expected, shapes(hidden_states, other, weight))


def widened(x: torch.Tensor) -> torch.Tensor:
    """Cast `x` to float32, or keep float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _reference(hidden_states, weight, eps, offset, residual, gate, linear_weight, *, stream, gate_first, sigmoid):
    if linear_weight is not None:
        options = {"gate_first": gate_first, "activation": "sigmoid" if sigmoid else "silu"}
        normed = gated_rms_norm(hidden_states, gate, weight, eps, **options)
        return apply_reference(normed.flatten(-2), linear_weight)
    if residual is not None:
        hidden_states = residual + hidden_states
    x, dtype = widened(hidden_states), hidden_states.dtype
    if gate_first:
        x = x * F.silu(widened(gate))
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if gate_first:
        return (weight * x.to(dtype)).to(dtype)
    if sigmoid:
        return (widened(weight) * x * torch.sigmoid(widened(gate))).to(dtype)
    if gate is not None:
        return (weight * x.to(dtype) * F.silu(widened(gate))).to(dtype)
    normed = (x * (offset + widened(weight))).to(dtype)
    return (normed, hidden_states) if stream or residual is not None else normed


def _triton(hidden_states, weight, eps, offset, residual, gate, linear_weight, *, stream, gate_first, sigmoid):
    from .backends.triton.norm import RMSNorm, normed_again

    plan, tensors = planned([] if linear_weight is None else [as_projection(linear_weight)])
    options = eps, offset, stream, gate_first, sigmoid
    result = RMSNorm.apply(hidden_states, weight, residual, gate, *options, plan, *tensors)
    if gate is None:
        normed, total = result if stream or residual is not None else (result, hidden_states)
        remember_recipe(normed, partial(normed_again, eps=eps, offset=offset), total, weight)
    return result


def _verify_triton(hidden_states, weight, eps, offset, residual, gate=None, linear_weight=None, **_):
    if residual is not None and torch.float64 in (hidden_states.dtype, residual.dtype):
        return "supports float32, float16 and bfloat16, not torch.float64"
    if hidden_states.shape[-1] > 16384:
        return f"supports widths up to 16384, not {hidden_states.shape[-1]}"
    gate = hidden_states if gate is None else gate
    return verify_layer(hidden_states, linear_weight) or triton.verify_gated(hidden_states, gate)


IMPLEMENTATIONS = with_triton(_triton, _verify_triton, _reference)


def example(setting: Setting) -> dict[str, Call]:
    """The calls of a layer, for [`availability`]."""
    row, weight, layer = setting.zeros(1, 3, 256), setting.zeros(256), setting.zeros(8, 256)
    gated = row[:, :, None], weight, 1e-6, 0.0, None, row[:, :, None]
    return {
        "rms_norm": Call(IMPLEMENTATIONS, (row, weight, 1e-6, 1.0, row)),
        "gated_rms_norm": Call(IMPLEMENTATIONS, gated),
        "gated_rms_norm_linear": Call(IMPLEMENTATIONS, (*gated, layer)),
    }
