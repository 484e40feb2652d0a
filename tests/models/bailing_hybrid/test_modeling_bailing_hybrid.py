import unittest

from common.families import tiny_config
from mixins.model import PackedVariantTesterMixin
from mixins.padding import PackedPaddingRouterTesterMixin, PackedPaddingTesterMixin
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as builtin

from transformers_packed.models.bailing_hybrid import modeling_bailing_hybrid as packed


SIZES = {"qk_rope_head_dim": 4, "num_local_experts": 8, "initializer_range": 0.04, "n_group": 2, "q_lora_rank": None}


class BailingHybridModelTest(PackedPaddingTesterMixin, PackedVariantTesterMixin, unittest.TestCase):
    """Every layer has a dense MLP, and the decay has no bound."""

    builtin_class = builtin.BailingHybridForCausalLM
    packed_class = packed.BailingHybridForCausalLM
    gradient_bar = 5e-6

    def get_config(self):
        return tiny_config("bailing_hybrid", **SIZES, mlp_layer_types=["dense"] * 2, kda_safe_gate=False)


class BailingHybridMoeModelTest(PackedPaddingRouterTesterMixin, PackedVariantTesterMixin, unittest.TestCase):
    """A dense layer and a mixture, and a bound for the decay, as in released checkpoints."""

    builtin_class = builtin.BailingHybridForCausalLM
    packed_class = packed.BailingHybridForCausalLM
    is_moe = True

    def get_config(self):
        return tiny_config("bailing_hybrid", **SIZES)
