"""Before the first step Trainer stops, or warns, when its model would mix the documents of our collator's batches."""

import subprocess
import sys
import tempfile
import unittest
from functools import partial
from unittest import mock

import peft
import torch
from mixins.patch import COMPOSITE, builtin_model
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
from transformers_packed.audit.matrix import SupportMatrix, load_support_matrix
from transformers_packed.audit.tiny import tiny_config
from transformers_packed.training.callbacks import guard


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
    def setUp(self):
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
            r"position_ids only. Call transformers_packed.patch_model\(model\) before building the Trainer"
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
        """Trainer shifts labels by the name of the class: for heads that want no shift it is right."""
        args = TrainingArguments(self.directory, label_smoothing_factor=0.1, use_cpu=True, report_to="none")
        model = AutoModelForImageTextToText.from_config(tiny_config("qwen3_5"))
        collator = DataCollatorWithFlattening()
        with self.assertRaisesRegex(ValueError, "does not shift the labels of a Qwen3_5ForConditionalGeneration"):
            guard.check_model(patch_model(model), collator, args=args)
        for auto in (AutoModelForCausalLM, AutoModelForTokenClassification, AutoModelForSequenceClassification):
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
        """With one it makes no mask of documents; the model's own setting is what the Trainer's became."""
        message = (
            "got LlamaForCausalLM with config.use_cache=True, and beside a cache .* Set model.config.use_cache = False"
        )
        for options in ({}, ALL):
            self.check_stops(build("llama"), DataCollatorWithFlattening(**options), message, use_cache=True)
        trainer = self.trainer(build("llama"), DataCollatorWithFlattening(), use_cache=True)
        with self.assertRaisesRegex(ValueError, message):
            trainer.evaluate()
        self.check_trains(self.trainer(patch_model(build()), DataCollatorWithFlattening(), use_cache=True))

    def test_a_cache_under_gradient_checkpointing(self):
        """Training makes none, evaluation does."""
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
                continue  # PEFT makes no prefix for a recurrent state
            model = prompt_learning(model, method)
            self.check_stops(
                model, DataCollatorWithFlattening(), "got PEFT prompt learning .*virtual tokens stand once"
            )

    def test_prompt_learning_without_a_trainer(self):
        model = prompt_learning(patch_model(build()), "prompt_tuning")
        batch = DataCollatorWithFlattening(**ALL)(Samples(3).rows)
        with self.assertRaisesRegex(
            ValueError, "put tokens before the row, as PEFT prompt learning does: use padded batches"
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
        # Once for the training batches, once for those of the evaluation.
        self.assertEqual(warning.call_count, 2)
        self.assertIn("Qwen3_5GatedDeltaNet", warning.call_args[0][0])

    def quiet(self):
        return mock.patch.object(guard.logger, "warning")

    def test_other_collators_are_left_alone(self):
        DataCollatorWithFlattening()
        for collator in (BuiltinCollator(), lambda features: BuiltinCollator()(features)):
            self.check_trains(self.trainer(build(), collator))

    def test_installed_once_and_only_when_asked_for(self):
        code = (
            "import transformers, transformers_packed, sys\n"
            "transformers_packed.DataCollatorWithFlattening(on_leak='ignore')\n"
            "assert 'transformers.trainer' not in sys.modules\n"
            "for _ in range(2):\n"
            "    transformers_packed.DataCollatorWithFlattening()\n"
            "from transformers.trainer import DEFAULT_CALLBACKS\n"
            "print([callback.__name__ for callback in DEFAULT_CALLBACKS])\n"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertEqual(result.stdout.strip(), "['DefaultFlowCallback', 'PackingGuard']", result.stderr)

    def test_on_leak_is_checked(self):
        with self.assertRaisesRegex(ValueError, "expected on_leak"):
            DataCollatorWithFlattening(on_leak="raise")


class CacheTest(unittest.TestCase):
    """What is said of a cache is what a changed first document does to the second one."""

    @parameterized.expand(
        [
            (model_type, outer, inner)
            for model_type in ("llama", "qwen3", "gpt_neo", "mllama", "llama4")
            for outer in (True, False)
            for inner in (True, False)
        ]
    )
    def test_documents_leak_exactly_where_said(self, model_type, outer, inner):
        config = tiny_config(model_type)
        composite = config.get_text_config() is not config
        torch.manual_seed(0)
        model = (AutoModelForImageTextToText if composite else AutoModelForCausalLM).from_config(config).eval()
        config = model.config
        config.get_text_config().use_cache = inner
        config.use_cache = outer
        rows = torch.randint(5, 20, (2, 24))
        rows[1, 12:] = rows[0, 12:]
        with torch.no_grad():
            first, second = (
                model(input_ids=row[None], position_ids=torch.arange(12).repeat(2)[None]).logits[0, 12:]
                for row in rows
            )
        leak, _ = guard.judge(model, DataCollatorWithFlattening(on_leak="ignore"))
        self.assertEqual(leak is not None, bool((first - second).abs().max() > 1e-6), str(leak))

    def test_flash_attention_needs_no_mask(self):
        model = build("llama")
        self.assertIsNotNone(guard.judge(model, DataCollatorWithFlattening(on_leak="ignore"))[0])
        model.config._attn_implementation_internal = "flash_attention_2"
        self.assertIsNone(guard.judge(model, DataCollatorWithFlattening(on_leak="ignore"))[0])


class JudgeTest(unittest.TestCase):
    """What is made of an entry of the matrix, for a Qwen3.5 model."""

    def judge(self, builtin: dict, *, options=ALL, ours="isolated", model=None, model_type="qwen3_5_text"):
        entry = {
            "class": "Qwen3_5ForCausalLM",
            "attention": "sdpa",
            "builtin": builtin,
            "ours": {"position_ids": {"verdict": ours}, "all": {"verdict": ours}},
        }
        matrix = SupportMatrix("0", "0", {model_type: entry})
        model = model or build()
        # As Trainer leaves it, and as the audits were.
        model.config.use_cache = model.config.get_text_config().use_cache = False
        with mock.patch.object(guard, "load_support_matrix", return_value=matrix):
            leak, doubt = guard.judge(model, DataCollatorWithFlattening(**options))
        return str(leak or ""), doubt or ""

    leaks = {"verdict": "leaks", "module": "Qwen3_5Attention", "kind": "attention"}
    isolated = {"verdict": "isolated"}

    def test_a_flag_of_the_collator_is_enough(self):
        builtin = {"position_ids": self.leaks, "all": self.isolated, "position_ids+seq_idx": self.leaks}
        self.assertEqual(self.judge(builtin), ("", ""))
        leak, _ = self.judge(builtin, options={"return_seq_idx": True}, ours="refused")
        self.assertIn("given position_ids and seq_idx", leak)
        self.assertIn("Pass return_flash_attn_kwargs=True and return_seq_idx=True to the collator. ", leak)
        self.assertNotIn("patch_model", leak)

    def test_cu_seqlens_for_a_vision_tower(self):
        """It would take them for boundaries of images; by Transformers' own names they stay out of it."""
        isolated = {"position_ids": self.isolated, "all": self.isolated}
        model = builtin_model("qwen3_5", "Qwen3_5ForConditionalGeneration", COMPOSITE["qwen3_5"])
        leak, _ = self.judge(isolated, options={**ALL, "return_cu_seqlens": True}, model=model)
        self.assertIn("whose vision tower takes them for boundaries of images", leak)
        self.assertNotIn("vision tower", "".join(self.judge(isolated, model=model)))

    def test_nothing_helps(self):
        leak, _ = self.judge({"position_ids": self.leaks, "all": self.leaks}, ours="refused")
        self.assertIn("Train it on padded batches.", leak)

    def test_sources_between_isolated_ends(self):
        builtin = {"position_ids": self.isolated, "all": self.isolated}
        self.assertEqual(self.judge(builtin, options={"return_seq_idx": True}), ("", ""))

    def test_not_causal(self):
        refused = {"verdict": "refused", "reason": "not causal: later tokens change earlier ones"}
        leak, _ = self.judge({"position_ids": refused, "all": refused}, ours="refused")
        self.assertIn("in which tokens change earlier ones", leak)

    def test_doubts(self):
        refused = {"verdict": "refused", "reason": "ValueError: no kernel"}
        ends = {"position_ids": self.leaks, "all": self.leaks}
        for expected, judged in (
            ("the audit of its type ended with ValueError: no kernel", self.judge({**ends, "all": refused})),
            ("no model of the type qwen3_5_text", self.judge(ends, model_type="llama")),
            ("gives no position_ids", self.judge(ends, options={"return_position_ids": False})),
            (
                "leaks in Mamba2Mixer, which this model does not have",
                self.judge({**ends, "all": {**self.leaks, "module": "Mamba2Mixer"}}),
            ),
        ):
            self.assertEqual(judged[0], "")
            self.assertIn(expected, judged[1])

    def test_another_attention_implementation(self):
        model = build()
        ends = {"position_ids": self.leaks, "all": self.leaks}
        model.set_attn_implementation("eager")
        self.assertIn("Qwen3_5Attention", self.judge(ends, model=model)[0])
        # Set only when it is installed.
        model.config._attn_implementation_internal = "flash_attention_2"
        self.assertIn("not audited with flash_attention_2", self.judge(ends, model=model)[1])
        states = {**self.leaks, "module": "Qwen3_5GatedDeltaNet", "kind": "state"}
        self.assertIn("carries its state", self.judge({"position_ids": states, "all": states}, model=model)[0])

    def test_a_model_around_one_that_is_isolated_alone(self):
        model = AutoModelForImageTextToText.from_config(tiny_config("qwen3_5"))
        ends = {"position_ids": self.isolated, "all": self.isolated}
        self.assertEqual(self.judge(ends, model=model)[1], "its type was not audited, only qwen3_5_text")

    def test_every_leak_in_the_matrix_names_a_module(self):
        for name, entry in load_support_matrix().types.items():
            for found in entry.get("builtin", {}).values():
                if found["verdict"] == "leaks":
                    self.assertNotEqual(found["module"], "not found", name)
