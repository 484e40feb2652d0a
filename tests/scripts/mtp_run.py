"""Train a small model with a head of multi-token prediction, by `PackedTrainer` and SGD: `mtp_run.py KIND OUTPUT`.

KIND is `ddp`, `fsdp` (sharded through accelerate) or `sequence_parallel`. The update of each parameter, the log, and a
saved checkpoint go to OUTPUT. Every kind takes the same samples in a step as a single process with `alone`.
"""

import sys

from scripts.trainer_arms import OPTIONS, TINY, Samples, save_and_end, shards_by_fsdp, updates_and_log
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, set_seed

from transformers_packed import PackedTrainer, PackedTrainingArguments


BATCH = 4


def build(folder, kind="alone", samples=None, model=None, teacher=None, **options):
    """A trainer whose steps have two batches: of two accumulated rows, of two processes, or of one row of both."""
    shares = {
        "alone": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": BATCH},
        "sequence_parallel": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": BATCH},
    }.get(kind, {"per_device_train_batch_size": BATCH})
    if kind == "sequence_parallel":
        shares["sequence_parallel_size"] = 2
    arguments = {"max_steps": 2, "mtp_loss_weight": 0.5, "train_sampling_strategy": "sequential", **OPTIONS, **shares}
    set_seed(0)
    model = model or Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY, mtp_num_hidden_layers=1))
    arguments = PackedTrainingArguments(str(folder), **(arguments | options))
    return PackedTrainer(model, arguments, train_dataset=samples or Samples(), teacher=teacher)


if __name__ == "__main__":
    kind, output = sys.argv[1:]
    trainer = build(f"{output}.trainer", kind, use_cpu=not shards_by_fsdp())
    updates, log = updates_and_log(trainer)
    trainer.save_model(f"{output}.saved")
    save_and_end(trainer, output, updates=updates, log=log)
