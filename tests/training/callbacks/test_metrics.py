"""The metrics of packing that depend on how a model is stored. `test_trainer.py` has those of a whole training."""

import unittest
from unittest import mock

import torch
from mixins.lora import lora
from mixins.patch import builtin_model
from peft import get_peft_model

from transformers_packed.training.callbacks.metrics import PackingMetricsCallback


class PassesTest(unittest.TestCase):
    def passes(self, model) -> float:
        callback = PackingMetricsCallback(mock.Mock(model=model, model_wrapped=model))
        callback.on_train_begin(mock.Mock(device=torch.device("cpu")), None, None)
        callback._detach()
        return callback._passes

    def test_parameters_that_zero_3_has_partitioned(self):
        model = get_peft_model(builtin_model("qwen3_5_moe"), lora())
        expected = self.passes(model)
        self.assertTrue(2 < expected < 3)
        for parameter in model.parameters():
            parameter.ds_numel, parameter.data = parameter.numel(), torch.empty(0)
        self.assertEqual(self.passes(model), expected)


if __name__ == "__main__":
    unittest.main()
