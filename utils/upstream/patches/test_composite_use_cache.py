import tempfile
import types
import unittest

import torch
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)


TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def composite_model():
    torch.manual_seed(0)
    text = {**TEXT, "head_dim": 16, "layer_types": ["full_attention"], "initializer_range": 0.2}
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))


class TrainerUseCacheTest(unittest.TestCase):
    def trainer(self, model, **options):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return Trainer(model, TrainingArguments(folder.name, use_cpu=True, report_to=[], **options))

    def test_text_config(self):
        model = composite_model()
        self.assertTrue(model.config.text_config.use_cache)
        self.trainer(model)
        self.assertFalse(model.config.text_config.use_cache)
        model.config.text_config.use_cache = False
        self.trainer(model, use_cache=True)
        self.assertTrue(model.config.text_config.use_cache)

    def test_packed_sequences(self):
        model = composite_model()
        self.trainer(model)
        model.train()
        sequences = [torch.randint(1, 60, (n,)) for n in (6, 9)]
        batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": x} for x in sequences])
        output = model(**batch)
        self.assertIsNone(output.past_key_values)
        alone = model(sequences[1][None]).logits[0]
        torch.testing.assert_close(output.logits[0, 6:], alone, rtol=1e-4, atol=1e-5)

    def test_unchanged_text_model(self):
        model = LlamaForCausalLM(LlamaConfig(**TEXT))
        self.trainer(model)
        self.assertFalse(model.config.use_cache)
        self.assertIsNone(model(torch.ones(1, 3, dtype=torch.long)).past_key_values)

    def test_unchanged_encoder_decoder(self):
        config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        model = T5ForConditionalGeneration(config)
        self.trainer(model)
        self.assertFalse(model.config.use_cache)

    def test_unchanged_other_config(self):
        model = torch.nn.Linear(2, 2)
        model.config = types.SimpleNamespace(use_cache=True)
        self.trainer(model)
        self.assertFalse(model.config.use_cache)


if __name__ == "__main__":
    unittest.main()
