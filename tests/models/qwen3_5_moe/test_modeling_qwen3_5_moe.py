import unittest

import torch
from mixins.model import PackedModelTesterMixin, PackedVariantTesterMixin, packed_batch, relative_error
from mixins.padding import PackedPaddingRouterTesterMixin
from mixins.patch import EXPERTS
from mixins.shared_code import SharedModelTesterMixin
from mixins.shared_padding import SharedPaddingTesterMixin
from mixins.vision import TEXT, PackedVisionTesterMixin, vision_config
from parameterized import parameterized
from transformers import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as builtin

from transformers_packed.models.qwen3_5_moe import modeling_qwen3_5_moe as packed


class Qwen3_5MoeModelTest(PackedPaddingRouterTesterMixin, PackedVariantTesterMixin, unittest.TestCase):
    builtin_class = builtin.Qwen3_5MoeForCausalLM
    packed_class = packed.Qwen3_5MoeForCausalLM
    is_moe = True

    def get_config(self):
        return Qwen3_5MoeTextConfig(**TEXT, **EXPERTS, initializer_range=0.02)

    def test_base_model_as_a_tuple(self):
        _, model = self.models()
        batch = packed_batch(self.documents)
        batch.pop("labels")
        as_dict = model.model(**batch)
        self.assertTrue(torch.equal(model.model(**batch, return_dict=False)[0], as_dict.last_hidden_state))
        self.assertEqual(as_dict.last_hidden_state.shape[1], sum(self.lengths))


class Qwen3_5MoeVisionTest(
    SharedPaddingTesterMixin,
    SharedModelTesterMixin,
    PackedPaddingRouterTesterMixin,
    PackedVisionTesterMixin,
    PackedModelTesterMixin,
    unittest.TestCase,
):
    builtin_class = builtin.Qwen3_5MoeForConditionalGeneration
    packed_class = packed.Qwen3_5MoeForConditionalGeneration
    is_moe = True

    def get_config(self):
        return Qwen3_5MoeConfig(**vision_config({**TEXT, **EXPERTS}))

    @parameterized.expand([("tail_padding", 64), ("no_padding", None)])
    def test_router_statistics_leave_padding_out(self, _, multiple):
        """Router logits cover real tokens only. The auxiliary loss equals that of the padded batch with its mask."""
        builtin_model, model = self.models()
        expected = builtin_model(**self.padded(self.documents, "right"), output_router_logits=True)
        row = packed_batch(self.documents, pad_to_multiple_of=multiple, pad_token_id=0)
        self.assertEqual("padding_tokens" in row, multiple is not None)
        actual = model(**row, output_router_logits=True)
        self.assertEqual({x.shape[0] for x in actual.router_logits}, {sum(self.lengths)})
        self.assertLess(relative_error(actual.aux_loss, expected.aux_loss), 1e-5)
        self.assertLess(relative_error(actual.loss, expected.loss), 1e-5)
        if multiple:
            row["padding_tokens"] += 1
            with self.assertRaisesRegex(ValueError, "padding_tokens of 0 or"):
                model(**row)
            with self.assertRaisesRegex(ValueError, "together with padding_tokens"):
                model(input_ids=row["input_ids"], padding_tokens=4)
