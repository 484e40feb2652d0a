"""Train one model in Trainer or a trainer of TRL: padded through the stock class, packed by `configure_packing`, or packed
with explicit rows and collator.

Also a script, `configured_arms.py KIND ARM MODE TUNING OUTPUT`, to run in several processes as with torchrun.
"""

import sys

import torch
from common.blocks import LAYERS, stored_and_plain
from common.trl_trainers import preference_trainer
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from scripts.trainer_arms import (
    CONFIGS,
    OPTIONS,
    Samples,
    collate_padded,
    save_and_end,
    shards_by_fsdp,
    updates_and_log,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed
from trl import DistillationTrainer, RewardTrainer, SFTConfig, SFTTrainer

from transformers_packed import DataCollatorWithFlattening, PackingDataset, configure_packing, patch_model


STEPS = 4
MAX_LENGTH = 128


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 61)}}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")), pad_token="<pad>", eos_token="<eos>"
    )


def build(kind: str, tuning: str = "full", accumulation: int = 1, directory: str = "", **arguments) -> Trainer:
    """Build a padded Trainer as in user code."""
    if kind in ("reward", "distillation"):
        own = {"center_rewards_coefficient": 0.1} if kind == "reward" else {}
        return preference_trainer(kind, directory, per_device_train_batch_size=2, **own)
    set_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
    if tuning in ("stored", "plain"):
        # Weights in FP8, and the same values in float32. PEFT draws other numbers for the first.
        adapters = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=list(LAYERS))
        base = dict(zip(("stored", "plain"), stored_and_plain(model), strict=True))[tuning]
        model = get_peft_model(base, adapters)
        for index, parameter in enumerate(x for x in model.parameters() if x.requires_grad):
            torch.manual_seed(index)
            torch.nn.init.normal_(parameter, std=0.1)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear") if tuning == "lora" else None
    options = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": accumulation,
        **OPTIONS,
        **arguments,
    }
    samples = Dataset.from_list(Samples().rows)
    if kind == "sft":
        options = {"bf16": False, "gradient_checkpointing": False, "max_length": MAX_LENGTH, **options}
        return SFTTrainer(
            model,
            SFTConfig(directory, **options),
            processing_class=tokenizer(),
            train_dataset=samples,
            peft_config=lora,
        )
    if lora is not None:
        model = get_peft_model(model, lora)
    return Trainer(model, TrainingArguments(directory, **options), train_dataset=samples, data_collator=None)


def collate_rows(rows: list) -> dict:
    """Collate samples, or the samples of packed rows, to a padded batch."""
    return collate_padded([sample for row in rows for sample in (row if isinstance(row, list) else [row])])


def configure(trainer: Trainer, arm: str, mode: str) -> Trainer:
    if arm == "packed":
        return configure_packing(trainer, mode, max_length=MAX_LENGTH if mode == "pack" else None)
    if isinstance(trainer, RewardTrainer | DistillationTrainer):
        return trainer
    trainer.data_collator = collate_rows
    if arm == "handed":
        patch_model(trainer.model)
        trainer.data_collator = DataCollatorWithFlattening(
            return_cu_seqlens=True, return_seq_idx=True, model=trainer.model
        )
    if mode == "pack":
        args = trainer.args
        trainer.train_dataset = PackingDataset(
            trainer.train_dataset,
            MAX_LENGTH,
            world_size=args.world_size,
            gradient_accumulation_steps=args.gradient_accumulation_steps * args.per_device_train_batch_size,
            balance=trainer.model.config,
            seed=args.seed,
        )
        args.train_sampling_strategy = "sequential"
    return trainer


if __name__ == "__main__":
    kind, arm, mode, tuning, output = sys.argv[1:]
    sys.modules["fla"] = None  # the padded arm uses the stock class, which would run CUDA kernels on CPU tensors
    trainer = build(kind, tuning, directory=f"{output}.trainer", use_cpu=not shards_by_fsdp())
    configure(trainer, arm, mode)
    updates, log = updates_and_log(trainer)
    sharded = isinstance(next(trainer.model.parameters()), DTensor)
    save_and_end(trainer, output, updates=updates, log=log, sharded=sharded)
