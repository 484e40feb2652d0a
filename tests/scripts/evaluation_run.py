"""Evaluate packed rows with metrics in several processes: `evaluation_run.py OUTPUT`, as with torchrun.

Also trains two steps, so that a set-up is verified on all processes.
"""

import sys

import torch
from scripts.trainer_arms import CONFIGS, OPTIONS, Samples, save_and_end
from transformers import AutoModelForCausalLM, set_seed

from transformers_packed import PackedTrainer, PackedTrainingArguments, PackingDataset


if __name__ == "__main__":
    (output,) = sys.argv[1:]
    set_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
    seen = []

    def metrics(prediction):
        seen.append((len(prediction.predictions), int((prediction.label_ids[:, 1:] != -100).sum())))
        return {}

    options = {**OPTIONS, "max_steps": 2, "per_device_train_batch_size": 3, "per_device_eval_batch_size": 4}
    args = PackedTrainingArguments(f"{output}.trainer", **options, eval_strategy="steps", eval_steps=2)
    samples = {"train_dataset": Samples(24), "eval_dataset": PackingDataset(Samples(23), 128)}
    trainer = PackedTrainer(model, args, compute_metrics=metrics, **samples)
    trainer.train()
    predicted = len(trainer.predict(samples["eval_dataset"]).predictions)
    loss = next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    parts = []
    for row in Samples(23).rows:
        targets = sum(x != -100 for x in row["labels"][1:])
        with torch.no_grad():
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            parts.append(
                (trainer.model(input_ids=ids, labels=labels).loss.item() * targets if targets else 0, targets)
            )
    alone = sum(loss for loss, _ in parts) / sum(targets for _, targets in parts)
    save_and_end(trainer, output, evaluated=seen[0], predicted=predicted, loss=loss, alone=alone)
