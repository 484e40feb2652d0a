"""Models whose built-in layers know nothing of boundaries: what happens at the top, once per packed row.

`root_class` derives a class from a built-in model, as a [`Root`] says. Its forward takes the boundary keywords, settles them, and runs the
built-in with what that knows: position ids that restart, no mask, no cache. Input that is not packed goes to the
built-in as it came.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
from transformers.utils import ModelOutput
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_torchdynamo_compiling

from ..boundaries import FLASH_KEYWORDS, LAYER_KEYWORDS, PACKING_KEYWORDS, SequenceBoundaries
from ..errors import input_error
from .base import PackedModelMixin
from .current import current_boundaries, packed_row, running
from .inputs import check_causal, mask_targets_across_documents, resolve_boundaries


# How a forward may call its cache.
_CACHES = ("past_key_values", "cache_params", "state")
_EXPLICIT = (*PACKING_KEYWORDS, "boundaries")
# What a packed row of text cannot have beside it.
_NOT_TEXT = ("pixel", "image", "video", "audio", "mm_", "token_type", "input_features")

# Runs the built-in forward of a base model on a packed row: (model, forward, boundaries, inputs) -> outputs.
Run = Callable[[torch.nn.Module, Callable, SequenceBoundaries, dict[str, Any]], Any]


@dataclass(frozen=True)
class Root:
    """What a model at the top does with a packed row.

    Args:
        builtin (`type`):
            The built-in model class. By its name it is a base model, a head with one result per token, a language
            model, whose targets across documents are masked, or another head, which refuses packed rows.
        run (`Callable`, *optional*):
            Runs the built-in forward of a base model on a packed row; by default once, with the whole row.
        has_attention_weights (`bool`, *optional*, defaults to `True`):
            Whether there are attention weights over the row.
        shifts_labels (`bool`, *optional*, defaults to `True`):
            Whether the loss compares a token's logits with the next label, as that of almost all models does.
    """

    builtin: type
    run: Run | None = None
    has_attention_weights: bool = True
    shifts_labels: bool = True

    @cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.builtin.forward)

    @cached_property
    def known(self) -> tuple[str, ...]:
        """The names of the built-in's arguments."""
        return tuple(self.signature.parameters)[1:]

    @cached_property
    def takes_any(self) -> bool:
        """Whether the built-in takes arguments that it does not name, and may hand them on."""
        return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.signature.parameters.values())

    @cached_property
    def kind(self) -> str:
        name = self.builtin.__name__
        if name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")):
            return "language model"
        if name.endswith(("Model", "Decoder")):
            return "base"
        return "per token" if name.endswith("ForTokenClassification") else "other"


def root_class(root: Root) -> type:
    """The subclass of `root.builtin` that takes packed rows."""
    builtin, known, takes_any = root.builtin, root.known, root.takes_any

    @wraps(builtin.forward)
    def forward(self, *args, **kwargs):
        inputs = dict(zip(known, args, strict=False))
        inputs.update(kwargs)
        if running.count == 0 and not _may_be_packed(inputs):
            return builtin.forward(self, **(inputs if takes_any else _for_builtin(inputs, known)))
        return _forward(self, root, inputs)

    forward.__signature__ = _with_boundaries(root.signature)
    namespace = {
        "forward": forward,
        "_supports_flex_attn": builtin._supports_flex_attn,
        "__doc__": f"[`{builtin.__name__}`] that keeps the documents of a packed row apart.",
    }
    return type(builtin.__name__, (PackedModelMixin, builtin), namespace)


def _with_boundaries(signature: inspect.Signature) -> inspect.Signature:
    """The built-in's signature and the boundary keywords: Trainer drops what a signature does not name."""
    parameters = list(signature.parameters.values())
    rest = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    extra = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in ("position_ids", *LAYER_KEYWORDS)
        if name not in signature.parameters
    ]
    return signature.replace(parameters=[p for p in parameters if p not in rest] + extra + rest)


def _may_be_packed(inputs: dict[str, Any]) -> bool:
    for name in _EXPLICIT:
        if inputs.get(name) is not None:
            return True
    # A compiled graph cannot branch on what position_ids hold: there, packing needs explicit metadata.
    if inputs.get("position_ids") is None or is_torchdynamo_compiling():
        return False
    return inputs.get("attention_mask") is None and _cache(inputs) is None


def _cache(inputs: dict[str, Any]) -> Any:
    for name in _CACHES:
        if inputs.get(name) is not None:
            return inputs[name]
    return None


def _for_builtin(inputs: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """The inputs without keywords of ours that the built-in does not name."""
    return {name: value for name, value in inputs.items() if name in known or name not in (*_EXPLICIT, "position_ids")}


def _run_packed(model: torch.nn.Module, root: Root, inputs: dict[str, Any]) -> Any:
    call = f"{type(model).__name__}.forward"
    tokens = inputs.get("input_ids") if inputs.get("input_ids") is not None else inputs.get("inputs_embeds")
    boundaries = current_boundaries()
    outermost = boundaries is None
    if outermost:
        boundaries = resolve_boundaries(
            call,
            inputs,
            input_ids=inputs.get("input_ids"),
            inputs_embeds=inputs.get("inputs_embeds"),
            attention_mask=inputs.get("attention_mask"),
            position_ids=inputs.get("position_ids"),
            past_key_values=_cache(inputs),
            use_cache=inputs.get("use_cache"),
        )
    if boundaries is None:
        return root.builtin.forward(model, **(inputs if root.takes_any else _for_builtin(inputs, root.known)))
    inputs = _for_builtin(inputs, root.known)
    if tokens is None or tokens.shape[:2] != (1, boundaries.total_length):
        raise input_error(
            f"the packed row of {boundaries.total_length} tokens",
            "no tokens" if tokens is None else f"shape {tuple(tokens.shape)}",
            "Give the model input_ids or inputs_embeds of the row that the boundaries describe.",
        )
    _check_possible(call, model, root, boundaries, inputs)
    if root.kind == "language model" and root.shifts_labels:
        labels = mask_targets_across_documents(boundaries, inputs.get("labels"), inputs)
        if labels is not None:
            inputs["labels"] = labels
    if "position_ids" in root.known and inputs.get("position_ids") is None:
        inputs["position_ids"] = boundaries.position_ids
    if root.kind == "base":
        # Also where only the text model inside names it, and would make a cache by default.
        inputs["use_cache"] = False
    if not outermost:
        return _run(model, root, boundaries, inputs)
    with packed_row(model, boundaries):
        return _run(model, root, boundaries, inputs)


# Its frame alone is left out of graphs that are being compiled: the lengths of documents are different in each row.
_forward = torch.compiler.disable(
    _run_packed, recursive=False, reason="packed rows differ in the lengths of their documents"
)


def _check_possible(call: str, model, root: Root, boundaries: SequenceBoundaries, inputs: dict[str, Any]) -> None:
    """Raise where the results of a packed row could not be those of the documents alone."""
    if root.kind == "other" or getattr(model.config, "is_encoder_decoder", False):
        raise input_error(
            "documents in rows of their own for this model",
            f"a packed row of {boundaries.num_documents} documents",
            "Use a padded batch.",
        )
    check_causal(call, model.config, inputs)
    boundaries.check_whole(
        "Train this model without sequence parallelism: its layers do not exchange what crosses a cut."
    )
    for name, value in inputs.items():
        if value is not None and name.startswith(_NOT_TEXT):
            raise input_error("a packed row of text alone", name, "Use a padded batch for what is not text.")
    wants_weights = inputs.get("output_attentions") or getattr(model.config, "output_attentions", False)
    if wants_weights and not root.has_attention_weights:
        raise input_error(
            "a packed row without output_attentions, as attention runs on documents alone",
            "output_attentions=True",
            "Leave output_attentions out.",
        )


def _run(model, root: Root, boundaries: SequenceBoundaries, inputs: dict[str, Any]) -> Any:
    if root.run is not None:
        outputs = root.run(model, root.builtin.forward, boundaries, inputs)
    else:
        if root.kind == "base" and is_flash_attention_requested(model.config):
            inputs.update((name, value) for name, value in boundaries.layer_kwargs().items() if name in FLASH_KEYWORDS)
        outputs = root.builtin.forward(model, **inputs)
    if root.kind == "base" and isinstance(outputs, ModelOutput) and outputs.get("router_logits"):
        layers = outputs.router_logits
        outputs.router_logits = tuple(x if x is None else boundaries.real_tokens(x) for x in layers)
    return outputs
