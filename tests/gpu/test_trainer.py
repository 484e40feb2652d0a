"""Trainer hardly waits for the GPU: `make test-gpu`."""

import tempfile
import unittest
import warnings

import pytest
import torch
from common.gpu import report
from common.real_heads import FAMILIES, REAL_HEADS
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from transformers_packed import configure_packing


FIRST, LAST = 3, 6


class Waits(TrainerCallback):
    """Turns torch's warnings of waits on, from one step to another."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == FIRST:
            torch.cuda.set_sync_debug_mode("warn")

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == LAST:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class CudaTrainerTest(unittest.TestCase):
    def test_waits_of_a_step(self):
        """That of the loss for the number of targets, and none of Trainer."""
        cls, config_class, options = FAMILIES["qwen3_5"]
        set_seed(0)
        generator = torch.Generator().manual_seed(0)
        documents = [torch.randint(1, 97, (n,), generator=generator).tolist() for n in range(20, 120)]
        samples = [{"input_ids": ids, "labels": ids} for ids in documents]
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.addCleanup(torch.cuda.set_sync_debug_mode, "default")
        args = TrainingArguments(
            directory.name,
            per_device_train_batch_size=8,
            max_steps=LAST + 1,
            bf16=True,
            logging_steps=100,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            cls._from_config(config_class(**REAL_HEADS, **options)), args, train_dataset=samples, callbacks=[Waits()]
        )
        configure_packing(trainer, "padding_free")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        waits = [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA operation" in str(w.message)]
        report("waits of a training step", waits=len(waits) / (LAST - FIRST))
        self.assertTrue(0 < len(waits) <= LAST - FIRST, waits)
