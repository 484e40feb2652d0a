"""Settings of a model that keep documents apart may change in training, such as the cache that a generation turns on."""

from typing import Any

from transformers import TrainerCallback

from ...errors import check_rules
from ...foreign import attention_of
from ...models.registry import inner_model
from ..checks import of_settings, text_config
from ..typed import Trainer


class IsolationCallback(TrainerCallback):
    """Stops training before an update if a changed setting lets documents of a row mix. [`configure_packing`] adds it.

    Args:
        trainer (`transformers.Trainer`):
            The Trainer.

    Raises:
        `ValueError`: raised in `train()` for a cache, an attention implementation or an adapter with which
            [`configure_packing`] does not pack.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self._judged: Any = None

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        # Not when a step begins, because callbacks of the user may follow this one.
        settings = _settings(self.trainer)
        if settings != self._judged:
            check_rules(of_settings(self.trainer))
            self._judged = settings


def _settings(trainer: Trainer) -> list[Any]:
    """What is quick to read in each step."""
    model = inner_model(trainer.model)
    configs = model.config, text_config(model)
    adapters = [*getattr(trainer.model, "peft_config", ())]
    return [*((attention_of(x), getattr(x, "use_cache", None)) for x in configs), adapters]
