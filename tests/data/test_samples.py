"""Every reader of data counts real tokens: those with an attention_mask of 0 do not exist."""

import unittest
from functools import partial
from unittest import mock

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from parameterized import parameterized

import transformers_packed as packed
from transformers_packed import IterablePackingDataset, PackingDataset, pack_dataset
from transformers_packed.audit.tiny import tiny_model
from transformers_packed.data.dataset import find_unusable, sample_lengths, sampled_lengths
from transformers_packed.data.samples import real_sample


# No model trains on these batches, so skip the check for leaks.
DataCollatorWithFlattening = partial(packed.DataCollatorWithFlattening, on_leak="ignore")

PADDED = 64
LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 0.6, 24), 1, PADDED).astype(int).tolist()
COLUMNS = ("input_ids", "labels", "attention_mask")


def real(lengths=LENGTHS):
    """Samples without padding, whose labels differ from their tokens."""
    ids = [list(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths, 1)]
    return [{"input_ids": x, "labels": [token + 1 for token in x], "attention_mask": [1] * len(x)} for x in ids]


def padded(side, lengths=LENGTHS, length=PADDED):
    """The same samples as a tokenizer with `padding="max_length"` returns them."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    samples = []
    for sample in real(lengths):
        padding = {name: [fill[name]] * (length - len(sample["input_ids"])) for name in COLUMNS}
        parts = (sample, padding) if side == "right" else (padding, sample)
        samples.append({name: parts[0][name] + parts[1][name] for name in COLUMNS})
    return samples


class Items:
    """A dataset with items that is neither a list nor one of `datasets`."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def with_transform(samples):
    dataset = Dataset.from_list([{"n": n} for n in range(len(samples))])
    dataset.set_transform(lambda batch: {name: [samples[n][name] for n in batch["n"]] for name in COLUMNS})
    return dataset


def selected(samples):
    """A dataset in several chunks, with indices."""
    parts = [Dataset.from_list(samples[::-1][:5]), Dataset.from_list(samples[::-1][5:])]
    return concatenate_datasets(parts).select(range(len(samples) - 1, -1, -1))


def arrays(make):
    return lambda samples: [{name: make(column) for name, column in sample.items()} for sample in samples]


KINDS = {
    "list": list,
    "arrays": arrays(np.array),
    "tensors": arrays(torch.tensor),
    "tuples": arrays(tuple),
    "items": Items,
    "table": Dataset.from_list,
    "table_of_tensors": lambda samples: Dataset.from_list(samples).with_format("torch"),
    "selected": selected,
    "transform": with_transform,
}
ACTIONS = [("truncate", "right"), ("truncate", "left"), ("split", "right"), ("drop", "right")]
ARGUMENTS = [*({"max_length": 96},), *({"max_length": 20, "overlong": o, "truncation_side": s} for o, s in ACTIONS)]


def plain(documents):
    """The columns of documents as tuples, in one order."""
    return sorted(tuple(tuple(np.asarray(document[name]).tolist()) for name in COLUMNS) for document in documents)


SIDES = "right", "left"


class RealTokensTest(unittest.TestCase):
    @parameterized.expand([(kind, SIDES[number % 2]) for number, kind in enumerate(KINDS)])
    def test_rows_are_those_of_the_samples_without_padding(self, kind, side):
        dataset = KINDS[kind](padded(side))
        self.assertEqual(sample_lengths(dataset).tolist(), LENGTHS)
        self.assertEqual(sampled_lengths(dataset).tolist(), LENGTHS)
        self.assertEqual(sampled_lengths(dataset, masked=True).tolist(), [PADDED] * len(LENGTHS))
        self.assertIsNone(find_unusable(dataset))
        for arguments in ARGUMENTS:
            got, want = PackingDataset(dataset, **arguments), PackingDataset(real(), **arguments)
            self.assertEqual(got.plan.fingerprint, want.plan.fingerprint)
            self.assertEqual(got.plan.summary(), want.plan.summary())
            self.assertEqual([plain(row) for row in got], [plain(row) for row in want])

    @parameterized.expand([("list", "left"), ("selected", "right"), ("transform", "left")])
    def test_written_rows(self, kind, side):
        for arguments in ARGUMENTS:
            got, want = pack_dataset(KINDS[kind](padded(side)), **arguments), pack_dataset(real(), **arguments)
            self.assertEqual(got.to_list(), want.to_list())

    @parameterized.expand([("list", "right"), ("tensors", "left"), ("stream", "left")])
    def test_streams(self, kind, side):
        samples = padded(side)
        dataset = Dataset.from_list(samples).to_iterable_dataset() if kind == "stream" else KINDS[kind](samples)
        for arguments in ARGUMENTS:
            got = IterablePackingDataset(dataset, buffer_size=3, **arguments)
            want = [plain(row) for row in IterablePackingDataset(real(), buffer_size=3, **arguments)]
            rows = iter(got)
            found = [plain(next(rows)) for _ in range(2)]
            resumed = IterablePackingDataset(dataset, buffer_size=3, **arguments)
            resumed.load_state_dict(got.state_dict())
            self.assertEqual(found + [plain(row) for row in resumed], want)

    # Transformers' collator accepts no tuples.
    @parameterized.expand([(kind, "left") for kind in sorted({*KINDS} - {"tuples"})])
    def test_batches(self, kind, side):
        dataset, collator = KINDS[kind](padded(side)), DataCollatorWithFlattening(return_cu_seqlens=True)
        got, want = collator([dataset[i] for i in range(len(dataset))]), collator(real())
        for name, value in want.items():
            self.assertTrue(torch.equal(got[name], value), name)

    def test_masks_without_padding_are_not_decoded(self):
        dataset = Dataset.from_list(real())
        for name in ("__getitem__", "__getitems__"):
            with mock.patch.object(Dataset, name, side_effect=AssertionError("decoded")):
                self.assertEqual(sample_lengths(dataset).tolist(), LENGTHS)
                self.assertEqual(sampled_lengths(dataset).tolist(), LENGTHS)
        (sample,) = real([5])
        self.assertIs(real_sample(sample), sample)

    def test_columns_that_are_not_tokens(self):
        sample = {
            "input_ids": [0, 7, 8],
            "attention_mask": [0, 1, 1],
            "boxes": [[0, 0], [7, 7], [8, 8]],
            "weights": torch.tensor([0.0, 0.7, 0.8]),
            "pixel_values": torch.zeros(3, 2),
            "shorter": [1, 2],
            "text": "abc",
            "labels": 3,
        }
        got = real_sample(sample)
        self.assertEqual((got["input_ids"], got["boxes"]), ([7, 8], [[7, 7], [8, 8]]))
        torch.testing.assert_close(got["weights"], torch.tensor([0.7, 0.8]))
        for name in ("pixel_values", "shorter", "text", "labels"):
            self.assertIs(got[name], sample[name])
        answers = [{"input_ids": [3, 4], "attention_mask": [1, 0]}, {"input_ids": [5, 6]}]
        model = packed.patch_model(tiny_model("qwen3_5_text"))
        batch = DataCollatorWithFlattening(model=model)([{"prefix": [1, 2], "answers": answers}])
        self.assertEqual(batch["input_ids"].tolist(), [[1, 2, 3, 2, 5, 6]])


def change(**columns):
    return lambda samples: [{**sample, **columns} if i == 3 else sample for i, sample in enumerate(samples)]


# Name, change of sample 3, and the message. The samples have 5 tokens.
UNUSABLE = [
    ("numbered_mask", change(attention_mask=[1, 1, 2, 2, 0]), "attention_mask of 0 and 1 in sample 3, got 2"),
    ("hole_in_the_mask", change(attention_mask=[1, None, 1, 1, 1]), "attention_mask .* in sample 3, got None"),
    (
        "short_mask",
        change(attention_mask=[1, 1]),
        "attention_mask with the length of input_ids, 5, in sample 3, got 2",
    ),
    ("missing_tokens", change(input_ids=None), "input_ids .*in sample 3, got None"),
]
# Known before training, but not needed to plan rows.
UNUSABLE_IN_BATCHES = [
    ("short_labels", change(labels=[1, 2]), "labels with the length of input_ids, 5, in sample 3, got 2"),
    ("missing_labels", change(labels=None), "labels without missing values in sample 3, got None"),
    ("hole_in_the_tokens", change(input_ids=[1, 2, 3, None, 5]), "input_ids .* in sample 3, got None at token 3"),
    ("hole_in_the_labels", change(labels=[1, 2, None, 4, 5]), "labels .* in sample 3, got None at token 2"),
]
READERS = ("list", "table", "table_of_tensors", "transform")


class UnusableTest(unittest.TestCase):
    @parameterized.expand([(*fault, kind) for fault in UNUSABLE + UNUSABLE_IN_BATCHES for kind in READERS])
    def test_a_sample_is_named_before_training(self, _, make, message, kind):
        self.assertRegex(str(find_unusable(KINDS[kind](make(real([5] * 9))))), f"^expected {message}")

    @parameterized.expand([(*fault, kind) for fault in UNUSABLE for kind in READERS])
    def test_a_sample_is_named_by_its_readers(self, _, make, message, kind):
        dataset, usable = KINDS[kind](make(real([5] * 9))), real([5] * 9)
        with self.assertRaisesRegex(ValueError, f"^expected {message}"):
            PackingDataset(dataset, 32)
        rows = PackingDataset(usable, 5)
        if kind != "table_of_tensors":
            rows.dataset = dataset
            with self.assertRaisesRegex(ValueError, f"^expected {message}"):
                list(rows)
            with self.assertRaisesRegex(ValueError, f"^expected {message}"):
                list(IterablePackingDataset(dataset, 32))
        with self.assertRaisesRegex(ValueError, f"^expected {message}"):
            pack_dataset(dataset, 32)

    def test_columns_that_samples_lack(self):
        samples = real([5] * 9)
        del samples[3]["input_ids"]
        for dataset in (samples, Items(samples)):
            self.assertRegex(str(find_unusable(dataset)), "^expected input_ids in sample 3, got columns")
            with self.assertRaisesRegex(ValueError, "^expected input_ids in sample 3, got columns"):
                PackingDataset(dataset, 32)

    @parameterized.expand(["list", "table", "items"])
    def test_samples_of_several_documents(self, kind):
        samples = [{"input_ids": [1, 2, 3, 4], "position_ids": [0, 1, 2, 3]} for _ in range(6)]
        samples[3]["position_ids"] = [0, 1, 0, 1]
        why = str(find_unusable(KINDS[kind](samples)))
        self.assertRegex(why, "position_ids of one document in sample 3, got 0 after 1")
        rows = [{**sample, "seq_lengths": [2, 2]} for sample in samples]
        self.assertIsNone(find_unusable(KINDS[kind](rows)))

    @parameterized.expand(["list", "table", "items"])
    def test_an_empty_sample_can_be_skipped_but_not_its_own_label(self, kind):
        samples = [{"input_ids": [1, 2], "labels": [1, 2]} for _ in range(6)]
        samples[3] = {"input_ids": [], "labels": []}
        self.assertIsNone(find_unusable(KINDS[kind](samples)))
        with self.assertRaisesRegex(ValueError, "sample 3"):
            PackingDataset(KINDS[kind](samples), 8)
        samples = [{"input_ids": [1, 2] * (i != 3), "labels": 1} for i in range(6)]
        why = str(find_unusable(KINDS[kind](samples)))
        self.assertRegex(why, "at least one token in sample 3, which has a label of its own")

    def test_a_large_dataset_is_not_decoded(self):
        class Counted(Items):
            read = 0

            def __getitem__(self, index):
                self.read += 1
                return self.samples[index]

        dataset = Counted(real([5]) * 5000)
        self.assertIsNone(find_unusable(dataset))
        self.assertLess(dataset.read, 200)
