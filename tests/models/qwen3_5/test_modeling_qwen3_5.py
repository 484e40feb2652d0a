import unittest

import torch
from common.real_heads import HEADS_27B, REAL_HEADS
from common.releases import DECAY_ROUNDING, DECAYS
from mixins.heads import PackedHeadsTesterMixin
from mixins.model import VOCAB_SIZE, PackedModelTesterMixin, alone, gradients, packed_batch, relative_error
from mixins.padding import PackedPaddingTesterMixin
from mixins.shared_code import SharedModelTesterMixin
from mixins.shared_padding import SharedPaddingTesterMixin
from mixins.vision import TEXT, PackedVisionTesterMixin, vision_config
from transformers import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin

from transformers_packed.models.qwen3_5 import modeling_qwen3_5 as packed


def tiny_config(**kwargs) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
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
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "initializer_range": 0.02,
            "pad_token_id": 0,
            **kwargs,
        }
    )


class Qwen3_5ModelTest(
    SharedPaddingTesterMixin,
    SharedModelTesterMixin,
    PackedPaddingTesterMixin,
    PackedModelTesterMixin,
    unittest.TestCase,
):
    builtin_class = builtin.Qwen3_5ForCausalLM
    packed_class = packed.Qwen3_5ForCausalLM

    def get_config(self):
        return tiny_config()


class Qwen3_5HeadsTest(PackedHeadsTesterMixin, unittest.TestCase):
    builtin = builtin
    packed = packed
    heads = {
        "sequence_classification": "Qwen3_5TextForSequenceClassification",
        "token_classification": "Qwen3_5ForTokenClassification",
    }

    def get_config(self, **kwargs):
        return tiny_config(**kwargs)


class Qwen3_5HeadCountsTest(unittest.TestCase):
    def test_heads_of_27b(self):
        """In float64, but the stock delta rule computes in float32."""
        torch.manual_seed(0)
        config = Qwen3_5TextConfig(**REAL_HEADS | HEADS_27B | {"hidden_size": 64, "intermediate_size": 64})
        stock = builtin.Qwen3_5ForCausalLM(config).double().train()
        ours = packed.Qwen3_5ForCausalLM(config).double().train()
        with torch.no_grad():
            for name, parameter in stock.named_parameters():
                if "norm" in name or "dt_bias" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        ours.load_state_dict(stock.state_dict())
        documents = [torch.randint(1, VOCAB_SIZE, (n,)) for n in (1, 5, 64, 70)]
        logits, loss = alone(stock, documents)
        output = ours(**packed_batch(documents), skip_logits=False)
        self.assertLess(relative_error(output.logits[0], torch.cat(logits)), 1e-6)
        actual, expected = gradients(ours, output.loss), gradients(stock, loss)
        self.assertEqual(set(actual), set(expected))
        for name in expected:
            bar = 1e-4 * DECAY_ROUNDING if name.endswith(DECAYS) else 1e-5
            self.assertLess(relative_error(actual[name], expected[name]), bar, name)


class Qwen3_5PositionIdsTest(unittest.TestCase):
    def test_four_rows_of_position_ids(self):
        """Text positions mark document starts in four rows and in three, with and without explicit boundaries."""
        torch.manual_seed(0)
        model = packed.Qwen3_5ForCausalLM(tiny_config())
        documents = [torch.randint(1, VOCAB_SIZE, (n,)) for n in (5, 70, 3)]
        batch = packed_batch(documents)
        expected = model(**batch).logits
        four = batch["position_ids"].expand(4, 1, -1)
        for name, inputs in {
            "4 rows": {"position_ids": four},
            "4 rows, all": {**batch, "position_ids": four},
            "3 rows": {"position_ids": four[1:]},
            "3 rows, cu_seqlens": {"position_ids": four[1:], "cu_seqlens": batch["cu_seqlens"]},
        }.items():
            with self.subTest(name):
                logits = model(**{"input_ids": batch["input_ids"], **inputs}).logits
                self.assertTrue(torch.equal(logits, expected))


class Qwen3_5VisionTest(PackedPaddingTesterMixin, PackedVisionTesterMixin, unittest.TestCase):
    builtin_class = builtin.Qwen3_5ForConditionalGeneration
    packed_class = packed.Qwen3_5ForConditionalGeneration

    def get_config(self):
        return Qwen3_5Config(**vision_config(TEXT))
