"""The metrics of packing that depend on how a model is stored or called. `test_trainer.py` has those of a whole training."""

import tempfile
import unittest
from unittest import mock

import torch
import torch.nn.functional as F
from mixins.configure import said
from mixins.lora import lora
from mixins.patch import builtin_model
from parameterized import parameterized
from peft import get_peft_model
from scripts.trainer_arms import OPTIONS, Samples
from transformers import Trainer, TrainingArguments

from transformers_packed import configure_packing
from transformers_packed.training.callbacks.metrics import PackingMetricsCallback


class PassesTest(unittest.TestCase):
    def passes(self, model) -> float:
        callback = PackingMetricsCallback(mock.Mock(model=model, model_wrapped=model))
        callback.on_train_begin(mock.Mock(device=torch.device("cpu")), None, None)
        callback._hooks.close()
        return callback._passes

    def test_parameters_that_zero_3_has_partitioned(self):
        model = get_peft_model(builtin_model("qwen3_5_moe"), lora())
        expected = self.passes(model)
        self.assertTrue(2 < expected < 3)
        for parameter in model.parameters():
            parameter.ds_numel, parameter.data = parameter.numel(), torch.empty(0)
        self.assertEqual(self.passes(model), expected)


class OwnLoss(Trainer):
    """A loss of the user, which calls the model or its parts in its own way."""

    call = "model"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.calls = getattr(self, "calls", 0) + 1
        ids, labels, rest = inputs["input_ids"], inputs["labels"], {"position_ids": inputs["position_ids"]}
        call = ("model", "parts")[self.calls % 2] if self.call == "both" else self.call
        if call == "parts":
            logits = F.linear(model.model(input_ids=ids, **rest).last_hidden_state, model.lm_head.weight)
        elif call == "positional":
            logits = model(ids, **rest).logits
        elif call == "embeddings":
            logits = model(inputs_embeds=model.get_input_embeddings()(ids), **rest).logits
        else:
            logits = model(input_ids=ids, **rest).logits
        loss = F.cross_entropy(logits[0, :-1], labels[0, 1:])
        return (loss, logits) if return_outputs else loss


class CallsTest(unittest.TestCase):
    """Whatever a loss calls, training ends, and the log has either the right metrics or none."""

    def train(self, call, packing, **options):
        folder = self.enterContext(tempfile.TemporaryDirectory())
        options = {**OPTIONS, "max_steps": 2, "gradient_accumulation_steps": 2, **options}
        args = TrainingArguments(folder, per_device_train_batch_size=2, **options)
        trainer = OwnLoss(builtin_model("qwen3_5"), args, train_dataset=Samples(32))
        trainer.call = call
        said(configure_packing, trainer, packing, **{"max_length": 128} if packing == "pack" else {})
        trainer.train()
        return [entry for entry in trainer.state.log_history if "loss" in entry]

    @parameterized.expand([("embeddings", "pack"), ("positional", "padding_free"), ("parts", "pack")])
    def test_calls(self, call, packing):
        log = self.train(call, packing)
        self.assertEqual(len(log), 2)
        expected = self.train("model", packing) if call == "embeddings" else log
        for entry, other in zip(log, expected, strict=True):
            self.assertEqual("tokens_per_second" in entry, call in ("model", "embeddings"))
            self.assertEqual(entry.get("documents_per_row"), other.get("documents_per_row"))

    @parameterized.expand([("no", 1), ("steps", 3)])
    def test_logs_after_training(self, strategy, every):
        """Steps after the last log are counted at the end."""
        self.train("parts", "padding_free", logging_strategy=strategy, logging_steps=every)

    def test_statistics_that_fail(self):
        """An error of ours in counting leaves the metrics out."""
        with mock.patch(f"{PackingMetricsCallback.__module__}._ends_of_documents", side_effect=RuntimeError):
            log = self.train("model", "padding_free")
        self.assertFalse(any("tokens_per_second" in entry for entry in log))
