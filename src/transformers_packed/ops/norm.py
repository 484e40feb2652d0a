"""RMS norm, alone, with the residual addition before it, or with the gate and a linear layer after it."""

import torch
import torch.nn.functional as F

from ..errors import input_error
from .backends import triton
from .dispatch import Implementation, always, run
from .linear import check_layer


def rms_norm(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    offset: float = 1.0,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`s / sqrt(mean(s^2) + eps) * (offset + weight)` with `s = hidden_states + residual`, over the last dimension.

    Args:
        hidden_states (`torch.Tensor` of shape `[..., width]`):
            The input, any floating dtype; the norm is computed in float32, or in float64 if that is its dtype.
        weight (`torch.Tensor` of shape `[width]`):
            The scale less `offset`.
        eps (`float`, *optional*, defaults to 1e-6):
            Added to the mean of the squares.
        residual (`torch.Tensor` of shape `[..., width]`, *optional*):
            Added first.
        offset (`float`, *optional*, defaults to 1.0):
            1 for the zero-centred weights of Qwen3-Next and Qwen3.5, 0 for others.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` or `"reference"`.

    Returns:
        `torch.Tensor`: the norm `[..., width]`, in the dtype of `hidden_states`; with a residual the pair of it and `s`.

    Raises:
        `ValueError`: shapes that do not fit, or an `impl` that cannot serve.

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
    return run("rms_norm", impl, IMPLEMENTATIONS, hidden_states, weight, eps, offset, residual)


def gated_rms_norm(
    hidden_states: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    linear_weight: torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight * silu(gate)` over the last dimension, and the linear layer behind it.

    Args:
        hidden_states, gate (`torch.Tensor` of shape `[..., width]`, or `[..., heads, width]` before a layer):
            The input and its gate, any floating dtype; computed in float32, or in float64 if that is their dtype.
        weight (`torch.Tensor` of shape `[width]`):
            The scale.
        eps (`float`, *optional*, defaults to 1e-6):
            Added to the mean of the squares.
        linear_weight (`torch.Tensor` of shape `[out, heads * width]`, *optional*):
            The weight of the layer that takes the norms of all heads. Backward then makes the norm again.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (before a layer the norm is not kept for backward) or `"reference"`.

    Returns:
        `torch.Tensor` of shape `[..., width]` in the dtype of `hidden_states`, or `[..., out]` with a layer.

    Raises:
        `ValueError`: shapes that do not fit, or an `impl` that cannot serve.

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
    _check(hidden_states, weight, "gate", gate)
    name = "gated_rms_norm"
    if linear_weight is not None:
        check_layer(hidden_states.shape[-2:].numel(), linear_weight)
        name += "_linear"
    return run(name, impl, IMPLEMENTATIONS, hidden_states, weight, eps, 0.0, None, gate, linear_weight)


def _check(hidden_states: torch.Tensor, weight: torch.Tensor, name: str, other: torch.Tensor | None) -> None:
    if weight.shape != hidden_states.shape[-1:] or (other is not None and other.shape != hidden_states.shape):
        got = ", ".join("none" if x is None else str(tuple(x.shape)) for x in (hidden_states, other, weight))
        raise input_error(f"hidden_states and {name} [..., width] and weight [width]", got)


def widened(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32, or in float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _reference(hidden_states, weight, eps, offset, residual, gate=None, linear_weight=None):
    if linear_weight is not None:
        return F.linear(gated_rms_norm(hidden_states, gate, weight, eps).flatten(-2), linear_weight)
    if residual is not None:
        hidden_states = residual + hidden_states
    x, dtype = widened(hidden_states), hidden_states.dtype
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    if gate is not None:
        return (weight * x.to(dtype) * F.silu(widened(gate))).to(dtype)
    normed = (x * (offset + widened(weight))).to(dtype)
    return normed if residual is None else (normed, hidden_states)


def _triton(hidden_states, weight, eps, offset, residual, gate=None, linear_weight=None):
    from .backends.triton.norm import RMSNorm

    return RMSNorm.apply(hidden_states, weight, residual, gate, linear_weight, eps, offset)


def _verify_triton(hidden_states, weight, eps, offset, residual, gate=None, linear_weight=None):
    if residual is not None and torch.float64 in (hidden_states.dtype, residual.dtype):
        return False, "serves float32, float16 and bfloat16, not torch.float64"
    if hidden_states.shape[-1] > 16384:
        return False, f"serves widths up to 16384, not {hidden_states.shape[-1]}"
    return triton.verify_gated(hidden_states, hidden_states if gate is None else gate, linear_weight)


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, _verify_triton),
    "reference": Implementation(_reference, always),
}
