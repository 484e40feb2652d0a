"""Ops that keep the documents of a packed row apart, each with a torch reference that runs anywhere."""

from .attention import attention
from .causal_conv1d import causal_conv1d, torch_causal_conv1d
from .dispatch import implementations_used
from .gated_delta_rule import gated_delta_rule, torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule
from .per_document import per_document


__all__ = [
    "attention",
    "causal_conv1d",
    "gated_delta_rule",
    "implementations_used",
    "per_document",
    "torch_causal_conv1d",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
]
