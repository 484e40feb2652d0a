"""Before the first step of a Trainer: will this model keep the documents of these batches apart?

Trainer offers no other way in that needs nothing of the user: the collator sees no model, and a model sees no collator.
So the first collator adds `PackingGuard` to the callbacks that every Trainer starts with. It looks once at the model and
at the collator, never at a batch. What it knows of a built-in model is what the audit measured (`audit.matrix`).
"""

import importlib
from typing import Any

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging
from transformers.utils.generic import is_flash_attention_requested, merge_with_config_defaults

from ...audit.matrix import load_support_matrix
from ...audit.model_state import text_config
from ...data.collator import DataCollatorWithFlattening
from ...errors import input_error
from ...models.registry import has_our_classes, transformers_model
from .neftune import DocumentNoise


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
LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
SEPARATE = "a model that keeps the documents of a packed row apart"
_ANYWAY = 'DataCollatorWithFlattening(on_leak="warn") lets it train all the same.'


class PackingGuard(TrainerCallback):
    """Stops a Trainer whose collator is ours and whose model, or PEFT adapter, is known to mix the documents of such batches.

    Raises:
        `ValueError`: before the first training step, or in the first step of an evaluation without training.
    """

    def __init__(self):
        self._checked: tuple | None = None
        self._noise = DocumentNoise()

    def on_train_begin(self, args, state, control, model=None, train_dataloader=None, **kwargs):
        self._check(args, model, train_dataloader, training=True)
        if find_collator(train_dataloader) is not None:
            self._noise.on_train_begin(args, state, control, model=model)

    def on_train_end(self, args, state, control, **kwargs):
        self._noise.on_train_end(args, state, control)

    def on_prediction_step(self, args, state, control, model=None, eval_dataloader=None, **kwargs):
        self._check(args, model, eval_dataloader, training=False)

    def _check(self, args: TrainingArguments, model: torch.nn.Module, loader: Any, training: bool) -> None:
        if self._checked is None or self._checked[0] is not model or self._checked[1] is not loader:
            self._checked = (model, loader)
            collator = find_collator(loader)
            if collator is not None:
                check_model(model, collator, training, args)


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


def check_model(
    model: torch.nn.Module,
    collator: DataCollatorWithFlattening,
    training: bool = True,
    args: TrainingArguments | None = None,
) -> None:
    """Raise or warn, as the collator says, if the model mixes the documents of its batches or nobody knows."""
    inner = transformers_model(model)
    if inner is None or collator.on_leak == "ignore":
        return
    leak, doubt = None, None
    per_row = adapter_per_row(model)
    unshifted = None if args is None else unshifted_smoothing(args, inner)
    if unshifted is not None:
        leak = _error("targets that stand one token later", unshifted, "Set label_smoothing_factor=0.", _ANYWAY)
    elif per_row is not None:
        leak = _error("adapters that look at documents", per_row, "Train it on padded batches.", _ANYWAY)
    elif not has_our_classes(inner):
        leak, doubt = judge(inner, collator, training)
    if leak is not None:
        if collator.on_leak == "error":
            raise leak
        logger.warning(str(leak))
    elif doubt is not None:
        logger.warning(
            f"{type(inner).__name__} gets packed rows, and nothing is known of whether it keeps their documents apart: "
            f"{doubt}. transformers_packed.audit_model(model) measures it."
        )


def unshifted_smoothing(args: TrainingArguments, model: PreTrainedModel) -> str | None:
    """What is wrong with Trainer's label smoothing of this model, which goes by the name of the model's class."""
    name = model._get_name()
    shifts = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or not name.endswith(LANGUAGE_MODELS)
    if shifts or not args.label_smoothing_factor:
        return None
    return f"label_smoothing_factor, for which Trainer does not shift the labels of a {name}"


def adapter_per_row(model: torch.nn.Module) -> str | None:
    """What PEFT does once per row that each document would need, if it does."""
    for module in model.modules():
        # PEFT's own property, looked up on the class: wrappers hand attributes through.
        if hasattr(type(module), "active_peft_config"):
            config = module.active_peft_config
            if config.is_prompt_learning:
                kind = getattr(config.peft_type, "value", config.peft_type)
                return f"PEFT prompt learning ({kind}), whose virtual tokens stand once before the row"
            if getattr(config, "alora_invocation_tokens", None):
                return "an activated LoRA (alora_invocation_tokens), which looks for its invocation once in the row"
    return None


def judge(
    model: PreTrainedModel, collator: DataCollatorWithFlattening, training: bool = False
) -> tuple[ValueError | None, str | None]:
    """The complaint if the model leaks with what the collator gives; or else what is not known of it.

    `training` says that it is in training mode, where gradient checkpointing makes no cache.
    """
    if collator.return_cu_seqlens and hasattr(model.config, "vision_config"):
        got = f"cu_seqlens for {type(model).__name__}, whose vision tower takes them for boundaries of images"
        fix = (
            "Leave return_cu_seqlens out, or call transformers_packed.patch_model(model) before building the Trainer."
        )
        return _error("boundaries of documents for the language model alone", got, fix, _ANYWAY), None
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
        setting = cache_setting(model, training)
        if setting is not None:
            return _error(SEPARATE, *cache_complaint(model, setting), _ANYWAY), None
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
    got = f"{type(model).__name__}, in which {what} when it is given {_emitted(source)}"
    return _error(SEPARATE, got, f"{fix[0].upper()}{fix[1:]}.", _ANYWAY)


def _error(expected: str, got: str, *fix: str) -> ValueError:
    return input_error(expected, got, " ".join(fix))


def cache_setting(model: PreTrainedModel, training: bool = False) -> str | None:
    """The setting by which a stock model makes a cache for a packed row, so that its masks know no documents."""
    text = text_config(model)
    if is_flash_attention_requested(text) or (training and model.is_activation_checkpointing):
        return None
    configs = {id(text): "config.get_text_config()", id(model.config): "config"}
    # The outermost forward that reads `use_cache` from its configuration hands it down; most models have one such.
    reading = (m.config for m in model.modules() if id(getattr(m, "config", None)) in configs and _reads_config(m))
    config = next((c for c in reading if getattr(c, "use_cache", None) is not None), text)
    return f"{configs[id(config)]}.use_cache" if getattr(config, "use_cache", False) else None


def cache_complaint(model: PreTrainedModel, setting: str) -> tuple[str, str]:
    """What is wrong with what [`cache_setting`] found, and what to do."""
    got = f"{type(model).__name__} with {setting}=True, and beside a cache masks are made without regard to documents"
    return got, f"Set model.{setting} = False."


def _reads_config(module: torch.nn.Module) -> bool:
    """Whether Transformers fills in arguments of the module's forward from its configuration."""
    forward = type(module).forward
    while forward is not None:
        if getattr(forward, "__code__", None) in merge_with_config_defaults.__code__.co_consts:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


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
