import json
import os
import tempfile
import unittest

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen4ExpTextConfig,
)
from transformers.modeling_layers import MtpModel


TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "initializer_range": 0.2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [],
}
ROPE = {name: x for name, x in TEXT["rope_parameters"].items() if "mrope" not in name}
MODELS = {
    "dense": lambda n=1: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT, mtp_num_hidden_layers=n)),
    "experts": lambda n=1: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**TEXT, **EXPERTS, mtp_num_hidden_layers=n)),
    # Released configurations do not say how many layers they have.
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**{**TEXT, "rope_parameters": ROPE}, **EXPERTS)),
    "images": lambda n=1: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config={**TEXT, "mtp_num_hidden_layers": n}, vision_config=VISION)
    ),
    "images and experts": lambda n=1: Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config={**TEXT, **EXPERTS, "mtp_num_hidden_layers": n}, vision_config=VISION)
    ),
}


def weights_of_layer(trunk, stacked):
    """The weights of a layer by the names of a checkpoint, from a model of this one layer, which computes it."""
    weights = {f"mtp.{name}": x.clone() for name, x in trunk.state_dict().items() if "embed_tokens" not in name}
    for name in [name for name in weights if "experts." in name and not stacked]:
        x = weights.pop(name)
        for i, expert in enumerate(x):
            parts = {"gate_proj": expert[:16], "up_proj": expert[16:]} if "gate_up" in name else {"down_proj": expert}
            prefix = name.rpartition(".")[0]
            weights |= {f"{prefix}.{i}.{part}.weight": y.clone() for part, y in parts.items()}
    return weights


class QwenMtpLayersTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        torch.manual_seed(0)

    def load(self, kind="dense", stacked=False, cls=None):
        """The main model of a checkpoint with an MTP layer, and what computes this layer."""
        main = MODELS[kind]()
        main.save_pretrained(self.folder)
        # The layer is added below.
        main.config.save_pretrained(self.folder)
        config = main.config.get_text_config()
        config = type(config)(**{**config.to_dict(), "num_hidden_layers": 1, "layer_types": ["full_attention"]})
        trunk = type(main.get_decoder())(config).eval()
        parts = {"fc": torch.randn(32, 64) / 8, **{name: torch.randn(32) / 4 for name in ("embedding", "hidden")}}
        path = os.path.join(self.folder, "model.safetensors")
        layer = weights_of_layer(trunk, stacked) | {"mtp.fc.weight": parts["fc"]}
        layer |= {f"mtp.pre_fc_norm_{name}.weight": parts[name] for name in ("embedding", "hidden")}
        save_file(load_file(path) | layer, path, {"format": "pt"})

        def compute(inputs_embeds, hidden_states, position_ids):
            def norm(x, weight):
                return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * (1 + weight)

            pair = [norm(inputs_embeds, parts["embedding"]), norm(hidden_states, parts["hidden"])]
            x = torch.cat(pair, dim=-1) @ parts["fc"].T
            return trunk(inputs_embeds=x, position_ids=position_ids, use_cache=False).last_hidden_state

        return (cls or type(main)).from_pretrained(self.folder).eval(), compute

    def check(self, kind, stacked=False, cls=None, position_ids=None):
        main, compute = self.load(kind, stacked, cls)
        mtp = MtpModel.from_pretrained(main).eval()
        ids = torch.randint(0, 64, (1, 8))
        with torch.no_grad():
            hidden = main.get_decoder()(ids, use_cache=False).last_hidden_state[:, :-1]
            positions = torch.arange(1, 8)[None] if position_ids is None else position_ids
            call = {"last_hidden_states": hidden, "position_ids": positions, "mtp_cache": None}
            actual = mtp.forward_layer(0, input_ids=ids[:, 1:], **call)
            expected = compute(main.get_input_embeddings()(ids[:, 1:]), hidden, positions)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
            tokens, logits, loss = mtp(input_ids=ids[:, 1:], attention_mask=None, **call)
            torch.testing.assert_close(logits, main.lm_head(expected[:, -1:]), rtol=1e-5, atol=1e-5)
        self.assertEqual(tokens.tolist(), logits.argmax(-1).tolist())
        self.assertIsNone(loss)
        return actual

    def test_dense(self):
        self.check("dense")

    def test_experts_of_split_checkpoints(self):
        self.check("experts")

    def test_experts_of_stacked_checkpoints(self):
        self.check("experts", stacked=True)

    def test_qwen3_next(self):
        self.check("qwen3_next")

    def test_images(self):
        self.check("images")

    def test_images_and_experts(self):
        self.check("images and experts", stacked=True)

    def test_text_model_of_a_checkpoint_with_images(self):
        self.check("images", cls=Qwen3_5ForCausalLM)

    def test_patterns_of_other_parts(self):
        regex = MtpModel.get_mtp_weights_regex(MODELS["dense"]())
        self.assertTrue(regex.search("mtp.fc.weight"))
        self.assertIsNone(regex.search("model.visual.patch_embed.proj.weight"))

    def test_positions_of_multimodal_rope(self):
        rows = torch.arange(1, 8).expand(3, 1, -1)
        with_text = torch.cat([rows[:1], rows])
        axes = torch.stack([torch.arange(1, 8), torch.arange(7) // 2, torch.arange(7) % 3])[:, None]
        results = []
        for positions in (None, rows, with_text, axes, torch.cat([rows[:1], axes])):
            torch.manual_seed(0)
            results.append(self.check("images", position_ids=positions))
        for same in (results[1], results[2]):
            torch.testing.assert_close(same, results[0])
        self.assertGreater((results[3] - results[0]).abs().max().item(), 1e-3)
        torch.testing.assert_close(results[3], results[4])

    def test_loss(self):
        main, compute = self.load()
        mtp = MtpModel.from_pretrained(main)
        ids = torch.randint(0, 64, (1, 9))
        hidden = main.get_decoder()(ids[:, :-2], use_cache=False).last_hidden_state
        positions = torch.arange(1, 8)[None]
        labels = ids[:, 2:].clone()
        labels[:, :3] = -100
        *_, loss = mtp(ids[:, 1:-1], hidden, None, positions, None, labels=labels)
        logits = main.lm_head(compute(main.get_input_embeddings()(ids[:, 1:-1]), hidden, positions))
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits[0, 3:], labels[0, 3:]))
        loss.backward()
        self.assertGreater(mtp.layers[0].eh_proj.weight.grad.abs().max().item(), 0)

    def test_config(self):
        for kind in MODELS:
            config = MODELS[kind]().config.get_text_config()
            self.assertEqual((config.num_mtp_layers, config.mtp_layer_types), (1, ["full_attention"]))
            self.assertEqual(config.get_mtp_config().layer_types, ["full_attention"])
        config = Qwen3NextConfig(num_nextn_predict_layers=0)
        self.assertEqual((config.num_mtp_layers, config.mtp_layer_types), (0, []))

    def test_saved_config(self):
        model = MODELS["dense"]()
        model.config.num_mtp_layers = 3
        model.save_pretrained(self.folder)
        with open(os.path.join(self.folder, "config.json")) as file:
            saved = json.load(file)
        self.assertFalse({"num_mtp_layers", "mtp_layer_types"} & set(saved))
        self.assertIn("mtp_num_hidden_layers", saved)

    def test_unchanged_config_without_a_layer(self):
        for config in (Qwen3_5TextConfig(**TEXT), Qwen3_5MoeTextConfig(**TEXT, **EXPERTS), Qwen4ExpTextConfig()):
            self.assertFalse(any("mtp" in name for name in config.to_dict()))
            self.assertFalse(hasattr(config, "num_mtp_layers"))
            self.assertFalse(hasattr(config, "mtp_layer_types"))
            with self.assertRaisesRegex(ValueError, "num_mtp_layers"):
                config.get_mtp_config()

    def test_unchanged_main_model(self):
        """The main model loads as before, and says nothing of the weights that it leaves out."""
        self.load("images")
        model, about = AutoModelForCausalLM.from_pretrained(self.folder, output_loading_info=True)
        self.assertIsInstance(model, Qwen3_5ForCausalLM)
        self.assertEqual((set(about["missing_keys"]), set(about["unexpected_keys"])), (set(), set()))

    def test_unchanged_patterns(self):
        small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        sizes = {"intermediate_size": 32, "moe_intermediate_size": 16, "num_key_value_heads": 2}
        deepseek = DeepseekV3ForCausalLM(DeepseekV3Config(**small, **experts, **ranks, **sizes))
        regex = MtpModel.get_mtp_weights_regex(deepseek)
        self.assertTrue(regex.search("model.layers.61.enorm.weight"))
        self.assertIsNone(regex.search("model.layers.60.mlp.up_proj.weight"))
        mellum = MellumForCausalLM(MellumConfig(**small, **sizes, num_experts=4, num_experts_per_tok=2, head_dim=16))
        self.assertTrue(MtpModel.get_mtp_weights_regex(mellum).search("mtp.layers.0.eh_proj.weight"))


if __name__ == "__main__":
    unittest.main()
