"""Raise the errors of `docs/reference/errors.md` and compare the messages."""

import tempfile
import unittest
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import Trainer, TrainerState, TrainingArguments

from transformers_packed import (
    DataCollatorWithFlattening,
    PackingDataset,
    SequenceBoundaries,
    configure_packing,
    patch_model,
    plan_packing,
)
from transformers_packed.audit.tiny import tiny_model
from transformers_packed.data.records.samples import read_records
from transformers_packed.ops import gated_delta_rule, prompts
from transformers_packed.shared_prompts import SharedPrompts
from transformers_packed.training import verify
from transformers_packed.training.callbacks.resume import PackingPlanCallback


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
LENGTHS = SequenceBoundaries.from_lengths([3, 2])
ROW = {"input_ids": torch.ones(1, 5, dtype=torch.int64), "cu_seqlens": LENGTHS.cu_seqlens, "use_cache": False}
SAMPLES = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]


class CommonErrorsTest(unittest.TestCase):
    def setUp(self):
        self.page = " ".join(PAGE.read_text(encoding="utf-8").split())

    def assert_on_the_page(self, call):
        with self.assertRaises(ValueError) as caught:
            call()
        self.assertTrue(str(caught.exception) in self.page, f"the page has to have: {caught.exception}")

    def test_of_a_model(self):
        model = patch_model(tiny_model("qwen3_5_text"))
        for change in (
            {"attention_mask": torch.ones(1, 5)},
            {"use_cache": True},
            {"input_ids": ROW["input_ids"].expand(2, 5)},
            {"cu_seqlens": torch.tensor([0, 3, 4])},
            {"cu_seqlens": torch.tensor([0, 3, 3, 5])},
            {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])},
            {"cu_seqlens": None, "max_length_q": 3},
            {"is_causal": False},
        ):
            self.assert_on_the_page(lambda change=change: model(**ROW | change))
        row, causal = torch.ones(2, 12, dtype=torch.int64), torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
        self.assert_on_the_page(lambda: model(row[:1], attention_mask=row[:1] * 2))
        self.assert_on_the_page(lambda: model(row[:1], attention_mask=causal.triu(-4)))
        causal[..., 5:, :5] = False
        self.assert_on_the_page(lambda: model(row, attention_mask=causal))
        model.config._attn_implementation = "paged"
        self.assert_on_the_page(lambda: model(**ROW))

    def test_of_a_collator(self):
        stock = tiny_model("qwen3_5_text")
        self.assert_on_the_page(lambda: DataCollatorWithFlattening(model=stock))
        self.assert_on_the_page(lambda: DataCollatorWithFlattening(pad_to_multiple_of=64, on_leak="ignore"))
        collator = DataCollatorWithFlattening(on_leak="ignore")
        self.assert_on_the_page(lambda: collator([]))
        self.assert_on_the_page(lambda: collator([{"input_ids": []}]))
        self.assert_on_the_page(lambda: collator([{"input_ids": [], "labels": 1}]))
        self.assert_on_the_page(lambda: collator([{"input_ids": [5, 6], "labels": [5]}]))
        self.assert_on_the_page(lambda: collator([{"input_ids": [5], "labels": [5]}, {"input_ids": [6]}]))

    def test_of_a_dataset(self):
        self.assert_on_the_page(lambda: plan_packing([3, 5000, 10], 4096))
        self.assert_on_the_page(lambda: plan_packing([3, 5], 8, world_size=8))
        self.assert_on_the_page(lambda: PackingDataset(iter(SAMPLES), max_length=8))

    def test_of_a_trainer(self):
        with tempfile.TemporaryDirectory() as directory:
            args = TrainingArguments(directory, report_to=[], use_cpu=True)
            trainer = Trainer(tiny_model("qwen3_5_text"), args, train_dataset=SAMPLES)
            self.assert_on_the_page(lambda: configure_packing(trainer, packing=True))
            self.assert_on_the_page(lambda: verify._check_leak(0.091, documents=3))
            trainer.train_dataset = [{"text": "a"}]
            self.assert_on_the_page(lambda: configure_packing(trainer, packing="padding_free"))

    def test_of_a_resumed_run(self):
        def begin(max_length, accumulation, state):
            plan = plan_packing([5, 4, 3, 2] * 4, max_length, gradient_accumulation_steps=2)
            callback, args = PackingPlanCallback(), SimpleNamespace(ignore_data_skip=False, seed=0, data_seed=None)
            args.gradient_accumulation_steps = accumulation
            loader = SimpleNamespace(dataset=SimpleNamespace(plan=plan), total_batch_size=1)
            callback.on_train_begin(args, state, None, train_dataloader=loader)
            return callback.state()

        saved = begin(8, 2, TrainerState())
        state = TrainerState(global_step=1, stateful_callbacks={"PackingPlanCallback": saved})
        for now in ((8, 1), (16, 2)):
            self.assert_on_the_page(lambda now=now: begin(*now, state))

    def test_of_preferences(self):
        # Stands for TRL's own, which is not installed everywhere.
        preferences = type("DPOTrainer", (Trainer,), {"__module__": "trl.trainer.dpo_trainer"})
        with tempfile.TemporaryDirectory() as directory:
            args = TrainingArguments(directory, report_to=[], use_cpu=True)
            trainer = Trainer(tiny_model("qwen3_5_text"), args, train_dataset=SAMPLES)
            self.assert_on_the_page(lambda: configure_packing(trainer, share_prompts=True))
            other = preferences(tiny_model("llama"), args, train_dataset=SAMPLES)
            self.assert_on_the_page(lambda: configure_packing(other, packing="padding_free"))
            trainer = preferences(tiny_model("qwen3_5_text"), args, train_dataset=SAMPLES)
            self.assert_on_the_page(lambda: configure_packing(trainer, packing=True))
            args.neftune_noise_alpha = 5.0
            self.assert_on_the_page(lambda: configure_packing(trainer, packing="padding_free"))
            args.neftune_noise_alpha = None
            patch_model(trainer.model)
            trainer.model.packs_padding = False
            self.assert_on_the_page(lambda: configure_packing(trainer, packing="padding_free"))

    def test_of_shared_prompts(self):
        self.assert_on_the_page(lambda: SharedPrompts.of(LENGTHS, [0, -1]))
        shared = SharedPrompts.of(LENGTHS, [-1, 0])
        layer = torch.nn.Module()
        layer.config = SimpleNamespace(_attn_implementation="flex_attention")
        heads = [torch.zeros(1, 2, 5, 8)] * 3
        self.assert_on_the_page(lambda: prompts.attention(layer, *heads, None, boundaries=shared))
        row = [torch.zeros(1, 5, 2, 8)] * 3 + [torch.zeros(1, 5, 2)] * 2
        state = torch.zeros(2, 2, 8, 8)
        self.assert_on_the_page(lambda: prompts.gated_delta_rule(*row, boundaries=shared, initial_state=state))
        samples = [{"prefix": [5, 6], "answers": [{"input_ids": [7]}]}]
        self.assert_on_the_page(lambda: DataCollatorWithFlattening(on_leak="ignore")(samples))
        model = patch_model(tiny_model("qwen3_5_text"))
        collator = DataCollatorWithFlattening(model=model)
        self.assert_on_the_page(lambda: collator([{"prefix": [], "answers": [{"input_ids": [7]}]}]))
        row = {name: x for name, x in collator(samples).items() if name != "cu_seqlens"}
        self.assert_on_the_page(lambda: model(**row))

    def test_of_ops(self):
        row = [torch.zeros(1, 5, 2, 8)] * 3 + [torch.zeros(1, 5, 2)] * 2
        state = torch.zeros(1, 2, 8, 8)
        self.assert_on_the_page(lambda: gated_delta_rule(*row, boundaries=LENGTHS, initial_state=state))
        self.assert_on_the_page(lambda: gated_delta_rule(*row, boundaries=LENGTHS, impl="flash"))

    def test_of_the_command_line(self):
        with tempfile.TemporaryDirectory() as directory, chdir(directory):
            Path("chats.jsonl").write_text("no JSON\n")
            self.assert_on_the_page(lambda: list(read_records("chats.jsonl")))


if __name__ == "__main__":
    unittest.main()
