"""Mixers of families without classes of their own that compute a whole packed row with the ops of this package.

Each function does what the stock forward does without a cache and without padding. It calls the linear layers and the
norm of the module unless nothing touches them, so hooks, adapters and quantized weights have the effect that they have
there. It returns `None` for a call that it cannot compute, for which the stock forward then runs.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.accelerate import force_accelerate_hooks

from ..boundaries import SequenceBoundaries
from ..foreign import attention_of
from ..ops import attention, causal_conv1d, gated_rms_norm, glu, selective_scan, ssd
from ..ops.attention import options_of_layer
from .families import family_of
from .projections import project, to_fuse
from .releases import calls_step_layer
from .untouched import is_untouched


def causal_attention(module: Any, boundaries: SequenceBoundaries, hidden_states, position_embeddings=None, **_):
    """Compute attention that is causal in each document, perhaps with norms or rotary embeddings, without its mask."""
    if attention_of(module.config) != "sdpa":
        return None
    stock = import_module(family_of(module).stock)
    # Another library may have replaced the function that rotates them, by one that does so in place.
    rotates = position_embeddings is not None and not hasattr(module, "q_layernorm")
    rows = project(hidden_states, module.q_proj, module.k_proj, module.v_proj, keep=not rotates)
    query, key, value = (x.unflatten(-1, (-1, module.head_dim)) for x in rows)
    if hasattr(module, "q_layernorm"):
        query, key = module.q_layernorm(query), module.k_layernorm(key)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if hasattr(module, "key_multiplier"):
        key = key * module.key_multiplier
    if position_embeddings is not None:
        query, key = stock.apply_rotary_pos_emb(query, key, *position_embeddings)
    given = {"boundaries": boundaries}
    options = options_of_layer(module, stock.eager_attention_forward, given, boundaries.total_length)
    output, weights = attention(module, query, key, value, None, **options)
    layer = module.o_proj if hasattr(module, "o_proj") else module.out_proj
    return project(output.flatten(2), layer)[0], weights


@force_accelerate_hooks("conv")
def short_conv(module: Any, boundaries: SequenceBoundaries, hidden_states, **_):
    """Compute the short convolution of LFM2 between two gates."""
    conv = module.conv
    (projected,) = project(hidden_states, module.in_proj)
    first, second, x = projected.chunk(3, dim=-1)
    convolved = causal_conv1d(first * x, conv.weight.squeeze(1), conv.bias, boundaries=boundaries)
    return project(second * convolved, module.out_proj)[0]


@force_accelerate_hooks("conv1d")
def mamba2(module: Any, boundaries: SequenceBoundaries, hidden_states, **_):
    """Compute a Mamba-2 mixer: the convolution, the scan, the norm with a gate, and the output layer.

    That of Falcon-H1 has multipliers, and perhaps no norm.
    """
    if hasattr(module, "ssm_in_multiplier"):
        hidden_states = hidden_states * module.ssm_in_multiplier
    (projected,) = project(hidden_states, module.in_proj)
    if hasattr(module, "mup_vector"):
        # Under autocast the multipliers are in float32, in which the mixer would be slow.
        projected = (projected * module.mup_vector).to(projected.dtype)
    groups, states = module.n_groups, module.ssm_state_size
    sizes = [module.intermediate_size, module.intermediate_size + 2 * groups * states, module.num_heads]
    gate, mixed, dt = projected.split(sizes, dim=-1)
    mixed = _convolved(module, mixed, boundaries)
    x, b, c = mixed.split([module.intermediate_size, groups * states, groups * states], dim=-1)
    y = ssd(
        x.unflatten(-1, (module.num_heads, -1)),
        dt,
        -torch.exp(module.A_log.float()),
        b.unflatten(-1, (groups, -1)),
        c.unflatten(-1, (groups, -1)),
        module.D,
        dt_bias=module.dt_bias,
        dt_limit=tuple(module.time_step_limit),
        boundaries=boundaries,
    ).flatten(-2)
    return _with_gate(module, y, gate)


def _convolved(module, x: torch.Tensor, boundaries) -> torch.Tensor:
    conv = module.conv1d
    return causal_conv1d(x, conv.weight.squeeze(1), conv.bias, module.activation, boundaries=boundaries)


def _with_gate(module, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Apply the gate, the norm and the output layer."""
    layer = to_fuse(module.out_proj, y)
    if not getattr(module, "mamba_rms_norm", True):
        return glu(gate, y, layer)
    norm = module.norm
    if not type(norm).__module__.startswith("transformers.models.") or not is_untouched(norm, type(norm)):
        return project(norm(y, gate).to(y.dtype), module.out_proj)[0]
    y, gate, weight = (x.unflatten(-1, (_groups_of(norm), -1)) for x in (y, gate, norm.weight))
    first = not getattr(norm, "norm_before_gate", False)
    return gated_rms_norm(y, gate, weight, norm.variance_epsilon, gate_first=first, linear_weight=layer)


def _groups_of(norm: Any) -> int:
    """Return how many parts of a row a gated norm divides by a mean of their own. Those of earlier releases have one."""
    return norm.weight.numel() // norm.group_size if hasattr(norm, "group_size") else getattr(norm, "n_groups", 1)


@force_accelerate_hooks(["conv1d", "dt_proj"])
def mamba(module: Any, boundaries: SequenceBoundaries, hidden_states, **_):
    """Compute a Mamba mixer, perhaps with norms of the step, B and C, as in Jamba and Falcon-Mamba."""
    layer = module.dt_proj
    (projected,) = project(hidden_states, module.in_proj)
    x, gate = projected.chunk(2, dim=-1)
    x = _convolved(module, x, boundaries)
    (parameters,) = project(x, module.x_proj)
    dt, b, c = parameters.split([module.time_step_rank, module.ssm_state_size, module.ssm_state_size], dim=-1)
    if hasattr(module, "dt_layernorm"):
        dt, b, c = module.dt_layernorm(dt), module.b_layernorm(b), module.c_layernorm(c)
    # The stock forward reads the weight too, and calls the layer only if its weight is quantized.
    if calls_step_layer(module):
        (dt,), bias = project(dt, layer), None
    else:
        dt, bias = F.linear(dt, layer.weight), layer.bias
    a = -torch.exp(module.A_log.float())
    y = selective_scan(x, dt, a, b, c, module.D, dt_bias=bias, boundaries=boundaries)
    return glu(gate, y, to_fuse(module.out_proj, y))


@force_accelerate_hooks("conv1d")
def zamba(module: Any, boundaries: SequenceBoundaries, hidden_states, **_):
    """Compute a Mamba mixer whose heads have projections of their own for the step, B and C."""
    (projected,) = project(hidden_states, module.in_proj)
    x, gate = projected.unflatten(-1, (-1, 2)).unbind(-1)
    x = _convolved(module, x, boundaries)
    heads = x.unflatten(-1, (module.n_mamba_heads, -1))
    parameters = torch.einsum("zthp,hop->ztho", heads, module.x_proj_weight)
    dt, b, c = parameters.split([module.time_step_rank, module.ssm_state_size, module.ssm_state_size], dim=-1)
    dt = torch.einsum("zthr,hpr->zthp", dt, module.dt_proj_weight).flatten(2)
    a, d, bias = -torch.exp(module.A_log.float()).flatten(0, 1), module.D.flatten(), module.dt_proj_bias.flatten()
    y = selective_scan(x, dt, a, b, c, d, dt_bias=bias, boundaries=boundaries)
    return glu(gate, y, to_fuse(module.out_proj, y))


# By the names in `Mixer.row`.
ROWS: dict[str, Callable[..., Any]] = {
    "causal_attention": causal_attention,
    "mamba": mamba,
    "mamba2": mamba2,
    "short_conv": short_conv,
    "zamba": zamba,
}
