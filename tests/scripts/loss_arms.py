"""The arms of `trainer_arms.py` with a loss averaged over samples: ours, and a reference for padded batches.

Also a script, `loss_arms.py OUTPUT`, which trains both, to run in several processes as with torchrun.
"""

import sys

import torch
import torch.nn.functional as F
from scripts.trainer_arms import build_trainer, save_and_end, updates_and_losses
from transformers import Trainer

from transformers_packed import set_loss_normalization


class PaddedSampleMean(Trainer):
    """Average the mean loss of each sample over the samples of a step, for padded batches through the stock class."""

    loss_is_scaled_for_ga = True

    def get_batch_samples(self, *args):
        batches, _ = super().get_batch_samples(*args)
        return batches, self.accelerator.gather(sum(has_targets(batch["labels"]).sum() for batch in batches)).sum()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        means = losses.sum(1) / (labels[:, 1:] != -100).sum(1).clamp(min=1)
        if not model.training:
            loss = means.sum() / has_targets(labels).sum()
        else:
            # DDP averages over processes.
            loss = means.sum() / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


def has_targets(labels: torch.Tensor) -> torch.Tensor:
    return (labels[:, 1:] != -100).any(1)


def build_sample_trainer(arm: str, output_dir: str, family: str = "qwen3_5", **arguments) -> Trainer:
    trainer = build_trainer(arm, family, output_dir, **arguments)
    for dataset in (trainer.train_dataset, trainer.eval_dataset):
        # A prompt without completion does not count as a sample.
        dataset.rows[5]["labels"] = [-100] * len(dataset.rows[5]["labels"])
    if arm == "padded":
        trainer.__class__ = PaddedSampleMean
    else:
        set_loss_normalization(trainer, "sample")
    return trainer


if __name__ == "__main__":
    (output,) = sys.argv[1:]
    sys.modules["fla"] = None  # the padded arm uses the stock class, which would run CUDA kernels on CPU tensors
    results = {}
    for arm in ("padded", "packed"):
        trainer = build_sample_trainer(arm, f"{output}.{arm}", max_steps=4)
        results[arm] = updates_and_losses(trainer)
    save_and_end(trainer, output, **results)
