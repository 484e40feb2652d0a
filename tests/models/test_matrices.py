"""Which parameters are hidden matrices, and that fused ones are cut where the stock layers cut their outputs."""

import unittest

import torch
from common.matrices import MODELS, is_hidden, rows_of_projections, tiny_model
from mixins.vision import TEXT, vision_config
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForImageTextToText, Qwen3_5Config, Qwen3_5ForSequenceClassification

from transformers_packed import patch_model
from transformers_packed.models.matrices import hidden_matrices


# Parameters of all kinds, and the number of matrices in each weight of a layer, or in those of an expert.
EXPECTED = {
    "qwen3_5": {
        "in_proj_qkv": 3,
        "in_proj_z": 1,
        "in_proj_a": 1,
        "q_proj": 2,
        "k_proj": 1,
        "o_proj": 1,
        "gate_proj": 1,
    },
    "qwen3_5_moe": {"in_proj_qkv": 3, "gate": 1, "gate_up_proj": 2, "down_proj": 1, "q_proj": 2},
    "qwen3_next": {"in_proj_qkvz": 4, "in_proj_ba": 2, "gate": 1, "gate_up_proj": 2, "down_proj": 1, "q_proj": 2},
}


class HiddenMatricesTest(unittest.TestCase):
    @parameterized.expand(MODELS)
    def test_each_parameter(self, family):
        model = tiny_model(family)
        for built in (model, patch_model(tiny_model(family))):
            found = hidden_matrices(built)
            self.assertEqual(set(found), {name for name, _ in model.named_parameters() if is_hidden(name)})
            numbers = {name.removesuffix(".weight").rpartition(".")[2]: len(x[1]) or 1 for name, x in found.items()}
            self.assertEqual(numbers | EXPECTED[family], numbers)
            for name, (repetitions, parts) in found.items():
                rows = torch.arange(model.get_parameter(name).shape[-2]).view(repetitions, -1)
                cut = [x.flatten() for x in rows.split(parts or rows.shape[1], 1)]
                expected = rows_of_projections(model, name)
                self.assertEqual([x.tolist() for x in cut], [x.tolist() for x in expected], name)

    def test_a_tower_and_a_head(self):
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(Qwen3_5Config(**vision_config(TEXT)))
            classifier = Qwen3_5ForSequenceClassification(model.config)
        found, dim = hidden_matrices(model), model.config.vision_config.hidden_size
        self.assertEqual(found["model.visual.blocks.0.attn.qkv.weight"], (1, (dim,) * 3))
        self.assertFalse([name for name in found if "patch_embed" in name or "pos_embed" in name])
        self.assertNotIn("score.weight", hidden_matrices(classifier))

    def test_frozen_weights_and_adapters(self):
        model = tiny_model("qwen3_5")
        model.model.layers[0].requires_grad_(False)
        self.assertFalse([name for name in hidden_matrices(model) if ".layers.0." in name])
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["o_proj"])
        found = hidden_matrices(get_peft_model(tiny_model("qwen3_5"), config))
        self.assertEqual(
            set(found), {"base_model.model.model.layers.1.self_attn.o_proj.modules_to_save.default.weight"}
        )

    def test_wrapped_weights_are_cut_too(self):
        names = ("in_proj_qkv", "q_proj")
        for options in ({"target_modules": ["o_proj"], "modules_to_save": [*names]}, {"target_modules": [*names]}):
            model = get_peft_model(tiny_model("qwen3_5"), LoraConfig(r=2, **options)).requires_grad_(True)
            found, expected = hidden_matrices(model), hidden_matrices(tiny_model("qwen3_5"))
            for name in names:
                wrapped = {cuts for path, cuts in found.items() if f".{name}." in path and "original" not in path}
                self.assertEqual(wrapped, {cuts for path, cuts in expected.items() if f".{name}." in path})

    def test_a_flattened_weight(self):
        model = tiny_model("qwen3_5")
        projection = model.model.layers[1].mlp.up_proj
        projection.weight = torch.nn.Parameter(projection.weight.flatten())
        message = (
            r"expected a matrix in model.layers.1.mlp.up_proj.weight, got a tensor of shape \(1536,\). Train with DDP"
        )
        with self.assertRaisesRegex(ValueError, message):
            hidden_matrices(model)
