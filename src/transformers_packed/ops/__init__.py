"""Ops that keep the documents of a packed row apart, and the layers' fused parts, each with a torch reference."""

from .attention import attention
from .convolution import causal_conv1d, convolved_query_key_value, torch_causal_conv1d
from .cross_entropy import linear_cross_entropy
from .dispatch import implementations_used
from .gated_delta_rule import gated_delta_rule, torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule
from .glu import decay_and_rate, sigmoid_gate, sigmoid_gate_linear, swiglu, swiglu_linear
from .norm import gated_rms_norm, gated_rms_norm_linear, rms_norm
from .per_document import per_document
from .rotary import normed_rotary


__all__ = [
    "attention",
    "causal_conv1d",
    "convolved_query_key_value",
    "decay_and_rate",
    "gated_delta_rule",
    "gated_rms_norm",
    "gated_rms_norm_linear",
    "implementations_used",
    "linear_cross_entropy",
    "normed_rotary",
    "per_document",
    "rms_norm",
    "sigmoid_gate",
    "sigmoid_gate_linear",
    "swiglu",
    "swiglu_linear",
    "torch_causal_conv1d",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
]
