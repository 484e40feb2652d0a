"""Hooks, second derivatives and reads of logits work with the kernels of this package: `make test-gpu`."""

import unittest

import torch
from common.gpu import needs_gpu, report
from common.real_heads import FAMILIES, model_on_gpu, on_gpu, random_documents
from mixins.model import gradients, packed_batch, relative_error, total_relative_error
from parameterized import parameterized


LENGTHS = (1, 64, 65, 130)


@needs_gpu
class CudaTouchedModulesTest(unittest.TestCase):
    def model_and_batch(self, family: str):
        return model_on_gpu(family, all_experts=True), on_gpu(packed_batch(random_documents(LENGTHS)))

    @parameterized.expand([(family,) for family in FAMILIES])
    def test_every_hooked_module_runs(self, family):
        model, batch = self.model_and_batch(family)
        expected = gradients(model, model(**batch).loss)
        largest = 0.0
        for name, module in model.named_modules():
            parts = name.split(".")
            layers = len(parts) > 3 and parts[2] in ("0", "3")
            # The number of calls of the activation inside experts is up to Transformers.
            if not (layers or name == "lm_head") or name.endswith(("conv1d", "experts.act_fn")):
                continue
            calls = []
            handle = module.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            got = gradients(model, model(**batch).loss)
            handle.remove()
            self.assertEqual(len(calls), 1, name)
            largest = max(largest, total_relative_error(got, expected))
            self.assertLess(largest, 2e-2, name)
        report(f"{family}, bfloat16, each module hooked", gradients=largest)

    def test_gradients_of_gradients_are_refused(self):
        model, batch = self.model_and_batch("qwen3_5")
        for options in ({}, {"skip_logits": False}):
            with self.assertRaisesRegex(ValueError, "first-order gradients, got create_graph=True"):
                model(**batch, **options).loss.backward(create_graph=True)
            model.zero_grad()

    def test_a_graph_that_is_kept(self):
        model, batch = self.model_and_batch("qwen3_5")
        loss = model(**batch).loss
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss, parameters, retain_graph=True)
        second = torch.autograd.grad(loss, parameters)
        errors = [relative_error(b.float(), a.float()) for a, b in zip(first, second, strict=True)]
        self.assertLess(max(errors), 1e-2)

    def test_logits_on_demand(self):
        model, batch = self.model_and_batch("qwen3_5")
        expected = model(**batch, skip_logits=False).logits
        output = model(**batch)
        output.loss.backward()
        self.assertLess(relative_error(output.logits.float(), expected.float()), 1e-2)
        self.assertTrue(output.logits.requires_grad)
        output = model(**batch)
        output.loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        with self.assertRaisesRegex(ValueError, "^expected .*forward.*optimizer.step"):
            output.logits  # noqa: B018
