"""Run the program that mypy checks."""

import contextlib
import io
import os
import tempfile
import unittest

import torch
from common.families import tiny_config
from common.processes import EXPERTS
from scripts.trainer_arms import TINY, Samples
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Trainer, TrainingArguments
from typed import public_api

import transformers_packed
from transformers_packed import SequenceBoundaries, patch_model


def model() -> Qwen3_5ForCausalLM:
    return Qwen3_5ForCausalLM(tiny_config("qwen3_5_text"))


class PublicApiTest(unittest.TestCase):
    def setUp(self):
        self.enterContext(contextlib.chdir(self.enterContext(tempfile.TemporaryDirectory())))
        self.enterContext(contextlib.redirect_stdout(io.StringIO()))
        self.samples = [{"input_ids": [1] * n} for n in (5, 3, 8)]

    def test_models(self):
        public_api.models(model())
        mixture = patch_model(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**TINY, **EXPERTS)))
        public_api.mixtures(mixture.requires_grad_(False))

    def test_rows(self):
        self.assertEqual(len(list(public_api.rows(self.samples, patch_model(model())))), 3)

    def test_losses(self):
        logits, labels = torch.randn(1, 5, 2), torch.randint(2, (1, 5))
        self.assertTrue(public_api.losses(logits, labels, SequenceBoundaries.from_lengths([2, 3])).isfinite())

    def test_training(self):
        documents = [{"input_ids": [1] * n, "labels": [1] * n} for n in range(20, 60)]
        public_api.training(model(), documents)

    def test_refused_values(self):
        trainer = Trainer(model(), TrainingArguments("out", use_cpu=True), train_dataset=Samples(6))
        for number, call in enumerate(public_api.refused(trainer, self.samples, torch.zeros(1, 5))):
            with self.subTest(number), self.assertRaisesRegex(ValueError, "^expected"):
                call()

    def test_submodules(self):
        """All of them are attributes without an import of their own."""
        # The import of `auto` registers our classes.
        self.addCleanup(transformers_packed.unregister)
        folder = os.path.dirname(transformers_packed.__file__)
        names = {name.removesuffix(".py") for name in os.listdir(folder) if not name.startswith(("_", "py.typed"))}
        self.assertEqual({name for name in names if hasattr(transformers_packed, name)}, names)
