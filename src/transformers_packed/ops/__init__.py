"""Ops that isolate the documents of a packed row, and fused ops of the layers, each with a PyTorch reference.

An op is a file with the public function, its reference and its `IMPLEMENTATIONS`; `dispatch.py` chooses one for each
call. `backends/` has other packages' kernels and our own (`triton/`), and `terms/` what the output of a linear layer is a
sum of. `per_document.py` makes any causal function an op, and `prompts.py` has the forms for shared prompts.
`example.py` says what a training call would select, and `compilations.py` records which kernels are compiled.
"""

from . import prompts  # noqa: F401  the forms of the ops for rows with shared prompts
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
from .kimi_delta_rule import kimi_delta_rule
from .logps import linear_logps
from .moe import choose_experts, experts
from .norm import gated_rms_norm, rms_norm
from .per_document import per_document
from .rotary import qk_norm_rope
from .selective_scan import selective_scan, torch_selective_scan
from .ssd import ssd, torch_ssd


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
    "kimi_delta_rule",
    "linear_cross_entropy",
    "linear_logps",
    "per_document",
    "qk_norm_rope",
    "rms_norm",
    "selective_scan",
    "ssd",
    "torch_causal_conv1d",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "torch_selective_scan",
    "torch_ssd",
]
