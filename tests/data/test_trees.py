"""Trees of samples and groups of answers in one row, against whole documents."""

import tempfile
import unittest
from collections import Counter

import numpy as np
import torch
from common.families import tiny_model
from common.trees import batches, group, loss_and_gradients, make_model, node, paths
from datasets import Dataset
from hypothesis import given, settings
from mixins.model import total_relative_error
from mixins.patch import builtin_model
from parameterized import parameterized
from transformers import Trainer, TrainingArguments

from transformers_packed import (
    DataCollatorWithFlattening,
    PackingDataset,
    patch_model,
)
from transformers_packed.data.collator import CausalLabelsCollator
from transformers_packed.parallel import shard_batch
from transformers_packed.shared_prompts import level_order
from transformers_packed.training.losses import per_document_logps


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


def documents_in(batch, name="input_ids"):
    return [x.tolist() for x in batch[name][0].tensor_split(batch["cu_seqlens"][1:-1].long())]


def in_words(batch):
    """The documents of a row. Targets have a star."""
    labels = documents_in(batch, "labels")
    return [
        " ".join(f"{token}{'*' * (label == token)}" for token, label in zip(*document, strict=True))
        for document in zip(documents_in(batch), labels, strict=True)
    ]


def targets_in(batch):
    """How often each token is a target after each list of tokens."""
    parent_of, whole, found = batch.get("parent_of"), [], Counter()
    for number, (ids, labels) in enumerate(zip(documents_in(batch), documents_in(batch, "labels"), strict=True)):
        parent = -1 if parent_of is None else int(parent_of[number])
        before = whole[parent] if parent >= 0 else []
        assert labels[0] == -100
        found.update((*before, *ids[: at + 1]) for at, label in enumerate(labels) if label != -100)
        whole.append([*before, *ids])
    return found


class TreesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = make_model()
        cls.collator = DataCollatorWithFlattening(model=cls.model, return_cu_seqlens=True)

    @given(elements=batches(4))
    @settings(deadline=None, max_examples=60)
    def test_targets_of_any_trees(self, elements):
        options = {"return_cu_seqlens": True, "return_boundaries": True}
        collator = DataCollatorWithFlattening(model=self.model, token_columns=["weight"], **options)
        batch, whole = collator(elements), [*paths(elements)]
        self.assertEqual(targets_in(batch), targets_in(self.collator(whole)))
        self.assertEqual(batch["weight"].sum(), sum(label != -100 for sample in whole for label in sample["labels"]))
        self.assertLessEqual(batch["input_ids"].numel(), sum(len(sample["input_ids"]) for sample in whole))
        if "parent_of" in batch:
            parent_of = batch["parent_of"].tolist()
            self.assertEqual(level_order(parent_of), [*range(len(parent_of))])
            self.assertEqual(batch["boundaries"].parent_of, tuple(parent_of))
            self.assertTrue(torch.equal(batch["boundaries"].position_ids, batch["position_ids"]))

    @given(elements=batches(70))
    @settings(deadline=None, max_examples=3)
    def test_trains_like_the_nodes_of_any_trees(self, elements):
        batch, whole = self.collator(elements), self.collator([*paths(elements)])
        for wide, bar in ((True, 1e-11), (False, 1e-6)):
            (loss, gradients), (expected, want) = (loss_and_gradients(self.model, x, wide) for x in (batch, whole))
            self.assertLessEqual(abs(loss - expected).item(), bar * expected.item())
            if expected:
                self.assertLess(total_relative_error(gradients, want), bar)

    @parameterized.expand(
        [
            ("no_target", {1, 2}, {1}, ["5 6* 7*", "8 9*", "4"]),
            ("after_a_token_without_label", {1}, {0, 1}, ["5 6*", "7 8* 9*", "7 4"]),
            ("after_a_target", {2}, {0}, ["5", "6 7* 8* 9", "6 7 4"]),
            ("after_targets", {1, 2}, {0}, ["5 6* 7* 8* 9", "5 6 7 4"]),
        ]
    )
    def test_targets_at_the_start_of_turns(self, _, labels, of_turn, documents):
        batch = self.collator([node([5, 6, 7], labels, node([8, 9], of_turn), node([4], {}))])
        self.assertEqual(in_words(batch), documents)
        expected = [-1, 0, 0] if len(documents) == 3 else None
        self.assertEqual(batch["parent_of"].tolist() if "parent_of" in batch else None, expected)

    def test_copies_count_once(self):
        collator = DataCollatorWithFlattening(model=self.model, token_columns=["weight"], return_cu_seqlens=True)
        turns = node([8, 9], {0}, weight=[4.0, 5.0]), node([4], {}, weight=[6.0], turns=None)
        batch = collator([node([5, 6, 7], {2}, *turns, weight=torch.tensor([1.0, 2.0, 3.0]))])
        self.assertEqual(documents_in(batch, "weight"), [[1], [2, 3, 4, 5], [0, 0, 6]])

    def test_without_labels_all_tokens_are_targets(self):
        turns = [{"input_ids": [8, 9]}, {"input_ids": [4]}]
        batch = self.collator([{"input_ids": [5, 6, 7], "turns": turns}, {"input_ids": [1, 2]}])
        self.assertEqual(in_words(batch), ["5 6* 7* 8* 9*", "5 6 7 4*", "1 2*"])
        with self.assertRaisesRegex(ValueError, "labels in all samples or in none"):
            self.collator([{"input_ids": [5], "turns": [node([8, 9], {0}), turns[1]]}])

    def test_columns_of_a_table(self):
        """Its nodes have the same columns at each level."""
        leaf = {"input_ids": [4], "labels": [4]}
        turns = [{**leaf, "turns": [leaf, leaf]}, {**leaf, "turns": None}, {**leaf, "turns": []}]
        table = Dataset.from_list(
            [{"input_ids": [5, 6], "labels": [-100, 6], "turns": turns}, {**leaf, "turns": None}]
        )
        for rows in (table, table.with_format("numpy")):
            self.assertEqual(in_words(self.collator(list(rows))), ["5 6* 4* 4*", "5 6 4 4*", "5 6 4*", "5 6 4*", "4"])

    def test_masked_tokens(self):
        masked = node([8, 0, 9], {0, 2}, attention_mask=[1, 0, 1])
        batch = self.collator([node([5, 6], {}, masked, node([4], {}), attention_mask=[0, 1])])
        self.assertEqual(in_words(batch), ["6 8* 9*", "6 4"])

    def test_losses_per_document(self):
        """A value for each node, and that of the first turn includes the targets that have moved to it."""
        turns = node([8, 9, 3], {0, 2}), node([4, 1], {0, 1})
        whole = [node([2, 5], {1}), node([2, 5, 6, 7, 8, 9, 3], {3, 4, 6}), node([2, 5, 6, 7, 4, 1], {4, 5})]
        found = []
        for elements in ([node([2, 5, 6, 7], {1, 3}, *turns)], whole):
            batch = self.collator(elements)
            logits = self.model(**{name: x for name, x in batch.items() if name != "labels"}).logits
            found.append(per_document_logps(logits, batch["labels"], batch["cu_seqlens"]))
        self.assertTrue(torch.allclose(found[0].sums, found[1].sums))
        self.assertEqual(found[0].token_counts.tolist(), found[1].token_counts.tolist())

    def test_an_only_turn_joins_its_parent(self):
        """Bit for bit, and without a limit of their number."""
        tree, tokens = None, [1 + at % 60 for at in range(3000)]
        for at in reversed(range(0, 3000, 2)):
            tree = {"input_ids": tokens[at : at + 2], "turns": [tree] if tree else []}
        batch, expected = (self.collator([x, {"input_ids": [1, 2]}]) for x in (tree, {"input_ids": tokens}))
        self.assertEqual(batch.keys(), expected.keys())
        for name, value in expected.items():
            self.assertTrue(torch.equal(batch[name], value), name)


class GroupsTest(unittest.TestCase):
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
    @parameterized.expand([("qwen3_next", 1e-6)])
    def test_trains_like_whole_documents(self, family, bar):
        model, samples = make_model(family), make_samples()
        collator = DataCollatorWithFlattening(model=model, return_cu_seqlens=True)
        (loss, gradients), (expected, want) = (
            loss_and_gradients(model, collator(some)) for some in (grouped(samples), list(map(whole, samples)))
        )
        self.assertLess(abs(loss - expected).item(), max(bar, 1e-6) * expected.item())
        self.assertLess(total_relative_error(gradients, want), bar)

    def test_prefixes_of_one_token(self):
        """They are the first tokens of their samples, in a plain row."""
        whole_ones = [{"input_ids": tokens, "labels": [-100, *tokens[1:]]} for tokens in ([5, 8, 9], [5, 4])]
        batch, expected = self.collator([group([5], [8, 9], [4])]), self.collator(whole_ones)
        self.assertEqual(batch.keys(), expected.keys())
        for name, value in expected.items():
            self.assertTrue(torch.equal(batch[name], value), name)

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


class RefusalsTest(unittest.TestCase):
    def setUp(self):
        self.model = make_model()

    def check(self, collator, samples, pattern):
        with self.assertRaisesRegex(ValueError, pattern):
            collator(samples)

    def test_collators(self):
        stock = builtin_model("qwen3_5")
        other, trees = patch_model(tiny_model("inkling")), (group([5, 6], [8]), node([5, 6], {1}, node([8], {0})))
        for options, got in (
            ({"on_leak": "ignore"}, "a model without classes"),
            ({"model": stock, "on_leak": "ignore"}, "a model without classes"),
            ({"model": other, "on_leak": "ignore"}, "a model without classes"),
            ({"model": self.model, "pad_to_multiple_of": 4, "pad_token_id": 0}, "pad_to_multiple_of"),
        ):
            for tree in trees:
                self.check(DataCollatorWithFlattening(**options), [tree], f"expected trees .* got {got}")
        collator = CausalLabelsCollator(0, model=self.model)
        self.check(collator, [trees[1]], "labels all tokens does not support trees")

    @parameterized.expand(
        [
            ("lists", [[8, 9]], "turns as a list of samples, got list in the list"),
            ("deep", [node([8], {}, *"ab")], "turns as a list of samples, got str in the list"),
            ("mapping", [node([8], {}) | {"turns": node([9], {})}], "turns as a list of samples, got dict"),
            ("columns", [node([8], {}), {"labels": [9]}], "input_ids in sample 3"),
            (
                "empty",
                [node([], {}), node([9], {})],
                "at least one token in each node of a tree, got none in sample 2",
            ),
            ("masked", [node([8], {}, node([9], {}), attention_mask=[0])], "at least one token .* in sample 2"),
            ("images", [node([8], {}, pixel_values=torch.ones(1, 3))], "got images or videos"),
            ("one_label", [node([8], {}) | {"labels": 1}], "one label per token in all samples"),
            ("lengths", [node([8], {}) | {"labels": [1, 2]}], "labels with the length of input_ids, 1, in sample 2"),
            ("none", [node([8], {}) | {"labels": None}], "labels without missing values in sample 2"),
        ]
    )
    def test_nodes(self, _, turns, pattern):
        samples = [node([1, 2], {1}), node([5, 6], {1}, *turns)]
        self.check(DataCollatorWithFlattening(model=self.model), samples, pattern)

    def test_answers(self):
        for answers in ([[3, 4]], {"input_ids": [[3, 4]]}):
            samples = [{"input_ids": [1]}, {"prefix": [1, 2], "answers": answers}]
            self.check(
                DataCollatorWithFlattening(model=self.model), samples, "expected answers as a list of samples, got "
            )

    def test_columns_that_trainer_removes(self):
        """Trainer drops columns that the forward does not name. A group then has none left."""
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(folder, use_cpu=True, report_to="none", max_steps=1)
            collator = DataCollatorWithFlattening(model=self.model)
            trainer = Trainer(self.model, args, train_dataset=[group([5, 6], [8])], data_collator=collator)
            with self.assertRaisesRegex(ValueError, "expected input_ids in sample 0.*remove_unused_columns=False"):
                trainer.train()

    def test_a_column_of_the_user(self):
        """A sample with a column "prefix" is no group, and one with messages is no tree."""
        collator = DataCollatorWithFlattening()
        turns = ["a", "b"], [{"role": "user", "content": "a"}], 2, [], None
        samples = [{"input_ids": [1, 2], "prefix": "a"}, *[{"input_ids": [3], "turns": x} for x in turns]]
        self.assertEqual(collator(samples)["input_ids"].tolist(), [[1, 2, 3, 3, 3, 3, 3]])
        self.assertEqual(len(PackingDataset(Dataset.from_list([{**samples[1], "turns": x} for x in turns[:1]]), 4)), 1)

    def test_boundaries_without_documents(self):
        with self.assertRaisesRegex(ValueError, "cu_seqlens together with parent_of"):
            self.model(torch.ones(1, 4, dtype=torch.long), parent_of=torch.tensor([-1, 0]))

    def test_sequence_parallelism(self):
        batch = DataCollatorWithFlattening(model=self.model)([group([5, 6], [8], [9])])
        with self.assertRaisesRegex(
            ValueError, "does not support shared prompts .parent_of.*without sequence parallelism"
        ):
            shard_batch(batch, 0, 2)

    def test_neftune(self):
        from transformers_packed.models.inputs import resolve_boundaries
        from transformers_packed.training.callbacks.neftune import document_lengths

        batch = DataCollatorWithFlattening(model=self.model)([group([5, 6], [8], [9])])
        with self.assertRaisesRegex(ValueError, "neftune_noise_alpha does not support a row with shared prompts"):
            document_lengths(resolve_boundaries(dict(batch)))
