import unittest

import torch
from mixins.heads import PackedHeadsTesterMixin
from mixins.model import VOCAB_SIZE, PackedModelTesterMixin, packed_batch, relative_error
from mixins.padding import PackedPaddingRouterTesterMixin, PackedPaddingTesterMixin
from parameterized import parameterized
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next import modeling_qwen3_next as builtin

from transformers_packed.models.qwen3_next import modeling_qwen3_next as packed


def tiny_config(**kwargs) -> Qwen3NextConfig:
    return Qwen3NextConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "initializer_range": 0.02,
            "pad_token_id": 0,
            **kwargs,
        }
    )


class Qwen3NextModelTest(PackedPaddingTesterMixin, PackedModelTesterMixin, unittest.TestCase):
    """Every layer has a dense MLP."""

    builtin_class = builtin.Qwen3NextForCausalLM
    packed_class = packed.Qwen3NextForCausalLM

    def get_config(self):
        return tiny_config(mlp_only_layers=[0, 1, 2, 3])


class Qwen3NextMoeModelTest(PackedPaddingRouterTesterMixin, PackedModelTesterMixin, unittest.TestCase):
    """Every layer has a mixture of experts, as in the released checkpoints."""

    builtin_class = builtin.Qwen3NextForCausalLM
    packed_class = packed.Qwen3NextForCausalLM
    is_moe = True

    def get_config(self):
        return tiny_config()


class Qwen3NextHeadsTest(PackedHeadsTesterMixin, unittest.TestCase):
    builtin = builtin
    packed = packed
    heads = {
        "sequence_classification": "Qwen3NextForSequenceClassification",
        "token_classification": "Qwen3NextForTokenClassification",
        "question_answering": "Qwen3NextForQuestionAnswering",
    }

    def get_config(self, **kwargs):
        return tiny_config(**kwargs)

    def test_question_answering_needs_rows_of_their_own(self):
        builtin_model, model = self.models("question_answering")
        documents = self.documents()
        with self.assertRaisesRegex(ValueError, "start and end .*packed row of 4 documents"):
            model(**self.row(documents))
        alone = documents[2][None]
        spans = {"start_positions": torch.tensor([3]), "end_positions": torch.tensor([9])}
        want, got = builtin_model(alone, **spans), model(alone, **spans)
        self.assertLess(relative_error(got.loss, want.loss), 1e-5)
        self.assertLess(relative_error(got.end_logits, want.end_logits), 1e-5)


class Qwen3NextExpertsTest(unittest.TestCase):
    """Shapes in grouped experts depend on other documents. This causes small differences, but is no leak."""

    @parameterized.expand(["eager", "grouped_mm"])
    def test_grouped_experts_stay_close(self, experts):
        torch.manual_seed(0)
        model = packed.Qwen3NextForCausalLM._from_config(tiny_config(), experts_implementation=experts).eval()
        documents = [torch.randint(1, VOCAB_SIZE, (n,)) for n in (30, 70, 65)]
        with torch.no_grad():
            before = model(**packed_batch(documents)).logits[0].split((30, 70, 65))
            documents[0] = documents[0] % (VOCAB_SIZE - 1) + 1
            after = model(**packed_batch(documents)).logits[0].split((30, 70, 65))
        self.assertGreater(relative_error(after[0], before[0]), 1e-2)
        for i in (1, 2):
            self.assertLess(relative_error(after[i], before[i]), 1e-4)
