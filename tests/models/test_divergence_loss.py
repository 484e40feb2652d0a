"""Distillation as a loss of a model: in a row as in its documents, beside the model's own losses and alone, in Trainers."""

import contextlib
import io
import tempfile
import unittest

import torch
from common.trl_trainers import HAS_TRL, sft_trainer
from mixins.model import gradients, total_relative_error
from parameterized import parameterized
from scripts.mtp_run import BATCH, build
from scripts.trainer_arms import OPTIONS, TINY, Samples, collate_padded, updates_and_log
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, set_seed

from transformers_packed import DataCollatorWithFlattening, configure_packing, patch_model
from transformers_packed.models.losses import OWN, own_with
from transformers_packed.models.losses.loss import DivergenceLoss


if HAS_TRL:
    from scripts.configured_arms import tokenizer


SAMPLES = Samples().rows[:5]


def make_model(seed=0, **sizes):
    set_seed(seed)
    model = patch_model(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY | sizes)))
    with torch.no_grad():
        # So that teacher and student differ by more than rounding.
        model.lm_head.weight.normal_()
    return model.train()


def make_loss(**options):
    return DivergenceLoss(make_model(1, hidden_size=24).eval(), **{"weight": 0.7, "beta": 0.3, **options})


def packed(samples):
    return DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore")(samples)


def alone(model, samples):
    """The loss of each document alone, summed as a row is."""
    number = sum(x != -100 for sample in samples for x in sample["labels"][1:])
    items = {"num_items_in_batch": number, "num_divergence_items_in_batch": number}
    batches = [{name: torch.tensor([x]) for name, x in sample.items()} for sample in samples]
    return sum(model(**batch, **items).loss for batch in batches)


class DivergenceLossTest(unittest.TestCase):
    @parameterized.expand([("row", packed), ("padded", collate_padded), ("logits", packed, False)])
    def test_a_batch_equals_its_documents(self, _, collate, skip_logits=None):
        model, samples = make_model(), SAMPLES
        model.losses = (*own_with(0.4), make_loss())
        batch = collate(samples)
        loss, expected = model(**batch, skip_logits=skip_logits).loss, alone(model, samples)
        got, want = gradients(model, loss), gradients(model, expected)
        self.assertLess(abs(loss.item() - expected.item()), 1e-5)
        self.assertLess(total_relative_error(got, want), 1e-5)
        # The sum of two losses, of which the second one reads where targets are, not what they are.
        model.losses, second = OWN, model.losses[-1:]
        own = model(**batch).loss
        model.losses = second
        self.assertLess(abs(0.4 * own + model(**batch).loss - loss), 1e-5)
        changed = batch | {"labels": batch["labels"].where(batch["labels"] == -100, 3)}
        self.assertEqual(model(**changed).loss, model(**batch).loss)

    def test_a_student_that_is_its_teacher(self):
        model, samples = make_model(), SAMPLES
        model.losses = (DivergenceLoss(make_model().eval()),)
        loss = model(**packed(samples)).loss
        self.assertLess(abs(loss), 1e-6)
        self.assertLess(max(x.abs().max() for x in gradients(model, loss).values()), 1e-6)
        # In evaluation, the loss of a model is its own.
        self.assertGreater(model.eval()(**packed(samples)).loss, 1)

    def test_what_is_refused(self):
        model = make_model()
        ids = torch.arange(1, 9)[None]
        model.losses = (DivergenceLoss(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY)).eval()),)
        self.assertRaisesRegex(ValueError, "patch_model\\(teacher\\)", model, input_ids=ids, labels=ids)
        model.losses = (DivergenceLoss(make_model(1)),)
        self.assertRaisesRegex(ValueError, "teacher.eval\\(\\)", model, input_ids=ids, labels=ids)
        model.losses = (make_loss(),)
        embeddings = model.get_input_embeddings()(ids)
        self.assertRaisesRegex(ValueError, "tokens without images", model, inputs_embeds=embeddings, labels=ids)
        model.lm_head.register_forward_hook(lambda *args: None)
        self.assertRaisesRegex(ValueError, "plain linear heads", model, input_ids=ids, labels=ids)


class TrainerTest(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def trained(self, losses):
        model = make_model()
        model.losses = losses
        with contextlib.redirect_stdout(io.StringIO()) as said:
            trainer = build(self.folder, model=model, mtp_loss_weight=0.0, max_steps=1)
            updates, log = updates_and_log(trainer)
        return updates, log, said.getvalue()

    def test_a_step(self):
        """The mean over the targets of all rows of a step, the log, and the check before the first step."""
        samples, model = Samples().rows[: 2 * BATCH], make_model()
        model.losses = (*OWN, make_loss())
        loss = alone(model, samples)
        loss.backward()
        updates, log, said = self.trained((*OWN, make_loss()))
        rate = OPTIONS["learning_rate"]
        expected = {name: -rate * x.grad for name, x in model.named_parameters()}
        self.assertLess(total_relative_error(updates, expected), 1e-5)
        self.assertAlmostEqual(log[0]["loss"], loss.item(), places=4)
        model.losses = model.losses[-1:]
        self.assertAlmostEqual(0.7 * log[0]["divergence"], alone(model, samples).item(), places=3)
        self.assertIn("trains with 0.7 x the loss of the divergence from a teacher", said)
        self.assertIn("Verified packing", said)

    @unittest.skipUnless(HAS_TRL, "needs trl and datasets")
    def test_sft_trainer(self):
        """Beside the scores of TRL, from which it computes its own loss."""
        expected, log, _ = self.trained((*OWN, make_loss()))
        model = make_model()
        model.losses = (*OWN, make_loss())
        trainer = sft_trainer(
            self.folder,
            model,
            Samples().rows,
            tokenizer(),
            max_steps=1,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=2,
            train_sampling_strategy="sequential",
        )
        with contextlib.redirect_stdout(io.StringIO()):
            configure_packing(trainer, "padding_free", verify=False)
            updates, found = updates_and_log(trainer)
        self.assertLess(total_relative_error(updates, expected), 1e-5)
        for name in ("loss", "divergence"):
            self.assertAlmostEqual(found[0][name], log[0][name], places=3)
