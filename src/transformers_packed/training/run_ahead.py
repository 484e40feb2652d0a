"""Let the host prepare the next step while the GPU still computes the current one.

Trainer waits for the GPU twice in each step: after backward, to leave out of the log a loss that is not finite, and when
it copies a batch to the GPU. Without these waits, clipping, the optimizer, logging and collating take no time of the GPU.

Trainer also walks through all modules in each step, to set their mode and to count their parameters. A mixture with
adapters has thousands of modules, for which this takes the host as long as a few layers.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.utils import logging

from ..foreign import swapped
from ..models.untouched import modules_of


logger = logging.get_logger(__name__)

# What `train` of a module may be if calling it in training mode does nothing but call that of the modules inside.
_TRAINS = {cls.train for cls in (torch.nn.Module, PreTrainedModel, DistributedDataParallel)}


class RunAheadCallback(TrainerCallback):
    """The training step of a Trainer without both waits, and with fewer walks. [`configure_packing`] adds it.

    In place of `logging_nan_inf_filter`, a filter on the device counts a loss that is not finite as the mean of those since
    the last log, as Trainer does. A warning tells how many there were. Evaluation keeps Trainer's filter.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer, whose `training_step` this object takes the place of, and whose `floating_point_ops` its method does.
    """

    def __init__(self, trainer: Trainer):
        self.trainer, self.step, self.count = trainer, trainer.training_step, trainer.floating_point_ops
        self.filters, self.number = False, 0
        self.total: torch.Tensor | float = 0.0
        self.finite: torch.Tensor | int = 0
        self.size: int | None = None

    def __call__(self, model: torch.nn.Module, *args, **kwargs) -> torch.Tensor:
        settings = self.trainer.args
        with _trained_once(model):
            loss = self.step(model, *args, **kwargs)
        self.filters = settings.logging_nan_inf_filter
        if self.filters:
            # Trainer reads it next. Evaluation reads it after the end of the step.
            settings.logging_nan_inf_filter = False
            is_finite = torch.isfinite(loss)
            loss = torch.where(is_finite, loss, self.total / max(self.number, 1))
            self.total, self.number = self.total + loss, self.number + 1
            self.finite = self.finite + is_finite
        return loss

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Those of Trainer, with the number of parameters at the first step."""
        model: Any = self.trainer.model
        is_stock = getattr(self.count, "__func__", None) is Trainer.floating_point_ops
        if not is_stock or not hasattr(model, "num_parameters"):
            return self.count(inputs)
        if self.size is None:
            self.size = model.num_parameters(exclude_embeddings=True)
        with swapped(vars(model), num_parameters=lambda **_: self.size):
            return self.count(inputs)

    def on_step_end(self, args, state, control, **kwargs):
        if self.filters:
            args.logging_nan_inf_filter = True

    on_substep_end = on_step_end

    def on_train_begin(self, args, state, control, **kwargs):
        self.size = None
        self._start()

    def _start(self) -> None:
        self.total, self.number, self.finite = 0.0, 0, 0

    def on_log(self, args, state, control, **kwargs):
        # The log has just waited for the device.
        if left_out := self.number - int(self.finite):
            logger.warning(
                f"{left_out} of {self.number:,} losses since the last log were not finite. The log counts the mean of "
                "the others for them; logging_nan_inf_filter=False shows them."
            )
        self._start()


def _trained_once(model: torch.nn.Module) -> AbstractContextManager:
    """Let `model.train()` change nothing meanwhile if all modules are in training mode."""
    known = "train" not in vars(model) and type(model).train in _TRAINS
    return swapped(vars(model), train=partial(_train, model)) if known else nullcontext()


def _train(model: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
    return model if mode and _all_train(model) else type(model).train(model, mode)


def _all_train(model: torch.nn.Module) -> bool:
    modules = modules_of(model)
    if not all(module.training for module in modules):
        return False
    # Others may do more, such as staying in evaluation.
    own = any("train" in vars(module) for module in modules[1:])
    return not own and {cls.train for cls in {type(module) for module in modules}} <= _TRAINS
