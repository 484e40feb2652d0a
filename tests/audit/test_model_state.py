"""What the audit and the check before training change in a model for a while."""

import unittest

import torch

from transformers_packed.audit.model_state import off_zero


class OffZeroTest(unittest.TestCase):
    def test_trained_zeros_alone(self):
        model = torch.nn.Module()
        values = {"zero": torch.zeros(3, 2), "frozen": torch.zeros(2), "partly": torch.tensor([0.0, 1.0])}
        for name, value in values.items():
            model.register_parameter(name, torch.nn.Parameter(value.clone(), name != "frozen"))
        with self.assertRaises(KeyError), off_zero(model):
            self.assertTrue(model.zero.all())
            self.assertTrue(
                all(torch.equal(x, values[name]) for name, x in model.named_parameters() if name != "zero")
            )
            raise KeyError
        self.assertTrue(all(torch.equal(x, values[name]) for name, x in model.named_parameters()))

    def test_weights_without_memory(self):
        """To read an emptied storage would end the process."""
        model = torch.nn.Linear(2, 3, bias=False)
        model.register_parameter("meta", torch.nn.Parameter(torch.zeros(2, device="meta")))
        model.weight.untyped_storage().resize_(0)
        with off_zero(model):
            self.assertEqual(model.weight.untyped_storage().nbytes(), 0)
