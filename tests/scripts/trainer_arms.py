"""Train one model with the stock Trainer: `padded` through the stock class, `packed` or `padded_ours` through ours.

Also a script, `trainer_arms.py ARM FAMILY OUTPUT`, to run in several processes as with torchrun.
"""

import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import TestCase

import torch
from common.families import tiny_config
from common.processes import pretend_gpus, run_script
from mixins import vision
from mixins.patch import OTHERS
from mixins.vision import EXPERTS
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig, Trainer, TrainingArguments, set_seed

import transformers_packed


TINY = vision.TINY | {
    "vocab_size": 61,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_value_head_dim": 8,
    "initializer_range": 0.02,
}
CONFIGS = {
    "qwen3_5": lambda **values: Qwen3_5TextConfig(**TINY, **values),
    "qwen3_next": lambda: Qwen3NextConfig(**TINY, mlp_only_layers=[0, 1]),
    "qwen3_next_moe": lambda: Qwen3NextConfig(**TINY, **EXPERTS),
    **{name: partial(tiny_config, name, vocab_size=61, initializer_range=0.05) for name in OTHERS},
}


# As far as possible, a step depends on the gradients alone.
OPTIONS = {
    "optim": "sgd",
    "learning_rate": 0.3,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "logging_steps": 1,
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}


class Samples(torch.utils.data.Dataset):
    """Draw samples of 2 to 90 tokens: prompts without loss, and completions."""

    def __init__(self, size: int = 48):
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(2, 90, (size,), generator=generator).tolist()
        self.rows = []
        for length in lengths:
            ids = torch.randint(1, 61, (length,), generator=generator)
            prompt = int(torch.randint(1, length, (1,), generator=generator))
            self.rows.append({"input_ids": ids.tolist(), "labels": [-100] * prompt + ids[prompt:].tolist()})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


class Stream(torch.utils.data.IterableDataset):
    """Samples without numbers and without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def collate_padded(features):
    ids, labels = ([torch.tensor(f[name]) for f in features] for name in ("input_ids", "labels"))
    mask = [torch.ones_like(x) for x in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence(mask, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def build_trainer(arm: str, family: str, output_dir: str, **arguments) -> Trainer:
    set_seed(0)
    collator = collate_padded
    if arm == "padded":
        model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    else:
        with transformers_packed.registered():
            model = AutoModelForCausalLM.from_config(CONFIGS[family]())
        if arm == "packed":
            collator = transformers_packed.DataCollatorWithFlattening(
                return_cu_seqlens=True, return_seq_idx=True, model=model
            )
    args = TrainingArguments(
        output_dir,
        **{
            "max_steps": 4,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 2,
            **OPTIONS,
            # Large steps magnify rounding.
            **({"learning_rate": 0.03} if family in OTHERS else {}),
            **arguments,
        },
    )
    return Trainer(model=model, args=args, train_dataset=Samples(), eval_dataset=Samples(7), data_collator=collator)


def updates_and_log(trainer: Trainer) -> tuple[dict[str, torch.Tensor], list[dict]]:
    """Train, and return the change of each trained parameter and the log entries with a loss."""
    before = {name: whole(p).clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.train()
    # FSDP replaces the parameters of the model.
    after = {name: whole(p) for name, p in trainer.model.named_parameters() if name in before}
    updates = {name: after[name] - before[name] for name in before}
    return updates, [entry for entry in trainer.state.log_history if "loss" in entry]


def whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a parameter, or gather one that FSDP2 or DeepSpeed's ZeRO-3 has sharded."""
    if isinstance(parameter, DTensor):
        return parameter.detach().full_tensor()
    if hasattr(parameter, "ds_id"):
        with import_module("deepspeed").zero.GatheredParameters(parameter):
            return parameter.detach().clone()
    return parameter.detach()


def updates_and_losses(trainer: Trainer) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Like [`updates_and_log`], with the logged losses alone."""
    set_seed(0)  # GRPO's generated text depends on it
    updates, log = updates_and_log(trainer)
    return updates, [entry["loss"] for entry in log]


def run_in_two_processes(test: TestCase, script: str, *arguments: str, **variables: str) -> tuple[str, Any]:
    """Run a script of this folder in two processes. Return its output and the file that its last argument names.

    `variables` are environment variables.
    """
    path = Path(__file__).with_name(script)
    finished = run_script(path, *arguments, processes=2, **{"ACCELERATE_USE_CPU": "true", **variables})
    for process in finished:
        test.assertEqual(process.status, 0, process.stderr[-3000:])
    saved = torch.load(arguments[-1])
    test.assertEqual(saved["processes"], 2)
    return "".join(process.stdout for process in finished), saved


def shards_by_fsdp() -> bool:
    """Whether the variables of such a script ask accelerate to shard. It then does so without GPUs."""
    if "ACCELERATE_USE_FSDP" not in os.environ:
        return False
    pretend_gpus()
    return True


def save_and_end(trainer: Trainer, output: str, **found) -> None:
    """Save what such a script has found, from one process, and end it."""
    if trainer.is_world_process_zero():
        torch.save(found | {"processes": trainer.args.world_size}, output)
    end_process()


def end_process() -> None:
    """End such a script. Threads of its group may still run, and would abort the process at interpreter shutdown."""
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def train(arm: str, family: str, output_dir: str, **arguments) -> tuple[dict, list[float], Trainer]:
    """Return the change of each parameter, the logged losses, and the trainer."""
    trainer = build_trainer(arm, family, output_dir, **arguments)
    return *updates_and_losses(trainer), trainer


if __name__ == "__main__":
    arm, family, output = sys.argv[1:]
    sys.modules["fla"] = None  # the padded arm uses the stock class, which would run CUDA kernels on CPU tensors
    updates, losses, trainer = train(arm, family, f"{output}.trainer")
    save_and_end(trainer, output, updates=updates, losses=losses)
