"""The guard of a collator that was not told its model: a callback that looks at both before a Trainer's first step.

A collator that is built with `model=` judges the model at once and changes nothing. Without it no object of the user's
knows both, so the first such collator adds [`PackingGuard`] to the callbacks that every Trainer starts with. That is the
one thing in this package that changes Transformers by being built, and a `FutureWarning` says what to pass instead.
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


# Where data loaders and collators keep the collator that they wrap.
_INSIDE = ("base_dataloader", "collate_fn", "data_collator", "collate", "func")


class PackingGuard(DocumentNoise):
    """Stops a Trainer whose collator is ours and whose model, or PEFT adapter, is known to mix the documents of such batches.

    With our collator NEFTune's noise goes by the document, too.

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
    """Let every Trainer that is built from now on begin with the guard, and say how to do without it."""
    if PackingGuard in trainer.DEFAULT_CALLBACKS:
        return
    trainer.DEFAULT_CALLBACKS.append(PackingGuard)
    warnings.warn(
        "DataCollatorWithFlattening without model= adds a callback to every Trainer, which judges the model before the "
        "first step. This will end: call configure_packing(trainer), or pass DataCollatorWithFlattening(model=model), which "
        "knows nothing of a Trainer's label_smoothing_factor and neftune_noise_alpha.",
        FutureWarning,
        stacklevel=4,  # who built the collator
    )


def find_collator(loader: Any) -> DataCollatorWithFlattening | None:
    """Our collator, if that is what a data loader or what wraps it calls in the end."""
    for _ in range(20):
        if loader is None or isinstance(loader, DataCollatorWithFlattening):
            return loader
        loader = next((inside for name in _INSIDE if (inside := getattr(loader, name, None)) is not None), None)
    return None


def check_model(
    model: torch.nn.Module, collator: DataCollatorWithFlattening, args: TrainingArguments, training: bool = True
) -> None:
    """Raise or warn, as the collator says, if the model mixes the documents of its batches or nobody knows."""
    inner = transformers_model(model)
    if inner is None or collator.on_leak == "ignore":
        return
    leak, doubt = unshifted_smoothing(args, inner), None
    if leak is None:
        leak, doubt = judge(model, **collator.given(), cache=cache_setting(inner, training))
    complain(model, leak, doubt, collator.on_leak)


def unshifted_smoothing(args: TrainingArguments, model: torch.nn.Module) -> ValueError | None:
    """What is wrong with Trainer's label smoothing of this model, which goes by the name of the model's class."""
    name = model._get_name()
    shifts = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or not name.endswith(LANGUAGE_MODELS)
    if shifts or not args.label_smoothing_factor:
        return None
    got = f"label_smoothing_factor, for which Trainer does not shift the labels of a {name}"
    return input_error("targets that stand one token later", got, "Set label_smoothing_factor=0.")
