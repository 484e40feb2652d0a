"""Fine-tune a vision-language model in the stock Trainer: packed rows through ours, padded through the stock class."""

import tempfile
import unittest

import torch
from mixins.model import total_relative_error
from mixins.vision import IMAGE, TEXT, document, padded_documents, vision_config
from parameterized import parameterized
from scripts.trainer_arms import OPTIONS, updates_and_log
from transformers import AutoModelForImageTextToText, Qwen3_5Config, Trainer, TrainingArguments, set_seed

from transformers_packed import DataCollatorWithFlattening, PackingDataset, registered


# Tokens of text, and images in patches (time, height, width).
EXAMPLES = [
    (7, ((1, 4, 4),)),
    (9, ()),
    (60, ((1, 8, 2), (1, 4, 6))),
    (3, ((1, 10, 6),)),
    (1, ()),
    (7, ((1, 4, 4), (1, 2, 2), (1, 6, 4))),
    (70, ((1, 4, 8),)),
    (80, ()),
]


class Processed(torch.utils.data.Dataset):
    """What a processor returns for each example. Image tokens have no loss."""

    def __len__(self):
        return len(EXAMPLES)

    def __getitem__(self, index):
        length, images = EXAMPLES[index]
        sample = document(length, index, images)
        return {**sample, "labels": [-100 if token == IMAGE else token for token in sample["input_ids"]]}


def collate(features):
    """A padded batch of some samples, or of rows of samples."""
    batch = padded_documents(
        [x for feature in features for x in (feature if isinstance(feature, list) else [feature])]
    )
    batch["labels"] = batch["labels"].masked_fill(batch["mm_token_type_ids"] != 0, -100)
    return batch


class VisionTrainerTest(unittest.TestCase):
    def train(self, arm, rows="samples", positions="collator", accumulation=2):
        """Run 4 steps. Return the change of each parameter, the losses, and the trainer."""
        set_seed(0)
        make = AutoModelForImageTextToText.from_config
        dataset, config = Processed(), Qwen3_5Config(**vision_config(TEXT))
        if arm == "padded":
            model, collator = make(config), collate
        else:
            with registered():
                model = make(config)
            of_model = {"model": model} if positions == "collator" else {"on_leak": "ignore"}
            collator = DataCollatorWithFlattening(return_cu_seqlens=True, return_seq_idx=True, **of_model)
        if rows == "planned":
            dataset = PackingDataset(dataset, max_length=128)
            self.assertLess(len(dataset), len(EXAMPLES))
        options = {**OPTIONS, "max_steps": 4, "learning_rate": 0.1, "remove_unused_columns": False}
        options |= {"per_device_train_batch_size": 1 if rows == "planned" else 3}
        folder = self.enterContext(tempfile.TemporaryDirectory())
        args = TrainingArguments(folder, gradient_accumulation_steps=accumulation, **options)
        trainer = Trainer(model, args, train_dataset=dataset, data_collator=collator)
        if arm == "padded" and accumulation > 1:
            # The stock class computes a mean of the micro-batches' means, ours the mean over all targets of a step.
            self.assertFalse(trainer.model_accepts_loss_kwargs)
            trainer.model_accepts_loss_kwargs = True
        updates, log = updates_and_log(trainer)
        return updates, [entry["loss"] for entry in log], trainer

    @parameterized.expand([("samples", "collator", 1), ("samples", "model", 2), ("planned", "collator", 2)])
    def test_packed_updates_equal_padded_updates(self, rows, positions, accumulation):
        # Elsewhere: padding-free training with images scores lower.
        want, expected, _ = self.train("padded", rows, accumulation=accumulation)
        got, losses, packed = self.train("packed", rows, positions, accumulation)
        self.assertEqual(type(packed.model).__module__, "transformers_packed.models.qwen3_5.modeling_qwen3_5")
        self.assertEqual(len(expected), 4)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        self.assertLess(total_relative_error(got, want), 2e-6)
        for name, update in got.items():
            if "visual" in name and name.endswith("weight"):
                self.assertGreater(update.abs().max(), 0, name)
