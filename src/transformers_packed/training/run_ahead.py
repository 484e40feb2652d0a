"""Let the host prepare the next step while the GPU still computes the current one.

Trainer waits for the GPU twice in each step: after backward, to leave out of the log a loss that is not finite, and when
it copies a batch to the GPU. Without these waits, clipping, the optimizer, logging and collating take no time of the GPU.
"""

import torch
from transformers import Trainer, TrainerCallback
from transformers.utils import logging


logger = logging.get_logger(__name__)


class RunAheadCallback(TrainerCallback):
    """The training step of a Trainer without both waits. [`configure_packing`] adds it.

    In place of `logging_nan_inf_filter`, a filter on the device counts a loss that is not finite as the mean of those since
    the last log, as Trainer does. A warning tells how many there were. Evaluation keeps Trainer's filter.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer, whose `training_step` this object takes the place of.
    """

    def __init__(self, trainer: Trainer):
        self.trainer, self.step = trainer, trainer.training_step
        self.filters, self.number = False, 0
        self.total: torch.Tensor | float = 0.0
        self.finite: torch.Tensor | int = 0

    def __call__(self, *args, **kwargs) -> torch.Tensor:
        loss, settings = self.step(*args, **kwargs), self.trainer.args
        self.filters = settings.logging_nan_inf_filter
        if self.filters:
            # Trainer reads it next. Evaluation reads it after the end of the step.
            settings.logging_nan_inf_filter = False
            is_finite = torch.isfinite(loss)
            loss = torch.where(is_finite, loss, self.total / max(self.number, 1))
            self.total, self.number = self.total + loss, self.number + 1
            self.finite = self.finite + is_finite
        return loss

    def on_step_end(self, args, state, control, **kwargs):
        if self.filters:
            args.logging_nan_inf_filter = True

    on_substep_end = on_step_end

    def on_train_begin(self, args, state, control, **kwargs):
        self.total, self.number, self.finite = 0.0, 0, 0

    def on_log(self, args, state, control, **kwargs):
        # The log has just waited for the device.
        if left_out := self.number - int(self.finite):
            logger.warning(
                f"{left_out} of {self.number:,} losses since the last log were not finite. The log counts the mean of "
                "the others for them; logging_nan_inf_filter=False shows them."
            )
        self.on_train_begin(args, state, control)
