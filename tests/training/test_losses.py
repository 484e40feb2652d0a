import io
import tempfile
import unittest
from contextlib import redirect_stdout
from unittest import mock

import torch
import torch.nn.functional as F
from common.fused import LargestTensor, assert_near
from common.processes import run_processes
from mixins.configure import ConfigureTestCase
from mixins.model import relative_error, total_relative_error
from parameterized import parameterized
from scripts.loss_arms import build_sample_trainer
from scripts.trainer_arms import CONFIGS, Samples, build_trainer, run_in_two_processes, updates_and_losses
from transformers import AutoModelForCausalLM, Trainer, set_seed

from transformers_packed import (
    PackedTrainer,
    PackedTrainingArguments,
    SequenceBoundaries,
    patch_model,
    per_document_logps,
    per_document_loss,
    set_loss_normalization,
)


def evaluate_in_processes(batch):
    """The loss of an evaluation of sample means in this process's group."""
    set_seed(0)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        options = {"per_device_eval_batch_size": batch, "use_cpu": True, "report_to": "none", "ddp_backend": "gloo"}
        model = patch_model(AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]()))
        samples = Samples(10)
        args = PackedTrainingArguments(folder, **options)
        trainer = PackedTrainer(model, args, train_dataset=samples, eval_dataset=samples)
        set_loss_normalization(trainer, "sample")
        return trainer.evaluate()["eval_loss"]


VOCAB_SIZE, HIDDEN_SIZE = 61, 16
# The documents: a completion, a prompt alone, one token, targets in the middle, tail padding.
LENGTHS = (9, 4, 1, 30, 7)
TARGETS = (range(3, 9), (), range(1), (0, 5, 6, 7, 20, 29), ())
COUNTS = [6, 0, 0, 5, 0]


def packed_row(dtype=torch.float32):
    """Create hidden states `[1, T, hidden]`, the weight of a head, and labels `[1, T]`."""
    generator = torch.Generator().manual_seed(0)
    hidden_states = torch.randn(1, sum(LENGTHS), HIDDEN_SIZE, generator=generator).to(dtype)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator).to(dtype)
    tokens = torch.randint(0, VOCAB_SIZE, (sum(LENGTHS),), generator=generator)
    labels = [torch.full((n,), -100) for n in LENGTHS]
    for document, ids, targets in zip(labels, tokens.split(LENGTHS), TARGETS, strict=True):
        document[list(targets)] = ids[list(targets)]
    return hidden_states.requires_grad_(), weight.requires_grad_(), torch.cat(labels)[None]


def sums_alone(logits, labels):
    """Return the loss of each document alone, summed over its targets, in the dtype of `logits`."""
    sums = []
    for document, targets in zip(logits[0].split(LENGTHS), labels[0].split(LENGTHS), strict=True):
        sums.append(F.cross_entropy(document[:-1], targets[1:], reduction="sum"))
    return torch.stack(sums)


class PerDocumentTest(unittest.TestCase):
    boundaries = SequenceBoundaries.from_lengths(LENGTHS)

    @parameterized.expand([(form, size) for form in ("logits", "head") for size in (7, 512)])
    def test_equals_documents_alone(self, form, chunk_size):
        """Compare values and gradients, with different weights per document."""
        hidden_states, weight, labels = packed_row()
        weights = torch.tensor([1.0, 5.0, 7.0, -2.0, 3.0])
        want = sums_alone(hidden_states @ weight.T, labels)
        expected = torch.autograd.grad((want * weights).sum(), (hidden_states, weight))
        for normalization in ("sum", "mean"):
            counts = torch.tensor(COUNTS) if normalization == "mean" else torch.ones(5)
            if form == "head":
                given, arguments = hidden_states, {"head": lambda x: x @ weight.T}
            else:
                given, arguments = hidden_states @ weight.T, {}
            arguments |= {"normalization": normalization, "chunk_size": chunk_size}
            losses, got_counts = per_document_loss(given, labels, self.boundaries, **arguments)
            self.assertEqual(got_counts.tolist(), COUNTS)
            self.assertEqual(losses.shape, (5,))
            self.assertLess(relative_error(losses * counts, want), 1e-6)
            self.assertEqual([losses[i].item() for i in (1, 2, 4)], [0.0, 0.0, 0.0])
            actual = torch.autograd.grad((losses * counts * weights).sum(), (hidden_states, weight))
            assert_near(actual, expected, 1e-6)

    def test_logps(self):
        hidden_states, weight, labels = packed_row()
        logits = hidden_states @ weight.T
        for boundaries in (self.boundaries, self.boundaries.cu_seqlens):
            logps = per_document_logps(logits, labels, boundaries)
            self.assertLess(relative_error(logps.sums, -sums_alone(logits, labels)), 1e-6)
            self.assertEqual(logps.token_counts.tolist(), COUNTS)
        # Each log-probability is at the position of its token.
        normalized, start = logits.log_softmax(-1)[0], 0
        expected = torch.zeros(sum(LENGTHS))
        for length, targets in zip(LENGTHS, TARGETS, strict=True):
            for t in targets:
                if t > 0:
                    expected[start + t] = normalized[start + t - 1, labels[0, start + t]]
            start += length
        self.assertEqual(logps.per_token.shape, labels.shape)
        self.assertLess(relative_error(logps.per_token[0], expected), 1e-6)
        self.assertTrue(torch.equal(logps.per_token[0] != 0, expected != 0))

    def test_no_target_at_all(self):
        hidden_states, weight, labels = packed_row()
        for arguments in ({"head": lambda x: x @ weight.T}, {}):
            given = hidden_states if arguments else hidden_states @ weight.T
            losses, counts = per_document_loss(given, torch.full_like(labels, -100), self.boundaries, **arguments)
            self.assertEqual((losses.tolist(), counts.tolist()), ([0.0] * 5, [0] * 5))
            losses.sum().backward()
            self.assertEqual(hidden_states.grad.abs().max(), 0)

    @parameterized.expand([(torch.bfloat16,), (torch.float64,)])
    def test_dtypes(self, dtype):
        """Sums are at least float32, and equal those of the same logits in a wider dtype."""
        hidden_states, weight, labels = packed_row(dtype)
        logits = (hidden_states @ weight.T).detach().requires_grad_()
        wide = torch.promote_types(dtype, torch.float32)
        losses, _ = per_document_loss(logits, labels, self.boundaries, normalization="sum")
        self.assertEqual(losses.dtype, wide)
        self.assertLess(relative_error(losses, sums_alone(logits.to(wide), labels)), 1e-6)
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        self.assertEqual(gradient.dtype, dtype)

    @parameterized.expand([("logits",), ("head",)])
    def test_no_float32_copy_of_the_logits(self, form):
        hidden_states, weight, labels = packed_row(torch.bfloat16)
        given, arguments = hidden_states, {"head": lambda x: x @ weight.T}
        if form == "logits":
            given, arguments = hidden_states @ weight.T, {}
        largest, kept = {}, []

        def keep(x):
            kept.append((x.dtype, x.shape))
            return x

        for chunk_size in (5, 512):
            with LargestTensor(torch.float32) as seen, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                losses, _ = per_document_loss(given, labels, self.boundaries, chunk_size=chunk_size, **arguments)
                losses.sum().backward(retain_graph=True)
            largest[chunk_size] = seen.elements
        self.assertEqual(largest[5], 5 * VOCAB_SIZE)
        self.assertGreater(largest[512], 5 * VOCAB_SIZE)
        # No chunks of it are kept for backward either.
        self.assertTrue(kept)
        self.assertFalse([shape for dtype, shape in kept if dtype == torch.float32 and VOCAB_SIZE in shape])

    def test_bad_input(self):
        hidden_states, weight, labels = packed_row()
        logits = hidden_states @ weight.T
        for message, arguments in (
            ("expected logits", (logits[0], labels, self.boundaries)),
            ("expected logits", (logits, labels[:, 1:], self.boundaries)),
            ("expected logits", (logits, labels.float(), self.boundaries)),
            ("boundaries of the row's 51 tokens", (logits, labels, SequenceBoundaries.from_lengths([51, 1]))),
            ("ends at the row's 51 tokens", (logits, labels, torch.tensor([0, 50]))),
        ):
            with self.assertRaisesRegex(ValueError, message):
                per_document_loss(*arguments)
        with self.assertRaisesRegex(ValueError, "chunk_size of at least 1"):
            per_document_logps(logits, labels, self.boundaries, chunk_size=0)
        with self.assertRaisesRegex(ValueError, 'normalization "mean" or "sum", got \'token\''):
            per_document_loss(logits, labels, self.boundaries, normalization="token")


class HeadTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.head = torch.nn.Linear(8, 11).double()
        self.hidden = torch.randn(1, 9, 8, dtype=torch.float64, requires_grad=True)
        self.labels = torch.tensor([[1, 2, -100, 4, 5, 10, 7, 0, 9]])

    def run_head(self, head):
        sums, counts, per_token = per_document_logps(self.hidden, self.labels, torch.tensor([0, 4, 9]), head=head)
        leaves = self.hidden, *self.head.parameters()
        weights = torch.arange(1.0, 10.0, dtype=torch.float64)
        return [sums, counts, per_token, *torch.autograd.grad((per_token * weights).sum() + sums[0], leaves)]

    def test_plain_layer_equals_a_called_one(self):
        expected = self.run_head(lambda x: self.head(x))
        with mock.patch("transformers_packed.training.losses._called_logps", side_effect=AssertionError):
            found = self.run_head(self.head)
        assert_near(found, expected, 1e-12)

    def test_hooked_layer_is_called(self):
        plain = self.run_head(self.head)
        self.head.register_forward_hook(lambda module, inputs, output: output * 2)
        hooked = self.run_head(self.head)
        self.assertGreater(relative_error(hooked[0], plain[0]), 1e-2)
        torch.testing.assert_close(hooked, self.run_head(lambda x: self.head(x)), rtol=0, atol=0)


class LossNormalizationTest(ConfigureTestCase):
    def check_same_training(self, got, want, steps, bar=1e-6):
        self.assertEqual(len(want[1]), steps)
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=0)
        self.assertLess(total_relative_error(got[0], want[0]), bar)

    def test_sample_mean_of_packed_rows_equals_that_of_padded_batches(self):
        """Steps of SGD with accumulation over unequal rows. A different mean gives different parameters."""
        # Elsewhere: a mean over samples is needed, not over tokens.
        want = updates_and_losses(build_sample_trainer("padded", self.directory, max_steps=4))
        trainer = build_sample_trainer("packed", self.directory, max_steps=4)
        self.check_same_training(updates_and_losses(trainer), want, 4)
        self.assertEqual(type(trainer).__name__, "Trainer")
        set_loss_normalization(trainer, "token")
        self.assertIs(type(trainer), Trainer)
        self.assertIsNone(trainer.compute_loss_func)

    def test_padded_batches(self):
        """A row of a padded batch is a document, so our loss works there too."""
        want = updates_and_losses(build_sample_trainer("padded", self.directory, max_steps=3))
        trainer = build_sample_trainer("padded", self.directory, max_steps=3)
        trainer.__class__ = Trainer
        set_loss_normalization(trainer, "sample")
        self.check_same_training(updates_and_losses(trainer), want, 3)

    def test_evaluate(self):
        padded, packed = (build_sample_trainer(arm, self.directory) for arm in ("padded", "packed"))
        for trainer in (padded, packed):
            trainer.args.per_device_eval_batch_size = 7
        want, got = (trainer.evaluate()["eval_loss"] for trainer in (padded, packed))
        self.assertLess(abs(got - want) / want, 1e-5)
        # TRL's trainers do not count targets in evaluation.
        batch = packed.data_collator(packed.eval_dataset.rows)
        self.assertLess(abs(packed.compute_loss(packed.model, batch).item() - want) / want, 1e-5)
        set_loss_normalization(packed, "token")
        self.assertGreater(abs(packed.evaluate()["eval_loss"] - want) / want, 1e-5)

    def test_auxiliary_loss_of_experts(self):
        """It is added in the same way as to the model's own loss."""
        losses = {}
        for normalization in ("token", "sample"):
            trainer = build_trainer("packed", "qwen3_next_moe", self.directory, per_device_eval_batch_size=1)
            trainer.model.config.output_router_logits = True
            trainer.model.router_aux_loss_coef = 3.0
            trainer.eval_dataset.rows = trainer.eval_dataset.rows[:1]
            set_loss_normalization(trainer, normalization)
            # With one document both means are equal.
            losses[normalization] = trainer.evaluate()["eval_loss"]
        self.assertGreater(losses["token"], 9)
        self.assertLess(abs(losses["sample"] - losses["token"]) / losses["token"], 1e-6)

    def test_two_processes(self):
        output = f"{self.directory}/results.pt"
        _, results = run_in_two_processes(self, "loss_arms.py", output)
        self.check_same_training(results["packed"], results["padded"], 4)

    def test_evaluation_in_two_processes(self):
        """The mean over all documents, for any number of them in a batch."""
        (want,) = run_processes(evaluate_in_processes, 1, 10)
        for found in run_processes(evaluate_in_processes, 2, 3):
            self.assertAlmostEqual(found, want, places=5)

    def test_what_cannot_be(self):
        def build(**arguments):
            return build_trainer("packed", "qwen3_5", self.directory, max_steps=1, **arguments)

        with self.assertRaisesRegex(ValueError, 'normalization "token" or "sample", got \'row\''):
            set_loss_normalization(build(), "row")
        with self.assertRaisesRegex(ValueError, "without another loss, got label_smoothing_factor"):
            set_loss_normalization(build(label_smoothing_factor=0.1), "sample")
        for name, value, normalization, message in (
            ("compute_loss_func", print, "sample", "without another loss, got compute_loss_func"),
            ("model_accepts_loss_kwargs", False, "token", "ForCausalLM, which does not accept num_items_in_batch"),
        ):
            trainer = build()
            setattr(trainer, name, value)
            with self.assertRaisesRegex(ValueError, message):
                set_loss_normalization(trainer, normalization)

        class OwnLoss(Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                return model(**inputs).loss

        trainer = build()
        trainer.__class__ = OwnLoss
        set_loss_normalization(trainer, "sample")
        with self.assertRaisesRegex(ValueError, "got OwnLoss, which computes its own loss"):
            trainer.train()
        trainer = build()
        set_loss_normalization(trainer, "sample")
        collate = trainer.data_collator
        trainer.data_collator = lambda features: {n: x for n, x in collate(features).items() if n != "labels"}
        with self.assertRaisesRegex(ValueError, "batches with labels .* got none"):
            trainer.train()
