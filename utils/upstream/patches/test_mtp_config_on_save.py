import json
import os
import tempfile
import unittest
from unittest import mock

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    modeling_utils,
)


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TEXT = {**SMALL, "head_dim": 16, "layer_types": ["full_attention"]}
DEEPSEEK = {
    **SMALL,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def text_model(**options):
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT, **options))


class MtpConfigOnSaveTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        warn = mock.patch.object(modeling_utils.logger, "warning_once")
        self.warn = warn.start()
        self.addCleanup(warn.stop)

    def saved(self, model, **options):
        """The saved configuration, and the warnings about layers."""
        self.warn.reset_mock()
        model.save_pretrained(self.folder, **options)
        with open(os.path.join(self.folder, "config.json")) as file:
            config = json.load(file)
        return config, [call for call in self.warn.call_args_list if "MTP" in call.args[0]]

    def test_text_model(self):
        model = text_model(mtp_num_hidden_layers=1)
        config, warnings = self.saved(model)
        self.assertEqual((config["mtp_num_hidden_layers"], len(warnings)), (0, 1))
        self.assertEqual(model.config.mtp_num_hidden_layers, 1)
        self.assertEqual(Qwen3_5ForCausalLM.from_pretrained(self.folder).config.mtp_num_hidden_layers, 0)

    def test_both_levels(self):
        vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
        text = {**TEXT, "mtp_num_hidden_layers": 1}
        config = Qwen3_5Config(text_config=text, vision_config=vision, mtp_num_hidden_layers=1)
        model = Qwen3_5ForConditionalGeneration(config)
        config, warnings = self.saved(model)
        self.assertEqual((config["mtp_num_hidden_layers"], config["text_config"]["mtp_num_hidden_layers"]), (0, 0))
        self.assertEqual(len(warnings), 1)
        self.assertEqual(model.config.text_config.mtp_num_hidden_layers, 1)

    def test_given_weights(self):
        model = text_model(mtp_num_hidden_layers=1)
        config, warnings = self.saved(model, state_dict=model.state_dict())
        self.assertEqual((config["mtp_num_hidden_layers"], len(warnings)), (0, 1))

    def test_layers_after_those_of_the_main_model(self):
        model = DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK))
        config, warnings = self.saved(model)
        self.assertEqual((config["num_nextn_predict_layers"], len(warnings)), (0, 1))
        DeepseekV3ForCausalLM.from_pretrained(self.folder)

    def test_unchanged_model_with_the_weights(self):
        model = text_model(mtp_num_hidden_layers=1)
        model.mtp = torch.nn.Module()
        model.mtp.fc = torch.nn.Linear(64, 32, bias=False)
        config, warnings = self.saved(model)
        self.assertEqual((config["mtp_num_hidden_layers"], warnings), (1, []))

    def test_unchanged_given_weights_with_the_layer(self):
        model = text_model(mtp_num_hidden_layers=1)
        config, warnings = self.saved(model, state_dict=model.state_dict() | {"mtp.fc.weight": torch.zeros(32, 64)})
        self.assertEqual((config["mtp_num_hidden_layers"], warnings), (1, []))

    def test_unchanged_model_without_layers(self):
        config, warnings = self.saved(text_model())
        self.assertFalse(any("mtp" in name for name in config))
        self.assertEqual(warnings, [])

    def test_unchanged_model_that_leaves_nothing_out(self):
        config, warnings = self.saved(LlamaForCausalLM(LlamaConfig(**SMALL, num_mtp_layers=1)))
        self.assertEqual((config["num_mtp_layers"], warnings), (1, []))


if __name__ == "__main__":
    unittest.main()
