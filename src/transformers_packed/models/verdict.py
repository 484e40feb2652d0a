"""Decide from audits of model types whether a model keeps the documents of a packed row apart.

`support_matrix.json` in this folder holds the measurements for every causal model type of Transformers.
`make support-matrix` writes it together with `docs/reference/support_matrix.md`.
"""

import json
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers.utils import logging
from transformers.utils.generic import is_flash_attention_requested

from ..errors import input_error
from ..foreign import attention_of
from .adapters import adapter_per_row
from .families import families_of_class
from .family import Unpacked
from .registry import has_our_classes, transformers_model
from .releases import fills_in_arguments


logger = logging.get_logger(__name__)

SUPPORT_MATRIX = Path(__file__).with_name("support_matrix.json")
SEPARATE = "a model that keeps the documents of a packed row apart"
_HOW = {
    "attention": "attends from one document to another",
    "convolution": "convolves across the documents",
    "state": "carries its state from one document into the next",
    "boundary": "cuts the documents in the wrong place",
    "positions": "gives documents different positions than separate documents",
}
# These apply the mask that the model creates. Other implementations detect documents themselves, or ignore them.
_MASKED = {"sdpa", "eager", "flex_attention"}


@cache
def measurements() -> dict[str, dict]:
    """Load the entries of the support matrix by model type. `utils/audit_all.py` documents their format."""
    return json.loads(SUPPORT_MATRIX.read_text(encoding="utf-8"))["types"]


def text_config(model: "transformers.PreTrainedModel") -> "transformers.PreTrainedConfig":
    """Return the text configuration, or the whole configuration if the text part is ambiguous."""
    try:
        return model.config.get_text_config()
    except ValueError:
        return model.config


def measured(model: "transformers.PreTrainedModel") -> tuple[str, dict | None]:
    """Return the model type to look up, which is its own or that of its text part, and its entry in the matrix."""
    model_type = model.config.model_type
    if model_type not in measurements():
        model_type = text_config(model).model_type
    return model_type, measurements().get(model_type)


def judge(
    model: torch.nn.Module, source: str | None, *, cu_seqlens: bool = False
) -> tuple[ValueError | None, str | None]:
    """Decide whether a model mixes the documents of packed rows.

    Args:
        model (`torch.nn.Module`):
            The model, which may be inside PEFT or `torch.compile`. Models from outside Transformers are not judged.
        source (`str`, *optional*):
            The boundaries that the model receives, as named in the matrix: `"position_ids"`, the same with
            `"+seq_idx"` or `"+cu_seq_lens"`, or `"all"`.
        cu_seqlens (`bool`, *optional*, defaults to `False`):
            Whether the model also receives `cu_seqlens`.

    Returns:
        `tuple`: an error if the model mixes documents or loses their first labels, else `None`; and the reason if the
            answer is unknown, else `None`.
    """
    inner = transformers_model(model)
    if inner is None:
        return None, None
    per_row = adapter_per_row(model)
    if per_row is not None:
        return input_error("adapters that support packed rows", per_row, "Train on padded batches."), None
    if (unshifted := first_label_error(inner)) is not None:
        return unshifted, None
    if has_our_classes(inner):
        return None, None
    name = type(inner).__name__
    if cu_seqlens and hasattr(inner.config, "vision_config"):
        got = f"cu_seqlens for {name}, whose vision tower reads them as image boundaries"
        fix = "Remove return_cu_seqlens, or call transformers_packed.patch_model(model) before creating the Trainer."
        return input_error("document boundaries for the language model only", got, fix), None
    model_type, entry = measured(inner)
    if entry is None or "not_built" in entry:
        return None, f"no model of type {inner.config.model_type} was audited"
    if source is None:
        return None, "the collator returns no position_ids, but every audit used them"
    leak, doubt = _judge_by_audit(inner, entry, source)
    if leak is None and doubt is None and model_type != inner.config.model_type:
        doubt = f"its type was not audited, only {model_type}"
    return leak, doubt


def _judge_by_audit(
    model: "transformers.PreTrainedModel", entry: dict, source: str
) -> tuple[ValueError | None, str | None]:
    """Return the leak that the audit of a model's type found, or the doubt whether the model has it, as [`judge`] does."""
    name = type(model).__name__
    # A source without its own measurement has the verdict of "position_ids" and "all", which agree in that case.
    found = entry["builtin"].get(source) or entry["builtin"]["position_ids"]
    if found["verdict"] == "refused":
        if not found["reason"].startswith("not causal"):
            return None, f"the audit of its type failed with {found['reason']}"
        return _leak(name, entry, source, "later tokens change earlier ones"), None
    if found["verdict"] != "leaks":
        return None, None
    path = next((path for path, module in model.named_modules() if type(module).__name__ == found["module"]), None)
    if path is None:
        return None, f"its type leaks in {found['module']}, but this model has no such module"
    implementation = attention_of(text_config(model))
    if found["kind"] == "attention" and not {implementation, entry["attention"]} <= _MASKED:
        return None, f"its type leaks in {path} with {entry['attention']}, but was not audited with {implementation}"
    how = _HOW.get(found["kind"], "lets documents change one another")
    return _leak(name, entry, source, f"{path} ({found['module']}) {how}"), None


def first_label_error(model: torch.nn.Module) -> ValueError | None:
    """The error for a loss that reads the label of a document's first token, which collators leave out."""
    name = type(model).__name__
    unpacked = (family.apart for family in families_of_class(type(model)) if isinstance(family.apart, Unpacked))
    if not name.endswith("ForTokenClassification") and all(way.shifts_labels for way in unpacked):
        return None
    got = f"{name}, whose loss does not shift labels, so the first token of each document would be lost"
    return input_error("labels of the next tokens", got, "Train on padded batches.")


def complain(model: torch.nn.Module, leak: ValueError | None, doubt: str | None, on_leak: str) -> None:
    """Raise an error or log a warning for the result of [`judge`], according to a collator's `on_leak`."""
    if leak is not None and on_leak == "error":
        raise ValueError(f'{leak} To train anyway, use DataCollatorWithFlattening(on_leak="warn").')
    if leak is not None:
        logger.warning(str(leak))
    elif doubt is not None:
        logger.warning(
            f"{type(transformers_model(model)).__name__} receives packed rows, but it is unknown whether it keeps "
            f"their documents apart: {doubt}. Check it with transformers_packed.audit_model(model)."
        )


def cache_setting(model: "transformers.PreTrainedModel") -> str | None:
    """Return the setting that makes a stock model create a cache for packed rows, so that its mask ignores documents.

    In training, gradient checkpointing disables the cache, but evaluation creates it.
    """
    text = text_config(model)
    if is_flash_attention_requested(text):
        return None
    configs = {id(text): "config.get_text_config()", id(model.config): "config"}
    # The outermost forward that reads `use_cache` from its configuration passes it on. Most models have only one.
    reading = (
        m.config
        for m in model.modules()
        if id(getattr(m, "config", None)) in configs and fills_in_arguments(type(m).forward)
    )
    config = next((c for c in reading if getattr(c, "use_cache", None) is not None), text)
    return f"{configs[id(config)]}.use_cache" if getattr(config, "use_cache", False) else None


def _leak(name: str, entry: dict, source: str, what: str) -> ValueError:
    fixes = []
    if entry["builtin"]["all"]["verdict"] == "isolated":
        fixes.append("pass return_flash_attn_kwargs=True and return_seq_idx=True to the collator")
    if entry["ours"][source if source == "position_ids" else "all"]["verdict"].startswith("isolated"):
        fixes.append("call transformers_packed.patch_model(model) before creating the Trainer")
    fix = " or ".join(fixes) or "train on padded batches"
    given = {"all": "all boundaries of the collator", "position_ids": "position_ids only"}
    got = f"{name}, in which {what} if it receives {given.get(source, source.replace('+', ' and '))}"
    return input_error(SEPARATE, got, f"{fix[0].upper()}{fix[1:]}.")
