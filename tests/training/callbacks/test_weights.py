"""The warning for trained weights of 16 bits that an optimizer updates in place."""

import unittest
from importlib import import_module
from importlib.util import find_spec
from unittest import mock

import torch
from accelerate import Accelerator
from common.records import make_tokenizer
from common.trl_trainers import preference_trainer
from mixins.configure import ConfigureTestCase
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from scripts.trainer_arms import CONFIGS, collate_padded
from transformers import Adafactor, AutoModelForCausalLM

from transformers_packed import configure_packing
from transformers_packed.training.callbacks import weights
from transformers_packed.training.callbacks.weights import rounded_apart, rounded_away


ADAMW = torch.optim.AdamW


class OfAnotherPackage(torch.optim.AdamW):
    """May keep a copy, or the bits that a weight has no room for."""


def linear(dtype=torch.bfloat16) -> torch.nn.Linear:
    return torch.nn.Linear(4, 3, dtype=dtype)


def line(model, optimizer=ADAMW, **options) -> str | None:
    return rounded_away(model, optimizer([x for x in model.parameters() if x.requires_grad], **options))


def build_model(dtype=torch.bfloat16):
    return AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"](), dtype=dtype)


def warnings_of(trainer) -> list[str]:
    with mock.patch.object(weights.logger, "warning") as warning:
        trainer.train()
    return [call.args[0] for call in warning.call_args_list]


class RoundedAwayTest(unittest.TestCase):
    @parameterized.expand([("AdamW", ADAMW), ("SGD", torch.optim.SGD), ("Adafactor", Adafactor)])
    def test_optimizers_that_update_in_place(self, name, optimizer):
        said = line(linear(), optimizer)
        self.assertIn(f"15 trained weights are in bfloat16, and {name} keeps no float32 copy", said)
        self.assertIn(
            'below 1/512 of a weight is rounded away. Load the model with dtype="float32". With bf16=True', said
        )

    def test_the_fraction_is_that_of_the_dtype(self):
        for dtype, lost in ((torch.bfloat16, 512), (torch.float16, 4096)):
            with self.subTest(dtype=dtype):
                self.assertIn(f"1/{lost} of", line(linear(dtype)))
                weight = 1 + torch.arange(1024, dtype=torch.float64) / 1024
                weight = weight.to(dtype)
                smaller = (weight.double() * (1 - 1 / (lost + 1))).to(dtype)
                self.assertTrue(smaller.equal(weight))
                self.assertFalse((weight.double() * (1 - 1 / (lost - 1))).to(dtype).equal(weight))

    def test_optimizers_that_may_keep_the_bits_or_a_copy(self):
        self.assertIsNone(line(linear(), OfAnotherPackage))
        self.assertIsNone(rounded_away(linear(), ADAMW(linear(torch.float32).parameters())))

    def test_an_optimizer_inside_that_of_accelerate(self):
        optimizer = Accelerator(cpu=True).prepare_optimizer(ADAMW((model := linear()).parameters()))
        self.assertIn("and AdamW keeps", rounded_away(model, optimizer))

    @parameterized.expand([x for x in ("torchao", "bitsandbytes") if find_spec(x)])
    def test_optimizers_of_other_packages(self, package):
        cls = import_module(f"{package}.optim").AdamW8bit
        self.assertIn("AdamW8bit", line(linear(), cls))
        if package == "torchao":
            self.assertIsNone(line(linear(), cls, bf16_stochastic_round=True))

    def test_float32_and_frozen_weights(self):
        self.assertIsNone(line(linear(torch.float32)))
        model = torch.nn.Sequential(linear().requires_grad_(False), linear(torch.float32))
        self.assertIsNone(line(model))

    def test_adapters(self):
        lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
        model = get_peft_model(build_model(), lora)
        self.assertIsNone(line(model))
        # As TRL trains QLoRA.
        self.assertIsNone(line(model.to(torch.bfloat16)))
        lora.modules_to_save = ["lm_head"]
        model = get_peft_model(build_model(), lora)
        numbers = model.get_base_model().lm_head.modules_to_save["default"].weight.numel()
        self.assertIn(f"{numbers:,} trained weights are in bfloat16", line(model))


class RoundedApartTest(unittest.TestCase):
    @unittest.skipUnless(find_spec("torchao"), "needs torchao")
    def test_processes_that_round_at_random(self):
        from torchao.optim import AdamW8bit

        at_random = AdamW8bit(linear().parameters(), bf16_stochastic_round=True)
        said = rounded_apart(Accelerator(cpu=True).prepare_optimizer(at_random), 2)
        self.assertIn("AdamW8bit rounds updates at random in each process. The weights of the 2 processes stay", said)
        self.assertIsNone(rounded_apart(at_random, 1))
        self.assertIsNone(rounded_apart(AdamW8bit(linear().parameters()), 2))
        self.assertIsNone(rounded_apart(AdamW8bit(linear(torch.float32).parameters(), bf16_stochastic_round=True), 2))
        self.assertIsNone(rounded_apart(ADAMW(linear().parameters()), 2))


class WeightsCallbackTest(ConfigureTestCase):
    @parameterized.expand([("bfloat16", torch.bfloat16, 1), ("float32", torch.float32, 0)])
    def test_training_says_so_once(self, _, dtype, lines):
        # A second call replaces the callback of the first.
        trainer = configure_packing(configure_packing(self.trainer(build_model(dtype))), "padding_free")
        self.assertEqual(len(warnings_of(trainer)), lines)

    def test_an_unchanged_trainer_says_nothing(self):
        trainer = self.trainer(build_model(), collator=collate_padded)
        self.assertEqual(warnings_of(configure_packing(trainer, False)), [])

    def test_batches_of_preferences(self):
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"](), dtype=torch.bfloat16)
        model.resize_token_embeddings(len(make_tokenizer()))
        trainer = preference_trainer("dpo", self.directory, model, max_steps=1)
        (said,) = warnings_of(configure_packing(configure_packing(trainer)))
        self.assertIn("SGD keeps no float32 copy", said)
