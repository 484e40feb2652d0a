"""`batch_invariant=True` of a Trainer: on for the process, checked before the first step, and off again."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from common.blocks import mixture
from mixins.configure import ConfigureTestCase, said, train_configured
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS, Samples
from transformers import AutoModelForCausalLM

from transformers_packed import (
    PackedTrainer,
    PackedTrainingArguments,
    configure_packing,
    patch_model,
    use_float8,
)
from transformers_packed.models import float8
from transformers_packed.models.registry import has_our_classes
from transformers_packed.ops import implementations_used
from transformers_packed.ops.invariance import is_batch_invariant, set_batch_invariant
from transformers_packed.training.callbacks import verify
from transformers_packed.training.compare import DifferenceError


class BatchInvarianceTest(ConfigureTestCase):
    def setUp(self):
        super().setUp()
        self.addCleanup(set_batch_invariant, False)

    def test_it_stays_until_packing_is_configured_anew(self):
        trainer = self.trainer()
        line, _ = said(configure_packing, trainer, batch_invariant=True)
        self.assertRegex(line, "^Padding-free on: .*; documents have the same bits in every row\n$")
        self.assertTrue(is_batch_invariant())
        said(trainer.train)
        self.assertTrue(is_batch_invariant())
        said(configure_packing, trainer)
        self.assertFalse(is_batch_invariant())

    def test_the_mode_of_the_user_stays(self):
        set_batch_invariant(True)
        trainer = self.trainer()
        for packing, invariant in (("padding_free", True), ("padding_free", False), (False, False)):
            said(configure_packing, trainer, packing, batch_invariant=invariant)
            self.assertTrue(is_batch_invariant())

    def test_arguments_of_a_trainer(self):
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
        options = {"max_steps": 1, "use_cpu": True, "report_to": "none", "packing": True, "max_length": 128}
        args = PackedTrainingArguments(self.directory, batch_invariant=True, **options)
        line, trainer = said(PackedTrainer, model, args, train_dataset=Samples(12))
        self.assertIn("; documents have the same bits in every row", line)
        self.assertTrue(is_batch_invariant())
        self.assertIn("Verified packing", said(trainer.train)[0])

    @parameterized.expand(
        [
            ({"packing": "off"}, "packing other than False with batch_invariant"),
            ({"sequence_parallel_size": 2}, "sequence_parallel_size=1 with batch_invariant"),
        ]
    )
    def test_what_it_excludes(self, options, message):
        with self.assertRaisesRegex(ValueError, message):
            configure_packing(self.trainer(), batch_invariant=True, **options)
        self.assertFalse(is_batch_invariant())

    @parameterized.expand([("option",), ("model",)])
    def test_float8(self, marked_by):
        """The linear layers of this model have no scales of blocks."""
        trainer = self.trainer()
        names = [name for name, x in trainer.model.named_modules() if name.endswith("mlp.up_proj")]
        if marked_by == "model":
            use_float8(patch_model(trainer.model), lambda _, name: name == names[0])
        chosen = mock.patch.object(float8, "_by_default", lambda *_: {names[0]: 1.0})
        message = f"got {names[0]}, which is not batch invariant: PyTorch chooses .*instead of float8=True"
        with chosen, self.assertRaisesRegex(ValueError, message):
            configure_packing(trainer, batch_invariant=True, float8=marked_by == "option")
        self.assertFalse(is_batch_invariant())
        self.assertEqual(has_our_classes(trainer.model), marked_by == "model")

    def test_float8_of_weights_in_blocks(self):
        trainer = self.trainer(mixture()[0])
        line, _ = said(configure_packing, trainer, batch_invariant=True, float8=True)
        self.assertIn("; layers train in float8; documents have the same bits in every row", line)
        said(trainer.train)
        self.assertIn("experts_float8", implementations_used())

    def test_compiled_layers(self):
        trainer = self.trainer()
        trainer.args.torch_compile = True
        with self.assertRaisesRegex(ValueError, "^expected batch_invariant=True without torch_compile"):
            configure_packing(trainer, batch_invariant=True)

    def test_packing_that_is_not_possible(self):
        """In auto mode too: padded batches of the stock class would have other bits."""
        trainer = self.trainer(compute_loss_func=lambda *args, **kwargs: None)
        with self.assertRaisesRegex(ValueError, "^expected .*loss"):
            configure_packing(trainer, batch_invariant=True)
        self.assertFalse(is_batch_invariant())
        self.assertFalse(has_our_classes(trainer.model))

    def test_a_difference_before_the_first_step(self):
        """Bits are compared on a GPU, as on which this CPU passes itself off here."""
        trainer = self.trainer()
        said(configure_packing, trainer, batch_invariant=True)
        callback = next(x for x in trainer.callback_handler.callbacks if isinstance(x, verify.VerifyCallback))
        batch, place = {"input_ids": torch.ones(1, 32, dtype=torch.long)}, [torch.arange(32)]
        looked = callback._bits(trainer.model, lambda: trainer.model(**batch), batch, place)
        self.assertEqual(looked, "")
        gpu = SimpleNamespace(args=SimpleNamespace(device=SimpleNamespace(type="cuda"), world_size=1))
        gpu.compute_loss_context_manager = contextlib.nullcontext
        callback.trainer = gpu
        looked = callback._bits(trainer.model, lambda: trainer.model(**batch), batch, place)
        self.assertEqual(looked, "; documents have the bits that they have alone")
        with (
            mock.patch.object(verify, "changed_by_others", return_value=3e-3),
            self.assertRaisesRegex(
                DifferenceError, r"^expected the bits of each document alone.*a difference of 3\.0e-03"
            ),
        ):
            callback._bits(trainer.model, None, batch, place)

    def test_a_difference_is_an_error_in_auto_mode(self):
        trainer = self.trainer()
        with (
            mock.patch.object(verify.VerifyCallback, "_bits", side_effect=DifferenceError("expected the bits")),
            self.assertRaisesRegex(ValueError, "expected the bits"),
        ):
            train_configured(trainer, batch_invariant=True)


if __name__ == "__main__":
    import unittest

    unittest.main()
