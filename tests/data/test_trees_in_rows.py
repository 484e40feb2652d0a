"""Planned rows of trees and groups, against trees that are collated by hand and whole documents."""

import tempfile
import unittest

import torch
from common.trees import batches, group, loss_and_gradients, make_model, node, paths
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from mixins.model import total_relative_error
from parameterized import parameterized
from scripts.trainer_arms import Stream
from transformers import Trainer, TrainingArguments

from transformers_packed import (
    DataCollatorWithFlattening,
    IterablePackingDataset,
    PackedTrainer,
    PackedTrainingArguments,
    PackingDataset,
    configure_packing,
    pack_dataset,
    verify_packing,
)
from transformers_packed.data.excerpts import excerpts
from transformers_packed.data.trees import tokens_in
from transformers_packed.training.sequence_parallel import PartCollator


PACKERS = {
    "planned": lambda samples, *args, **options: [*PackingDataset(samples, *args, **options)],
    "streamed": lambda samples, *args, **options: [*IterablePackingDataset(samples, *args, **options)],
}
# As the ends of nodes move, they have 14 and 7 tokens.
TREE = node([5, 6, 7], {1}, node([8, 9, 3], {0, 2}, node([7, 7], {0, 1}), node([6], {0})), node([4, 1], {0, 1}))
GROUP = group([5, 6, 7], [8, 9], [4], labels=[[8, 9], [4]])
SAMPLES = [TREE, node([1, 2, 3, 4, 5], {1, 2}), GROUP, node([1, 2], {1})] * 3


@st.composite
def elements(draw):
    """Trees, flat samples, and groups of which several have the same short prefix."""
    found = draw(batches(4))
    for _ in range(draw(st.integers(0, 4))):
        answers = []
        for _ in range(draw(st.integers(1, 4))):
            answers += draw(batches(2))[:1]
        found.append({"prefix": [60] * draw(st.integers(1, 3)), "answers": answers})
    return [{name: x for name, x in sample.items() if name != "weight"} for sample in draw(st.permutations(found))]


def numbered(samples):
    """Samples with a number that shows which of them a row has."""
    return [sample | {"number": number} for number, sample in enumerate(samples)]


def numbers_in(rows):
    return [[sample["number"] for sample in row] for row in rows]


def arguments(folder, kind=TrainingArguments, **options):
    options = {"use_cpu": True, "report_to": "none", "remove_unused_columns": False, "logging_steps": 1} | options
    return kind(folder, **options)


class PlansTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.model = make_model()
        cls.collator = DataCollatorWithFlattening(model=cls.model, return_cu_seqlens=True)

    def tokens(self, row):
        return self.collator([row])["input_ids"].numel()

    @given(elements=elements(), room=st.integers(0, 20))
    @settings(deadline=None, max_examples=20)
    def test_rows_of_any_trees(self, elements, room):
        """Each sample is in one row, and no collated row has more than max_length tokens."""
        samples = numbered(elements)
        for sample in samples:
            difference = tokens_in(sample) - self.tokens([sample])
            self.assertEqual(difference if "turns" in sample else min(difference, 0), 0)
        max_length = max(map(tokens_in, samples)) + room
        for name, pack in PACKERS.items():
            rows = pack(samples, max_length)
            self.assertEqual(sorted(sum(numbers_in(rows), [])), [*range(len(samples))], name)
            for row in rows:
                self.assertLessEqual(self.tokens(row), sum(map(tokens_in, row)))
                self.assertLessEqual(sum(map(tokens_in, row)), max_length)

    def test_groups_with_a_common_prefix(self):
        """The prefix of one token of the first group moves to its answers only because of the second group."""
        samples = [group([5], [1], [2], [3], labels=[[-100]] * 3), group([5], [4], labels=[[4]])]
        self.assertEqual([self.tokens([sample]) for sample in samples], [4, 2])
        self.assertEqual(self.tokens(samples), 8)
        self.assertEqual([tokens_in(sample) for sample in samples], [6, 2])

    def test_a_table(self):
        """Lengths come from a pass over it. Nodes have the same columns at each level."""
        leaf = {"input_ids": [4], "labels": [4]}
        trees = [{**leaf, "turns": None}, {**leaf, "turns": [leaf, leaf]}, {**leaf, "turns": []}]
        for samples in (trees, [GROUP] * 3):
            for table in (Dataset.from_list(samples), Dataset.from_list(samples).with_format("numpy")):
                for pack in PACKERS.values():
                    rows = pack(table, 8)
                    found = sorted(tokens_in(sample) for row in rows for sample in row)
                    self.assertEqual(found, sorted(map(tokens_in, samples)))
        rows = PackingDataset(Dataset.from_list(trees).select([1, 0]), 8, num_proc=1)
        self.assertEqual(rows.plan.tokens, 5)

    @parameterized.expand([("list", True), ("stream", False)])
    def test_resumed_streams(self, _, indexed):
        """After each row, with trees in rows that are open."""
        samples = numbered(SAMPLES)
        make = lambda: IterablePackingDataset(samples if indexed else Stream(samples), 16, buffer_size=3)  # noqa: E731
        whole = numbers_in(make())
        for done in range(1, len(whole)):
            first, second = make(), make()
            rows = iter(first)
            begun = [next(rows) for _ in range(done)]
            second.load_state_dict(first.state_dict())
            self.assertEqual(numbers_in(begun) + numbers_in(second), whole)

    @parameterized.expand([("error",), ("truncate",), ("split",)])
    def test_longer_trees(self, overlong):
        expected = (
            r"a tree of at most 13 computed tokens in sample 1, got 14. Raise max_length, or pass overlong=.drop"
        )
        samples = [node([1, 2], {1}), TREE]
        for pack in PACKERS.values():
            with self.assertRaisesRegex(ValueError, expected):
                pack(samples, 13, overlong=overlong)
        lengths = [sample | {"length": 2} for sample in samples]
        with self.assertRaisesRegex(ValueError, expected):
            [*PackingDataset(lengths, 13, length_column="length", overlong=overlong)]

    def test_longer_trees_are_dropped(self):
        samples = numbered([node([1, 2], {1}), TREE])
        for pack in PACKERS.values():
            self.assertEqual(numbers_in(pack(samples, 13, overlong="drop")), [[0]])
        stream = IterablePackingDataset(samples, 13, overlong="drop")
        list(stream)
        self.assertEqual((stream.counts["dropped"], stream.counts["tokens_cut"]), (1, 14))

    @parameterized.expand([("truncate", 1), ("split", 2)])
    def test_documents_beside_trees_are_cut(self, overlong, documents):
        samples = [TREE, node([*range(1, 20)], {1})]
        for pack in PACKERS.values():
            rows = pack(samples, 15, overlong=overlong)
            lengths = [tokens_in(sample) for row in rows for sample in row]
            self.assertEqual(sorted(lengths), sorted([14, 15, 4][: 1 + documents]))

    def test_a_plan_for_other_trees(self):
        samples = [sample | {"length": tokens_in(sample)} for sample in SAMPLES]
        self.assertEqual(len(sum(PackingDataset(samples, 16, length_column="length"), [])), len(samples))
        samples[2]["length"] = 5
        with self.assertRaisesRegex(ValueError, "sample 2 to have tokens 0 to 5, as planned, got a sample of 7"):
            list(PackingDataset(samples, 16, length_column="length"))

    def test_nodes_that_cannot_be_used(self):
        for turns, expected in (
            ([node([], {}), node([9], {})], "at least one token in each node of a tree"),
            ([{"labels": [9]}, node([9], {})], "input_ids in sample 1"),
            ([node([8], {}) | {"labels": [1, 2]}, node([9], {})], "labels with the length of input_ids, 1, in sample"),
        ):
            samples = [node([1, 2], {1}), node([5, 6], {1}, *turns)]
            for pack in PACKERS.values():
                with self.assertRaisesRegex(ValueError, expected):
                    pack(samples, 8)

    def test_processes_that_share_rows(self):
        with self.assertRaisesRegex(ValueError, "sequence parallelism does not support shared prompts"):
            PartCollator(self.collator, 0, 2, 1)([PackingDataset([TREE], 16)[0]])

    def test_tables_of_concatenated_rows(self):
        for dataset in (SAMPLES, [GROUP], Dataset.from_list([TREE]), Dataset.from_list([GROUP])):
            with self.assertRaisesRegex(ValueError, "one document in sample 0, got samples that continue others"):
                pack_dataset(dataset, 16)


class TrainingTest(unittest.TestCase):
    def test_loss_and_gradients(self):
        """Those of the same trees collated by hand, and of all nodes as whole documents."""
        model = make_model()
        collator = DataCollatorWithFlattening(model=model, return_cu_seqlens=True)
        samples = [sample for sample in SAMPLES if "input_ids" in sample]
        rows = PACKERS["planned"](numbered(samples), 20)
        self.assertGreater(len(rows), 2)
        for row in rows:
            plain, batch = [samples[number] for number in numbers_in([row])[0]], collator([row])
            for others, bar in ((plain, 0), ([*paths(plain)], 1e-11)):
                for wide in (True, False):
                    (loss, gradients), (expected, want) = (
                        loss_and_gradients(model, x, wide) for x in (batch, collator(others))
                    )
                    bar = max(bar, 1e-6) if bar and not wide else bar
                    self.assertLessEqual(abs(loss - expected).item(), bar * expected.item())
                    self.assertLessEqual(total_relative_error(gradients, want), bar)

    def train(self, samples, max_length, **options):
        """The losses of a run with one step for each epoch, its weights and its Trainer."""
        model = make_model(dtype=torch.float32)
        with tempfile.TemporaryDirectory() as folder:
            options = {"num_train_epochs": 3, "learning_rate": 0.01, "per_device_train_batch_size": 1} | options
            args = arguments(folder, PackedTrainingArguments, packing=True, max_length=max_length, **options)
            trainer = PackedTrainer(model, args, train_dataset=samples)
            trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log], model, trainer

    def test_packed_trainer(self):
        """A step of two rows of trees equals one of two rows of whole documents, three times."""
        samples = [x for x in SAMPLES if "input_ids" in x]
        runs = []
        for some in (samples, [*paths(samples)]):
            total = sum(map(tokens_in, some))
            runs.append(self.train(some, -(-total // 2) + 6, gradient_accumulation_steps=2))
            self.assertEqual(len(runs[-1][2].train_dataset), 2)
        (losses, model, trainer), (expected, other, _) = runs
        self.assertEqual(len(losses), 3)
        for loss, want in zip(losses, expected, strict=True):
            self.assertAlmostEqual(loss, want, delta=1e-6 * want)
        error = max((x - y).abs().max() for x, y in zip(model.parameters(), other.parameters(), strict=True))
        self.assertLess(error, 1e-4)
        log, plan = trainer.state.log_history[0], trainer.train_dataset.plan
        self.assertEqual(log["documents_per_row"], len(samples) / 2)
        self.assertAlmostEqual(log["packing_fill"], plan.fill, places=4)
        self.assertAlmostEqual(log["padding_avoided"], plan.padding_avoided, delta=2e-3)

    def test_configured_trainer_resumes(self):
        """With the rows that are left, in the order of the plan and with the same losses."""
        with tempfile.TemporaryDirectory() as folder:
            losses = []
            for resume in (False, True):
                model = make_model(dtype=torch.float32)
                args = arguments(folder, max_steps=6, save_steps=3, per_device_train_batch_size=1)
                trainer = Trainer(model, args, train_dataset=SAMPLES)
                configure_packing(trainer, True, 16)
                trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
                losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        self.assertEqual(losses[0], losses[1])

    def test_verification_of_a_row(self):
        model = make_model(dtype=torch.float32)
        collator = DataCollatorWithFlattening(model=model, return_cu_seqlens=True)
        rows = PackingDataset(SAMPLES, 40)
        self.assertIn("turns that branch. Check a batch with verify_packing", excerpts(rows, (20, 48))[1])
        batch = collator([rows[0]])
        found = verify_packing(model, batch)
        self.assertEqual(found.leak, 0)
        self.assertAlmostEqual(found.loss, found.loss_alone, places=4)
