"""Gradient release: the same weights as without it, what excludes it, and no step before the first one."""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import torch
from common import optimizers
from mixins.configure import ConfigureTestCase, said
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed

from transformers_packed import GradientReleaseCallback, configure_packing
from transformers_packed.models.versions import checkpointing_argument
from transformers_packed.training.callbacks.gradient_release import end_releases
from transformers_packed.training.checks import excludes_graphs
from transformers_packed.training.optimizers import arguments_for, class_and_kwargs


RATE = 1e-2
# What flashoptim computes without a GPU.
PLAIN = {"quantize": False, "master_weight_bits": None, "fused": False}
PACKAGES = {"stand-in": optimizers.flashoptim()}
if find_spec("flashoptim"):
    PACKAGES["flashoptim"] = import_module("flashoptim")


class Noted(TrainerCallback):
    """Keeps the gradients that are there before each step."""

    def __init__(self):
        self.left = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.left.append(sum(x.grad is not None for x in model.parameters()))


class Raises(TrainerCallback):
    """As when memory runs out in the first step."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        raise MemoryError


class GradientReleaseTest(ConfigureTestCase):
    def setUp(self):
        super().setUp()
        self.use("stand-in")

    def use(self, package):
        self.enterContext(mock.patch.dict(sys.modules, {"flashoptim": PACKAGES[package]}))
        self.options = PLAIN if package == "flashoptim" else {}

    def make(self, releases=True, family="qwen3_5", tied=True, early=False, **args):
        set_seed(0)
        config = CONFIGS[family]()
        config.tie_word_embeddings = tied
        model = AutoModelForCausalLM.from_config(config)
        args = {"max_steps": 2, "learning_rate": RATE, **arguments_for("flash_adamw_release"), **args}
        rates = SimpleNamespace(learning_rate=RATE, adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-8)
        cls, options = class_and_kwargs("flash_adamw", rates)
        given = cls, options | self.options
        trainer = self.trainer(model, args=args, optimizer_cls_and_kwargs=given, callbacks=[Noted()])
        said(configure_packing, trainer)
        if releases:
            # Before or after the check.
            callbacks = trainer.callback_handler.callbacks
            callbacks.insert(0 if early else len(callbacks), GradientReleaseCallback(trainer))
        return trainer

    @parameterized.expand(
        [
            (package, family, tied, checkpointing)
            for package in PACKAGES
            for family, tied, checkpointing in (
                ("qwen3_5", True, True),
                ("qwen3_next_moe", False, False),
            )
        ]
    )
    def test_the_same_weights(self, package, family, tied, checkpointing):
        self.use(package)
        trained = []
        for releases in (False, True):
            trainer = self.make(releases, family, tied, **{checkpointing_argument(): checkpointing})
            said(trainer.train)
            (noted,) = [x for x in trainer.callback_handler.callbacks if isinstance(x, Noted)]
            number = sum(1 for _ in trainer.model.parameters())
            self.assertEqual(noted.left, [0 if releases else number] * 2)
            trained.append(trainer.model)
        for name, weight in trained[0].state_dict().items():
            self.assertTrue(torch.equal(weight, trained[1].state_dict()[name]), name)

    @parameterized.expand([(False,), (True,)])
    def test_nothing_steps_before_the_first_step(self, early):
        """The check before the first step has backwards, whose gradients step no weight."""
        trainer = self.make(early=early)
        before = [x.detach().clone() for x in trainer.model.parameters()]
        begun = []

        class Begun(TrainerCallback):
            def on_step_begin(self, args, state, control, model=None, **kwargs):
                begun.append(all(map(torch.equal, before, model.parameters())))

        trainer.add_callback(Begun())
        output, _ = said(trainer.train)
        self.assertIn("Verified packing on 3 documents", output)
        self.assertEqual(begun, [True, False])

    def test_no_hook_stays_after_training(self):
        trainer = self.make()
        for _ in range(2):
            said(trainer.train)
            self.assertFalse(any(x._post_accumulate_grad_hooks for x in trainer.model.parameters()))

    def run_that_raised(self, package="stand-in", early=False):
        """Return the Trainer of a run that raised in the first step, with its hooks on the model."""
        self.use(package)
        trainer = self.make(early=early)
        trainer.add_callback(Raises())
        with self.assertRaises(MemoryError):
            said(trainer.train)
        trainer.remove_callback(Raises)
        self.assertTrue(all(x._post_accumulate_grad_hooks for x in trainer.model.parameters()))
        return trainer

    @parameterized.expand(PACKAGES)
    def test_a_run_that_raised_updates_nothing_in_the_next_one(self, package):
        model = self.run_that_raised(package).model
        before = [x.detach().clone() for x in model.parameters()]
        given = torch.optim.SGD, {"lr": 0.0}
        said(said(configure_packing, self.trainer(model, optimizer_cls_and_kwargs=given))[1].train)
        for old, new in zip(before, model.parameters(), strict=True):
            self.assertFalse(new._post_accumulate_grad_hooks)
            self.assertTrue(torch.equal(old, new))

    @parameterized.expand([(package, early) for package in PACKAGES for early in (False, True)])
    def test_a_run_that_raised_may_go_on(self, package, early):
        """Its hooks are replaced, so that each weight is updated once a step."""
        trainer, counts = self.run_that_raised(package, early), []

        class Counted(TrainerCallback):
            def on_step_begin(self, args, state, control, model=None, **kwargs):
                counts.extend(len(x._post_accumulate_grad_hooks) for x in model.parameters())

        trainer.add_callback(Counted())
        said(trainer.train)
        self.assertEqual(set(counts), {1})
        self.assertFalse(any(x._post_accumulate_grad_hooks for x in trainer.model.parameters()))

    def test_a_part_of_the_model_ends_the_run_too(self):
        model = self.run_that_raised().model
        end_releases(model.model.layers)
        self.assertFalse(any(x._post_accumulate_grad_hooks for x in model.parameters()))

    @parameterized.expand(
        [
            ({"max_grad_norm": 1.0}, "max_grad_norm=0 for gradient release, got 1.0. Clipping needs"),
            ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=1 for gradient release, got 2."),
        ]
    )
    def test_what_needs_all_gradients(self, args, message):
        with self.assertRaisesRegex(ValueError, message):
            said(self.make(**args).train)

    def test_other_optimizers_and_processes_and_graphs(self):
        trainer = self.make()
        callback, own = trainer.callback_handler.callbacks[-1], optimizers.FlashAdamW(trainer.model.parameters())
        callback._check(own)
        with self.assertRaisesRegex(ValueError, "an optimizer of flashoptim for gradient release, got AdamW"):
            callback._check(torch.optim.AdamW(trainer.model.parameters()))
        with (
            mock.patch.object(type(trainer.args), "world_size", 2),
            self.assertRaisesRegex(ValueError, "one process, or FSDP2 for gradient release, got 2 processes"),
        ):
            callback._check(own)
        with (
            mock.patch.object(trainer.accelerator, "scaler", object()),
            self.assertRaisesRegex(ValueError, "bf16=True for gradient release"),
        ):
            callback._check(own)
        trainer.model.model.layer_graphs = object()
        with self.assertRaisesRegex(ValueError, "layers without CUDA graphs"):
            callback._check(own)

    def test_no_graph_computes_all_gradients(self):
        self.assertIsNone(excludes_graphs(self.make(False)))
        self.assertIn("gradient release", excludes_graphs(self.make()))
