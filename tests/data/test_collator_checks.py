"""The collator raises or warns if the model of its batches would mix their documents."""

import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import peft
import pytest
import torch
from mixins.patch import snapshot
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS, Samples
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)

from transformers_packed import DataCollatorWithFlattening, patch_model
from transformers_packed.audit.tiny import tiny_config
from transformers_packed.data import collator as collator_module
from transformers_packed.models import verdict


SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
ALL = {"return_seq_idx": True, "return_flash_attn_kwargs": True}


def build(model_type: str = "qwen3_5"):
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL) if model_type == "llama" else CONFIGS[model_type]()
    return AutoModelForCausalLM.from_config(config)


def prompt_learning(model, method: str) -> peft.PeftModel:
    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    config = {
        "prompt_tuning": lambda: peft.PromptTuningConfig(**options),
        "p_tuning": lambda: peft.PromptEncoderConfig(**options, encoder_hidden_size=8),
        "prefix_tuning": lambda: peft.PrefixTuningConfig(**options),
    }[method]()
    return peft.get_peft_model(model, config)


class BuiltWithModelTest(unittest.TestCase):
    """The collator checks `model=` on construction, and changes nothing in the model, torch or Transformers."""

    @parameterized.expand(
        [
            ("bare", lambda model: model),
            ("compiled", torch.compile),
            ("inside", torch.nn.Sequential),
            ("adapted", lambda model: peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))),
        ]
    )
    def test_a_model_that_leaks(self, _, wrap):
        model = build()
        wrapped = wrap(model)
        before = snapshot(model)
        # Elsewhere: a hybrid model trains on rows with position_ids alone, and its linear layers mix documents silently.
        message = (
            r"got Qwen3_5ForCausalLM, in which model.layers.0.linear_attn \(Qwen3_5GatedDeltaNet\) carries its state .*"
            r"position_ids only. Call transformers_packed.patch_model\(model\) before creating the Trainer"
        )
        with self.assertRaisesRegex(ValueError, message):
            DataCollatorWithFlattening(model=wrapped)
        with mock.patch.object(verdict.logger, "warning") as warning:
            DataCollatorWithFlattening(model=wrapped, on_leak="warn")
            DataCollatorWithFlattening(model=wrapped, on_leak="ignore")
        self.assertEqual(warning.call_count, 1)
        self.assertRegex(warning.call_args[0][0], message)
        self.assertEqual(snapshot(model), before)

    def test_vision_language(self):
        with self.assertRaisesRegex(ValueError, "Qwen3_5ForConditionalGeneration, in which .*linear_attn"):
            DataCollatorWithFlattening(model=AutoModelForImageTextToText.from_config(tiny_config("qwen3_5")))

    def test_what_the_collator_gives_counts(self):
        model = build("llama")
        with self.assertRaisesRegex(ValueError, "vision tower reads them as image boundaries"):
            DataCollatorWithFlattening(
                model=AutoModelForImageTextToText.from_config(tiny_config("gemma3")), return_cu_seqlens=True
            )
        with mock.patch.object(verdict.logger, "warning") as warning:
            DataCollatorWithFlattening(model=model, return_position_ids=False, return_seq_idx=True)
        self.assertIn("LlamaForCausalLM receives packed rows, but it is unknown", warning.call_args[0][0])

    @parameterized.expand([("ours", True), ("stock", False)])
    def test_no_boundaries(self, _, ours):
        model, samples = patch_model(build()) if ours else build("llama"), Samples(3).rows
        collator = DataCollatorWithFlattening(model=model, return_position_ids=False)
        with self.assertRaisesRegex(
            ValueError, "boundaries of the batch's 3 documents, got return_position_ids=False"
        ):
            collator(samples)
        collator(samples[:1])
        for options in ({"on_leak": "ignore"}, {"return_boundaries": True}):
            DataCollatorWithFlattening(model=model, return_position_ids=False, **options)(samples)

    def test_labels_of_first_tokens(self):
        model = AutoModelForTokenClassification.from_config(tiny_config("qwen3_next"))
        for made in (model, patch_model(model)):
            with self.assertRaisesRegex(ValueError, "whose loss does not shift labels, so the first token of each"):
                DataCollatorWithFlattening(model=made)

    def test_models_of_ours_and_isolated_ones_pass_without_a_word(self):
        stock = build("llama")
        stock.config.use_cache = False
        with self.assertNoLogs("transformers_packed", "WARNING"):
            for model in (patch_model(build()), stock):
                with mock.patch.object(verdict.logger, "warning") as warning:
                    collator = DataCollatorWithFlattening(model=model)
                warning.assert_not_called()
                self.assertIs(collator.config, model.config)

    def test_a_cache_is_a_warning(self):
        """Trainer disables the cache later. Our models create none on packed rows."""
        with mock.patch.object(collator_module.logger, "warning_once") as warning:
            DataCollatorWithFlattening(model=patch_model(build()))
            warning.assert_not_called()
            DataCollatorWithFlattening(model=build("llama"))
        self.assertIn(
            "LlamaForCausalLM keeps documents apart with its attention mask, but with a cache", warning.call_args[0][0]
        )

    @parameterized.expand(["prompt_tuning", "p_tuning", "prefix_tuning"])
    def test_prompt_learning(self, method):
        for model in (build("llama"), patch_model(build())):
            if method == "prefix_tuning" and model.config.model_type != "llama":
                continue  # PEFT supports no prefix for a recurrent state
            with self.assertRaisesRegex(ValueError, "got PEFT prompt learning .*virtual tokens once per row"):
                DataCollatorWithFlattening(model=prompt_learning(model, method))

    def test_prompt_learning_without_a_check(self):
        model = prompt_learning(patch_model(build()), "prompt_tuning")
        batch = DataCollatorWithFlattening(on_leak="ignore", **ALL)(Samples(3).rows)
        with self.assertRaisesRegex(
            ValueError, "tokens were added before the row, as PEFT prompt learning does: use padded batches"
        ):
            model(**batch)

    def test_activated_lora(self):
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5, 6])
        with self.assertRaisesRegex(ValueError, "activated LoRA"):
            DataCollatorWithFlattening(model=peft.get_peft_model(build("llama"), config))

    def test_on_leak_is_checked(self):
        with self.assertRaisesRegex(ValueError, "expected on_leak"):
            DataCollatorWithFlattening(on_leak="raise")

    @pytest.mark.slow
    def test_without_a_model_nothing_is_checked(self):
        code = (
            "import sys, transformers_packed\n"
            "transformers_packed.DataCollatorWithFlattening(on_leak='ignore')\n"
            "for _ in range(2):\n"
            "    transformers_packed.DataCollatorWithFlattening()\n"
            "assert 'transformers.trainer' not in sys.modules\n"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr.count("NEFTune is checked. Pass model=model"), 1, result.stderr)

    def test_trains_in_a_stock_trainer(self):
        with tempfile.TemporaryDirectory() as directory:
            args = TrainingArguments(directory, max_steps=1, report_to="none", save_strategy="no", use_cpu=True)
            model = patch_model(build())
            trainer = Trainer(model, args, DataCollatorWithFlattening(model=model, **ALL), train_dataset=Samples(6))
            trainer.train()
        self.assertEqual(trainer.state.global_step, 1)
