"""A callback that checks the model before a Trainer's first step, for collators without `model=`.

A collator with `model=` checks the model at once and has no side effects. Without `model=` the check has to wait for
the Trainer. The first such collator therefore adds [`PackingGuard`] to the default callbacks of every Trainer. No
other constructor in this package changes Transformers. A `FutureWarning` names the arguments to pass instead.
"""

import warnings
from typing import Any

import torch
from transformers import TrainingArguments, trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import input_error
from ..models.families import LANGUAGE_MODELS
from ..models.registry import transformers_model
from ..models.verdict import cache_setting, complain, judge
from .collator import DataCollatorWithFlattening
from .neftune import DocumentNoise


# Attributes in which data loaders and collators keep a wrapped collator.
_INSIDE = ("base_dataloader", "collate_fn", "data_collator", "collate", "func")


class PackingGuard(DocumentNoise):
    """Stops a Trainer that uses our collator with a model or PEFT adapter that is known to mix documents.

    It also scales NEFTune noise per document if the collator is ours.

    Raises:
        `ValueError`: before the first training step, or in the first step of an evaluation without training.
    """

    def __init__(self):
        super().__init__()
        self._checked: tuple | None = None

    def on_train_begin(self, args, state, control, model=None, train_dataloader=None, **kwargs):
        self._check(args, model, train_dataloader, training=True)
        if find_collator(train_dataloader) is not None:
            super().on_train_begin(args, state, control, model=model)

    def on_prediction_step(self, args, state, control, model=None, eval_dataloader=None, **kwargs):
        self._check(args, model, eval_dataloader, training=False)

    def _check(self, args: TrainingArguments, model: torch.nn.Module, loader: Any, training: bool) -> None:
        if self._checked is None or self._checked[0] is not model or self._checked[1] is not loader:
            self._checked = (model, loader)
            collator = find_collator(loader)
            if collator is not None:
                check_model(model, collator, args, training)


def install_guard() -> None:
    """Add the guard to the default callbacks of every Trainer, and warn about it."""
    if PackingGuard in trainer.DEFAULT_CALLBACKS:
        return
    trainer.DEFAULT_CALLBACKS.append(PackingGuard)
    warnings.warn(
        "DataCollatorWithFlattening without model= adds a callback to every Trainer that checks the model before the "
        "first step. This behavior is deprecated: call configure_packing(trainer), or pass "
        "DataCollatorWithFlattening(model=model), which ignores label_smoothing_factor and neftune_noise_alpha.",
        FutureWarning,
        stacklevel=4,  # the caller that builds the collator
    )


def find_collator(loader: Any) -> DataCollatorWithFlattening | None:
    """Our collator if a data loader uses it, directly or inside wrappers; else `None`."""
    for _ in range(20):
        if loader is None or isinstance(loader, DataCollatorWithFlattening):
            return loader
        loader = next((inside for name in _INSIDE if (inside := getattr(loader, name, None)) is not None), None)
    return None


def check_model(
    model: torch.nn.Module, collator: DataCollatorWithFlattening, args: TrainingArguments, training: bool = True
) -> None:
    """Raise or warn, depending on `collator.on_leak`, if the model mixes documents or its isolation is unknown."""
    inner = transformers_model(model)
    if inner is None or collator.on_leak == "ignore":
        return
    leak, doubt = unshifted_smoothing(args, inner), None
    if leak is None:
        leak, doubt = judge(model, **collator.given(), cache=cache_setting(inner, training))
    complain(model, leak, doubt, collator.on_leak)


def unshifted_smoothing(args: TrainingArguments, model: torch.nn.Module) -> ValueError | None:
    """The error if Trainer's label smoothing does not shift this model's labels. Trainer decides by the class name."""
    name = model._get_name()
    shifts = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or not name.endswith(LANGUAGE_MODELS)
    if shifts or not args.label_smoothing_factor:
        return None
    got = f"label_smoothing_factor with {name}, whose labels Trainer does not shift"
    return input_error("labels shifted by one token", got, "Set label_smoothing_factor=0.")
