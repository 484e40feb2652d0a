"""Checks of models whose frozen weights are stored in fewer bits, against models with the weights that these stand for."""

import unittest

import torch
from mixins.model import packed_batch, total_relative_error
from mixins.patch import on_a_gpu

from transformers_packed.audit.isolation import changed_by_others
from transformers_packed.ops import implementations_used


DOCUMENTS = [torch.arange(1, n) for n in (9, 30, 2, 17)]


def run(model):
    """The loss of a packed row, and the gradients by name."""
    model.zero_grad()
    loss = model(**packed_batch(DOCUMENTS, "cu_seqlens"), use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


class StoredWeightsTestCase(unittest.TestCase):
    def check_adapters(self, stored, plain):
        """The adapters of both models have the same gradients, in the fused ops and in forwards of their own."""
        with on_a_gpu():
            (loss, gradients), expected = map(run, (stored, plain))
        self.assertLess(abs(loss / expected[0] - 1).item(), 1e-6)
        self.assertEqual(gradients.keys(), expected[1].keys())
        self.assertTrue(all("lora_" in name for name in gradients))
        self.assertLess(total_relative_error(gradients, expected[1]), 2e-6)
        used = implementations_used()
        for op, other in (("linear_lora", "peft"), ("experts_lora", "peft"), ("experts", "grouped_mm")):
            self.assertNotIn(other, used.get(op, ()))
        # PEFT's own forward of a plain layer adds in another order.
        expected = run(plain)
        for checkpointing in (False, True):
            if checkpointing:
                stored.gradient_checkpointing_enable({"use_reentrant": False})
            loss, gradients = run(stored)
            self.assertLess(abs(loss - expected[0]).item(), 1e-5)
            self.assertLess(total_relative_error(gradients, expected[1]), 1e-5)

    def check_isolation(self, stored, plain, bar=0.0):
        """No document changes another one, and both models have the same logits, or up to `bar`."""
        batch = packed_batch(DOCUMENTS, "cu_seqlens")
        places = list(torch.arange(sum(map(len, DOCUMENTS))).split([len(x) for x in DOCUMENTS]))
        self.assertLess(changed_by_others(stored, lambda: stored(**batch), batch, places), 1e-4)
        with torch.no_grad():
            self.assertLessEqual((stored(**batch).logits - plain(**batch).logits).abs().max(), bar)
