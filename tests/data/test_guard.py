"""Before the first step, Trainer stops or warns if its model would mix the documents of a packed batch."""

import subprocess
import sys
import tempfile
import unittest
import warnings
from functools import partial
from unittest import mock

import peft
import torch
import transformers
from mixins.patch import snapshot
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS, Samples
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    Trainer,
    TrainingArguments,
)
from transformers import DataCollatorWithFlattening as BuiltinCollator

from transformers_packed import DataCollatorWithFlattening, patch_model
from transformers_packed.audit.tiny import tiny_config
from transformers_packed.data import collator as collator_module
from transformers_packed.data import guard
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
        "multitask": lambda: peft.MultitaskPromptTuningConfig(**options, num_tasks=2),
        "cpt": lambda: peft.CPTConfig(
            task_type="CAUSAL_LM",
            cpt_token_ids=[3, 4, 5],
            cpt_mask=[1, 1, 1],
            cpt_tokens_type_mask=[1, 2, 4],
        ),
    }[method]()
    return peft.get_peft_model(model, config)


class GuardTest(unittest.TestCase):
    """Uses a collator without `model=`, unless a test sets one."""

    def setUp(self):
        warnings.filterwarnings("ignore", "DataCollatorWithFlattening", FutureWarning)
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name

    def trainer(self, model, collator, **arguments) -> Trainer:
        args = TrainingArguments(
            self.directory,
            max_steps=1,
            per_device_train_batch_size=3,
            per_device_eval_batch_size=3,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            **arguments,
        )
        return Trainer(
            model=model, args=args, train_dataset=Samples(6), eval_dataset=Samples(3), data_collator=collator
        )

    def check_trains(self, trainer: Trainer):
        trainer.train()
        self.assertEqual(trainer.state.global_step, 1)

    def check_stops(self, model, collator, message: str, **arguments):
        trainer = self.trainer(model, collator, **arguments)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        forward = mock.Mock(return_value=None)
        model.register_forward_pre_hook(forward)
        with self.assertRaisesRegex(ValueError, message):
            trainer.train()
        forward.assert_not_called()
        self.assertEqual(trainer.state.global_step, 0)
        for name, parameter in model.named_parameters():
            self.assertTrue(torch.equal(parameter, before[name]), name)

    def test_a_model_that_leaks_stops_before_the_first_step(self):
        # Elsewhere: a hybrid model trains on rows with position_ids alone, and its linear layers mix documents silently.
        message = (
            r"got Qwen3_5ForCausalLM, in which model.layers.0.linear_attn \(Qwen3_5GatedDeltaNet\) carries its state .*"
            r"position_ids only. Call transformers_packed.patch_model\(model\) before creating the Trainer"
        )
        self.check_stops(build(), DataCollatorWithFlattening(), message)

    def test_inside_peft_and_compile(self):
        model = peft.get_peft_model(build(), peft.LoraConfig(target_modules=["q_proj"]))
        self.check_stops(model, DataCollatorWithFlattening(), r"in which model.layers.0.linear_attn")
        self.check_stops(torch.compile(build(), backend="eager"), DataCollatorWithFlattening(), "patch_model")

    def test_vision_language(self):
        model = AutoModelForImageTextToText.from_config(tiny_config("qwen3_5"))
        self.check_stops(
            model, DataCollatorWithFlattening(), "Qwen3_5ForConditionalGeneration, in which .*linear_attn"
        )

    def test_label_smoothing(self):
        """Trainer shifts labels according to the class name. This is correct for heads without a shift."""
        args = TrainingArguments(self.directory, label_smoothing_factor=0.1, use_cpu=True, report_to="none")
        model = AutoModelForImageTextToText.from_config(tiny_config("qwen3_5"))
        collator = DataCollatorWithFlattening()
        with self.assertRaisesRegex(
            ValueError, "Qwen3_5ForConditionalGeneration, whose labels Trainer does not shift"
        ):
            guard.check_model(patch_model(model), collator, args=args)
        for auto in (AutoModelForCausalLM, AutoModelForSequenceClassification):
            guard.check_model(patch_model(auto.from_config(CONFIGS["qwen3_next"]())), collator, args=args)

    def test_a_wrapped_collator_is_found(self):
        collator = DataCollatorWithFlattening()
        self.check_stops(build(), partial(collator), "patch_model")
        self.check_stops(build(), collator, "patch_model", remove_unused_columns=True, dataloader_num_workers=1)

    def test_evaluation_and_prediction_without_training(self):
        for run in ("evaluate", "predict"):
            trainer = self.trainer(build(), DataCollatorWithFlattening())
            with self.assertRaisesRegex(ValueError, "patch_model"):
                getattr(trainer, run)(Samples(3))

    @parameterized.expand(
        [
            ("patched", lambda: patch_model(build()), {}),
            ("llama", lambda: build("llama"), {}),
            ("llama_all", lambda: build("llama"), ALL),
            ("ignored", build, {"on_leak": "ignore"}),
        ]
    )
    def test_trains_without_a_word(self, _, make, options):
        with self.assertNoLogs("transformers_packed", "WARNING"), self.quiet() as warning:
            self.check_trains(self.trainer(make(), DataCollatorWithFlattening(**options)))
        warning.assert_not_called()

    def test_a_cache_in_a_stock_model(self):
        """With a cache, the model creates no document mask. The Trainer's setting is copied to the model."""
        message = (
            "got LlamaForCausalLM with config.use_cache=True, and with a cache its attention mask ignores documents. "
            "Set model.config.use_cache = False"
        )
        for options in ({}, ALL):
            self.check_stops(build("llama"), DataCollatorWithFlattening(**options), message, use_cache=True)
        trainer = self.trainer(build("llama"), DataCollatorWithFlattening(), use_cache=True)
        with self.assertRaisesRegex(ValueError, message):
            trainer.evaluate()
        self.check_trains(self.trainer(patch_model(build()), DataCollatorWithFlattening(), use_cache=True))

    def test_a_cache_under_gradient_checkpointing(self):
        """Training creates no cache, evaluation does."""
        trainer = self.trainer(
            build("llama"), DataCollatorWithFlattening(), use_cache=True, gradient_checkpointing=True
        )
        self.check_trains(trainer)
        with self.assertRaisesRegex(ValueError, "config.use_cache=True"):
            trainer.evaluate()

    @parameterized.expand(["prompt_tuning", "p_tuning", "prefix_tuning", "multitask", "cpt"])
    def test_prompt_learning(self, method):
        for model in (build("llama"), patch_model(build())):
            if method == "prefix_tuning" and model.config.model_type != "llama":
                continue  # PEFT supports no prefix for a recurrent state
            model = prompt_learning(model, method)
            self.check_stops(
                model, DataCollatorWithFlattening(), "got PEFT prompt learning .*virtual tokens once per row"
            )

    def test_prompt_learning_without_a_trainer(self):
        model = prompt_learning(patch_model(build()), "prompt_tuning")
        batch = DataCollatorWithFlattening(**ALL)(Samples(3).rows)
        with self.assertRaisesRegex(
            ValueError, "tokens were added before the row, as PEFT prompt learning does: use padded batches"
        ):
            model(**batch)

    def test_activated_lora(self):
        config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[5, 6])
        self.check_stops(peft.get_peft_model(build("llama"), config), DataCollatorWithFlattening(), "activated LoRA")

    def test_warn(self):
        trainer = self.trainer(
            build(), DataCollatorWithFlattening(on_leak="warn"), eval_strategy="steps", eval_steps=1
        )
        with self.quiet() as warning:
            self.check_trains(trainer)
        # One for the training batches, one for the evaluation batches.
        self.assertEqual(warning.call_count, 2)
        self.assertIn("Qwen3_5GatedDeltaNet", warning.call_args[0][0])

    def quiet(self):
        return mock.patch.object(verdict.logger, "warning")

    def test_other_collators_are_left_alone(self):
        DataCollatorWithFlattening()
        for collator in (BuiltinCollator(), lambda features: BuiltinCollator()(features)):
            self.check_trains(self.trainer(build(), collator))

    def test_installed_once_and_only_when_asked_for(self):
        code = (
            "import transformers, transformers_packed, sys, warnings\n"
            "transformers_packed.DataCollatorWithFlattening(on_leak='ignore')\n"
            "assert 'transformers.trainer' not in sys.modules\n"
            "from transformers import LlamaConfig, LlamaForCausalLM\n"
            f"model = LlamaForCausalLM(LlamaConfig(**{SMALL}))\n"
            "transformers_packed.DataCollatorWithFlattening(model=model)\n"
            "from transformers.trainer import DEFAULT_CALLBACKS\n"
            "print([callback.__name__ for callback in DEFAULT_CALLBACKS])\n"
            "warnings.simplefilter('always')\n"
            "with warnings.catch_warnings(record=True) as warned:\n"
            "    for _ in range(2):\n"
            "        transformers_packed.DataCollatorWithFlattening(model=model.config)\n"
            "print([callback.__name__ for callback in DEFAULT_CALLBACKS])\n"
            "(warning,) = warned\n"
            "print(warning.category.__name__, warning.filename, warning.message)\n"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        before, after, warning = result.stdout.splitlines()
        self.assertEqual(before, "['DefaultFlowCallback']")
        self.assertEqual(after, "['DefaultFlowCallback', 'PackingGuard']")
        self.assertRegex(warning, r"^FutureWarning <string> .*pass DataCollatorWithFlattening\(model=model\)")

    def test_on_leak_is_checked(self):
        with self.assertRaisesRegex(ValueError, "expected on_leak"):
            DataCollatorWithFlattening(on_leak="raise")


class BuiltWithModelTest(unittest.TestCase):
    """The collator checks `model=` on construction, and changes nothing in the model, torch or Transformers."""

    def setUp(self):
        self.callbacks = list(transformers.trainer.DEFAULT_CALLBACKS)
        caught = warnings.catch_warnings()
        caught.__enter__()
        self.addCleanup(caught.__exit__, None, None, None)
        warnings.filterwarnings("error", "DataCollatorWithFlattening", FutureWarning)

    def tearDown(self):
        self.assertEqual(transformers.trainer.DEFAULT_CALLBACKS, self.callbacks)

    @parameterized.expand(
        [("bare", lambda model: model), ("compiled", torch.compile), ("inside", torch.nn.Sequential)]
    )
    def test_a_model_that_leaks(self, _, wrap):
        model = build()
        wrapped = wrap(model)
        before = snapshot(model)
        message = r"got Qwen3_5ForCausalLM, in which model.layers.0.linear_attn .*Call transformers_packed.patch_model"
        with self.assertRaisesRegex(ValueError, message):
            DataCollatorWithFlattening(model=wrapped)
        with mock.patch.object(verdict.logger, "warning") as warning:
            DataCollatorWithFlattening(model=wrapped, on_leak="warn")
            DataCollatorWithFlattening(model=wrapped, on_leak="ignore")
        self.assertEqual(warning.call_count, 1)
        self.assertRegex(warning.call_args[0][0], message)
        self.assertEqual(snapshot(model), before)

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

    def test_prompt_learning(self):
        with self.assertRaisesRegex(ValueError, "got PEFT prompt learning .*virtual tokens once per row"):
            DataCollatorWithFlattening(model=prompt_learning(patch_model(build()), "prompt_tuning"))

    def test_trains_in_a_stock_trainer(self):
        with tempfile.TemporaryDirectory() as directory:
            args = TrainingArguments(directory, max_steps=1, report_to="none", save_strategy="no", use_cpu=True)
            model = patch_model(build())
            trainer = Trainer(model, args, DataCollatorWithFlattening(model=model, **ALL), train_dataset=Samples(6))
            trainer.train()
        self.assertEqual(trainer.state.global_step, 1)
