"""Let the host prepare the next step while the GPU still computes the current one.

Trainer waits for the GPU twice in each step: after backward, to leave out of the log a loss that is not finite, and when
it copies a batch to the GPU. Without these waits, clipping, the optimizer, logging and collating take no time of the GPU.
"""

from functools import wraps

import torch
from transformers import Trainer


def run_ahead(trainer: Trainer) -> None:
    """Remove both waits from a Trainer.

    Sets `accelerator_config.non_blocking` if batches are in pinned memory, and replaces `logging_nan_inf_filter` by a
    filter on the device: a loss that is not finite counts as the last finite one. Trainer would count it as the mean of
    the losses since the last log.
    """
    args = trainer.args
    if args.device.type == "cuda" and args.dataloader_pin_memory:
        args.accelerator_config.non_blocking = trainer.accelerator.dataloader_config.non_blocking = True
    if args.logging_nan_inf_filter:
        args.logging_nan_inf_filter = False
        trainer.training_step = _with_finite_losses(trainer.training_step)


def _with_finite_losses(step):
    last = 0.0

    @wraps(step)
    def training_step(*args, **kwargs) -> torch.Tensor:
        nonlocal last
        loss = step(*args, **kwargs)
        last = torch.where(torch.isfinite(loss), loss, last)
        return last

    return training_step
