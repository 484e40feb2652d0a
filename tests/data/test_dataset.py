import collections
import itertools
import tempfile
import unittest
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from datasets import Dataset, concatenate_datasets
from parameterized import parameterized
from torch.utils.data import DataLoader

import transformers_packed as packed
from transformers_packed import PackingDataset, pack_dataset, plan_packing
from transformers_packed.data.dataset import sample_lengths


# No model trains on these batches, so skip the check for leaks.
DataCollatorWithFlattening = partial(packed.DataCollatorWithFlattening, on_leak="ignore")


MAX_LENGTH = 64
LENGTHS = np.clip(np.random.default_rng(0).lognormal(2.5, 0.8, 200), 1, MAX_LENGTH).astype(int).tolist()


def samples_of(lengths):
    return [
        {"input_ids": list(range(i, i + n)), "labels": [-100] + list(range(n - 1)), "name": f"sample {i}"}
        for i, n in enumerate(lengths)
    ]


def names(rows):
    return [[(sample["name"], len(sample["input_ids"])) for sample in row] for row in rows]


def first_of(batch):
    return batch[0]


class PackingDatasetTest(unittest.TestCase):
    def check_once(self, rows, times=1):
        seen = collections.Counter(itertools.chain.from_iterable(names(rows)))
        self.assertEqual(seen, collections.Counter({(f"sample {i}", n): times for i, n in enumerate(LENGTHS)}))

    @parameterized.expand([("list", list), ("hf", Dataset.from_list)])
    def test_rows_hold_every_sample_with_all_columns(self, _, make):
        samples = samples_of(LENGTHS)
        rows = PackingDataset(make(samples), MAX_LENGTH)
        self.check_once(rows)
        self.assertLess(len(rows), sum(LENGTHS) / MAX_LENGTH * 1.05 + 1)
        by_name = {sample["name"]: sample for sample in samples}
        for row in rows:
            self.assertLessEqual(sum(len(sample["input_ids"]) for sample in row), MAX_LENGTH)
            for sample in row:
                self.assertEqual(sample, by_name[sample["name"]])
        self.assertEqual(names([rows[-1]]), names([rows[len(rows) - 1]]))
        with self.assertRaises(IndexError):
            rows[len(rows)]

    @parameterized.expand([("right", [0, 1, 2, 3]), ("left", [6, 7, 8, 9])])
    def test_truncates_every_per_token_column(self, side, kept):
        # Elsewhere: truncation silently drops most tokens. Here it is opt-in and counted.
        ids = list(range(10))
        sample = {
            "input_ids": ids,
            "labels": tuple(ids),
            "attention_mask": torch.ones(10),
            "weights": torch.tensor(ids),
            "mm_token_type_ids": np.array(ids),
            "boxes": [[i, i] for i in ids],
            "pixel_values": torch.zeros(10, 3),
            "text": "ten letter",
            "score": 0.5,
            "shorter": [1, 2],
        }
        (row,) = PackingDataset([sample], 4, overlong="truncate", truncation_side=side)
        (cut,) = row
        for name in ("input_ids", "labels", "weights", "mm_token_type_ids"):
            self.assertEqual(list(map(int, cut[name])), kept, name)
        self.assertEqual(cut["attention_mask"].tolist(), [1] * 4)
        self.assertEqual(cut["boxes"], [[i, i] for i in kept])
        for name in ("pixel_values", "text", "score", "shorter"):
            self.assertIs(cut[name], sample[name])

    def test_splits_and_drops(self):
        # Elsewhere: conversations are cut in two. Here this is opt-in.
        samples = samples_of([3, 150, 20])
        parts = collections.defaultdict(list)
        for row in PackingDataset(samples, MAX_LENGTH, overlong="split"):
            for sample in row:
                parts[sample["name"]] += zip(sample["input_ids"], sample["labels"], strict=True)
        for sample in samples:
            whole = zip(sample["input_ids"], sample["labels"], strict=True)
            self.assertEqual(sorted(parts[sample["name"]]), sorted(whole))
        rows = PackingDataset(samples, MAX_LENGTH, overlong="drop")
        self.assertEqual(sorted(itertools.chain(*names(rows))), [("sample 0", 3), ("sample 2", 20)])
        self.assertEqual(rows.plan.lost_tokens, 150)
        with self.assertRaisesRegex(ValueError, "1 longer ones"):
            PackingDataset(samples, MAX_LENGTH)

    def test_the_collator_joins_rows_and_batches_of_rows(self):
        rows = PackingDataset(samples_of(LENGTHS), MAX_LENGTH)
        collator = DataCollatorWithFlattening(return_cu_seqlens=True)
        for batch in ([rows[0]], [rows[0], rows[1]], [rows[0], rows[1][0]]):
            flat = [s for f in batch for s in (f if isinstance(f, list) else [f])]
            got, want = collator(batch), collator(flat)
            self.assertEqual(got.keys(), want.keys())
            for name, value in want.items():
                self.assertTrue(torch.equal(got[name], value), name)
        with self.assertRaisesRegex(ValueError, "empty batch"):
            collator([[]])

    # ---- lengths ----
    def test_lengths_come_from_the_table_without_decoding(self):
        samples = samples_of(LENGTHS)
        whole = Dataset.from_list(samples)
        chunked = concatenate_datasets([whole.select(range(70)), whole.select(range(70, 200))])
        order = np.random.default_rng(1).permutation(200)[:90]
        with mock.patch.object(Dataset, "__getitem__", side_effect=AssertionError("decoded")):
            self.assertEqual(sample_lengths(chunked).tolist(), LENGTHS)
            self.assertEqual(sample_lengths(whole.with_format("torch")).tolist(), LENGTHS)
        for dataset in (whole, chunked):
            picked = dataset.select(order).filter(lambda row: row["name"] != "sample 7")
            self.assertIsNotNone(picked._indices)
            with mock.patch.object(Dataset, "__getitems__", side_effect=AssertionError("decoded")):
                self.assertEqual(sample_lengths(picked).tolist(), [LENGTHS[i] for i in order if i != 7])

    def test_length_column(self):
        samples = [{**sample, "n": len(sample["input_ids"])} for sample in samples_of(LENGTHS)]
        for dataset in (samples, Dataset.from_list(samples), Dataset.from_list(samples).select(range(199, -1, -1))):
            want = [sample["n"] for sample in dataset]
            self.assertEqual(sample_lengths(dataset, "n").tolist(), want)
            self.check_once(PackingDataset(dataset, MAX_LENGTH, length_column="n"))
        with self.assertRaisesRegex(ValueError, "length_column"):
            PackingDataset(Dataset.from_list(samples), MAX_LENGTH, length_column="m")
        wrong = [{**sample, "n": 1} for sample in samples]
        with self.assertRaisesRegex(ValueError, "as planned"):
            PackingDataset(wrong, MAX_LENGTH, length_column="n")[0]
        with self.assertRaisesRegex(ValueError, f"'n', got 1 for sample 0, which has {LENGTHS[0]}"):
            PackingDataset(Dataset.from_list(wrong), MAX_LENGTH, length_column="n")

    def check_refused(self, lengths, message, **arguments):
        """Check that reading a row raises an error with the sample's number. The samples have 5, 50 and 30 tokens."""
        samples = [{**sample, "n": n} for sample, n in zip(samples_of([5, 50, 30]), lengths, strict=True)]
        stale = plan_packing(lengths, 8, **arguments)
        for dataset in (samples, Dataset.from_list(samples)):
            made = [PackingDataset(dataset, 8, plan=stale, **arguments)]
            if dataset is samples:
                made.append(PackingDataset(samples, 8, length_column="n", **arguments))
            for rows in made:
                with self.assertRaisesRegex(ValueError, message):
                    list(rows)
        with self.assertRaisesRegex(ValueError, message):
            pack_dataset(Dataset.from_list(samples).remove_columns("n"), 8, plan=stale, **arguments)

    def test_lengths_that_are_wrong_cut_nothing(self):
        """This includes a planned part that `overlong` could produce from a longer sample."""
        named = "expected sample 1 to have tokens {} to {}, as planned, got a sample of 50 tokens"
        self.check_refused([5, 3, 8], "expected sample (1|2) to have tokens 0 to (3|8), as planned")
        for overlong in ("truncate", "split", "drop"):
            self.check_refused([5, 3, 30], named.format(0, 3), overlong=overlong)
        self.check_refused([5, 8, 30], named.format(0, 8), overlong="drop")
        self.check_refused([5, 16, 30], named.format("(0|8)", "(8|16)"), overlong="split")
        self.check_refused([5, 40, 30], named.format(32, 40), overlong="truncate", truncation_side="left")
        # A sample shorter than planned, with a part of the right length by coincidence.
        self.check_refused([5, 50, 38], "sample 2 to have .* got a sample of 30 tokens", overlong="split")

    # ---- plans ----
    def test_a_plan_that_does_not_fit_is_refused(self):
        samples = samples_of(LENGTHS)
        plan = plan_packing(LENGTHS, MAX_LENGTH)
        self.assertIs(PackingDataset(samples, MAX_LENGTH, plan=plan).plan, plan)
        for arguments in ({"max_length": 32}, {"world_size": 2}, {"dataset": samples[1:]}):
            with self.assertRaisesRegex(ValueError, "expected a plan with"):
                PackingDataset(**{"dataset": samples, "max_length": MAX_LENGTH, "plan": plan, **arguments})
        with self.assertRaisesRegex(ValueError, "IterablePackingDataset"):
            PackingDataset(iter(samples), MAX_LENGTH)

    def test_a_cached_plan_is_found_again_and_a_stale_one_is_not(self):
        samples = samples_of(LENGTHS)
        with tempfile.TemporaryDirectory() as directory:
            first = PackingDataset(samples, MAX_LENGTH, cache=directory).plan
            with mock.patch("transformers_packed.data.dataset.plan_packing", side_effect=AssertionError("planned")):
                again = PackingDataset(samples_of(LENGTHS), MAX_LENGTH, cache=directory).plan
                self.assertTrue(np.array_equal(again.samples, first.samples))
                changed = [LENGTHS[1], LENGTHS[0], *LENGTHS[2:]]
                for dataset, arguments in (
                    (samples_of(changed), {}),
                    (samples, {"seed": 1}),
                    (samples, {"max_length": 128}),
                    (samples, {"overlong": "drop"}),
                    (samples, {"world_size": 2}),
                    (samples, {"balance": packed.PackingCost()}),
                ):
                    with self.assertRaisesRegex(AssertionError, "planned"):
                        PackingDataset(dataset, **{"max_length": MAX_LENGTH, "cache": directory, **arguments})
            (path,) = Path(directory).iterdir()
            path.write_bytes(b"damaged")
            self.check_once(PackingDataset(samples, MAX_LENGTH, cache=directory))
            with self.assertRaisesRegex(ValueError, "directory"):
                PackingDataset(samples, MAX_LENGTH, cache=True)

            Dataset.from_list(samples).save_to_disk(f"{directory}/data")
            stored = Dataset.load_from_disk(f"{directory}/data")
            PackingDataset(stored, MAX_LENGTH, cache=True)
            self.assertEqual(len(list(Path(directory, "data").glob("packing-plan-*.npz"))), 1)
            with mock.patch("transformers_packed.data.dataset.plan_packing", side_effect=AssertionError("planned")):
                PackingDataset(Dataset.load_from_disk(f"{directory}/data"), MAX_LENGTH, cache=True)
                with self.assertRaisesRegex(AssertionError, "planned"):
                    PackingDataset(stored.select(range(199, -1, -1)), MAX_LENGTH, cache=True)

    @parameterized.expand([(False, 2), (True, 0)])
    def test_through_accelerate_resumed_in_the_second_epoch(self, shuffle, workers):
        """As in Trainer: sequential reading follows the plan, and random reading works separately."""
        samples = samples_of(LENGTHS)

        def loader():
            torch.manual_seed(0)
            rows = PackingDataset(samples, MAX_LENGTH)
            plain = DataLoader(rows, batch_size=1, shuffle=shuffle, num_workers=workers, collate_fn=first_of)
            return prepare_data_loader(plain, use_seedable_sampler=True, data_seed=1), rows

        whole, rows = loader()
        epochs = []
        for epoch in (0, 1):
            whole.set_epoch(epoch)
            epochs.append(list(whole))
            self.check_once(epochs[-1])
        self.assertNotEqual(names(epochs[0]), names(epochs[1]))
        if not shuffle:
            rows.set_epoch(1)
            self.assertEqual(names(epochs[1]), names(rows))
        resumed, _ = loader()
        resumed = skip_first_batches(resumed, 5)
        resumed.set_epoch(1)
        self.assertEqual(names(epochs[1][:5]) + names(resumed), names(epochs[1]))

    def test_set_epoch_reaches_workers_that_live_on(self):
        rows = PackingDataset(samples_of(LENGTHS), MAX_LENGTH)
        loader = DataLoader(rows, batch_size=1, num_workers=2, collate_fn=first_of, persistent_workers=True)
        for epoch in (0, 1):
            rows.set_epoch(epoch)
            self.assertEqual(names(loader), names(rows))


class PackDatasetTest(unittest.TestCase):
    def columns(self):
        samples = samples_of(LENGTHS)
        return Dataset.from_list([{k: s[k] for k in ("input_ids", "labels")} for s in samples])

    def documents(self, dataset):
        for row in dataset:
            self.assertEqual(sum(row["seq_lengths"]), len(row["input_ids"]))
            ends = list(itertools.accumulate(row["seq_lengths"], initial=0))
            for start, end in itertools.pairwise(ends):
                yield tuple(row["input_ids"][start:end]), tuple(row["labels"][start:end])

    def test_columns_and_types_are_those_of_trl(self):
        import trl

        dataset = self.columns()
        ours, theirs = pack_dataset(dataset, MAX_LENGTH), trl.pack_dataset(dataset, MAX_LENGTH, strategy="bfd")
        self.assertEqual(ours.features, theirs.features)
        self.assertEqual(sorted(self.documents(ours)), sorted(self.documents(theirs)))
        self.assertLessEqual(len(ours), len(theirs))

    @parameterized.expand(["truncate", "split"])
    def test_rows_are_those_of_the_packing_dataset(self, overlong):
        dataset = self.columns().select(range(199, -1, -1))
        arguments = {"max_length": 20, "overlong": overlong, "truncation_side": "left", "seed": 3}
        with mock.patch("transformers_packed.data.dataset._BLOCK_ROWS", 7):
            ours = pack_dataset(dataset, **arguments)
        rows = PackingDataset(dataset, **arguments)
        want = [(tuple(s["input_ids"]), tuple(s["labels"])) for row in rows for s in row]
        self.assertEqual(list(self.documents(ours)), want)
        collator = DataCollatorWithFlattening(return_cu_seqlens=True)
        for index in range(len(rows)):
            got, expected = collator([ours[index]]), collator([rows[index]])
            for name, value in expected.items():
                self.assertTrue(torch.equal(got[name], value), name)

    @parameterized.expand(
        [
            ("none", "labels", None, "no list"),
            ("short", "labels", [1], "1"),
            ("other", "loss_weight", [1, 2], "2"),
            ("ids", "input_ids", [1, None, 3], "a missing value among them"),
        ]
    )
    def test_a_sample_that_lacks_values_is_named(self, _, name, value, got):
        samples = [dict.fromkeys(("input_ids", "labels", "loss_weight"), s["input_ids"]) for s in samples_of([3] * 9)]
        samples[4] = {**samples[4], name: value}
        for dataset in (Dataset.from_list(samples), Dataset.from_list([samples[0], *samples]).select(range(1, 10))):
            with self.assertRaisesRegex(ValueError, f"{name} with one value per token in sample 4, got {got}"):
                pack_dataset(dataset, MAX_LENGTH)
