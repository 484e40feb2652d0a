"""Does a model keep the documents of a packed row apart? What the audit measured of its type says so.

`support_matrix.json` beside this file holds these measurements for every causal type of Transformers. `make support-matrix`
writes it and `docs/reference/support_matrix.md`.
"""

import json
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers.utils import logging
from transformers.utils.generic import is_flash_attention_requested, merge_with_config_defaults

from ..errors import input_error
from .registry import has_our_classes, transformers_model


logger = logging.get_logger(__name__)

SUPPORT_MATRIX = Path(__file__).with_name("support_matrix.json")
SEPARATE = "a model that keeps the documents of a packed row apart"
_HOW = {
    "attention": "attends from one document to another",
    "convolution": "convolves across the documents",
    "state": "carries its state from one document into the next",
    "boundary": "cuts the documents in the wrong place",
    "positions": "gives documents other positions than they have alone",
}
# These attend within one mask that the model makes; others find the documents by themselves, or not.
_MASKED = {"sdpa", "eager", "flex_attention"}
# The wrapper that Transformers puts around a forward to fill in arguments from the configuration. The wrapped function
# takes over the forward's name and signature, so its code object is the only thing that tells it apart.
_FILLED_IN = merge_with_config_defaults(lambda self: None).__code__


@cache
def measurements() -> dict[str, dict]:
    """The entries of the support matrix by model type, as `utils/audit_all.py` describes them."""
    return json.loads(SUPPORT_MATRIX.read_text(encoding="utf-8"))["types"]


def text_config(model: torch.nn.Module) -> "transformers.PreTrainedConfig":
    """The configuration of the part that takes text; the whole one if more than one part could be it."""
    try:
        return model.config.get_text_config()
    except ValueError:
        return model.config


def measured(model: torch.nn.Module) -> tuple[str, dict | None]:
    """The type by which the matrix knows a model, its own or else that of its text part, and its entry if it has one."""
    model_type = model.config.model_type
    if model_type not in measurements():
        model_type = text_config(model).model_type
    return model_type, measurements().get(model_type)


def judge(
    model: torch.nn.Module, source: str | None, *, cu_seqlens: bool = False, cache: str | None = None
) -> tuple[ValueError | None, str | None]:
    """Whether a model mixes the documents of packed rows.

    Args:
        model (`torch.nn.Module`):
            The model, also inside PEFT or `torch.compile`. What is not of Transformers is not judged.
        source (`str`, *optional*):
            What it is told of the documents, in the terms of the matrix: `"position_ids"`, these with `"+seq_idx"` or
            `"+cu_seq_lens"`, or `"all"`.
        cu_seqlens (`bool`, *optional*, defaults to `False`):
            Whether it gets `cu_seqlens` too.
        cache (`str`, *optional*):
            The setting by which it makes a cache, as [`cache_setting`] found it.

    Returns:
        `tuple`: the error if it mixes documents, else `None`; and what is not known of it, if anything is not.
    """
    outer, model = model, transformers_model(model)
    if model is None:
        return None, None
    per_row = adapter_per_row(outer)
    if per_row is not None:
        return input_error("adapters that look at documents", per_row, "Train it on padded batches."), None
    if has_our_classes(model):
        return None, None
    name = type(model).__name__
    if cu_seqlens and hasattr(model.config, "vision_config"):
        got = f"cu_seqlens for {name}, whose vision tower takes them for boundaries of images"
        fix = (
            "Leave return_cu_seqlens out, or call transformers_packed.patch_model(model) before building the Trainer."
        )
        return input_error("boundaries of documents for the language model alone", got, fix), None
    model_type, entry = measured(model)
    if entry is None or "not_built" in entry:
        return None, f"no model of the type {model.config.model_type} was audited"
    if source is None:
        return None, "the collator gives no position_ids, which the audits had"
    # What was not measured by itself is between the ends, which have one verdict then.
    found = entry["builtin"].get(source) or entry["builtin"]["position_ids"]
    if found["verdict"] == "refused":
        if not found["reason"].startswith("not causal"):
            return None, f"the audit of its type ended with {found['reason']}"
        return _leak(name, entry, source, "tokens change earlier ones"), None
    if found["verdict"] != "leaks":
        if cache is not None:
            return cache_error(model, cache), None
        inside = model_type != model.config.model_type
        return None, f"its type was not audited, only {model_type}" if inside else None
    path = next((path for path, module in model.named_modules() if type(module).__name__ == found["module"]), None)
    if path is None:
        return None, f"its type leaks in {found['module']}, which this model does not have"
    implementation = text_config(model)._attn_implementation
    if found["kind"] == "attention" and not {implementation, entry["attention"]} <= _MASKED:
        return None, f"its type leaks in {path} with {entry['attention']}, but was not audited with {implementation}"
    how = _HOW.get(found["kind"], "lets documents change one another")
    return _leak(name, entry, source, f"{path} ({found['module']}) {how}"), None


def complain(model: torch.nn.Module, leak: ValueError | None, doubt: str | None, on_leak: str) -> None:
    """Raise or warn of what [`judge`] found, as a collator's `on_leak` says."""
    if leak is not None and on_leak == "error":
        raise ValueError(f'{leak} DataCollatorWithFlattening(on_leak="warn") lets it train all the same.')
    if leak is not None:
        logger.warning(str(leak))
    elif doubt is not None:
        logger.warning(
            f"{type(transformers_model(model)).__name__} gets packed rows, and nothing is known of whether it keeps "
            f"their documents apart: {doubt}. transformers_packed.audit_model(model) measures it."
        )


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


def cache_setting(model: torch.nn.Module, training: bool = False) -> str | None:
    """The setting by which a stock model makes a cache for a packed row, so that its masks know no documents.

    `training` says that it is in training mode, where gradient checkpointing makes no cache.
    """
    text = text_config(model)
    if is_flash_attention_requested(text) or (training and model.is_activation_checkpointing):
        return None
    configs = {id(text): "config.get_text_config()", id(model.config): "config"}
    # The outermost forward that reads `use_cache` from its configuration hands it down; most models have one such.
    reading = (m.config for m in model.modules() if id(getattr(m, "config", None)) in configs and _reads_config(m))
    config = next((c for c in reading if getattr(c, "use_cache", None) is not None), text)
    return f"{configs[id(config)]}.use_cache" if getattr(config, "use_cache", False) else None


def cache_error(model: torch.nn.Module, setting: str) -> ValueError:
    """The error for what [`cache_setting`] found."""
    got = f"{type(model).__name__} with {setting}=True, and beside a cache masks are made without regard to documents"
    return input_error(SEPARATE, got, f"Set model.{setting} = False.")


def _reads_config(module: torch.nn.Module) -> bool:
    """Whether Transformers fills in arguments of the module's forward from its configuration."""
    forward = type(module).forward
    while forward is not None and getattr(forward, "__code__", None) is not _FILLED_IN:
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


def _leak(name: str, entry: dict, source: str, what: str) -> ValueError:
    fixes = []
    if entry["builtin"]["all"]["verdict"] == "isolated":
        fixes.append("pass return_flash_attn_kwargs=True and return_seq_idx=True to the collator")
    if entry["ours"][source if source == "position_ids" else "all"]["verdict"].startswith("isolated"):
        fixes.append("call transformers_packed.patch_model(model) before building the Trainer")
    fix = " or ".join(fixes) or "train it on padded batches"
    given = {"all": "everything the collator can give", "position_ids": "position_ids only"}
    got = f"{name}, in which {what} when it is given {given.get(source, source.replace('+', ' and '))}"
    return input_error(SEPARATE, got, f"{fix[0].upper()}{fix[1:]}.")
