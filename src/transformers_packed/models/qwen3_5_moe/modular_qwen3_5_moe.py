"""Qwen3.5-MoE with support for packed rows: the differences from Qwen3.5 and Qwen3-Next."""

from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as builtin  # noqa: F401

from ..qwen3_5.modular_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5DecoderLayer,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5GatedDeltaNet,
    Qwen3_5MLP,
    Qwen3_5Model,
    Qwen3_5RMSNorm,
    Qwen3_5RMSNormGated,
    Qwen3_5TextModel,
)
from ..qwen3_next.modular_qwen3_next import Qwen3NextSparseMoeBlock, Qwen3NextTopKRouter


class Qwen3_5MoeGatedDeltaNet(Qwen3_5GatedDeltaNet):
    pass


class Qwen3_5MoeAttention(Qwen3_5Attention):
    pass


class Qwen3_5MoeRMSNorm(Qwen3_5RMSNorm):
    pass


class Qwen3_5MoeRMSNormGated(Qwen3_5RMSNormGated):
    pass


class Qwen3_5MoeMLP(Qwen3_5MLP):
    pass


class Qwen3_5MoeTopKRouter(Qwen3NextTopKRouter):
    pass


class Qwen3_5MoeSparseMoeBlock(Qwen3NextSparseMoeBlock):
    pass


class Qwen3_5MoeDecoderLayer(Qwen3_5DecoderLayer):
    pass


class Qwen3_5MoeTextModel(Qwen3_5TextModel):
    pass


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    pass


class Qwen3_5MoeModel(Qwen3_5Model):
    pass


class Qwen3_5MoeForConditionalGeneration(Qwen3_5ForConditionalGeneration):
    pass
