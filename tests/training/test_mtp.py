"""The head of multi-token prediction in a Trainer: its share of a step, what trains, what is logged, saved and refused."""

import functools
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
from common.processes import FSDP_ON_CPU
from common.trl_trainers import preference_trainer, sft_trainer
from mixins.configure import ConfigureTestCase, said
from mixins.model import total_relative_error
from parameterized import parameterized
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from scripts.configured_arms import tokenizer
from scripts.mtp_run import BATCH, build
from scripts.trainer_arms import TINY, Samples, collate_padded, run_in_two_processes, updates_and_log
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Trainer,
    set_seed,
)

from transformers_packed import add_mtp, configure_packing, patch_model, registered
from transformers_packed.models import mtp
from transformers_packed.models.losses import OWN, MtpLoss
from transformers_packed.models.mtp_head import head_of


def make_model():
    set_seed(0)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY, mtp_num_hidden_layers=1))


def collated(samples):
    """Documents alone, as batches of one row."""
    return [{name: torch.tensor([x]) for name, x in sample.items()} for sample in samples]


@functools.cache
def alone():
    """The updates, the log and the head of a training in a single process."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(folder)
        return *updates_and_log(trainer), trainer.model.mtp.state_dict()


class StepTest(ConfigureTestCase):
    def test_a_step_is_the_mean_over_its_own_targets(self):
        """Of all rows of the accumulation window: the update of SGD is that of the pooled loss."""
        trainer, samples = build(self.directory, max_steps=1), Samples().rows[: 2 * BATCH]
        updates, log = updates_and_log(trainer)
        reference = build(self.directory).model
        trunk, head = (sum(x != -100 for s in samples for x in s["labels"][ahead:]) for ahead in (1, 2))
        self.assertNotEqual(trunk, head)
        loss = sum(
            reference(**batch, num_items_in_batch=trunk, num_mtp_items_in_batch=head).loss
            for batch in collated(samples)
        )
        loss.backward()
        rate = trainer.args.learning_rate
        expected = {name: -rate * x.grad for name, x in reference.named_parameters()}
        self.assertLess(total_relative_error(updates, expected), 1e-5)
        self.assertAlmostEqual(log[0]["loss"], loss.item(), places=4)
        # Logged beside it: the loss of the head, and how often its choice was the model's.
        reference.losses = (MtpLoss(),)
        alone = sum(reference(**batch, num_mtp_items_in_batch=head).loss for batch in collated(samples))
        self.assertAlmostEqual(log[0]["mtp_loss"], alone.item(), places=3)
        self.assertTrue(0 <= log[0]["mtp_acceptance"] <= 1)

    def test_acceptance_at_logging_steps_alone(self):
        trainer = build(self.directory, logging_steps=2, max_steps=4)
        compared = []
        trainer.model.register_forward_pre_hook(lambda module, _: compared.append(module.losses[-1].is_detailed))
        trainer.train()
        # Two rows in each step, after the rows of the check before the first step.
        self.assertEqual(compared[-8:], [False, False, True, True] * 2)
        self.assertFalse(any(compared[:-8]) or trainer.model.losses[-1].is_detailed)
        self.assertIsNone(trainer.model.losses[-1].record)

    def test_without_packing(self):
        """A padded batch trains the head as the row does."""
        trainer = build(self.directory, padding_free=False)
        trainer.data_collator = collate_padded
        padded, _ = updates_and_log(trainer)
        self.assertLess(total_relative_error(padded, alone()[0]), 1e-5)

    def test_sft_trainer(self):
        """TRL computes the loss of the trunk from scores of its own forward."""
        expected, log, _ = alone()
        sft = sft_trainer(
            self.directory,
            make_model(),
            Samples().rows,
            tokenizer(),
            max_steps=2,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2,
            train_sampling_strategy="sequential",
        )
        # A second call undoes the first one, and creates another head.
        random = torch.get_rng_state()
        for _ in range(2):
            torch.set_rng_state(random)
            said(configure_packing, sft, "padding_free", mtp_loss_weight=0.5)
        found, own = updates_and_log(sft)
        self.assertLess(total_relative_error({name: found[name] for name in expected}, expected), 1e-5)
        for got, want in zip(own, log, strict=True):
            self.assertAlmostEqual(got["loss"], want["loss"], places=3)
            self.assertAlmostEqual(got["mtp_loss"], want["mtp_loss"], places=3)

    def test_a_forward_that_leaves_the_head_out_is_an_error(self):
        trainer = build(self.directory, verify=False)
        model = trainer.model
        forward = model.forward

        @functools.wraps(forward)
        def without_head(*args, **kwargs):
            model.losses, before = OWN, model.losses
            try:
                return forward(*args, **kwargs)
            finally:
                model.losses = before

        with mock.patch.object(model, "forward", without_head):
            self.assertRaisesRegex(ValueError, "another, which left it out", trainer.train)

    @parameterized.expand(
        [("fsdp", FSDP_ON_CPU | {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}), ("sequence_parallel", {})]
    )
    def test_two_processes(self, kind, variables):
        """The denominator counts the targets of all processes, and the saved head is whole."""
        updates, log, head = alone()
        output = f"{self.directory}/out.pt"
        _, found = run_in_two_processes(self, "mtp_run.py", kind, output, **variables)
        self.assertLess(total_relative_error(found["updates"], updates), 1e-5)
        for name in ("loss", "mtp_loss", "mtp_acceptance"):
            for got, want in zip(found["log"], log, strict=True):
                self.assertAlmostEqual(got[name], want[name], places=3)
        saved = load_file(f"{output}.saved/model.safetensors")
        for name, x in head.items():
            self.assertLess((saved[f"mtp.{name}"] - x).abs().max(), 1e-5)


class WhatTrainsTest(unittest.TestCase):
    def setUp(self):
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_the_head_alone(self):
        # The same samples in each step.
        options = {"samples": Samples().rows[: 2 * BATCH], "max_steps": 5, "mtp_only": True}
        trainer = build(self.directory, mtp_loss_weight=0.0, **options)
        before = {name: x.clone() for name, x in trainer.model.state_dict().items()}
        updates, log = updates_and_log(trainer)
        self.assertTrue(all(name.startswith("mtp.") for name in updates))
        for name, x in trainer.model.state_dict().items():
            self.assertEqual(torch.equal(x, before[name]), not name.startswith("mtp."), name)
        self.assertLess(log[-1]["mtp_loss"], log[0]["mtp_loss"])
        self.assertAlmostEqual(log[-1]["mtp_loss"], log[-1]["loss"], places=3)

    def saved_base(self):
        model = patch_model(make_model())
        add_mtp(model)
        model.save_pretrained(self.directory / "base")
        return self.directory / "base"

    def loaded(self):
        with registered():
            return AutoModelForCausalLM.from_pretrained(self.directory / "base")

    def adapted(self):
        return get_peft_model(self.loaded(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))

    def test_adapters_and_the_whole_head(self):
        """The head is trained and saved beside the adapter, resumed from, read by PEFT's own code, and merged."""
        base = self.saved_base()
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "optim": "adamw_torch"}
        options |= {"learning_rate": 1e-2, "gradient_accumulation_steps": 1}
        trainer = build(self.directory / "run", model=self.adapted(), **options)
        head = head_of(trainer.model)
        self.assertFalse(any("lora" in name for name, _ in head.named_parameters()))
        trained = {name for name, x in trainer.model.named_parameters() if x.requires_grad}
        self.assertTrue(all("lora" in name or ".mtp." in name for name in trained))
        trainer.train()
        resumed = build(self.directory / "run", model=self.adapted(), **options)
        resumed.train(resume_from_checkpoint=str(self.directory / "run" / "checkpoint-2"))
        for (name, got), want in zip(
            resumed.model.state_dict().items(), trainer.model.state_dict().values(), strict=True
        ):
            self.assertTrue(torch.equal(got, want), name)

        adapter = self.directory / "run" / "checkpoint-4"
        self.assertFalse([name for name in load_file(adapter / "adapter_model.safetensors") if "mtp" in name])
        kept = load_file(adapter / "mtp.safetensors")
        self.assertTrue(torch.equal(kept["mtp.fc.weight"], head.fc.weight))
        with self.assertLogs(mtp.logger, "WARNING") as logs:
            model = PeftModel.from_pretrained(self.loaded(), adapter)
        self.assertIn(f"Call transformers_packed.add_mtp(model, '{adapter}')", logs.output[0])
        add_mtp(model, adapter)
        model.merge_and_unload().save_pretrained(self.directory / "merged")
        merged = load_file(self.directory / "merged" / "model.safetensors")
        self.assertTrue(torch.equal(merged["mtp.fc.weight"], head.fc.weight))
        stock, info = AutoModelForCausalLM.from_pretrained(self.directory / "merged", output_loading_info=True)
        self.assertFalse(any(info.values()))
        self.assertNotEqual(type(stock), type(self.loaded()))
        # Without it, the merged checkpoint has the head of the base model.
        PeftModel.from_pretrained(self.loaded(), adapter).merge_and_unload().save_pretrained(
            self.directory / "untrained"
        )
        untrained = load_file(self.directory / "untrained" / "model.safetensors")
        self.assertTrue(
            torch.equal(untrained["mtp.fc.weight"], load_file(base / "model.safetensors")["mtp.fc.weight"])
        )

    @unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
    def test_adapters_over_4_bit(self):
        """The head is not quantized, neither when it is added nor when its checkpoint is loaded again."""
        self.saved_base()
        four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
        with registered():
            model = AutoModelForCausalLM.from_pretrained(self.directory / "base", quantization_config=four_bit)
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
        options = {"samples": Samples().rows[: 2 * BATCH], "max_steps": 4, "verify": False}
        trainer = build(self.directory, model=model, **options)
        head = head_of(trainer.model)
        self.assertEqual({type(x) for x in head.modules() if hasattr(x, "in_features")}, {torch.nn.Linear})
        _, log = updates_and_log(trainer)
        self.assertLess(log[-1]["mtp_loss"], log[0]["mtp_loss"])

    def test_frozen_parts_stay_frozen(self):
        model = patch_model(make_model())
        add_mtp(model).layers[0].mlp.requires_grad_(False)
        updates, _ = updates_and_log(build(self.directory, model=model))
        self.assertFalse([name for name in updates if name.startswith("mtp.layers.0.mlp")])
        self.assertTrue([name for name in updates if name.startswith("mtp.layers.0.self_attn")])

    def test_models_of_model_init(self):
        trainer = build(self.directory)
        made = Trainer(None, trainer.args, model_init=make_model, train_dataset=Samples())
        said(configure_packing, made, "padding_free", mtp_loss_weight=0.5)
        made.train()
        self.assertIn("mtp_loss", made.state.log_history[-2])


class RefusedTest(ConfigureTestCase):
    def trainer(self, cls=Trainer, **options):
        args = build(self.directory, mtp_loss_weight=0.0).args
        for name in [name for name in options if hasattr(args, name)]:
            setattr(args, name, options.pop(name))
        return cls(make_model(), args, train_dataset=Samples(), **options)

    def refused(self, words, trainer, **options):
        with self.assertRaisesRegex(ValueError, words):
            configure_packing(trainer, **({"mtp_loss_weight": 0.1} | options))
        self.assertIsNone(head_of(trainer.model))

    def test_losses_that_are_not_the_models(self):
        own = type("Own", (Trainer,), {"compute_loss": lambda self, *args, **kwargs: None})
        for words, trainer in (
            ("a custom compute_loss", self.trainer(own)),
            ("compute_loss_func", self.trainer(compute_loss_func=lambda *args, **kwargs: None)),
            ("label_smoothing_factor=0.1", self.trainer(label_smoothing_factor=0.1)),
        ):
            self.refused(words, trainer)

    def test_preferences(self):
        self.refused("which the model does not compute", preference_trainer("dpo", self.directory, make_model()))

    def test_a_configuration_without_a_head(self):
        trainer = self.trainer()
        trainer.model.config.mtp_num_hidden_layers = 0
        self.refused("mtp_num_hidden_layers=1", trainer)
        self.assertTrue(type(trainer.model).__module__.startswith("transformers."))

    def test_adapters_in_the_head(self):
        model = patch_model(make_model())
        add_mtp(model)
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"))
        trainer = Trainer(adapted, build(self.directory).args, train_dataset=Samples())
        with self.assertRaisesRegex(ValueError, "exclude_modules"):
            configure_packing(trainer, mtp_loss_weight=0.1)

    def test_a_difference_is_an_error(self):
        """Undoing packing would leave the head out."""
        trainer = self.trainer()
        said(configure_packing, trainer, mtp_loss_weight=0.1)
        layer = trainer.model.model.layers[0]
        # It mixes the tokens of a row.
        layer.register_forward_hook(lambda module, args, output: output + output.mean(1, keepdim=True))
        self.assertRaisesRegex(ValueError, "no gradient between", trainer.train)
