"""Gradient release: flashoptim updates each weight in the backward, as soon as its gradient is there, and frees the gradient."""

from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import TrainerCallback, TrainerState

from ...errors import check_rules
from ...models.cuda_graphs import find_text_models
from ...models.optimizers import EACH_BACKWARD
from ..optimizers import unwrapped
from ..typed import Trainer


# The run that releases the gradients of a module, and the handle of its hooks. A run that raises has no end, so they stay.
_RELEASES: WeakKeyDictionary[torch.nn.Module, tuple[TrainerState, Any]] = WeakKeyDictionary()


def end_releases(model: torch.nn.Module, but: TrainerState | None = None) -> None:
    """Remove the hooks with which runs update weights of the model in the backward, except for the run of state `but`."""
    for module in model.modules():
        release = _RELEASES.get(module)
        if release is not None and release[0] is not but:
            release[1].remove()
            del _RELEASES[module]


class GradientReleaseCallback(TrainerCallback):
    """Frees each gradient of a Trainer as soon as flashoptim has updated its weight, from the first step to the last.

    No step has all gradients then, so none are clipped or accumulated, and the log has a `grad_norm` of 0. A run that raises
    leaves its hooks on the model. The next packed training of the model removes them.

    Args:
        trainer (`transformers.Trainer`):
            A Trainer with an optimizer of flashoptim, `max_grad_norm=0` and `gradient_accumulation_steps=1`, in one process
            or with FSDP2.

    Raises:
        `ValueError`: something in the set-up needs all gradients. Training raises it before the first step.

    Example:

    ```python
    >>> from flashoptim import FlashAdamW  # doctest: +SKIP
    >>> args = TrainingArguments("tuned", max_grad_norm=0)  # doctest: +SKIP
    >>> optimizer = FlashAdamW, {"lr": args.learning_rate}  # doctest: +SKIP
    >>> trainer = Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=optimizer)  # doctest: +SKIP
    >>> trainer.add_callback(GradientReleaseCallback(trainer))  # doctest: +SKIP

    ```
    """

    # No graph computes such a Trainer's layers.
    releases_gradients = True

    def __init__(self, trainer: transformers.Trainer):
        self.trainer = cast(Trainer, trainer)

    def on_train_begin(self, args, state, control, *, model, optimizer=None, **kwargs):
        end_releases(model)
        optimizer = unwrapped(optimizer)
        self._check(optimizer)
        from flashoptim import enable_gradient_release

        _RELEASES.update(dict.fromkeys(model.modules(), (state, enable_gradient_release(model, optimizer))))

    def on_train_end(self, args, state, control, *, model, **kwargs):
        end_releases(model)

    def _check(self, optimizer: Any) -> None:
        """Raise the error of what needs all gradients at once."""
        trainer = self.trainer
        args, kind, one = trainer.args, type(optimizer).__name__, "one process, or FSDP2"
        rows, apart = args.gradient_accumulation_steps, args.world_size > 1 and not trainer.is_fsdp_enabled
        recorded = any(text.layer_graphs is not None for text in find_text_models(trainer.model))
        cls = "Pass optimizer_cls_and_kwargs=(FlashAdamW, ...) to the Trainer."
        clips, graphs = "Clipping needs all gradients at once.", "A graph computes all gradients at once."
        rules = (
            (not hasattr(optimizer, "step_param"), "an optimizer of flashoptim", kind, cls),
            (args.max_grad_norm, "max_grad_norm=0", args.max_grad_norm, clips),
            (rows > 1, "gradient_accumulation_steps=1", rows, EACH_BACKWARD),
            (args.n_gpu > 1, one, f"{args.n_gpu} GPUs of one process", "Set CUDA_VISIBLE_DEVICES."),
            (apart, one, f"{args.world_size} processes", "DDP would sum gradients that are gone."),
            (trainer.accelerator.scaler, "bf16=True", "a scaler of gradients", "Remove fp16=True."),
            (recorded, "layers without CUDA graphs", "recorded layers", graphs),
        )
        check_rules((wrong, f"{expected} for gradient release", got, fix) for wrong, expected, got, fix in rules)
