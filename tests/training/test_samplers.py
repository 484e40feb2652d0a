"""A sampler of the user numbers samples. Planned rows refuse it, and everything else keeps it."""

from datasets import Dataset, IterableDataset
from mixins.configure import ConfigureTestCase, said
from parameterized import parameterized
from torch.utils.data import DataLoader, RandomSampler, Sampler, Subset, WeightedRandomSampler
from transformers import Trainer

from transformers_packed import PackedTrainer, PackedTrainingArguments, PackingDataset, configure_packing


SIZE = 12
SAMPLES = [{"input_ids": [n + 1] * 20, "labels": [n + 1] * 20} for n in range(SIZE)]
ORDER = list(range(SIZE))[::-1]


class Curriculum(Sampler):
    """Draws some samples by their difficulty."""

    def __init__(self, data_source=None):
        self.data_source = data_source

    def __iter__(self):
        return iter(ORDER)

    def __len__(self):
        return SIZE


class OwnSampler(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return Curriculum(self.train_dataset)


class PackedOwnSampler(PackedTrainer):
    _get_train_sampler = OwnSampler._get_train_sampler


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        sampler = WeightedRandomSampler([1.0] * SIZE, SIZE)
        loader = DataLoader(self.train_dataset, 2, sampler=sampler, collate_fn=self.data_collator)
        return self.accelerator.prepare(loader)


DATASETS = {
    "list": lambda: SAMPLES,
    "table": lambda: Dataset.from_list(SAMPLES),
    "subset": lambda: Subset(SAMPLES, ORDER),
}


class SamplersTest(ConfigureTestCase):
    def own(self, cls, dataset, **args):
        trainer = self.trainer(dataset=dataset, args={"per_device_train_batch_size": 4, "max_steps": 2, **args})
        if cls is not None:
            trainer.__class__ = cls
        return trainer

    def read(self, trainer):
        """The first tokens of the samples that an epoch reads."""
        batches = list(trainer.get_train_dataloader())
        return [batch["input_ids"][0, start].item() for batch in batches for start in batch["cu_seq_lens_q"][:-1]]

    @parameterized.expand([("list", "class"), ("table", "instance")])
    def test_a_sampler_of_samples(self, kind, how):
        trainer = self.own(OwnSampler if how == "class" else None, DATASETS[kind]())
        if how == "instance":
            trainer._get_train_sampler = lambda dataset=None: Curriculum(dataset)
        before = trainer.train_dataset, trainer.data_collator, type(trainer.model)
        message = 'a custom _get_train_sampler, which numbers samples. Pass packing="padding_free"'
        with self.assertRaisesRegex(ValueError, message):
            configure_packing(trainer, True, 64)
        self.assertEqual(before, (trainer.train_dataset, trainer.data_collator, type(trainer.model)))

    def test_a_sampler_of_a_trainer_that_packs(self):
        model = self.trainer().model
        args = PackedTrainingArguments(self.directory, packing=True, max_length=64, use_cpu=True, report_to="none")
        with self.assertRaisesRegex(ValueError, "which numbers samples"):
            PackedOwnSampler(model, args, train_dataset=SAMPLES)

    @parameterized.expand(["loader", "later", "batches"])
    def test_a_sampler_that_training_finds(self, kind):
        """In a loader of the user's own, or set after the rows were planned."""
        trainer = self.own(OwnLoader if kind == "loader" else None, SAMPLES)
        said(configure_packing, trainer, True, 64)
        if kind == "later":
            trainer._get_train_sampler = lambda dataset=None: Curriculum()
        if kind == "batches":
            loader = DataLoader(trainer.train_dataset, batch_sampler=[[0, 1], [2]], collate_fn=trainer.data_collator)
            trainer.get_train_dataloader = lambda: loader
        with self.assertRaisesRegex(ValueError, "expected a sampler of packed rows, got .*, which numbers samples"):
            said(trainer.train)

    @parameterized.expand([("table", "auto"), ("subset", "padding_free")])
    def test_batches_of_samples_keep_it(self, kind, mode):
        trainer = self.own(OwnSampler, DATASETS[kind]())
        said(configure_packing, trainer, mode)
        self.assertEqual(self.read(trainer), [DATASETS[kind]()[n]["input_ids"][0] for n in ORDER])
        said(trainer.train)

    @parameterized.expand(["random", "sequential", "group_by_length"])
    def test_strategies_of_trainer_order_rows(self, strategy):
        args = {"train_sampling_strategy": strategy, "length_column_name": "length"}
        trainer = self.own(None, Dataset.from_list([{**sample, "length": 20} for sample in SAMPLES]), **args)
        said(configure_packing, trainer, True, 64)
        self.assertEqual(sorted(self.read(trainer)), list(range(1, SIZE + 1)))

    def test_a_sampler_of_rows(self):
        """Who passes rows numbers rows."""
        rows = PackingDataset(SAMPLES * 4, 64)
        trainer = self.own(None, rows, per_device_train_batch_size=1)
        trainer._get_train_sampler = lambda dataset=None: Curriculum()
        said(configure_packing, trainer, True)
        self.assertEqual(self.read(trainer), [sample["input_ids"][0] for n in ORDER for sample in rows[n]])
        said(trainer.train)

    def test_a_stream_has_no_sampler(self):
        trainer = self.own(OwnSampler, IterableDataset.from_generator(lambda: iter(SAMPLES)))
        said(configure_packing, trainer, True, 64)
        self.assertEqual(sorted(self.read(trainer)), list(range(1, SIZE + 1)))

    def test_samplers_that_number_what_the_loader_reads(self):
        trainer = self.own(None, SAMPLES)
        said(configure_packing, trainer, True, 64)
        rows = trainer.train_dataset
        loader = DataLoader(rows, 1, sampler=RandomSampler(rows), collate_fn=trainer.data_collator)
        trainer.get_train_dataloader = lambda: trainer.accelerator.prepare(loader)
        said(trainer.train)
        self.assertEqual(trainer.state.global_step, 2)
