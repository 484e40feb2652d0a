"""Ops that isolate the documents of a packed row, and fused ops of the layers, each with a PyTorch reference."""

import warnings
from typing import Any

from .attention import attention
from .convolution import causal_conv1d, causal_conv1d_qkv, torch_causal_conv1d
from .cross_entropy import linear_cross_entropy
from .dispatch import implementations_used
from .gated_delta_rule import (
    gated_delta_gates,
    gated_delta_rule,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from .glu import glu
from .logps import linear_logps
from .moe import choose_experts, experts
from .norm import gated_rms_norm, rms_norm
from .per_document import per_document
from .rotary import qk_norm_rope


__all__ = [
    "attention",
    "causal_conv1d",
    "causal_conv1d_qkv",
    "choose_experts",
    "experts",
    "gated_delta_gates",
    "gated_delta_rule",
    "gated_rms_norm",
    "glu",
    "implementations_used",
    "linear_cross_entropy",
    "linear_logps",
    "per_document",
    "qk_norm_rope",
    "rms_norm",
    "torch_causal_conv1d",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
]


def _swiglu(gate, up, *, impl="auto"):
    return glu(gate, up, impl=impl)


def _swiglu_linear(gate, up, weight, *, impl="auto"):
    return glu(gate, up, weight, impl=impl)


def _sigmoid_gate(gate, hidden_states, *, impl="auto"):
    return glu(gate, hidden_states, activation="sigmoid", impl=impl)


def _sigmoid_gate_linear(gate, hidden_states, weight, *, impl="auto"):
    return glu(gate, hidden_states, weight, activation="sigmoid", impl=impl)


def _gated_rms_norm_linear(hidden_states, gate, norm_weight, weight, eps=1e-6, *, impl="auto"):
    return gated_rms_norm(hidden_states, gate, norm_weight, eps, linear_weight=weight, impl=impl)


_OLD_NAMES = {
    "convolved_query_key_value": ("causal_conv1d_qkv", causal_conv1d_qkv),
    "decay_and_rate": ("gated_delta_gates", gated_delta_gates),
    "gated_rms_norm_linear": ("gated_rms_norm with linear_weight=", _gated_rms_norm_linear),
    "normed_rotary": ("qk_norm_rope", qk_norm_rope),
    "sigmoid_gate": ('glu with activation="sigmoid"', _sigmoid_gate),
    "sigmoid_gate_linear": ('glu with activation="sigmoid" and linear_weight=', _sigmoid_gate_linear),
    "swiglu": ("glu", _swiglu),
    "swiglu_linear": ("glu with linear_weight=", _swiglu_linear),
}


def __getattr__(name: str) -> Any:
    if name not in _OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    now, op = _OLD_NAMES[name]
    warnings.warn(f"{__name__}.{name} is deprecated: use {now}", DeprecationWarning, stacklevel=2)
    return op
