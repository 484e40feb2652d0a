"""What tests expect of the supported releases of Transformers."""

from importlib.metadata import version

import transformers
from packaging.version import Version
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule


RELEASE = Version(transformers.__version__)
# The stock gated delta rule of 5.16 computes the gradients of the decay with larger rounding errors.
DECAY_ROUNDING = 10 if RELEASE < Version("5.17") else 1
DECAYS = ("A_log", "dt_bias", "in_proj_a.weight")
# `model.add_adapter` of 5.24 needs a release of PEFT that does not exist yet.
NEEDS_NEWER_PEFT = Version(version("peft")) < Version(MIN_PEFT_VERSION)
# How a stock model on a CPU refuses a packed row with boundaries.
STOCK_REFUSAL = (
    (TypeError, "multiple values for keyword argument 'cu_seqlens'")
    if RELEASE < Version("5.20")
    else (ValueError, "packed sequences apart")
)


def builtin_chunk_gated_delta_rule(query, key, value, *args, **kwargs):
    """Call the stock reference. Before 5.22, it takes queries and keys whose heads the caller has repeated."""
    repeats = value.shape[2] // query.shape[2]
    query, key = (x.repeat_interleave(repeats, dim=2) for x in (query, key))
    return torch_chunk_gated_delta_rule(query, key, value, *args, **kwargs)
