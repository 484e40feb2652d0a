"""Gradient release: flashoptim updates each weight in the backward, as soon as its gradient is there, and frees the gradient."""

from typing import Any, cast

import transformers
from transformers import TrainerCallback

from ...models.cuda_graphs import find_text_models
from ..checks import refused
from ..optimizers import unwrapped
from ..typed import Trainer


class GradientReleaseCallback(TrainerCallback):
    """Frees each gradient of a Trainer as soon as flashoptim has updated its weight, from the first step to the last.

    No step has all gradients then, so none are clipped or accumulated, and the log has a `grad_norm` of 0.

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
        self.handle: Any = None

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        self.on_train_end(args, state, control)
        optimizer = unwrapped(optimizer)
        self._check(optimizer)
        from flashoptim import enable_gradient_release

        self.handle = enable_gradient_release(model, optimizer)

    def on_train_end(self, args, state, control, **kwargs):
        if self.handle is not None:
            self.handle.remove()

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
            (rows > 1, "gradient_accumulation_steps=1", rows, "Each backward updates the weights."),
            (args.n_gpu > 1, one, f"{args.n_gpu} GPUs of one process", "Set CUDA_VISIBLE_DEVICES."),
            (apart, one, f"{args.world_size} processes", "DDP would sum gradients that are gone."),
            (trainer.accelerator.scaler, "bf16=True", "a scaler of gradients", "Remove fp16=True."),
            (recorded, "layers without CUDA graphs", "recorded layers", graphs),
        )
        for error in refused(
            *((wrong, f"{expected} for gradient release", *rest) for wrong, expected, *rest in rules)
        ):
            raise error
