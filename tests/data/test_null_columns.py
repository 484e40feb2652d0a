"""A column that is `None` is an absent one, as in a table of several kinds of samples, which has all of their columns."""

import itertools
import unittest

import torch
from common.families import tiny_model
from datasets import Dataset, concatenate_datasets
from parameterized import parameterized

from transformers_packed import (
    DataCollatorWithFlattening,
    IterablePackingDataset,
    PackingDataset,
    patch_model,
)
from transformers_packed.data.dataset import find_tree, find_unusable, sample_lengths, sampled_lengths
from transformers_packed.data.documents import PaddedSamples, is_packed, unpacked
from transformers_packed.data.excerpts import excerpts


def sample(*tokens, **columns):
    return {"input_ids": list(tokens), "labels": [-100, *tokens[1:]], **columns}


PLAIN = [sample(2, 3, 4), sample(5, 6)]
# Samples with a column that plain ones lack.
KINDS = {
    "rows": [sample(7, 8, 9, 2, 3, seq_lengths=[2, 3]), sample(4, 5, seq_lengths=[2])],
    "trees": [sample(5, 6, turns=[sample(7, 8), sample(9, 2)])],
    "groups": [{"prefix": [5, 6], "answers": [sample(7, 8), sample(9, 2)]}],
    "masks": [sample(0, 7, 8, attention_mask=[0, 1, 1])],
    "token_types": [sample(7, 8, mm_token_type_ids=[0, 1])],
    "positions": [sample(7, 8, position_ids=[0, 1])],
    "images": [sample(7, 8, pixel_values=[[1.0, 2.0]])],
    "other": [sample(7, 8, weight=[1, 2])],
}


def listed(kind, first):
    return PLAIN + KINDS[kind] if first == "plain" else KINDS[kind] + PLAIN


def filled(kind, first):
    samples = listed(kind, first)
    names = dict.fromkeys(name for x in samples for name in x)
    names = {**names, "never": None}
    # Groups have no labels of their own.
    return [{name: x.get(name) for name in names} for x in samples]


def table(kind, first):
    parts = [Dataset.from_list(x) for x in (PLAIN, KINDS[kind])]
    return concatenate_datasets(parts if first == "plain" else parts[::-1])


def plain(x):
    """Nested samples without missing columns."""
    if isinstance(x, dict):
        return {name: plain(column) for name, column in x.items() if column is not None}
    return [plain(part) for part in x] if isinstance(x, list) else x


class NullColumnsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.collator = DataCollatorWithFlattening(model=patch_model(tiny_model("qwen3_5_text")))

    def check_batch(self, got, want):
        self.assertEqual(got.keys(), want.keys())
        for name, value in want.items():
            same = torch.equal(got[name], value) if isinstance(value, torch.Tensor) else got[name] == value
            self.assertTrue(same, name)

    @parameterized.expand([(kind, *how) for kind in KINDS for how in (("plain", filled), ("kind", table))])
    def test_readers(self, kind, first, source):
        samples, dataset = listed(kind, first), source(kind, first)
        elements = [dataset[at] for at in range(len(dataset))]
        self.check_batch(self.collator(elements), self.collator(samples))
        if kind not in ("trees", "groups"):
            self.check_batch(PaddedSamples()(elements), PaddedSamples()(samples))
        for read in (is_packed, find_unusable, sample_lengths, sampled_lengths, lambda x: find_tree(x) is not None):
            self.assertEqual(
                *(torch.as_tensor(x).tolist() if x is not None else x for x in map(read, (dataset, samples)))
            )
        for make in (lambda x: PackingDataset(x, 8), lambda x: IterablePackingDataset(x, 8)):
            self.assertEqual(*([plain(list(row)) for row in make(x)] for x in (dataset, samples)))
            self.check_batch(*(self.collator(list(make(x))[:1]) for x in (dataset, samples)))
        self.assertEqual(*([plain(list(y)) for y in excerpts(x, (2, 3))[:1]] for x in (dataset, samples)))

    @parameterized.expand(itertools.product(("plain", "kind"), (filled, table)))
    def test_documents_of_rows_beside_samples(self, first, source):
        dataset = source("rows", first)
        self.assertTrue(is_packed(dataset))
        documents = [plain(dict(x)) for x in unpacked(dataset)]
        self.assertEqual(sorted(len(x["input_ids"]) for x in documents), [2, 2, 2, 3, 3])
        self.assertEqual(len(unpacked(dataset)), 5)

    @parameterized.expand(["input_ids", "labels"])
    def test_tokens_and_labels_are_never_absent(self, name):
        """All tokens of a sample without labels are targets."""
        samples = [*PLAIN, {**PLAIN[0], name: None}]
        dataset, message = Dataset.from_list(samples), f"{name} without missing values in sample 2, got None"
        for source in (samples, dataset):
            self.assertRegex(str(find_unusable(source)), message)
            with self.assertRaisesRegex(ValueError, message):
                self.collator(list(source))
        tree = sample(5, 6, turns=[{**PLAIN[0], name: None}, PLAIN[1]])
        with self.assertRaisesRegex(ValueError, f"{name} without missing values in sample 1, got None"):
            self.collator([tree])
