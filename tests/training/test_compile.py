"""`torch_compile=True` in the arguments of a Trainer: what trains is as without it, and compiles nothing for a row."""

from unittest import mock

import torch
from common.trl_trainers import preference_trainer
from mixins.configure import ConfigureTestCase, said
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS, Samples
from transformers import AutoModelForCausalLM, TrainerCallback, set_seed

from transformers_packed import PackedTrainer, PackedTrainingArguments, configure_packing
from transformers_packed.audit.tiny import tiny_config
from transformers_packed.models import float8


class Frames(TrainerCallback):
    """Lists how many functions dynamo has looked at, at the end of each step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        self.seen.append(torch._dynamo.utils.counters["frames"]["total"])


class CompileTest(ConfigureTestCase):
    def setUp(self):
        super().setUp()
        torch._dynamo.reset()
        self.addCleanup(torch._dynamo.reset)

    def train(self, config=None, **options):
        set_seed(0)
        torch._dynamo.utils.counters.clear()
        defaults = {"per_device_train_batch_size": 3, "max_steps": 6, "logging_steps": 1, "save_strategy": "no"}
        defaults |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "eval_strategy": "steps"}
        args = PackedTrainingArguments(self.directory, **defaults | {"eval_steps": 3} | options)
        model, frames = AutoModelForCausalLM.from_config(config or CONFIGS["qwen3_5"]()), Frames()
        samples = {"train_dataset": Samples(24), "eval_dataset": Samples(8)}
        _, trainer = said(PackedTrainer, model, args, callbacks=[frames], **samples)
        printed, _ = said(trainer.train)
        log = [(x.get("loss"), x.get("grad_norm"), x.get("eval_loss")) for x in trainer.state.log_history]
        return trainer, log, frames.seen, printed

    @parameterized.expand(
        [
            ("rows", {}),
            ("packed rows", {"packing": True, "max_length": 128}),
            ("checkpoints", {"gradient_checkpointing": True, "bf16": True}),
            ("two losses", {"config": CONFIGS["qwen3_5"](mtp_num_hidden_layers=1), "mtp_loss_weight": 0.1}),
            ("family", {"config": tiny_config("lfm2")}),
        ]
    )
    def test_packed(self, _, options):
        """The check before the first step sees what it sees without a compiler."""
        _, expected, none, _ = self.train(**options)
        self.assertEqual(set(none), {0})
        trainer, log, frames, printed = self.train(torch_compile=True, torch_compile_backend="aot_eager", **options)
        self.assertIsInstance(trainer.model_wrapped, torch._dynamo.OptimizedModule)
        self.assertEqual(log, expected)
        self.assertIn("Verified packing", printed)
        # Rows of the check and of the first steps. Then nothing is compiled.
        self.assertGreater(frames[0], 0)
        self.assertEqual(len(set(frames[2:])), 1, frames)

    def test_float8(self):
        """Layers train in it, as without a compiler. A compiled graph would leave it out."""
        self.enterContext(mock.patch.object(float8, "_LEAST_WORK", 0))
        config, compiled = tiny_config("qwen3_5_text"), {"torch_compile": True, "torch_compile_backend": "eager"}
        _, log, _, _ = self.train(config, float8=True)
        self.assertEqual(self.train(config, float8=True, **compiled)[1], log)
        self.assertNotEqual(self.train(config)[1], log)

    def test_padded_batches(self):
        """DPO packs its batches, of the model that it trains and of the reference."""
        logs = []
        for compiled in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
            set_seed(0)
            trainer = preference_trainer("dpo", self.directory, max_steps=2, logging_steps=1, **compiled)
            said(configure_packing, trainer)
            printed, _ = said(trainer.train)
            self.assertIn("Verified packing", printed)
            logs.append([(x.get("loss"), x.get("grad_norm")) for x in trainer.state.log_history])
        self.assertEqual(*logs)
