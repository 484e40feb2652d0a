import unittest

import torch
from common.families import tiny_config
from mixins.model import (
    PackedModelTesterMixin,
    PackedVariantTesterMixin,
    gradients,
    packed_batch,
    relative_error,
    total_relative_error,
)
from mixins.padding import PackedPaddingRouterTesterMixin, PackedPaddingTesterMixin
from transformers.models.kimi_linear import modeling_kimi_linear as builtin

from transformers_packed.models.kimi_linear import modeling_kimi_linear as packed


SIZES = {"qk_rope_head_dim": 4, "num_local_experts": 8, "initializer_range": 0.02}


class KimiLinearModelTest(PackedPaddingTesterMixin, PackedVariantTesterMixin, unittest.TestCase):
    """Every layer has a dense MLP."""

    builtin_class = builtin.KimiLinearForCausalLM
    packed_class = packed.KimiLinearForCausalLM
    gradient_bar = 5e-6

    def get_config(self):
        return tiny_config("kimi_linear", **SIZES, q_lora_rank=None, mlp_layer_types=["dense"] * 2)

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
    """A dense layer and a mixture, as in released checkpoints, and queries of low rank."""

    builtin_class = builtin.KimiLinearForCausalLM
    packed_class = packed.KimiLinearForCausalLM
    is_moe = True

    def get_config(self):
        return tiny_config("kimi_linear", **SIZES, n_group=2)
