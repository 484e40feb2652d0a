"""Before the first step of a Trainer: will this model keep the documents of these batches apart?

Trainer offers no other way in that needs nothing of the user: the collator sees no model, and a model sees no collator.
So the first collator adds `PackingGuard` to the callbacks that every Trainer starts with. It looks once at the model and
at the collator, never at a batch. What it knows of a built-in model is what the audit measured (`audit.matrix`).
"""

import importlib
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.utils import logging

from ..audit.matrix import load_support_matrix
from ..audit.state import text_config
from ..data.collator import DataCollatorWithFlattening
from ..errors import input_error
from ..models.base import has_our_classes, transformers_model


logger = logging.get_logger(__name__)

# Where data loaders and collators keep the collator that they wrap.
_INSIDE = ("base_dataloader", "collate_fn", "data_collator", "collate", "func")
_HOW = {
    "attention": "attends from one document to another",
    "convolution": "convolves across the documents",
    "state": "carries its state from one document into the next",
    "boundary": "cuts the documents in the wrong place",
    "positions": "gives documents other positions than they have alone",
}
# These attend within one mask that the model makes; others find the documents by themselves, or not.
_MASKED = {"sdpa", "eager", "flex_attention"}
_ANYWAY = 'DataCollatorWithFlattening(on_leak="warn") lets it train all the same.'


class PackingGuard(TrainerCallback):
    """Stops a Trainer whose collator is ours and whose model is known to mix the documents of such batches.

    Raises:
        `ValueError`: before the first training step, or in the first step of an evaluation without training.
    """

    def __init__(self):
        self._checked: tuple | None = None

    def on_train_begin(self, args, state, control, model=None, train_dataloader=None, **kwargs):
        self._check(model, train_dataloader)

    def on_prediction_step(self, args, state, control, model=None, eval_dataloader=None, **kwargs):
        self._check(model, eval_dataloader)

    def _check(self, model: torch.nn.Module, loader: Any) -> None:
        if self._checked is None or self._checked[0] is not model or self._checked[1] is not loader:
            self._checked = (model, loader)
            collator = find_collator(loader)
            if collator is not None:
                check_model(model, collator)


def install_guard() -> None:
    """Let every Trainer that is built from now on begin with the guard."""
    callbacks = importlib.import_module("transformers.trainer").DEFAULT_CALLBACKS
    if PackingGuard not in callbacks:
        callbacks.append(PackingGuard)


def find_collator(loader: Any) -> DataCollatorWithFlattening | None:
    """Our collator, if that is what a data loader or what wraps it calls in the end."""
    for _ in range(20):
        if loader is None or isinstance(loader, DataCollatorWithFlattening):
            return loader
        loader = next((inside for name in _INSIDE if (inside := getattr(loader, name, None)) is not None), None)
    return None


def check_model(model: torch.nn.Module, collator: DataCollatorWithFlattening) -> None:
    """Raise or warn, as the collator says, if the model mixes the documents of its batches or nobody knows."""
    inner = transformers_model(model)
    if inner is None or collator.on_leak == "ignore":
        return
    if has_our_classes(inner):
        return
    leak, doubt = judge(inner, collator)
    if leak is not None:
        if collator.on_leak == "error":
            raise leak
        logger.warning(str(leak))
    elif doubt is not None:
        logger.warning(
            f"{type(inner).__name__} gets packed rows, and nothing is known of whether it keeps their documents apart: "
            f"{doubt}. transformers_packed.audit_model(model) measures it."
        )


def judge(model: PreTrainedModel, collator: DataCollatorWithFlattening) -> tuple[ValueError | None, str | None]:
    """The complaint if the model leaks with what the collator gives; or else what is not known of it."""
    model_type, entry = audited(model)
    inside = model_type != model.config.model_type
    if entry is None or "not_built" in entry:
        return None, f"no model of the type {model.config.model_type} was audited"
    source = _source(collator)
    if source is None:
        return None, "the collator gives no position_ids, which the audits had"
    found = entry["builtin"].get(source)
    # What was not measured by itself is between the ends, which have one verdict then.
    found = entry["builtin"]["position_ids"] if found is None else found
    if found["verdict"] == "refused":
        if not found["reason"].startswith("not causal"):
            return None, f"the audit of its type ended with {found['reason']}"
        return _complaint(model, entry, source, "tokens change earlier ones"), None
    if found["verdict"] != "leaks":
        return None, f"its type was not audited, only {model_type}" if inside else None
    name = _module_of(model, found["module"])
    if name is None:
        return None, f"its type leaks in {found['module']}, which this model does not have"
    implementation = text_config(model)._attn_implementation
    if found["kind"] == "attention" and not {implementation, entry["attention"]} <= _MASKED:
        return None, f"its type leaks in {name} with {entry['attention']}, but was not audited with {implementation}"
    how = _HOW.get(found["kind"], "lets documents change one another")
    return _complaint(model, entry, source, f"{name} ({found['module']}) {how}"), None


def audited(model: PreTrainedModel) -> tuple[str, dict | None]:
    """The type by which the matrix knows a model, its own or else that of its text part, and its entry if it has one."""
    types = load_support_matrix().types
    model_type = model.config.model_type
    if model_type not in types:
        model_type = text_config(model).model_type
    return model_type, types.get(model_type)


def _complaint(model: PreTrainedModel, entry: dict, source: str, what: str) -> ValueError:
    fixes = []
    if entry["builtin"]["all"]["verdict"] == "isolated":
        fixes.append("pass return_flash_attn_kwargs=True and return_seq_idx=True to the collator")
    if entry["ours"][source if source == "position_ids" else "all"]["verdict"].startswith("isolated"):
        fixes.append("call transformers_packed.patch_model(model) before building the Trainer")
    fix = " or ".join(fixes) or "train it on padded batches"
    return input_error(
        "DataCollatorWithFlattening",
        expected="a model that keeps the documents of a packed row apart",
        got=f"{type(model).__name__}, in which {what} when it is given {_emitted(source)}",
        fix=f"{fix[0].upper()}{fix[1:]}. {_ANYWAY}",
    )


def _emits(collator: DataCollatorWithFlattening) -> list[str]:
    return [
        name
        for name, given in (
            ("position_ids", collator.return_position_ids),
            ("seq_idx", collator.return_seq_idx),
            ("cu_seq_lens", collator.return_flash_attn_kwargs),
        )
        if given
    ]


def _source(collator: DataCollatorWithFlattening) -> str | None:
    """What the collator gives, by the names of the support matrix."""
    given = _emits(collator)
    if "position_ids" not in given:
        return None
    return "all" if len(given) == 3 else "+".join(given)


def _emitted(source: str) -> str:
    return {"all": "everything the collator can give", "position_ids": "position_ids only"}.get(
        source, source.replace("+", " and ")
    )


def _module_of(model: PreTrainedModel, class_name: str) -> str | None:
    return next((name for name, module in model.named_modules() if type(module).__name__ == class_name), None)
