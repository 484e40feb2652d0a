import unittest

from mixins.model import VOCAB_SIZE, PackedModelTesterMixin
from mixins.padding import PackedPaddingRouterTesterMixin, PackedPaddingTesterMixin
from transformers import BailingHybridConfig
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as builtin

from transformers_packed.models.bailing_hybrid import modeling_bailing_hybrid as packed


def tiny_config(**options) -> BailingHybridConfig:
    return BailingHybridConfig(
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
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "initializer_range": 0.04,
            "pad_token_id": 0,
            **options,
        }
    )


class BailingHybridModelTest(PackedPaddingTesterMixin, PackedModelTesterMixin, unittest.TestCase):
    """Every layer has a dense MLP, and the decay has no bound."""

    builtin_class = builtin.BailingHybridForCausalLM
    packed_class = packed.BailingHybridForCausalLM
    lora_targets = ("q_proj", "f_proj", "kv_b_proj", "o_proj")
    gradient_bar = 5e-6

    def get_config(self):
        return tiny_config(mlp_layer_types=["dense"] * 4, kda_safe_gate=False)


class BailingHybridMoeModelTest(PackedPaddingRouterTesterMixin, PackedModelTesterMixin, unittest.TestCase):
    """Two dense layers and mixtures, and a bound for the decay, as in released checkpoints."""

    builtin_class = builtin.BailingHybridForCausalLM
    packed_class = packed.BailingHybridForCausalLM
    lora_targets = ("q_proj", "f_proj", "kv_b_proj", "o_proj")
    is_moe = True

    def get_config(self):
        return tiny_config()
