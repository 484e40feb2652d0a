"""The head that TRL's trainers add, with the products of this package: the scores and gradients of TRL's own."""

import unittest
from importlib.util import find_spec
from types import FunctionType, SimpleNamespace
from unittest import mock

import torch
from mixins.model import relative_error
from mixins.patch import builtin_model
from parameterized import parameterized

from transformers_packed import patch_model, unpatch_model
from transformers_packed.models.trl_head import distills_with_our_products
from transformers_packed.ops import linear_divergence, linear_logps


if find_spec("trl"):
    from trl.trainer import distillation_trainer
    from trl.trainer import utils as trl_utils

OUTPUTS = ("log_probs", "entropy", "is_top1")
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask", "loss")
# What the loss of a trainer takes from the scores.
LOSSES = {
    "sum": lambda output: output.log_probs.sum(),
    "weighted": lambda output: (output.log_probs * torch.arange(11.0)).sum(),
    "entropy": lambda output: output.log_probs.sum() + output.entropy.square().sum(),
}


def score(model, loss):
    """The scores of a row of which some tokens have no target, and the gradients of a loss."""
    ids = torch.arange(1, 13)[None]
    labels = ids.masked_fill((ids > 3) & (ids < 7), -100)
    output = model(input_ids=ids, labels=labels, fused_lm_head=True)
    leaves = [x for x in model.parameters() if x.requires_grad]
    gradients = torch.autograd.grad(LOSSES[loss](output), leaves, allow_unused=True)
    return output, [x for x in gradients if x is not None]


@unittest.skipUnless(find_spec("trl"), "needs trl")
class TRLHeadTest(unittest.TestCase):
    def model(self, change, frozen=False, **options):
        model = builtin_model()
        model.get_output_embeddings().weight.requires_grad_(not frozen)
        trl_utils.add_fused_lm_head(model, **options)
        return change(model)

    def compare(self, loss="sum", **options):
        """Compare a patched model with TRL's own head. Returns how often our op ran."""
        expected, wanted = score(self.model(lambda model: model, **options), loss)
        with mock.patch("transformers_packed.ops.linear_logps", wraps=linear_logps) as ours:
            got, gradients = score(self.model(patch_model, **options), loss)
        for name in FIELDS:
            want, value = getattr(expected, name), getattr(got, name)
            self.assertEqual(value is None, want is None, name)
            if want is not None:
                self.assertEqual((value.shape, value.dtype), (want.shape, want.dtype), name)
                torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-5)
        self.assertEqual(len(gradients), len(wanted))
        for a, b in zip(gradients, wanted, strict=True):
            self.assertLess(relative_error(a, b), 1e-4)
        return ours.call_count

    @parameterized.expand([("sum", "sum", False), ("weighted", "weighted", True), ("entropy", "entropy", False)])
    def test_scores_and_gradients(self, _, loss, frozen):
        self.assertEqual(self.compare(loss, frozen=frozen, outputs=OUTPUTS, temperature=0.8), 1)

    def test_log_probabilities_alone(self):
        self.assertEqual(self.compare(), 1)

    def test_other_outputs_are_left_to_trl(self):
        self.assertEqual(self.compare(outputs=("log_probs", "entropy", "mean_logits")), 0)
        self.assertEqual(self.compare(outputs=("log_probs", "log_sum_sq_probs")), 0)

    def test_another_dtype_is_left_to_trl(self):
        """A head in float32 over a model in bfloat16, which TRL converts tile by tile."""
        model = self.model(lambda model: patch_model(model.bfloat16()), cast_lm_head_to_fp32=True)
        with mock.patch("transformers_packed.ops.linear_logps", wraps=linear_logps) as ours:
            self.assertEqual(score(model, "sum")[0].log_probs.dtype, torch.float32)
            ours.assert_not_called()

    @parameterized.expand([("final_logit_softcapping", 3.0), ("logit_scale", 0.5)])
    def test_scaled_logits_are_left_to_trl(self, name, value):
        model = builtin_model()
        setattr(model.config, name, value)
        trl_utils.add_fused_lm_head(model)
        with mock.patch("transformers_packed.ops.linear_logps", wraps=linear_logps) as ours:
            before = score(model, "sum")[0].log_probs
            after = score(patch_model(model), "sum")[0].log_probs
            ours.assert_not_called()
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)

    def test_unpatched_models_have_their_own_head(self):
        model = unpatch_model(self.model(patch_model))
        with mock.patch("transformers_packed.ops.linear_logps", wraps=linear_logps) as ours:
            score(model, "sum")
            ours.assert_not_called()

    def test_models_that_were_created_with_our_classes(self):
        """TRL then wraps the forward of our class, and `patch_model` only has to replace the products."""
        model = self.model(patch_model)
        del model.forward
        trl_utils.add_fused_lm_head(model)
        expected = model(input_ids=torch.arange(1, 13)[None]).logits
        before = score(model, "sum")
        with mock.patch("transformers_packed.ops.linear_logps", wraps=linear_logps) as ours:
            after = score(patch_model(patch_model(model)), "sum")
            self.assertEqual(ours.call_count, 1)
            torch.testing.assert_close(after[0].log_probs, before[0].log_probs, rtol=1e-5, atol=1e-5)
            self.assertTrue(torch.equal(model(input_ids=torch.arange(1, 13)[None]).logits, expected))
            unpatch_model(model)
            score(model, "sum")
            self.assertEqual(ours.call_count, 1)

    def test_releases_with_another_function(self):
        class Theirs:
            @staticmethod
            def forward(ctx, hidden, weight):
                pass

            apply = mock.Mock(side_effect=RuntimeError("scored by TRL"))

        with mock.patch.object(trl_utils, "_ChunkedLogProbFunction", Theirs):
            model = self.model(patch_model)
            with self.assertRaisesRegex(RuntimeError, "scored by TRL"):
                score(model, "sum")
            self.assertIs(trl_utils._ChunkedLogProbFunction, Theirs)


@unittest.skipUnless(find_spec("trl"), "needs trl")
class TRLDivergenceTest(unittest.TestCase):
    """The loss of TRL's trainer of distillation, with our products in place of its own."""

    def compare(self, dtype=torch.float32, teacher_dtype=torch.float32, **options):
        """Compare both in the loss, what is logged and the gradients. Returns how often our op ran."""
        theirs = FunctionType((lambda *x, **y: _chunked_divergence_loss(*x, **y)).__code__, vars(distillation_trainer))  # noqa: F821
        loss = distills_with_our_products(SimpleNamespace(_compute_loss=theirs))["_compute_loss"]
        generator = torch.Generator().manual_seed(0)
        shapes = (2, 7, 8), (2, 7, 12), (37, 8), (37, 12)
        made = [torch.randn(shape, generator=generator) for shape in shapes]
        mask = torch.tensor([[1, 1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0]])
        found = []
        with mock.patch("transformers_packed.ops.linear_divergence", wraps=linear_divergence) as ours:
            for function in (theirs, loss):
                dtypes = dtype, teacher_dtype, dtype, torch.float32
                leaves = [x.to(kind).requires_grad_() for x, kind in zip(made, dtypes, strict=True)]
                output = function(*leaves, mask, 0.3, **options)
                found.append([*output, *torch.autograd.grad(2 * output[0], (leaves[0], leaves[2]))])
        for want, got in zip(*found, strict=True):
            torch.testing.assert_close(got, want)
        return ours.call_count

    @parameterized.expand(
        [
            ("plain", {}),
            ("items", {"num_items_in_batch": torch.tensor(0.5), "temperature": 2.0}),
            ("granite", {"student_logit_scale": 0.5, "teacher_final_logit_softcapping": 3.0}),
        ]
    )
    def test_loss_and_gradients(self, _, options):
        self.assertEqual(self.compare(**options), 1)

    def test_another_dtype_is_left_to_trl(self):
        self.assertEqual(self.compare(teacher_dtype=torch.bfloat16), 0)

    def test_another_release_is_left_to_trl(self):
        self.assertEqual(distills_with_our_products(SimpleNamespace(_compute_loss=self.compare)), {})
