"""Samples with a prefix, in one row that holds each prefix once, against whole documents."""

import tempfile
import unittest

import numpy as np
import torch
from common.families import tiny_model
from mixins.model import total_relative_error
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from transformers_packed import DataCollatorWithFlattening, patch_model
from transformers_packed.parallel import shard_batch
from transformers_packed.training.losses import per_document_loss


def make_model(family="qwen3_5", dtype=torch.float64):
    set_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="sdpa").to(dtype)
    return patch_model(model).train()


def make_samples():
    draw = np.random.default_rng(0)
    tokens = lambda n: draw.integers(1, 61, n).tolist()  # noqa: E731
    first, second, one = tokens(9), tokens(70), tokens(1)
    prefixes = [first, None, second, first, one, second, None, first]
    samples = []
    for k, prefix in enumerate(prefixes):
        sample = {"input_ids": tokens(3 + k)}
        sample |= {} if prefix is None else {"prefix": prefix}
        samples.append(sample)
    return samples


def whole(sample):
    prefix = sample.get("prefix", [])
    labels = sample.get("labels", sample["input_ids"])
    return {"input_ids": [*prefix, *sample["input_ids"]], "labels": [-100] * len(prefix) + labels}


def group(prefix, *answers, **columns):
    """A group whose answers have these tokens, and these columns, one value for each answer."""
    samples = [{"input_ids": tokens} | {n: v[k] for n, v in columns.items()} for k, tokens in enumerate(answers)]
    return {"prefix": prefix, "answers": samples}


def grouped(samples):
    """The samples with a prefix as groups of one or two, and the others as they are."""
    found = []
    for sample in samples:
        answer = {name: x for name, x in sample.items() if name != "prefix"}
        if "prefix" not in sample:
            found.append(sample)
        elif found and found[-1].get("prefix") == sample["prefix"]:
            found[-1]["answers"].append(answer)
        else:
            found.append({"prefix": sample["prefix"], "answers": [answer]})
    return found


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = model(**batch, num_items_in_batch=7).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


class PrefixesTest(unittest.TestCase):
    def setUp(self):
        self.model = make_model()
        self.collator = DataCollatorWithFlattening(model=self.model, return_cu_seqlens=True)

    def test_layout(self):
        samples = [
            group([5, 6, 7], [8, 9], labels=[[-100, 9]]),
            {"input_ids": [3, 2], "labels": [3, 2]},
            group([5, 6, 7], [4], labels=[[4]]),
            group([1], [2], labels=[[2]]),
        ]
        batch = self.collator(samples)
        self.assertEqual(batch["input_ids"].tolist(), [[5, 6, 3, 2, 1, 2, 7, 8, 9, 7, 4]])
        self.assertEqual(batch["labels"].tolist(), [[-100, -100, -100, 2, -100, 2, -100, -100, 9, -100, 4]])
        self.assertEqual(batch["cu_seqlens"].tolist(), [0, 2, 4, 6, 9, 11])
        self.assertEqual(batch["position_ids"].tolist(), [[0, 1, 0, 1, 0, 1, 2, 3, 4, 2, 3]])
        self.assertEqual(batch["parent_of"].tolist(), [-1, -1, -1, 0, 0])

    # Routers of experts compute in float32.
    @parameterized.expand([("qwen3_5", 1e-11), ("qwen3_next", 1e-6)])
    def test_trains_like_whole_documents(self, family, bar):
        model, samples = make_model(family), make_samples()
        collator = DataCollatorWithFlattening(model=model, return_cu_seqlens=True)
        (loss, gradients), (expected, want) = (
            loss_and_gradients(model, collator(some)) for some in (grouped(samples), list(map(whole, samples)))
        )
        self.assertLess(abs(loss - expected).item(), bar * expected.item())
        self.assertLess(total_relative_error(gradients, want), bar)

    def test_prefixes_of_one_token(self):
        """They are the first tokens of their samples, in a plain row."""
        whole_ones = [{"input_ids": tokens, "labels": [-100, *tokens[1:]]} for tokens in ([5, 8, 9], [5, 4])]
        batch, expected = self.collator([group([5], [8, 9], [4])]), self.collator(whole_ones)
        self.assertEqual(batch.keys(), expected.keys())
        for name, value in expected.items():
            self.assertTrue(torch.equal(batch[name], value), name)

    def test_losses_per_document(self):
        """Prompts count as documents without targets."""
        samples, means = make_samples(), []
        for some in (grouped(samples), list(map(whole, samples))):
            batch = self.collator(some)
            logits = self.model(**{name: x for name, x in batch.items() if name != "labels"}).logits
            means.append(per_document_loss(logits, batch["labels"], batch["cu_seqlens"]))
        order = [1, 4, 6, 0, 2, 3, 5, 7]
        self.assertEqual(means[0].losses[:2].tolist(), [0, 0])
        self.assertTrue(torch.allclose(means[0].losses[2:], means[1].losses[order]))
        self.assertEqual(means[0].token_counts[2:].tolist(), means[1].token_counts[order].tolist())

    def test_masked_tokens_and_token_columns(self):
        collator = DataCollatorWithFlattening(model=self.model, token_columns=["weight"])
        samples = [
            group([5, 6], [8, 9, 3], attention_mask=[[1, 0, 1]], weight=[[1.0, 2.0, 3.0]]),
            group(torch.tensor([5, 6]), [4], attention_mask=[[1]], weight=[[4.0]]),
        ]
        batch = collator(samples)
        self.assertEqual(batch["input_ids"].tolist(), [[5, 6, 8, 3, 6, 4]])
        self.assertEqual(batch["weight"].tolist(), [[0, 0, 1, 3, 0, 4]])
        self.assertEqual(batch["cu_seqlens"].tolist(), [0, 1, 4, 6])

    def test_trainer(self):
        model = make_model(dtype=torch.float32)
        collator = DataCollatorWithFlattening(model=model)
        losses = []
        groups = grouped(make_samples())
        for samples in (groups, [whole(sample) for sample in make_samples()]):
            with tempfile.TemporaryDirectory() as folder:
                options = {
                    "max_steps": 1,
                    "per_device_train_batch_size": len(samples),
                    "learning_rate": 0.0,
                    "logging_steps": 1,
                }
                args = TrainingArguments(
                    folder, use_cpu=True, report_to="none", remove_unused_columns=False, **options
                )
                trainer = Trainer(model, args, train_dataset=samples, data_collator=collator)
                trainer.train()
                losses.append(trainer.state.log_history[0]["loss"])
        self.assertAlmostEqual(*losses, places=4)


class RefusalsTest(unittest.TestCase):
    def setUp(self):
        self.model = make_model()

    def check(self, collator, samples, pattern):
        with self.assertRaisesRegex(ValueError, pattern):
            collator(samples)

    def test_collators(self):
        samples = [group([5, 6], [8])]
        stock = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
        other = patch_model(tiny_model("lara_mini"))
        for options, got in (
            ({"on_leak": "ignore"}, "a model without classes"),
            ({"model": stock, "on_leak": "ignore"}, "a model without classes"),
            ({"model": other, "on_leak": "ignore"}, "a model without classes"),
            ({"model": self.model, "pad_to_multiple_of": 4, "pad_token_id": 0}, "pad_to_multiple_of"),
            ({"model": self.model, "return_seq_idx": True}, "return_seq_idx"),
        ):
            self.check(DataCollatorWithFlattening(**options), samples, f"got {got}")

    @parameterized.expand([("empty", []), ("nested", [[1, 2]]), ("none", None), ("floats", [1.5])])
    def test_prefixes(self, _, prefix):
        samples = [{"input_ids": [1]}, group(prefix, [8])]
        self.check(DataCollatorWithFlattening(model=self.model), samples, "expected a prefix of at least one token")

    def test_answers(self):
        for answers in ([[3, 4]], {"input_ids": [[3, 4]]}):
            samples = [{"input_ids": [1]}, {"prefix": [1, 2], "answers": answers}]
            self.check(DataCollatorWithFlattening(model=self.model), samples, "expected answers of a group as a list")

    def test_no_answers(self):
        samples = [{"input_ids": [1]}, {"prefix": [1, 2], "answers": []}]
        self.check(DataCollatorWithFlattening(model=self.model), samples, "expected at least one answer in a group")

    def test_columns_that_trainer_removes(self):
        """Trainer drops columns that the forward does not name. A group then has none left."""
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(folder, use_cpu=True, report_to="none", max_steps=1)
            collator = DataCollatorWithFlattening(model=self.model)
            trainer = Trainer(self.model, args, train_dataset=[group([5, 6], [8])], data_collator=collator)
            with self.assertRaisesRegex(ValueError, "expected input_ids in sample 0.*remove_unused_columns=False"):
                trainer.train()

    def test_a_column_of_the_user(self):
        """A sample with a column "prefix" is no group."""
        collator = DataCollatorWithFlattening(model=self.model)
        batch = collator([{"input_ids": [1, 2], "prefix": "a"}])
        self.assertEqual(batch["input_ids"].tolist(), [[1, 2]])

    def test_one_label_per_sample(self):
        samples = [group([5, 6], [8], labels=[1])]
        self.check(DataCollatorWithFlattening(model=self.model), samples, "got one label per sample")

    def test_other_families(self):
        model = patch_model(tiny_model("lara_mini"))
        batch = {"input_ids": torch.ones(1, 4, dtype=torch.long), "cu_seqlens": torch.tensor([0, 2, 4])}
        with self.assertRaisesRegex(ValueError, "documents that do not share prompts.*Use a family with classes"):
            model(**batch, parent_of=torch.tensor([-1, 0]))

    def test_boundaries_without_documents(self):
        with self.assertRaisesRegex(ValueError, "cu_seqlens together with parent_of"):
            self.model(torch.ones(1, 4, dtype=torch.long), parent_of=torch.tensor([-1, 0]))

    def test_sequence_parallelism(self):
        batch = DataCollatorWithFlattening(model=self.model)([group([5, 6], [8])])
        with self.assertRaisesRegex(
            ValueError, "does not support shared prompts .parent_of.*without sequence parallelism"
        ):
            shard_batch(batch, 0, 2)

    def test_neftune(self):
        from transformers_packed.models.inputs import resolve_boundaries
        from transformers_packed.training.callbacks.neftune import document_lengths

        batch = DataCollatorWithFlattening(model=self.model)([group([5, 6], [8])])
        with self.assertRaisesRegex(ValueError, "neftune_noise_alpha to None"):
            document_lengths(resolve_boundaries(dict(batch)))


if __name__ == "__main__":
    unittest.main()
