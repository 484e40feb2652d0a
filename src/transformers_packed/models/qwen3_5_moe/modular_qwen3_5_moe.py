"""Qwen3.5-MoE with support for packed rows: the classes of Qwen3.5 and of Qwen3-Next, on the stock ones of this family."""

from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as builtin  # noqa: F401


SAME = [
    ("qwen3_5", "Qwen3_5", "Qwen3_5Moe", "GatedDeltaNet Attention RMSNorm RMSNormGated MLP"),
    ("qwen3_next", "Qwen3Next", "Qwen3_5Moe", "TopKRouter SparseMoeBlock"),
    ("qwen3_5", "Qwen3_5", "Qwen3_5Moe", "DecoderLayer TextModel ForCausalLM Model ForConditionalGeneration"),
]
