"""Raise the errors of `docs/reference/errors.md`: each section lists the messages that are raised here, in this order."""

import io
import re
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from common.processes import errors_of
from common.records import make_tokenizer
from parameterized import parameterized
from transformers import Trainer, TrainerState, TrainingArguments

from transformers_packed import (
    DataCollatorWithFlattening,
    PackedTrainingArguments,
    PackingDataset,
    SequenceBoundaries,
    configure_packing,
    keep_experts_in_host_memory,
    keep_layers_in_host_memory,
    pack_dataset,
    patch_model,
    plan_packing,
    unpatch_model,
    use_float8,
)
from transformers_packed.audit.tiny import tiny_model
from transformers_packed.data.records.samples import make_samples, read_records
from transformers_packed.models import host_parameters
from transformers_packed.ops import gated_delta_rule, per_document, prompts
from transformers_packed.parallel import RowShard
from transformers_packed.shared_prompts import SharedPrompts
from transformers_packed.training import verify
from transformers_packed.training.callbacks.resume import PackingPlanCallback


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"
LENGTHS = SequenceBoundaries.from_lengths([3, 2])
ROW = {"input_ids": torch.ones(1, 5, dtype=torch.int64), "cu_seqlens": LENGTHS.cu_seqlens, "use_cache": False}
SAMPLES = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
HEADS = [torch.zeros(1, 5, 2, 8)] * 3 + [torch.zeros(1, 5, 2)] * 2
# In auto mode, the first of these reasons that applies is printed.
OFF = "Packing off, training is unchanged: "

Calls = Iterator[Callable[[], object]]


def listed() -> dict[str, list[str]]:
    """The messages in the first column of each section of the page."""
    sections = {}
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        sections[title] = [found[2] for found in re.finditer(r"^\| (`+)(.+?)\1 \|", text, re.M)]
    return sections


def make_trainer(model=None, samples=SAMPLES, kind=Trainer, batch_size=8, **options) -> Trainer:
    args = TrainingArguments("trained", per_device_train_batch_size=batch_size, report_to=[], use_cpu=True)
    return kind(model or tiny_model("qwen3_5_text"), args, train_dataset=samples, **options)


def reason(trainer: Trainer) -> str:
    """The reason for which auto mode leaves a Trainer unchanged."""
    with redirect_stdout(io.StringIO()) as printed:
        configure_packing(trainer)
    return printed.getvalue().strip().removeprefix(OFF)


class WithOwnLoss(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs)


def my_collator(samples: list) -> dict:
    return {}


def of_auto_mode() -> Calls:
    yield lambda: reason(make_trainer(batch_size=1))
    yield lambda: reason(make_trainer(samples=[{"input_ids": [5, 6, 7]}]))
    yield lambda: reason(make_trainer(samples=[{"text": "a"}]))
    yield lambda: reason(make_trainer(data_collator=my_collator))
    yield lambda: reason(make_trainer(kind=WithOwnLoss))
    two_gpus = make_trainer()
    two_gpus.args._n_gpu = 2
    yield lambda: reason(two_gpus)


def of_configure_packing() -> Calls:
    yield lambda: configure_packing(make_trainer(), max_length=4096)
    yield lambda: configure_packing(make_trainer(), packing=True)
    yield lambda: PackedTrainingArguments(max_length=4096, use_cpu=True)
    trainer = make_trainer()
    trainer._get_train_sampler = lambda dataset=None: None
    yield lambda: configure_packing(trainer, packing=True, max_length=8)
    yield lambda: verify.check_leak(0.091, documents=3)
    in_float8 = use_float8(patch_model(tiny_model("qwen3_5_text")), lambda _, name: name.endswith("1.mlp.up_proj"))
    yield lambda: configure_packing(make_trainer(in_float8), batch_invariant=True)


def of_datasets() -> Calls:
    yield lambda: plan_packing([3, 5000, 10], 4096)
    yield lambda: plan_packing([3, 5], 8, world_size=8)
    yield lambda: PackingDataset(iter(SAMPLES), max_length=8)


def of_records() -> Calls:
    def read(line: str, tokenizer):
        with tempfile.TemporaryDirectory() as directory, chdir(directory):
            Path("chats.jsonl").write_text(line)
            make_samples(read_records("chats.jsonl"), tokenizer, max_length=64)

    yield lambda: read("no JSON", make_tokenizer())
    yield lambda: read('{"conversations": []}', make_tokenizer())
    yield lambda: read('{"messages": [{"role": "user", "content": "Hi"}]}', make_tokenizer(template=None))


def of_stock_models() -> Calls:
    yield lambda: DataCollatorWithFlattening(model=tiny_model("qwen3_5_text"))
    model = patch_model(tiny_model("qwen3_5_text"))
    yield lambda: model(**ROW, is_causal=False)
    model.config._attn_implementation = "paged"
    yield lambda: model(**ROW)


def of_a_collator() -> Calls:
    yield lambda: DataCollatorWithFlattening(pad_to_multiple_of=64, on_leak="ignore")
    collator = DataCollatorWithFlattening(on_leak="ignore")
    yield lambda: collator([])
    yield lambda: collator([{"input_ids": []}])
    yield lambda: collator([{"input_ids": [], "labels": 1}])
    yield lambda: collator([{"input_ids": [5, 6], "labels": [5]}])
    yield lambda: collator([{"input_ids": [5], "labels": [5]}, {"input_ids": [6]}])


def of_rows() -> Calls:
    model = patch_model(tiny_model("qwen3_5_text"))
    row, causal = torch.ones(2, 12, dtype=torch.int64), torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    apart = causal.clone()
    apart[..., 5:, :5] = False
    for change in (
        {"attention_mask": torch.ones(1, 5)},
        {"use_cache": True},
        {"input_ids": row[:1], "cu_seqlens": None, "attention_mask": row[:1] * 2},
        {"input_ids": row[:1], "cu_seqlens": None, "attention_mask": torch.tensor([0, 5, 12])},
        {"input_ids": row[:1], "cu_seqlens": None, "attention_mask": causal.triu(-4)},
        {"input_ids": row, "cu_seqlens": None, "attention_mask": apart},
        {"input_ids": ROW["input_ids"].expand(2, 5)},
        {"cu_seqlens": torch.tensor([0, 3, 4])},
        {"cu_seqlens": torch.tensor([0, 3, 3, 5])},
        {"position_ids": torch.tensor([[0, 1, 0, 1, 2]])},
        {
            "cu_seqlens": None,
            "position_ids": torch.tensor([[0, 1, 1, 0, 1], [0, 1, 2, 0, 1], [0, 1, 1, 0, 1]])[:, None],
        },
        {"cu_seqlens": None, "max_length_q": 3},
    ):
        yield lambda change=change: model(**ROW | change)


def of_resumed_runs() -> Calls:
    def begin(max_length: int, accumulation: int, state: TrainerState) -> dict:
        plan = plan_packing([5, 4, 3, 2] * 4, max_length, gradient_accumulation_steps=2)
        callback, args = PackingPlanCallback(), SimpleNamespace(ignore_data_skip=False, seed=0, data_seed=None)
        args.gradient_accumulation_steps = accumulation
        loader = SimpleNamespace(dataset=SimpleNamespace(plan=plan), total_batch_size=1)
        callback.on_train_begin(args, state, None, train_dataloader=loader)
        return callback.state()

    saved = begin(8, 2, TrainerState())
    state = TrainerState(global_step=1, stateful_callbacks={"PackingPlanCallback": saved})
    yield lambda: begin(8, 1, state)
    yield lambda: begin(16, 2, state)


def of_preferences() -> Calls:
    # Stands for TRL's own, which is not installed everywhere.
    preferences = type("DPOTrainer", (Trainer,), {"__module__": "trl.trainer.dpo_trainer"})
    yield lambda: configure_packing(make_trainer(), share_prompts=True)
    trainer = make_trainer(kind=preferences)
    yield lambda: configure_packing(trainer, packing=True)
    yield lambda: configure_packing(make_trainer(tiny_model("llama"), kind=preferences), packing="padding_free")
    patch_model(trainer.model).packs_padding = False
    yield lambda: configure_packing(trainer, packing="padding_free")
    trainer.model.packs_padding, trainer.args.neftune_noise_alpha = True, 5.0
    yield lambda: configure_packing(trainer, packing="padding_free")

    shared = SharedPrompts.of(LENGTHS, [-1, 0])
    layer = torch.nn.Module()
    layer.config = SimpleNamespace(_attn_implementation="flex_attention")
    yield lambda: prompts.attention(layer, *[torch.zeros(1, 2, 5, 8)] * 3, boundaries=shared)
    yield lambda: SharedPrompts.of(LENGTHS, [0, -1])
    samples = [{"prefix": [5, 6], "answers": [{"input_ids": [7]}, {"input_ids": [8]}]}]
    yield lambda: DataCollatorWithFlattening(on_leak="ignore")(samples)
    model = patch_model(tiny_model("qwen3_5_text"))
    collator = DataCollatorWithFlattening(model=model)
    yield lambda: collator([{"prefix": [], "answers": [{"input_ids": [7]}]}])
    yield lambda: collator([{"input_ids": [5], "turns": [[6], [7]]}])
    yield lambda: collator([{"input_ids": [5], "turns": [{"input_ids": []}, {"input_ids": [7]}]}])
    yield lambda: collator([{"tree_cu_seqlens_q": torch.tensor([0, 5])}] * 2)
    turns = [{"input_ids": [7, 8, 9]}, {"input_ids": [7, 8, 9]}]
    yield lambda: pack_dataset([{"input_ids": [5, 6], "turns": turns}], 8)
    yield lambda: PackingDataset([{"input_ids": [5, 6], "turns": turns}], 8)
    yield lambda: model(**{name: x for name, x in collator(samples).items() if name != "cu_seqlens"})
    yield lambda: gated_delta_rule(*HEADS, boundaries=shared, initial_state=torch.zeros(2, 2, 8, 8))


def of_mtp() -> Calls:
    preferences = type("DPOTrainer", (Trainer,), {"__module__": "trl.trainer.dpo_trainer"})
    yield lambda: configure_packing(make_trainer(), mtp_loss_weight=0.1)
    declared = tiny_model("qwen3_5_text")
    declared.config.mtp_num_hidden_layers, declared.config.name_or_path = 1, "tuned"
    yield lambda: configure_packing(make_trainer(declared), mtp_loss_weight=0.1)
    yield lambda: configure_packing(make_trainer(kind=WithOwnLoss), mtp_loss_weight=0.1)
    yield lambda: configure_packing(make_trainer(kind=preferences), mtp_loss_weight=0.1)
    trainer = make_trainer()
    trainer.args.label_smoothing_factor = 0.1
    yield lambda: configure_packing(trainer, mtp_loss_weight=0.1)


def of_teachers() -> Calls:
    trainer, longer = make_trainer(), tiny_model("qwen3_5_text")
    longer.resize_token_embeddings(264)
    yield lambda: configure_packing(trainer, teacher=longer)
    yield lambda: configure_packing(trainer, teacher=tiny_model("llama"))
    yield lambda: configure_packing(trainer, teacher=trainer.model)
    yield lambda: configure_packing(trainer, teacher="Qwen/Qwen3.5-4B")
    yield lambda: configure_packing(make_trainer(kind=WithOwnLoss), teacher=longer)


def of_host_memory() -> Calls:
    stock = tiny_model("qwen3_5_moe_text")
    yield lambda: keep_experts_in_host_memory(stock)
    yield lambda: keep_experts_in_host_memory(patch_model(stock))
    kept = keep_experts_in_host_memory(patch_model(tiny_model("qwen3_5_moe_text")).requires_grad_(False))
    yield lambda: kept.half()
    yield lambda: unpatch_model(kept)
    stock = tiny_model("qwen3_5_text")
    yield lambda: keep_layers_in_host_memory(stock)
    yield lambda: keep_layers_in_host_memory(patch_model(stock))
    with mock.patch.object(host_parameters, "SMALLEST", 0):
        kept = keep_layers_in_host_memory(stock.requires_grad_(False))
    kept.model.layers[0].mlp.up_proj.requires_grad_(True)
    yield lambda: kept(torch.ones(1, 2, dtype=torch.int64))


def of_ops() -> Calls:
    yield lambda: gated_delta_rule(*HEADS, boundaries=LENGTHS, initial_state=torch.zeros(1, 2, 8, 8))
    yield lambda: gated_delta_rule(*HEADS, boundaries=LENGTHS, impl="flash")
    yield lambda: per_document(torch.cumsum, boundaries=RowShard.cut(LENGTHS, 0, 5))


SECTIONS = {
    "Auto mode leaves packing off": of_auto_mode,
    "`configure_packing` refuses an explicit request": of_configure_packing,
    "`transformers-packed train` rejects a record": of_records,
    "A dataset cannot be packed": of_datasets,
    "A stock model leaks, or attention does": of_stock_models,
    "The collator rejects samples": of_a_collator,
    "A packed row is rejected": of_rows,
    "A packed run does not resume": of_resumed_runs,
    "Preferences and shared prompts": of_preferences,
    "A head of multi-token prediction does not train": of_mtp,
    "A teacher does not fit": of_teachers,
    "Weights do not stay in host memory": of_host_memory,
    "An op refuses a call": of_ops,
}


class ErrorsTest(unittest.TestCase):
    def setUp(self):
        self.enterContext(chdir(self.enterContext(tempfile.TemporaryDirectory())))

    def test_sections(self):
        self.assertEqual(list(listed()), list(SECTIONS))

    @parameterized.expand(SECTIONS.items())
    def test_messages(self, title, calls):
        self.assertEqual(errors_of(calls()), listed()[title])
