import collections
import importlib.util
import itertools
import json
import unittest
from functools import partial
from unittest import mock

import torch
from datasets import Dataset, IterableDataset
from hypothesis import given, settings
from hypothesis import strategies as st
from parameterized import parameterized
from scripts.resume_run import Rereadable, read_shards
from torch.utils.data import DataLoader

import transformers_packed
from transformers_packed import IterablePackingDataset


# No model trains on these batches, so skip the check for leaks.
DataCollatorWithFlattening = partial(transformers_packed.DataCollatorWithFlattening, on_leak="ignore")


MAX_LENGTH = 16


def samples_of(lengths):
    """Sample `i` holds tokens `100 * i`, `100 * i + 1`, ..."""
    return [{"input_ids": list(range(100 * i, 100 * i + n)), "name": f"sample {i}"} for i, n in enumerate(lengths)]


class Stateful(Rereadable):
    """A source that saves and restores its position and continues from it, like the datasets of `datasets`."""

    loaded = 0

    def __iter__(self):
        self.place = self.loaded
        while self.place < len(self.rows):
            self.place += 1
            yield self.rows[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.loaded = state["place"]


def hf_stream(rows, shards=4):
    parts = [rows[i::shards] for i in range(shards)]
    return IterableDataset.from_generator(read_shards, gen_kwargs={"shards": parts})


class Sized(Rereadable, torch.utils.data.IterableDataset):
    """A stream of torch that knows its length, and inherits a `__getitem__` that only raises."""

    def __len__(self):
        return len(self.rows)


SOURCES = {
    "list": list,
    "iterable": Rereadable,
    "sized": Sized,
    "stateful": Stateful,
    "hf_map": Dataset.from_list,
    "hf_stream": hf_stream,
    "hf_shuffled": lambda rows: hf_stream(rows).shuffle(seed=1, buffer_size=10),
}
LENGTHS = torch.randint(1, MAX_LENGTH + 1, (700,), generator=torch.Generator().manual_seed(0)).tolist()


def names(rows):
    return [[(sample["name"], len(sample["input_ids"])) for sample in row] for row in rows]


def first_of(batch):
    return batch[0]


class IterablePackingDatasetTest(unittest.TestCase):
    def check_once(self, rows, samples, max_length=MAX_LENGTH):
        tokens = collections.Counter(itertools.chain.from_iterable(s["input_ids"] for row in rows for s in row))
        expected = collections.Counter(itertools.chain.from_iterable(s["input_ids"] for s in samples))
        self.assertEqual(tokens, expected)
        for row in rows:
            self.assertLessEqual(sum(len(sample["input_ids"]) for sample in row), max_length)

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.integers(1, 40), max_size=60),
        st.integers(1, 6),
        st.sampled_from(["truncate", "split", "drop"]),
        st.sampled_from(["right", "left"]),
        st.integers(0, 40),
    )
    def test_packs_and_resumes_anywhere(self, lengths, buffer_size, overlong, side, stop):
        """Every kept token comes once, in order within a sample. A state after any row yields the remaining rows."""
        samples = samples_of(lengths)

        def dataset():
            return IterablePackingDataset(
                Rereadable(samples), MAX_LENGTH, buffer_size=buffer_size, overlong=overlong, truncation_side=side
            )

        whole = dataset()
        rows = list(whole)
        kept = []
        for sample in samples:
            ids = sample["input_ids"]
            if len(ids) > MAX_LENGTH and overlong != "split":
                cut = ids[:MAX_LENGTH] if side == "right" else ids[-MAX_LENGTH:]
                ids = [] if overlong == "drop" else cut
            kept.append({"input_ids": ids})
        self.check_once(rows, kept)
        for sample in itertools.chain.from_iterable(rows):
            ids = sample["input_ids"]
            self.assertEqual(ids, list(range(ids[0], ids[0] + len(ids))))
        too_long = sum(n > MAX_LENGTH for n in lengths)
        counted = whole.counts
        self.assertEqual(counted["truncated"] + counted["split"] + counted["dropped"], too_long)
        self.assertEqual(counted["tokens_cut"], sum(lengths) - sum(len(k["input_ids"]) for k in kept))

        interrupted = dataset()
        begun = list(itertools.islice(iter(interrupted), stop))
        resumed = dataset()
        resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
        self.assertEqual(begun + list(resumed), rows)
        self.assertEqual(resumed.counts, counted)
        # The pass after a resumed one starts at the beginning.
        self.assertEqual(list(resumed), rows)

    @parameterized.expand(SOURCES)
    def test_every_source_resumes_twice(self, source):
        """The source also has states, with more samples than lie between two of them."""
        # Elsewhere: a second resume of a stream starts at zero, or loses a sample in flight.
        samples = samples_of(LENGTHS)

        def dataset():
            return IterablePackingDataset(SOURCES[source](samples), MAX_LENGTH, buffer_size=8)

        rows = list(dataset())
        self.check_once(rows, samples)
        state, got = None, []
        for count in (290, 60, 10**6):
            resumed = dataset()
            if state is not None:
                resumed.load_state_dict(json.loads(json.dumps(state)))
            got += itertools.islice(iter(resumed), count)
            state = resumed.state_dict()
            self.assertEqual(state["source"] is not None, source in ("stateful", "hf_stream"))
        self.assertEqual(names(got), names(rows))
        # The next pass starts at the beginning.
        self.assertEqual(names(resumed), names(rows))

    @parameterized.expand(["stateful", "hf_stream"])
    def test_states_of_the_source_reach_back_to_the_oldest_open_sample(self, source):
        samples = samples_of(LENGTHS[:60])
        with mock.patch("transformers_packed.data.streaming._SNAPSHOT_EVERY", 3):
            rows = list(IterablePackingDataset(SOURCES[source](samples), MAX_LENGTH, buffer_size=4))
            for stop in range(1, len(rows)):
                interrupted = IterablePackingDataset(SOURCES[source](samples), MAX_LENGTH, buffer_size=4)
                begun = list(itertools.islice(iter(interrupted), stop))
                resumed = IterablePackingDataset(SOURCES[source](samples), MAX_LENGTH, buffer_size=4)
                resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
                self.assertEqual(names(begun + list(resumed)), names(rows))

    def test_a_state_of_the_source_spares_reading_again(self):
        samples = samples_of(LENGTHS)
        dataset = IterablePackingDataset(Stateful(samples), MAX_LENGTH, buffer_size=8)
        list(itertools.islice(iter(dataset), 350))
        state = dataset.state_dict()
        self.assertGreaterEqual(state["source"][0], 256)
        source = Stateful([None] * 256 + samples[256:])  # reading one of the first samples would fail
        resumed = IterablePackingDataset(source, MAX_LENGTH, buffer_size=8)
        resumed.load_state_dict(state)
        list(resumed)

    @parameterized.expand([("list", 2), ("sized", 1), ("hf_stream", 3)])
    def test_workers_share_the_samples(self, source, workers):
        samples = samples_of(LENGTHS[:90])
        dataset = IterablePackingDataset(SOURCES[source](samples), MAX_LENGTH, buffer_size=4)
        rows = list(DataLoader(dataset, batch_size=1, num_workers=workers, collate_fn=first_of))
        self.check_once(rows, samples)

    @parameterized.expand(["iterable", "hf_stream"])
    def test_ranks_share_the_samples(self, source):
        # Elsewhere: training hangs at the end of an epoch, because processes have different numbers of rows.
        samples = samples_of(LENGTHS[:90])
        rows = []
        for rank in range(3):
            dataset = IterablePackingDataset(SOURCES[source](samples), MAX_LENGTH, rank=rank, world_size=3)
            part = list(DataLoader(dataset, batch_size=1, num_workers=2, collate_fn=first_of))
            self.assertGreater(len(part), 5)
            rows += part
        self.check_once(rows, samples)

    def test_set_epoch_reaches_the_source_in_workers_that_live_on(self):
        samples = samples_of(LENGTHS[:90])
        dataset = IterablePackingDataset(SOURCES["hf_shuffled"](samples), MAX_LENGTH)
        loader = DataLoader(dataset, batch_size=1, num_workers=2, collate_fn=first_of, persistent_workers=True)
        passes = []
        for epoch in (0, 1, 0):
            dataset.set_epoch(epoch)
            passes.append(list(loader))
            self.check_once(passes[-1], samples)
        self.assertEqual(passes[0], passes[2])
        self.assertNotEqual(passes[0], passes[1])

    def test_a_row_closes_the_fullest_open_one(self):
        lengths = [10, 12, 9, 3, 16, 13]
        rows = list(IterablePackingDataset(samples_of(lengths), MAX_LENGTH, buffer_size=2))
        # 9 fits nowhere and closes 12. 3 joins 10, the better fit. 16 is a row at once, but needs a slot, so 10 + 3 is
        # emitted.
        self.assertEqual([[len(s["input_ids"]) for s in row] for row in rows], [[12], [10, 3], [16], [13], [9]])

    @parameterized.expand([(0,), (2,)])
    def test_an_error_of_the_source_comes_out_with_the_sample(self, workers):
        class Broken(Rereadable):
            def __iter__(self):
                yield from self.rows[:41]
                raise KeyError("no such file")

        dataset = IterablePackingDataset(Broken(samples_of(LENGTHS[:90])), MAX_LENGTH, buffer_size=4)
        options = {"num_workers": workers, "collate_fn": first_of, "timeout": 60 * bool(workers)}
        with self.assertRaises(KeyError) as caught:
            list(DataLoader(dataset, batch_size=1, **options))
        text = str(caught.exception) + "".join(getattr(caught.exception, "__notes__", ()))
        self.assertIn("sample 41", text)
        self.assertIn("no such file", text)

    def test_a_state_after_an_error_retries_the_sample(self):
        class Flaky(Rereadable):
            fails = True

            def __iter__(self):
                for index, row in enumerate(self.rows):
                    if index == 20 and self.fails:
                        self.fails = False
                        raise OSError("connection lost")
                    yield row

        samples = samples_of(LENGTHS[:40])
        dataset = IterablePackingDataset(Flaky(samples), MAX_LENGTH, buffer_size=4)
        rows = []
        with self.assertRaisesRegex(OSError, "connection lost"):
            for row in dataset:
                rows += [row]
        dataset.load_state_dict(dataset.state_dict())
        self.check_once(rows + list(dataset), samples)

    def test_refusals(self):
        samples = samples_of([3, 20, 4])
        for arguments, message in (
            ({"max_length": 0}, "max_length as a whole number of at least 1, got 0"),
            ({"overlong": "cut"}, "overlong .*, got 'cut'"),
            ({"truncation_side": "middle"}, "truncation_side"),
            ({"buffer_size": 0}, "buffer_size .*, got 0"),
            ({"rank": 1}, "rank and world_size"),
            ({"dataset": (s for s in samples)}, "more than once"),
        ):
            with self.subTest(message), self.assertRaisesRegex(ValueError, message):
                IterablePackingDataset(**{"dataset": samples, "max_length": MAX_LENGTH, **arguments})
        with self.assertRaisesRegex(ValueError, "got 20"):
            list(IterablePackingDataset(samples, MAX_LENGTH))
        with self.assertRaisesRegex(ValueError, "got 0"):
            list(IterablePackingDataset(samples_of([3, 0]), MAX_LENGTH))

    def test_states_that_do_not_fit_are_refused(self):
        samples = samples_of([3, 5, 9, 12])
        dataset = IterablePackingDataset(samples, MAX_LENGTH)
        next(iter(dataset))
        state = dataset.state_dict()
        for other, message in (
            ({**state, "version": 0}, "version 1"),
            ({**state, "settings": {**state["settings"], "max_length": 32}}, "same arguments"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                dataset.load_state_dict(other)
        resumed = IterablePackingDataset(samples, MAX_LENGTH, rank=0, world_size=2)
        resumed.load_state_dict(state)
        with self.assertRaisesRegex(ValueError, "reader 0 of 2"):
            next(iter(resumed))
        shorter = IterablePackingDataset(samples[:1], MAX_LENGTH)
        shorter.load_state_dict(state)
        with self.assertRaisesRegex(ValueError, "same data"):
            next(iter(shorter))


@unittest.skipUnless(importlib.util.find_spec("torchdata"), "needs torchdata")
class StatefulDataLoaderTest(unittest.TestCase):
    @parameterized.expand([("list", 2), ("hf_stream", 2)])
    def test_resumes_twice_within_a_pass_and_after_it(self, source, workers):
        from torchdata.stateful_dataloader import StatefulDataLoader

        samples = samples_of(LENGTHS[:90])

        def loader():
            dataset = IterablePackingDataset(SOURCES[source](samples), MAX_LENGTH, buffer_size=4)
            return StatefulDataLoader(dataset, batch_size=2, num_workers=workers, collate_fn=names)

        whole, state, got = list(loader()), None, []
        for count in (5, 4, 10**6):
            resumed = loader()
            if state is not None:
                resumed.load_state_dict(state)
            for batch in itertools.islice(resumed, count):
                got.append(batch)
                state = resumed.state_dict()
        self.assertEqual(got, whole)
        self.assertEqual(list(resumed), whole)

    def test_through_accelerate(self):
        from accelerate.data_loader import prepare_data_loader

        samples = samples_of(LENGTHS[:90])

        def loader():
            dataset = IterablePackingDataset(samples, MAX_LENGTH, buffer_size=4)
            plain = DataLoader(dataset, batch_size=1, collate_fn=DataCollatorWithFlattening())
            return prepare_data_loader(plain, dispatch_batches=False, use_stateful_dataloader=True)

        def tokens(batches):
            return [batch["input_ids"].tolist() for batch in batches]

        whole = tokens(loader())
        interrupted, begun = loader(), []
        for batch in interrupted:
            begun.append(batch["input_ids"].tolist())
            if len(begun) == 7:
                break
        resumed = loader()
        resumed.load_state_dict(interrupted.state_dict())
        self.assertEqual(begun + tokens(resumed), whole)
