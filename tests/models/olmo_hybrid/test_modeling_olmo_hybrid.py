import unittest

from mixins.model import VOCAB_SIZE, PackedModelTesterMixin
from mixins.padding import PackedPaddingTesterMixin
from transformers import OlmoHybridConfig
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as builtin

from transformers_packed.models.olmo_hybrid import modeling_olmo_hybrid as packed


class OlmoHybridModelTest(PackedPaddingTesterMixin, PackedModelTesterMixin, unittest.TestCase):
    """Keys and values of the delta rule differ in size, and released checkpoints have no rotary embedding."""

    builtin_class = builtin.OlmoHybridForCausalLM
    packed_class = packed.OlmoHybridForCausalLM
    lora_targets = ("q_proj", "v_proj", "o_proj")
    # Rounding: in float32, the gradients of the stock class are 4e-7 from those in float64, and more of a short row.
    gradient_bar = 5e-6

    def get_config(self, **options):
        return OlmoHybridConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=16,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            layer_types=["linear_attention", "full_attention"] * 2,
            pad_token_id=0,
            **options,
        )


class OlmoHybridWithRotaryEmbeddingTest(OlmoHybridModelTest):
    def get_config(self):
        options = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
        return super().get_config(**options, linear_allow_neg_eigval=False)
