"""TRL's trainers with a registered model, against the stock class on padded batches of the same samples."""

import copy

import torch
from common.records import MARKED, assistant, make_tokenizer, user
from common.trl_trainers import HAS_TRL, SGD, TRLTestCase, build_model, updates_and_losses
from mixins.model import total_relative_error
from parameterized import parameterized
from scripts.trainer_arms import Samples, collate_padded

from transformers_packed import (
    DataCollatorWithFlattening,
    PackingDataset,
    pack_dataset,
    registered,
    set_loss_normalization,
)


if HAS_TRL:
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

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

    @parameterized.expand(["trl", "ours"])
    def test_padding_free(self, collator):
        """With TRL's collator, or with ours in its place."""
        if collator == "trl":
            packed = self.build("packed", self.samples(), padding_free=True)
        else:
            flatten = DataCollatorWithFlattening(return_cu_seqlens=True, return_seq_idx=True, on_leak="ignore")
            packed = self.build("packed", self.samples(), flatten)
        batch = packed.data_collator([packed.train_dataset[i] for i in range(3)])
        self.assertEqual(batch["input_ids"].shape[0], 1)
        self.assertIn("seq_idx", batch)
        self.check_same_training(packed, self.build("padded", self.samples()))

    @parameterized.expand([("full",), ("lora",)])
    def test_packing(self, method):
        """Best-fit-decreasing rows with several documents."""
        peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "in_proj_qkv"]) if method == "lora" else None
        options = {"peft_config": peft_config}
        packed = self.build("packed", self.samples(), packing=True, max_length=ROW, **options)
        self.assertGreater(max(len(row["seq_lengths"]) for row in packed.train_dataset), 2)
        self.check_same_training(packed, self.padded_rows(packed, **copy.deepcopy(options)))

    @parameterized.expand(["pack_dataset_trl", "pack_dataset_ours", "packing_dataset"])
    def test_our_rows(self, form):
        flatten = DataCollatorWithFlattening(return_cu_seqlens=True, return_seq_idx=True, on_leak="ignore")
        if form == "packing_dataset":
            packed = self.build("packed", self.samples(), flatten)
            packed.train_dataset = PackingDataset(packed.train_dataset, max_length=ROW)
            first = packed.train_dataset[0]
            self.assertIsInstance(first, list)
        else:
            rows = pack_dataset(self.samples(), max_length=ROW)
            if form == "pack_dataset_trl":
                packed = self.build("packed", rows, padding_free=True)
            else:
                packed = self.build("packed", rows, flatten)
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
        padded, by_token = self.padded_rows(packed), self.padded_rows(packed)
        for trainer in (packed, padded):
            set_loss_normalization(trainer, "sample")
        sample_mean = self.check_same_training(packed, padded)
        token_mean, _ = updates_and_losses(by_token)
        self.assertGreater(total_relative_error(token_mean, sample_mean), 1e-2)

    def test_sample_mean_beside_another_loss(self):
        trainer = self.build("packed", self.samples(), padding_free=True, loss_type="dft")
        with self.assertRaisesRegex(ValueError, "got loss_type='dft'"):
            set_loss_normalization(trainer, "sample")

    def test_a_name_instead_of_a_model(self):
        """TRL looks up the class of a checkpoint in `transformers` directly, not through the Auto classes: see docs/how_to/sft.md."""
        build_model("packed", len(make_tokenizer())).save_pretrained(self.directory)
        with registered():
            trainer = SFTTrainer(
                self.directory,
                args=SFTConfig(self.directory, **SGD, padding_free=True, max_length=None),
                train_dataset=self.samples(),
                processing_class=make_tokenizer(),
            )
        self.assertEqual(type(trainer.model).__module__, "transformers.models.qwen3_5.modeling_qwen3_5")

    def test_the_comparison_can_fail(self):
        """Without boundaries the parameters differ, and the stock class refuses TRL's rows."""
        packed = self.build("packed", self.samples(), padding_free=True)
        padded, _ = updates_and_losses(self.build("padded", self.samples()))
        collate = packed.data_collator
        packed.data_collator = lambda features: {
            **{name: x for name, x in collate(features).items() if name in ("input_ids", "labels")},
            "attention_mask": torch.ones_like(collate(features)["input_ids"]),
        }
        leaking, _ = updates_and_losses(packed)
        self.assertGreater(total_relative_error(leaking, padded), 1e-4)
        with self.assertRaisesRegex(ValueError, "can't keep packed sequences apart"):
            self.build("padded", self.samples(), padding_free=True).train()


class PreferenceTest(TRLTestCase):
    """On the padded batches of these trainers, a registered model gives the same as the stock class."""

    def test_dpo(self):
        trainers = []
        for arm in ("packed", "padded"):
            tokenizer = make_tokenizer()
            pairs = [{"prompt": "q" * i, "chosen": "yes" * (i % 4 + 1), "rejected": "no" * i} for i in range(1, 17)]
            options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
            trainers.append(
                DPOTrainer(
                    build_model(arm, len(tokenizer)),
                    ref_model=build_model(arm, len(tokenizer)),
                    args=DPOConfig(self.directory, **SGD, **options),
                    train_dataset=Dataset.from_list(pairs),
                    processing_class=tokenizer,
                )
            )
        self.check_same_training(*trainers)
        with self.assertRaisesRegex(ValueError, "expected a trainer without another loss, got loss_type"):
            set_loss_normalization(trainers[0], "sample")

    def test_grpo(self):
        # Elsewhere: padding-free reinforcement learning scores lower.
        trainers, completions = [], {"packed": [], "padded": []}
        for arm in completions:
            tokenizer = make_tokenizer()

            def reward(completion_ids, seen=completions[arm], **kwargs):
                seen.append(completion_ids)
                return [float(sum(ids) % 7) for ids in completion_ids]

            options = {
                "per_device_train_batch_size": 4,
                "num_generations": 4,
                "max_completion_length": 8,
                "temperature": 1.0,
            }
            trainers.append(
                GRPOTrainer(
                    build_model(arm, len(tokenizer)),
                    reward_funcs=reward,
                    args=GRPOConfig(self.directory, **{**SGD, "max_steps": 3}, **options),
                    train_dataset=Dataset.from_list([{"prompt": "q" * i} for i in range(1, 9)]),
                    processing_class=tokenizer,
                )
            )
        self.check_same_training(*trainers, bar=1e-4)
        self.assertEqual(completions["packed"], completions["padded"])
        self.assertEqual(len(completions["packed"]), 3)
