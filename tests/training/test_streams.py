"""Streams reach training whole: each sample once and in order, whatever reads it, and however often it can be read."""

from collections import deque
from unittest import mock

from datasets import Dataset, IterableDataset
from mixins.configure import ConfigureTestCase, said
from parameterized import parameterized
from scripts.trainer_arms import Stream
from transformers import TrainerCallback, set_seed

from transformers_packed import DataCollatorWithFlattening, IterablePackingDataset, configure_packing
from transformers_packed.data.documents import unpacked
from transformers_packed.training.callbacks import verify


SIZE, STEPS = 12, 3


def make(number):
    # Longer than what the check before the first step leaves of a sample.
    tokens = [number % 60 + 1] * (50 + number % 7)
    return {"input_ids": tokens, "labels": tokens, "number": number}


class Queue:
    """Returns each sample once, whoever asks."""

    def __init__(self):
        self.left = deque(range(SIZE))

    def __call__(self):
        while self.left:
            yield make(self.left.popleft())

    __iter__ = __call__


def of_queue():
    return IterableDataset.from_generator(Queue())


STREAMS = {
    "queue": of_queue,
    "list": lambda: IterableDataset.from_generator(lambda: map(make, range(SIZE))),
    "table": lambda: Dataset.from_list(list(map(make, range(SIZE)))).to_iterable_dataset(),
    "mapped": lambda: of_queue().map(lambda sample: {**sample, "more": 1}),
    "filtered": lambda: of_queue().filter(lambda sample: sample["number"] >= 0),
    "shuffled": lambda: of_queue().shuffle(seed=0, buffer_size=8),
    "own": lambda: Stream(list(map(make, range(SIZE)))),
    "own_queue": lambda: Stream(Queue()),
}
_ENDS = [{"input_ids": tokens, "labels": [-100, *tokens[1:]]} for tokens in ([6, 7, 8], [9, 2, 3, 4])]
DIVIDED = {
    "rows": [{"input_ids": list(range(1, 10)), "labels": list(range(1, 10)), "seq_lengths": [2, 3, 4]}],
    "groups": [{"prefix": [5, 1], "answers": _ENDS}],
}


class Hooks(TrainerCallback):
    """Notes each forward from the beginning of training on."""

    def __init__(self, calls):
        self.calls = calls

    def on_train_begin(self, *args, model=None, **kwargs):
        model.register_forward_hook(lambda *call: self.calls.append(len(call)))


MODES = {"auto": ("auto", None), "padding_free": ("padding_free", None), "pack": (True, 128)}


class Recorder(DataCollatorWithFlattening):
    """Notes the numbers of the samples that are read for training."""

    def __init__(self):
        super().__init__(on_leak="ignore", return_cu_seqlens=True, return_seq_idx=True)
        self.seen = []

    def __call__(self, features, **kwargs):
        for feature in features:
            for sample in feature if isinstance(feature, list) else [feature]:
                if len(sample["input_ids"]) >= 50:
                    self.seen.append(sample["number"])
        return super().__call__(features, **kwargs)


CASES = [
    *((stream, "padding_free", True) for stream in ("table", "shuffled", "own_queue")),
    ("queue", "pack", True),
    ("own", "pack", True),
    ("queue", "auto", True),
    ("mapped", "pack", False),
]


class StreamsTest(ConfigureTestCase):
    @parameterized.expand(CASES)
    def test_each_sample_once(self, stream, mode, verifies):
        args = {"remove_unused_columns": False, "max_steps": STEPS, "per_device_train_batch_size": 4}
        args["per_device_train_batch_size"] //= 1 + (mode == "pack")
        trainer = self.trainer(dataset=STREAMS[stream](), collator=Recorder(), args=args)
        output, _ = said(configure_packing, trainer, *MODES[mode], verify=verifies)
        self.assertNotIn("Packing off", output)
        said(trainer.train)
        samples = list(STREAMS[stream]())
        rows = IterablePackingDataset(samples, 128) if mode == "pack" else [samples]
        self.assertEqual(trainer.data_collator.seen, [sample["number"] for row in rows for sample in row])
        self.assertEqual(sorted(trainer.data_collator.seen), list(range(SIZE)))
        self.assertEqual(trainer.state.global_step, STEPS)

    @parameterized.expand([("rows", False), ("groups", True)])
    def test_trainer_keeps_the_columns_that_divide_rows_and_trees(self, kind, known):
        """No sample is read before training, so none tells that the columns are there."""
        table = Dataset.from_list(DIVIDED[kind])
        stream = table.to_iterable_dataset() if known else Stream(DIVIDED[kind])
        trainer = self.trainer(dataset=stream, args={"max_steps": 1})
        said(configure_packing, trainer, "padding_free")
        batch = next(iter(trainer.get_train_dataloader()))
        self.assertEqual(batch["cu_seq_lens_q" if kind == "rows" else "cu_seqlens"].tolist(), [0, 2, 5, 9])
        said(trainer.train)
        self.assertEqual(trainer.state.global_step, 1)

    @parameterized.expand(STREAMS)
    def test_evaluation_reads_each_sample_once(self, stream):
        self.assertEqual(
            [sample["number"] for sample in unpacked(STREAMS[stream]())],
            [sample["number"] for sample in STREAMS[stream]()],
        )

    def test_a_stream_that_trl_packs(self):
        """Only the arguments tell that its rows are packed. A batch of one row then has no padding to avoid."""
        trainer = self.build("sft", packing=True, max_length=64, per_device_train_batch_size=1)
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset().map(lambda row: row)
        output, _ = said(configure_packing, trainer)
        self.assertIn("Packing on", output)
        self.assertEqual((trainer.args.packing, trainer.args.padding_free), (True, True))

    def test_the_first_batch_is_verified_and_leaves_no_trace(self):
        found = []
        for verifies in (True, False):
            set_seed(0)
            args = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1}
            trainer = self.trainer(dataset=STREAMS["queue"](), args=args)
            said(configure_packing, trainer, *MODES["pack"], verify=verifies)
            hooked = []
            trainer.add_callback(Hooks(hooked))
            output, _ = said(trainer.train)
            self.assertEqual(output.count("Verified packing on"), verifies, output)
            counted = [(log["documents_per_row"], log["loss"]) for log in trainer.state.log_history if "loss" in log]
            found.append((counted, len(hooked), [x.tolist() for x in trainer.model.parameters()]))
        self.assertEqual(*found)

    def test_a_difference_in_the_first_batch_stops_training(self):
        """Also in the automatic mode: what watches training has begun with packed rows."""
        trainer = self.trainer(dataset=STREAMS["queue"]())
        said(configure_packing, trainer)
        with (
            mock.patch.object(verify, "leak_between", return_value=1.0),
            self.assertRaisesRegex(ValueError, "gradient"),
        ):
            said(trainer.train)
        self.assertEqual(trainer.state.global_step, 0)
