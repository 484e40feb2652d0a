import unittest

from mixins.model import VOCAB_SIZE, PackedModelTesterMixin
from mixins.padding import PackedPaddingRouterTesterMixin, PackedPaddingTesterMixin
from transformers import KimiLinearConfig
from transformers.models.kimi_linear import modeling_kimi_linear as builtin

from transformers_packed.models.kimi_linear import modeling_kimi_linear as packed


def tiny_config(**options) -> KimiLinearConfig:
    return KimiLinearConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "moe_intermediate_size": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "pad_token_id": 0,
            **options,
        }
    )


class KimiLinearModelTest(PackedPaddingTesterMixin, PackedModelTesterMixin, unittest.TestCase):
    """Every layer has a dense MLP."""

    builtin_class = builtin.KimiLinearForCausalLM
    packed_class = packed.KimiLinearForCausalLM
    lora_targets = ("q_proj", "f_b_proj", "kv_b_proj", "o_proj")
    gradient_bar = 5e-6

    def get_config(self):
        return tiny_config(mlp_layer_types=["dense"] * 4)


class KimiLinearMoeModelTest(PackedPaddingRouterTesterMixin, PackedModelTesterMixin, unittest.TestCase):
    """A dense layer and three mixtures, as in released checkpoints, and queries of low rank."""

    builtin_class = builtin.KimiLinearForCausalLM
    packed_class = packed.KimiLinearForCausalLM
    lora_targets = ("q_b_proj", "f_b_proj", "kv_b_proj", "o_proj")
    is_moe = True

    def get_config(self):
        return tiny_config(q_lora_rank=24, n_group=2, topk_group=1)
