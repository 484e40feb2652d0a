"""A document has the same log-probabilities, bit by bit, in every row and in every padded batch."""

import unittest
from unittest import mock

import torch
from common.invariance import logps_in_places, packed, with_split_sums
from parameterized import parameterized

from transformers_packed import batch_invariant, patch_model
from transformers_packed.audit.isolation import changed_by_others
from transformers_packed.audit.tiny import tiny_model


# On a CPU, functions such as `exp` round the last elements of a tensor in another way, so lengths are multiples of 32,
# as many as two vectors of AVX-512 have.
LENGTH = 64


class BatchInvarianceTest(unittest.TestCase):
    @parameterized.expand(["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid", "kimi_linear"])
    def test_log_probabilities(self, name):
        model = patch_model(tiny_model(name)).eval()
        document = torch.randint(1, model.config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
        with batch_invariant(), with_split_sums(), torch.no_grad():
            (_, alone), *places = logps_in_places(model, document)
        for place, found in places:
            self.assertTrue(torch.equal(found, alone), f"{place}: {(found - alone).abs().max():.1e}")

    def test_checkpointing(self):
        model = patch_model(tiny_model("qwen3_5_text")).train()
        ids, batch = torch.randint(1, 64, (1, 96)), packed([LENGTH, 96 - LENGTH])
        losses, gradients = [], []
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            with batch_invariant(), with_split_sums():
                loss = model(input_ids=ids, labels=ids, **batch).loss
                loss.backward()
            losses.append(loss)
            gradients.append([x.grad for x in model.parameters()])
            model.zero_grad()
        self.assertTrue(torch.equal(*losses))
        self.assertTrue(all(map(torch.equal, *gradients)))


class ChangedByOthersTest(unittest.TestCase):
    """What the check before the first step looks at."""

    def setUp(self):
        self.model = patch_model(tiny_model("qwen3_5_text"))
        ids = torch.randint(1, 64, (1, 128))
        self.batch = {"input_ids": ids, **packed([64, 64])}
        self.places = list(torch.arange(128).split([64, 64]))

    def measure(self) -> float:
        return changed_by_others(self.model, lambda: self.model(**self.batch), self.batch, self.places)

    def test_nothing_changes(self):
        with batch_invariant(), with_split_sums():
            self.assertEqual(self.measure(), 0)

    def test_a_sum_that_is_split_by_the_number_of_rows(self):
        layer = self.model.model.layers[1].mlp.down_proj
        forward = layer.forward

        def split(x):
            # As a library whose kernels are chosen by the number of rows.
            half = x.shape[-1] // 2 if x.shape[-2] > 100 else 1
            first, second = torch.zeros_like(x), x.clone()
            first[..., :half], second[..., :half] = x[..., :half], 0
            return forward(first) + forward(second)

        with batch_invariant(), mock.patch.object(layer, "forward", split):
            self.assertGreater(self.measure(), 0)

    def test_values_that_are_not_finite(self):
        with batch_invariant(), torch.no_grad():
            self.model.get_input_embeddings().weight[self.batch["input_ids"][0, 0]] = float("nan")
        with batch_invariant():
            self.assertEqual(self.measure(), float("inf"))


if __name__ == "__main__":
    unittest.main()
