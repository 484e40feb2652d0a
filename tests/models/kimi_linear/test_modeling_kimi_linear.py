import unittest

import torch
from mixins.model import (
    VOCAB_SIZE,
    PackedModelTesterMixin,
    gradients,
    packed_batch,
    relative_error,
    total_relative_error,
)
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

    def test_a_module_of_the_decay_with_a_hook_runs(self):
        """Its results are those of the rule, which computes the decay otherwise, and a hook changes them."""
        _, model = self.models()
        batch, found, calls = packed_batch(self.documents), [], []
        gates = [module for module in model.modules() if type(module) is builtin.KimiLinearForgetGate]
        for _ in range(2):
            output = model(**batch)
            found.append((output.logits.detach(), gradients(model, output.loss)))
            for gate in gates:
                gate.register_forward_hook(lambda *_: calls.append("ran"))
        self.assertEqual(len(calls), len(gates))
        self.assertLess(relative_error(found[1][0], found[0][0]), 1e-5)
        self.assertLess(total_relative_error(found[1][1], found[0][1]), 1e-5)
        gates[0].register_forward_hook(lambda module, args, g: torch.zeros_like(g))
        self.assertGreater(relative_error(model(**batch).logits, found[0][0]), 1e-3)


class KimiLinearMoeModelTest(PackedPaddingRouterTesterMixin, PackedModelTesterMixin, unittest.TestCase):
    """A dense layer and three mixtures, as in released checkpoints, and queries of low rank."""

    builtin_class = builtin.KimiLinearForCausalLM
    packed_class = packed.KimiLinearForCausalLM
    lora_targets = ("q_b_proj", "f_b_proj", "kv_b_proj", "o_proj")
    is_moe = True

    def get_config(self):
        return tiny_config(q_lora_rank=24, n_group=2, topk_group=1)
