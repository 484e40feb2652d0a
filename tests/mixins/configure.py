"""Trainers for tests of `configure_packing`."""

import contextlib
import io
import tempfile
import unittest

import torch
from scripts.configured_arms import build
from scripts.trainer_arms import CONFIGS, Samples
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from transformers_packed import configure_packing
from transformers_packed.training.apply import Applied
from transformers_packed.training.callbacks.resume import PackingPlanCallback


UPDATE_BAR = 3e-6


def said(call, *args, **kwargs) -> tuple[str, object]:
    """Return the printed text and the returned value."""
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        result = call(*args, **kwargs)
    return stdout.getvalue(), result


def train_configured(trainer: Trainer, *args, **options) -> str:
    """Configure packing and train. Return what the training prints."""
    said(configure_packing, trainer, *args, **options)
    return said(trainer.train)[0]


def callbacks_of(trainer: Trainer) -> list:
    """The callbacks, without those of every set-up: what was applied, and who refuses to resume with other rows."""
    return [x for x in trainer.callback_handler.callbacks if type(x) not in (Applied, PackingPlanCallback)]


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, num_key_value_heads=2, head_dim=16, **sizes))


class ConfigureTestCase(unittest.TestCase):
    def setUp(self):
        self.directory = self.enterContext(tempfile.TemporaryDirectory())

    def build(self, kind="trainer", *args, **kwargs) -> Trainer:
        return build(kind, *args, directory=self.directory, **kwargs)

    def trainer(self, model=None, dataset=None, collator=None, args=None, **kwargs) -> Trainer:
        """Build a Trainer that supports packing, except for the given changes."""
        options = {"per_device_train_batch_size": 3, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
        options |= {"max_steps": 1, "save_strategy": "no"}
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]()) if model is None else model
        dataset = Samples(6) if dataset is None else dataset
        args = TrainingArguments(self.directory, **options | (args or {}))
        return Trainer(model, args, train_dataset=dataset, data_collator=collator, **kwargs)
