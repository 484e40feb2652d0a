"""Second-order gradients and retained graphs through whole models: correct numbers, or an error with a fix."""

import copy
import unittest

import torch
from mixins.model import alone, packed_batch, relative_error, total_relative_error
from mixins.patch import builtin_model, documents
from parameterized import parameterized

from transformers_packed import patch_model


def models(family="qwen3_5", attention="eager"):
    """Build the stock model and ours with the same weights."""
    builtin = builtin_model(family)
    builtin.set_attn_implementation(attention)
    if family != "qwen3_5":
        builtin.set_experts_implementation("eager")
    return builtin, patch_model(copy.deepcopy(builtin))


def penalty(model, loss) -> tuple[torch.Tensor, dict]:
    """Return the norm of the gradient, as in a gradient penalty, and its own gradient."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    norm = sum(x.square().sum() for x in torch.autograd.grad(loss, parameters, create_graph=True)).sqrt()
    return norm, dict(zip(names, torch.autograd.grad(norm, parameters), strict=True))


def gradients(model, loss, **options):
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, **options), strict=True))


class SecondOrderTest(unittest.TestCase):
    @parameterized.expand(["qwen3_5", "qwen3_next"])
    def test_gradient_penalty(self, family):
        builtin, model = models(family)
        norm, expected = penalty(builtin, alone(builtin, documents())[1])
        got_norm, got = penalty(model, model(**packed_batch(documents()), skip_logits=False).loss)
        self.assertLess(relative_error(got_norm, norm), 1e-5)
        self.assertLess(total_relative_error(got, expected), 1e-4 if family != "qwen3_5" else 1e-5)

    def test_the_loss_without_logits_names_the_argument_that_gives_them(self):
        _, model = models()
        with self.assertRaisesRegex(ValueError, "got create_graph=True. Pass skip_logits=False to the model"):
            penalty(model, model(**packed_batch(documents())).loss)

    def test_retain_graph(self):
        _, model = models(attention="sdpa")
        batch = packed_batch(documents())
        expected = gradients(model, model(**batch).loss)
        loss = model(**batch).loss
        for retain in (True, True, False):
            got = gradients(model, loss, retain_graph=retain)
            for name, gradient in got.items():
                self.assertTrue(torch.equal(gradient, expected[name]), name)
        with self.assertRaisesRegex(RuntimeError, "retain_graph=True"):
            gradients(model, loss)

    def test_torch_func_grad(self):
        builtin, model = models(attention="sdpa")
        expected = gradients(builtin, alone(builtin, documents())[1])
        batch = packed_batch(documents())

        def loss_and_logits(parameters):
            output = torch.func.functional_call(model, parameters, (), batch)
            return output.loss, output.logits

        got, logits = torch.func.grad(loss_and_logits, has_aux=True)(dict(model.named_parameters()))
        self.assertLess(total_relative_error(got, expected), 1e-5)
        self.assertEqual(logits.shape[:2], batch["input_ids"].shape)
