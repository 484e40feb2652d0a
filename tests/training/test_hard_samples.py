"""Problems of users with packing in other packages, if no other file tests them.

`# Elsewhere:` marks tests of such problems in all files.
"""

import torch
import torch.nn.functional as F
from mixins.configure import ConfigureTestCase, said
from mixins.model import total_relative_error
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS, OPTIONS, Samples, collate_padded, updates_and_log
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from transformers_packed import DataCollatorWithFlattening, configure_packing


# A single token predicts nothing, and a prompt alone has no target. The first micro-batch of a step has no target at
# all.
HARD = [
    {"input_ids": [5], "labels": [5]},
    {"input_ids": [7, 8, 9], "labels": [-100] * 3},
    {"input_ids": [9], "labels": [-100]},
    {"input_ids": [3, 4], "labels": [-100, 4]},
    {"input_ids": list(range(1, 60)), "labels": [*range(1, 60)]},
    {"input_ids": [6], "labels": [6]},
]


class WeightedTrainer(Trainer):
    """A loss with a separate weight per token."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, weights = inputs.pop("labels"), inputs.pop("weight")
        losses = F.cross_entropy(model(**inputs).logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        return (losses * weights[:, 1:]).sum() / num_items_in_batch


def collate_weighted(rows: list) -> dict:
    weights = [torch.tensor(row["weight"]) for row in rows]
    return {**collate_padded(rows), "weight": torch.nn.utils.rnn.pad_sequence(weights, batch_first=True)}


class HardSamplesTest(ConfigureTestCase):
    def trainer(self, rows, collator, cls=Trainer, **options) -> Trainer:
        set_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
        options = {"max_steps": 4, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, **options}
        args = TrainingArguments(self.directory, **OPTIONS, train_sampling_strategy="sequential", **options)
        return cls(model, args, train_dataset=rows, data_collator=collator)

    def train(self, trainer):
        _, (updates, log) = said(updates_and_log, trainer)
        for entry in log:
            self.assertTrue(0 < entry["loss"] < 10 and 0 < entry["grad_norm"] < 100, entry)
        return updates, [entry["loss"] for entry in log]

    def test_documents_without_targets(self):
        """The loss is no NaN and equals that of padded training."""
        # Elsewhere: the loss of packed rows is 0, or a gradient is NaN in the first step.
        want, expected = self.train(self.trainer(HARD, collate_padded))
        got, losses = self.train(said(configure_packing, self.trainer(HARD, None))[1])
        self.assertLess(total_relative_error(got, want), 1e-6)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)

    @parameterized.expand(["split", "drop"])
    def test_samples_that_are_too_long(self, overlong):
        # Elsewhere: splitting over rows gives NaN.
        rows = [*HARD, *Samples(12).rows]
        _, trainer = said(configure_packing, self.trainer(rows, None), True, 16, overlong=overlong)
        self.train(trainer)
        plan = trainer.train_dataset.plan
        longer = sum(len(row["input_ids"]) > 16 for row in rows)
        self.assertGreater(longer, 3)
        self.assertEqual(plan.overlong_samples, longer)

    def test_a_weight_per_token(self):
        # Elsewhere: weights of samples or tokens break with padding-free batches.
        generator = torch.Generator().manual_seed(0)
        rows = [
            {**row, "weight": torch.rand(len(row["input_ids"]), generator=generator).tolist()} for row in Samples(12)
        ]
        options = {"cls": WeightedTrainer, "remove_unused_columns": False}
        want, _ = self.train(self.trainer(rows, collate_weighted, **options))
        flags = {"return_cu_seqlens": True, "return_seq_idx": True, "on_leak": "ignore"}
        collator = DataCollatorWithFlattening(token_columns=("weight",), **flags)
        trainer = self.trainer(rows, collator, **options)
        got, _ = self.train(said(configure_packing, trainer, "padding_free")[1])
        self.assertLess(total_relative_error(got, want), 1e-6)
        plain, _ = self.train(self.trainer(rows, collate_padded))
        self.assertGreater(total_relative_error(plain, want), 1e-2)
