"""RMS norm and rotary position embedding of the queries and keys of an attention layer."""

import torch

from ..errors import input_error, shapes
from .backends import triton
from .dispatch import Call, Setting, run, with_triton
from .norm import rms_norm


def qk_norm_rope(
    query_gate: torch.Tensor,
    key: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    *,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply a zero-centered RMS norm to each query and key head, then a rotary embedding to the first channels.

    Args:
        query_gate (`torch.Tensor` of shape `[B, T, Q, 2 * dim]`):
            Projection of the queries. Each head holds the query, followed by its gate.
        key (`torch.Tensor` of shape `[B, T, K, dim]`):
            Projection of the keys.
        query_weight (`torch.Tensor` of shape `[dim]`):
            Scale of the query norm minus 1.
        key_weight (`torch.Tensor` of shape `[dim]`):
            Scale of the key norm minus 1.
        cos (`torch.Tensor` of shape `[B, T, rotary]` or `[1, T, rotary]`):
            Cosine of the angles of the first `rotary` channels. Each channel of their first half rotates with the
            corresponding channel of the second half.
        sin (`torch.Tensor` of the shape of `cos`):
            Sine of the angles.
        eps (`float`, *optional*, defaults to 1e-6):
            Added to the mean square.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (rounds once) or `"reference"`.

    Returns:
        `tuple`: queries `[B, T, Q, dim]`, keys `[B, T, K, dim]` and gates `[B, T, Q, dim]`, in the dtype of the
            projections. `"reference"` returns queries and keys in the dtype of `cos` and `sin` if that is wider.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import qk_norm_rope
    >>> query_gate, key = torch.ones(1, 1, 2, 8), torch.full((1, 1, 1, 4), 3.0)
    >>> cos, sin = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)  # a quarter turn
    >>> query, key, gate = qk_norm_rope(query_gate, key, torch.zeros(4), torch.zeros(4), cos, sin)
    >>> key.round(decimals=4).flatten().tolist()
    [-1.0, 1.0, 1.0, 1.0]

    ```
    """
    dim, rotary = key.shape[-1], cos.shape[-1]
    fits = query_gate.ndim == key.ndim == 4 and query_gate.shape[-1] == 2 * dim
    fits = fits and query_gate.shape[:2] == key.shape[:2] and query_weight.shape == key_weight.shape == (dim,)
    fits = fits and cos.shape == sin.shape and cos.shape[:-1] in (key.shape[:2], (1, key.shape[1]))
    if not fits or rotary > dim or rotary % 2:
        expected = "query_gate [B, T, Q, 2 * dim], key [B, T, K, dim], weights [dim], cos and sin [B, T, rotary]"
        raise input_error(expected, shapes(query_gate, key, query_weight, key_weight, cos, sin))
    return run("qk_norm_rope", impl, IMPLEMENTATIONS, query_gate, key, query_weight, key_weight, cos, sin, eps)


def _reference(query_gate, key, query_weight, key_weight, cos, sin, eps):
    query, gate = query_gate.chunk(2, dim=-1)
    query, key = (
        _turn(rms_norm(x, weight, eps, impl="reference"), cos[:, :, None], sin[:, :, None])
        for x, weight in ((query, query_weight), (key, key_weight))
    )
    return query, key, gate


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turning, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turning.chunk(2, dim=-1)
    return torch.cat([turning * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def _triton(query_gate, key, query_weight, key_weight, cos, sin, eps):
    from .backends.triton.rotary import QKNormRope

    rows, length, heads, double = query_gate.shape
    query_gate = query_gate.reshape(rows * length, heads, 2, double // 2)
    cos, sin = (x.expand(rows, -1, -1).flatten(0, 1) for x in (cos, sin))
    results = QKNormRope.apply(query_gate, key.flatten(0, 1), query_weight, key_weight, cos, sin, eps)
    return tuple(x.unflatten(0, (rows, length)) for x in results)


def _verify(query_gate, key, query_weight, key_weight, cos, sin, eps):
    dim = key.shape[-1]
    if dim & (dim - 1) or dim > 512:
        return f"needs a head dimension that is a power of two up to 512, not {dim}"
    if not cos.shape[-1]:
        return "needs rotary channels"
    if query_gate.dtype != key.dtype:
        return f"needs one dtype, not {query_gate.dtype} and {key.dtype}"
    if query_weight.dtype != key_weight.dtype:
        return f"needs weights of one dtype, not {query_weight.dtype} and {key_weight.dtype}"
    if cos.requires_grad or sin.requires_grad:
        return "does not compute gradients of cos and sin"
    return triton.verify(query_gate)


IMPLEMENTATIONS = with_triton(_triton, _verify, _reference)


def example(setting: Setting) -> dict[str, Call]:
    """The call of a layer, for [`availability`]."""
    dim, weight = setting.head_dim, setting.zeros(setting.head_dim)
    angles = setting.zeros(1, 3, max(2, dim // 4)).detach()
    call = setting.zeros(1, 3, 2, 2 * dim), setting.zeros(1, 3, 1, dim), weight, weight, angles, angles, 1e-6
    return {"qk_norm_rope": Call(IMPLEMENTATIONS, call)}
