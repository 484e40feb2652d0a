"""TRL's trainers with a registered model, against the stock class on padded batches of the same samples."""

import copy

import torch
from common.records import MARKED, assistant, make_tokenizer, user
from common.trl_trainers import SGD, TRLTestCase, build_model
from datasets import Dataset
from parameterized import parameterized
from peft import LoraConfig
from scripts.trainer_arms import Samples, collate_padded
from trl import SFTConfig, SFTTrainer

from transformers_packed import DataCollatorWithFlattening, PackingDataset, pack_dataset, set_loss_normalization


ROW = 96


def documents(feature):
    """Return the samples of a row of `PackingDataset` (a list) or TRL (joined, `seq_lengths`), or a single sample."""
    if isinstance(feature, list):
        return feature
    lengths = feature.get("seq_lengths", [len(feature["input_ids"])])
    columns = [torch.tensor(feature[name]).split(lengths) for name in ("input_ids", "labels")]
    return [{"input_ids": i.tolist(), "labels": t.tolist()} for i, t in zip(*columns, strict=True)]


def unpacking_collator(features):
    """Collate all samples of some rows to a padded batch."""
    return collate_padded([document for feature in features for document in documents(feature)])


class SFTTest(TRLTestCase):
    def build(self, arm, dataset, collator=None, tokenizer=None, peft_config=None, **arguments):
        tokenizer = tokenizer or make_tokenizer()
        return SFTTrainer(
            build_model(arm, len(tokenizer)),
            args=SFTConfig(
                self.directory,
                **{
                    **SGD,
                    "max_length": None,
                    "per_device_train_batch_size": 2,
                    "gradient_accumulation_steps": 2,
                    **arguments,
                },
            ),
            train_dataset=dataset,
            data_collator=collator,
            processing_class=tokenizer,
            peft_config=peft_config,
        )

    def padded_rows(self, packed, **arguments):
        """Build a Trainer of the stock class on padded batches of another trainer's rows, in the same order."""
        trainer = self.build("padded", Dataset.from_list(Samples().rows), unpacking_collator, **arguments)
        trainer.train_dataset = packed.train_dataset
        return trainer

    def samples(self):
        return Dataset.from_list(Samples().rows)

    def test_padding_free(self):
        packed = self.build("packed", self.samples(), padding_free=True)
        batch = packed.data_collator([packed.train_dataset[i] for i in range(3)])
        self.assertEqual(batch["input_ids"].shape[0], 1)
        self.assertIn("seq_idx", batch)
        self.check_same_training(packed, self.build("padded", self.samples()))

    def test_packing(self):
        """Best-fit-decreasing rows with several documents, and adapters."""
        options = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj", "in_proj_qkv"])}
        packed = self.build("packed", self.samples(), packing=True, max_length=ROW, **options)
        self.assertGreater(max(len(row["seq_lengths"]) for row in packed.train_dataset), 2)
        self.check_same_training(packed, self.padded_rows(packed, **copy.deepcopy(options)))

    @parameterized.expand(["pack_dataset", "packing_dataset"])
    def test_our_rows(self, form):
        flatten = DataCollatorWithFlattening(return_cu_seqlens=True, return_seq_idx=True, on_leak="ignore")
        if form == "packing_dataset":
            packed = self.build("packed", self.samples(), flatten)
            packed.train_dataset = PackingDataset(packed.train_dataset, max_length=ROW)
            first = packed.train_dataset[0]
            self.assertIsInstance(first, list)
        else:
            packed = self.build("packed", pack_dataset(self.samples(), max_length=ROW), padding_free=True)
            self.assertIn("seq_lengths", packed.train_dataset.column_names)
        self.check_same_training(packed, self.padded_rows(packed))

    def test_assistant_only_loss(self):
        """TRL's mask of assistant tokens, in packed rows."""
        chats = [
            {"messages": [user("a" * i), assistant("b" * (i % 5 + 1)), user("c"), assistant("d" * (i % 3 + 1))]}
            for i in range(1, 25)
        ]
        options = {"assistant_only_loss": True, "tokenizer": make_tokenizer(MARKED)}
        packed = self.build("packed", Dataset.from_list(chats), packing=True, max_length=200, **options)
        labels = packed.train_dataset[0]["labels"]
        answers = sum(a == -100 and b != -100 for a, b in zip(labels, labels[1:], strict=False))
        self.assertEqual(answers, 2 * len(packed.train_dataset[0]["seq_lengths"]))
        padded = self.build("padded", Dataset.from_list(chats), unpacking_collator, **options)
        padded.train_dataset = packed.train_dataset
        self.check_same_training(packed, padded)

    def test_sample_mean(self):
        packed = self.build("packed", self.samples(), packing=True, max_length=ROW)
        padded = self.padded_rows(packed)
        for trainer in (packed, padded):
            set_loss_normalization(trainer, "sample")
        self.check_same_training(packed, padded)

    def test_sample_mean_beside_another_loss(self):
        trainer = self.build("packed", self.samples(), padding_free=True, loss_type="dft")
        with self.assertRaisesRegex(ValueError, "got loss_type='dft'"):
            set_loss_normalization(trainer, "sample")
