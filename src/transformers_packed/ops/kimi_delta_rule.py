"""The delta rule of Kimi Linear (arXiv 2510.26692): the gated delta rule with a decay for each channel of the keys.

    S_t = (I - beta_t k_t k_t^T) Diag(exp(g_t)) S_{t-1} + beta_t k_t v_t^T          o_t = S_t^T q_t / sqrt(K)

[`torch_chunk_gated_delta_rule`] computes both rules in chunks. The decay between two tokens of a chunk is no factor of
the product of their key and query here, but differs between its `K` terms.
"""

from typing import Any

import torch
import torch.nn.functional as F

from ..boundaries import SequenceBoundaries
from ..errors import input_error, shapes
from .backends import fla
from .dispatch import Call, Implementation, Setting, run
from .gated_delta_rule import check_groups, check_state, reference
from .norm import widened


def kimi_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    boundaries: SequenceBoundaries | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the delta rule with a decay for each channel on a batch of sequences, or on each document of a packed row.

    Args:
        query (`torch.Tensor` of shape `[B, T, H, K]`):
            Queries of any floating dtype.
        key (`torch.Tensor` of shape `[B, T, H, K]`):
            Keys.
        value (`torch.Tensor` of shape `[B, T, HV, V]`):
            Values. `HV` is a multiple of `H`: `HV / H` consecutive value heads share one key head.
        g (`torch.Tensor` of shape `[B, T, HV, K]`):
            Natural logarithm of the decay, at most 0. With `a_log`, it is the projection `x` for the decay.
        beta (`torch.Tensor` of shape `[B, T, HV]`):
            Learning rate of the state, usually in (0, 1).
        a_log (`torch.Tensor` of shape `[HV]`, *optional*):
            Parameter `A_log` of the layer. The logarithm of the decay is `-exp(a_log) * softplus(x + dt_bias)`, or with
            a `lower_bound` `lower_bound * sigmoid(exp(a_log) * (x + dt_bias))`, in float32 (float64 for float64
            inputs).
        dt_bias (`torch.Tensor` of shape `[HV * K]`, *optional*):
            Parameter `dt_bias` of the layer, with `a_log`.
        lower_bound (`float`, *optional*):
            Lower bound of the logarithm, negative, with `a_log`.
        boundaries ([`SequenceBoundaries`], *optional*):
            Documents of a packed row (`B` = 1). Without `initial_state`, the state of each document starts at zero.
        initial_state (`torch.Tensor` of shape `[B, HV, K, V]`, *optional*):
            State before the first token. For a packed row `[N, HV, K, V]`, one for each document.
        output_final_state (`bool`, *optional*, defaults to `False`):
            Whether to return the state after the last token. For a packed row, one for each document.
        use_qk_l2norm_in_kernel (`bool`, *optional*, defaults to `False`):
            Whether to normalize queries and keys to unit length first.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"fla"` or `"reference"`.

    Returns:
        `tuple`: the output `[B, T, HV, V]` in the dtype of `query`, and the final state `[B, HV, K, V]`, or
            `[N, HV, K, V]` for a packed row, or `None`.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed import SequenceBoundaries
    >>> from transformers_packed.ops import kimi_delta_rule
    >>> q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    >>> g, beta = -torch.rand(1, 5, 2, 8), torch.rand(1, 5, 2)
    >>> packed, _ = kimi_delta_rule(q, k, v, g, beta, boundaries=SequenceBoundaries.from_lengths([2, 3]))
    >>> alone, _ = kimi_delta_rule(q[:, 2:], k[:, 2:], v[:, 2:], g[:, 2:], beta[:, 2:])
    >>> torch.allclose(packed[:, 2:], alone, atol=1e-6)
    True

    ```
    """
    check_groups(key, value)
    _check_gate(key, value, g, a_log, dt_bias, lower_bound)
    check_state(key, value, initial_state, output_final_state, boundaries)
    gate = {"a_log": a_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    options: dict[str, Any] = {"initial_state": initial_state, "output_final_state": output_final_state}
    options |= {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "boundaries": boundaries}
    return run("kimi_delta_rule", impl, IMPLEMENTATIONS, query, key, value, g, beta, **gate, **options)


def _check_gate(key, value, g, a_log, dt_bias, lower_bound) -> None:
    heads, dim = value.shape[2], key.shape[-1]
    if g.shape != (*value.shape[:3], dim):
        raise input_error(f"g {(*value.shape[:3], dim)}, a decay for each channel of the keys", tuple(g.shape))
    if a_log is None:
        if dt_bias is not None or lower_bound is not None:
            raise input_error("dt_bias and lower_bound together with a_log", "no a_log", "Pass a_log, or the decay.")
    elif dt_bias is None or a_log.shape != (heads,) or dt_bias.shape != (heads * dim,):
        raise input_error(f"a_log [{heads}] and dt_bias [{heads * dim}]", shapes(a_log, dt_bias))
    elif lower_bound is not None and lower_bound >= 0:
        raise input_error("a negative lower_bound", lower_bound)


def _reference(query, key, value, g, beta, *, a_log, dt_bias, lower_bound, **options):
    if a_log is not None:
        x, rate = widened(g) + dt_bias.view(g.shape[2:]), widened(a_log).exp()[:, None]
        g = -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)
    return reference(query, key, value, g, beta, **options)


IMPLEMENTATIONS = {
    "fla": Implementation(fla.kimi_delta_rule, fla.verify_kimi_delta_rule),
    "reference": Implementation(_reference),
}


def example(setting: Setting) -> dict[str, Call]:
    """The call of a layer, for [`availability`]."""
    rows = (setting.zeros(1, 3, 1, dim) for dim in (*[setting.key_dim] * 2, setting.value_dim, setting.key_dim))
    return {"kimi_delta_rule": Call(IMPLEMENTATIONS, (*rows, setting.zeros(1, 3, 1)), setting.row())}
