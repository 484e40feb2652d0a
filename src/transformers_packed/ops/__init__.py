"""Ops that isolate the documents of a packed row, and fused ops of the layers, each with a PyTorch reference.

An op is a file with the public function, its reference and its `IMPLEMENTATIONS`; `dispatch.py` chooses one for each
call, and says what a training call would select. `backends/` has other packages' kernels and our own (`triton/`), and
`terms/` what the output of a linear layer is a sum of. `per_document.py` makes any causal function an op, and `prompts.py`
has the forms for shared prompts. `compilations.py` records which kernels are compiled, and compiles variants in threads.
"""

from . import prompts  # noqa: F401  the forms of the ops for rows with shared prompts
from .attention import attention as attention
from .convolution import causal_conv1d as causal_conv1d
from .convolution import causal_conv1d_qkv as causal_conv1d_qkv
from .convolution import torch_causal_conv1d as torch_causal_conv1d
from .cross_entropy import linear_cross_entropy as linear_cross_entropy
from .dispatch import implementations_used as implementations_used
from .divergence import linear_divergence as linear_divergence
from .divergence import linear_topk_divergence as linear_topk_divergence
from .gated_delta_rule import gated_delta_gates as gated_delta_gates
from .gated_delta_rule import gated_delta_rule as gated_delta_rule
from .gated_delta_rule import torch_chunk_gated_delta_rule as torch_chunk_gated_delta_rule
from .gated_delta_rule import torch_recurrent_gated_delta_rule as torch_recurrent_gated_delta_rule
from .glu import glu as glu
from .kimi_delta_rule import kimi_delta_rule as kimi_delta_rule
from .logps import linear_logps as linear_logps
from .moe import choose_experts as choose_experts
from .moe import experts as experts
from .norm import gated_rms_norm as gated_rms_norm
from .norm import rms_norm as rms_norm
from .per_document import per_document as per_document
from .rotary import qk_norm_rope as qk_norm_rope
from .selective_scan import selective_scan as selective_scan
from .selective_scan import torch_selective_scan as torch_selective_scan
from .ssd import ssd as ssd
from .ssd import torch_ssd as torch_ssd
