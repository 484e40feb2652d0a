"""A resumed run continues the plan of its checkpoint, or is refused."""

import collections
import json
import logging
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from mixins.configure import ConfigureTestCase, said
from scripts.configured_arms import tokenizer
from scripts.trainer_arms import CONFIGS, OPTIONS
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from transformers_packed import IterablePackingDataset, PackingDataset, configure_packing
from transformers_packed.training.callbacks import verify
from transformers_packed.training.callbacks.resume import PackingPlanCallback


LENGTHS = np.random.default_rng(0).integers(2, 30, 60).tolist()
# The first token of a sample is its number.
SAMPLES = [{"input_ids": [at] + [1] * (n - 1), "labels": [1] * n} for at, n in enumerate(LENGTHS)]


class Recorder(Trainer):
    """Keeps the samples of each step, and computes nothing."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = collections.defaultdict(set)

    def training_step(self, model, inputs, *args, **kwargs):
        self.steps[self.state.global_step] |= set(inputs["input_ids"][inputs["position_ids"] == 0].tolist())
        return torch.zeros(())


class ResumedPlanTest(ConfigureTestCase):
    def trainer(
        self, batch=1, accumulation=2, samples=SAMPLES, max_length=64, steps=9, save=None, packing=True, **arguments
    ):
        saving = {"save_strategy": "steps" if save else "no", "save_steps": save or 1, "max_steps": steps}
        options = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        args = TrainingArguments(self.directory, **OPTIONS | saving | options | arguments)
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
        trainer = Recorder(model, args, train_dataset=samples)
        return configure_packing(trainer, packing, max_length if packing is True else None, verify=False)

    def start(self, steps, **options):
        """Train for some steps, and save the last one."""
        trainer = self.trainer(steps=steps, save=steps, **options)
        trainer.train()
        return trainer

    def resume(self, **options):
        trainer = self.trainer(**options)
        trainer.train(resume_from_checkpoint=get_last_checkpoint(self.directory))
        return trainer

    def test_other_micro_steps(self):
        """Resumed in the first and in the second epoch."""
        whole = self.trainer(batch=1, accumulation=4)
        self.assertEqual(len(whole.train_dataset) // 4, 4)
        whole.train()
        for steps in (3, 6):
            self.start(steps, batch=1, accumulation=4)
            resumed = self.resume(batch=2, accumulation=2)
            self.assertEqual(resumed.steps, {at: whole.steps[at] for at in range(steps, 9)})

    def refused(self, message, **options):
        with self.assertRaisesRegex(ValueError, message):
            self.resume(**options)

    def test_other_rows_are_refused(self):
        self.start(2)
        other = SAMPLES[:-1] + [{"input_ids": [59, 1], "labels": [1, 1]}]
        self.assertNotEqual(LENGTHS[-1], 2)
        for changed in ({"max_length": 96}, {"seed": 1}, {"samples": other}, {"samples": SAMPLES[:50]}):
            self.refused("expected the packed rows of the checkpoint, got other rows", **changed)
        self.refused("expected 2 rows per step, as in the checkpoint, got 3. Change per_device", accumulation=3)
        self.resume(ignore_data_skip=True, accumulation=3)

    def test_batches_of_samples_after_planned_rows(self):
        self.start(2)
        for packing in ("padding_free", "batches", "off"):
            self.refused("expected the packed rows of the checkpoint, got batches of samples", packing=packing)
        self.resume(ignore_data_skip=True, packing="padding_free")

    def test_batches_of_samples_after_a_stream_of_rows(self):
        def stream():
            return Dataset.from_list(SAMPLES).to_iterable_dataset()

        self.start(2, samples=stream())
        for packing in ("padding_free", "off"):
            self.refused("expected the packed rows of the checkpoint, got batches", packing=packing, samples=stream())
        self.refused("expected the packed rows of the checkpoint, got other rows", samples=stream(), max_length=96)
        self.refused("expected 2 rows per step, as in the checkpoint, got 3", samples=stream(), accumulation=3)
        self.assertEqual(self.resume(samples=stream()).state.global_step, 9)

    def test_rows_of_a_stream_on_several_processes(self):
        def rows(processes, batch):
            stream = IterablePackingDataset(SAMPLES, 64)
            options = {"num_processes": processes, "process_index": 0, "dispatch_batches": False}
            loader = prepare_data_loader(DataLoader(stream, batch, collate_fn=list), **options)
            args = TrainingArguments(self.directory, use_cpu=True, gradient_accumulation_steps=3)
            return PackingPlanCallback()._rows(args, loader)

        self.assertEqual(rows(2, 1), rows(1, 2))
        self.assertEqual([rows(*x)["rows_per_step"] for x in ((1, 1), (2, 1), (2, 2))], [3, 6, 12])

    def resume_stock(self, **arguments):
        """Resume a Trainer of Transformers, on padded batches."""
        settings = OPTIONS | {"max_steps": 9, "save_steps": 3, "save_strategy": "steps", **arguments}
        collator = DataCollatorForSeq2Seq(tokenizer())
        trainer = super().trainer(dataset=SAMPLES, collator=collator, args=settings)
        said(configure_packing, trainer)
        difference = verify.DifferenceError("a test")
        with mock.patch.object(verify.VerifyCallback, "_verify", side_effect=difference):
            printed, _ = said(trainer.train, resume_from_checkpoint=get_last_checkpoint(self.directory))
        return trainer, printed

    def test_padded_batches_after_a_difference(self):
        self.start(2)
        with self.assertRaisesRegex(ValueError, "got batches of samples"):
            self.resume_stock()
        trainer, printed = self.resume_stock(ignore_data_skip=True)
        self.assertIn("Packing off, training is unchanged: a test", printed)
        # Its checkpoints are of padded batches.
        self.assertEqual(trainer.state.global_step, 9)
        self.assertEqual(self.resume_stock(max_steps=10)[0].state.global_step, 10)

    def test_batches_of_samples(self):
        self.start(2, packing="padding_free")
        self.assertEqual(self.resume(packing="padding_free").state.global_step, 9)

    def test_rows_in_random_order(self):
        """`PackingDataset` with Trainer's own sampler: the seed and the order within a step matter."""

        def rows(world_size, accumulation):
            return PackingDataset(SAMPLES, 64, world_size=world_size, gradient_accumulation_steps=accumulation)

        self.start(2, accumulation=4, samples=rows(1, 4), max_length=None)
        for changed in ({"samples": rows(2, 2)}, {"seed": 1}, {"train_sampling_strategy": "sequential"}):
            self.refused("other rows", **{"accumulation": 4, "samples": rows(1, 4), "max_length": None} | changed)
        self.resume(accumulation=4, samples=rows(1, 4), max_length=None)

    def test_states_of_callbacks_that_trainer_restores(self):
        self.start(2)
        self.refused("other rows", max_length=96, restore_callback_states_from_checkpoint=True)
        self.resume(restore_callback_states_from_checkpoint=True)

    def test_a_checkpoint_without_its_plan_is_resumed_with_a_warning(self):
        self.start(2)
        path = Path(get_last_checkpoint(self.directory), "trainer_state.json")
        state = json.loads(path.read_text())
        self.assertEqual(
            state["stateful_callbacks"].pop("PackingPlanCallback")["attributes"]["saved"]["rows_per_step"], 2
        )
        path.write_text(json.dumps(state))
        with self.assertLogs("transformers_packed", logging.WARNING) as logs:
            self.resume(save=3)
        self.assertIn("does not tell its packed rows", str(logs.output))

    def test_a_data_loader_of_the_users_own(self):
        trainer = self.trainer(steps=2, save=2)
        rows = DataLoader(trainer.train_dataset, 1, collate_fn=trainer.data_collator)
        with mock.patch.object(trainer, "get_train_dataloader", lambda: rows):
            trainer.train()
        self.assertEqual(trainer.state.global_step, 2)

    def test_configured_twice(self):
        trainer = configure_packing(self.trainer(), True, 64, verify=False)
        names = [type(callback).__name__ for callback in trainer.callback_handler.callbacks]
        self.assertEqual(names.count("PackingPlanCallback"), 1)
