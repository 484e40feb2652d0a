"""RMS norm, alone, with the residual addition before it, or with the gate after it."""

import torch
import torch.nn.functional as F

from ..errors import input_error
from .dispatch import Implementation, always, run
from .kernels import verify_triton
from .linear import check_layer, verify_triton_linear


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
    _check("rms_norm", hidden_states, weight, "residual", residual)
    return run("rms_norm", impl, RMS_NORM, hidden_states, weight, eps, residual=residual, offset=offset)


def gated_rms_norm(
    hidden_states: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, impl: str = "auto"
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight * silu(gate)` over the last dimension.

    Args:
        hidden_states, gate (`torch.Tensor` of shape `[..., width]`):
            The input and its gate, any floating dtype; computed in float32, or in float64 if that is their dtype.
        weight (`torch.Tensor` of shape `[width]`):
            The scale.
        eps (`float`, *optional*, defaults to 1e-6):
            Added to the mean of the squares.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` or `"reference"`.

    Returns:
        `torch.Tensor` of shape `[..., width]` in the dtype of `hidden_states`.

    Raises:
        `ValueError`: shapes that do not fit, or an `impl` that cannot serve.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import gated_rms_norm
    >>> gated_rms_norm(torch.ones(1, 2), torch.zeros(1, 2), torch.ones(2)).tolist()
    [[0.0, 0.0]]

    ```
    """
    _check("gated_rms_norm", hidden_states, weight, "gate", gate)
    return run("gated_rms_norm", impl, GATED_RMS_NORM, hidden_states, gate, weight, eps)


def gated_rms_norm_linear(
    hidden_states: torch.Tensor,
    gate: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    impl: str = "auto",
) -> torch.Tensor:
    """[`gated_rms_norm`] of each head, and the linear layer behind it. Backward makes the norm again.

    Args:
        hidden_states, gate (`torch.Tensor` of shape `[..., heads, width]`):
            The input and its gate, any floating dtype.
        norm_weight (`torch.Tensor` of shape `[width]`):
            The scale of the norm.
        weight (`torch.Tensor` of shape `[out, heads * width]`):
            The layer's weight.
        eps (`float`, *optional*, defaults to 1e-6):
            Added to the mean of the squares.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (the norm is not kept for backward) or `"reference"`.

    Returns:
        `torch.Tensor` of shape `[..., out]`.

    Raises:
        `ValueError`: shapes that do not fit, or an `impl` that cannot serve.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import gated_rms_norm_linear
    >>> gated_rms_norm_linear(torch.ones(5, 2, 3), torch.zeros(5, 2, 3), torch.ones(3), torch.ones(4, 6)).shape
    torch.Size([5, 4])

    ```
    """
    _check("gated_rms_norm_linear", hidden_states, norm_weight, "gate", gate)
    check_layer("gated_rms_norm_linear", hidden_states.shape[-2:].numel(), weight)
    call = (hidden_states, gate, norm_weight, weight, eps)
    return run("gated_rms_norm_linear", impl, GATED_RMS_NORM_LINEAR, *call)


def _check(
    call: str, hidden_states: torch.Tensor, weight: torch.Tensor, name: str, other: torch.Tensor | None
) -> None:
    if weight.shape != hidden_states.shape[-1:] or (other is not None and other.shape != hidden_states.shape):
        raise input_error(
            f"hidden_states and {name} [..., width] and weight [width]",
            f"{tuple(hidden_states.shape)}, {None if other is None else tuple(other.shape)}, {tuple(weight.shape)}",
            "Normalise over the last dimension.",
        )


def widened(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32, or in float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rms_norm_reference(hidden_states, weight, eps, *, residual, offset):
    if residual is not None:
        hidden_states = residual + hidden_states
    x = widened(hidden_states)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    normed = (x * (offset + widened(weight))).type_as(hidden_states)
    return normed if residual is None else (normed, hidden_states)


def _gated_rms_norm_reference(hidden_states, gate, weight, eps):
    dtype = hidden_states.dtype
    x = widened(hidden_states)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * x.to(dtype) * F.silu(widened(gate))).to(dtype)


def _rms_norm_triton(hidden_states, weight, eps, *, residual, offset):
    from .backends.triton.norm import RMSNorm

    shape = hidden_states.shape
    rows = (x if x is None else x.reshape(-1, shape[-1]) for x in (hidden_states, residual))
    x, residual = rows
    if residual is None:
        return RMSNorm.apply(x, weight, None, None, eps, offset).view(shape)
    normed, stream = RMSNorm.apply(x, weight, residual, None, eps, offset)
    return normed.view(shape), stream.view(shape)


def _verify_gated(hidden_states, gate, weight, eps):
    if gate.dtype != hidden_states.dtype:
        return False, f"wants one dtype, not {hidden_states.dtype} beside {gate.dtype}"
    return _verify(hidden_states)


def _gated_rms_norm_triton(hidden_states, gate, weight, eps):
    from .backends.triton.norm import RMSNorm

    width = hidden_states.shape[-1]
    x, gate = hidden_states.reshape(-1, width), gate.reshape(-1, width)
    return RMSNorm.apply(x, weight, None, gate, eps, 0.0).view(hidden_states.shape)


def _verify(hidden_states, *args, residual=None, **kwargs):
    if residual is not None and torch.float64 in (hidden_states.dtype, residual.dtype):
        return False, "serves float32, float16 and bfloat16, not torch.float64"
    if hidden_states.shape[-1] > 16384:
        return False, f"serves widths up to 16384, not {hidden_states.shape[-1]}"
    return verify_triton(hidden_states)


def _gated_rms_norm_linear_reference(hidden_states, gate, norm_weight, weight, eps):
    return F.linear(gated_rms_norm(hidden_states, gate, norm_weight, eps).flatten(-2), weight)


def _gated_rms_norm_linear_triton(hidden_states, gate, norm_weight, weight, eps):
    from .backends.triton.norm import GatedRMSNormLinear

    return GatedRMSNormLinear.apply(hidden_states, gate, norm_weight, weight, eps)


def _verify_gated_linear(hidden_states, gate, norm_weight, weight, eps):
    ok, reason = verify_triton_linear(hidden_states, weight)
    return _verify_gated(hidden_states, gate, norm_weight, eps) if ok else (ok, reason)


RMS_NORM = {
    "triton": Implementation(_rms_norm_triton, _verify),
    "reference": Implementation(_rms_norm_reference, always),
}
GATED_RMS_NORM = {
    "triton": Implementation(_gated_rms_norm_triton, _verify_gated),
    "reference": Implementation(_gated_rms_norm_reference, always),
}
GATED_RMS_NORM_LINEAR = {
    "triton": Implementation(_gated_rms_norm_linear_triton, _verify_gated_linear),
    "reference": Implementation(_gated_rms_norm_linear_reference, always),
}
