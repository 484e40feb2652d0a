"""PEFT's adapters: which of them keep documents apart, and the parameters of LoRA layers for the fused ops.

PEFT keeps the adapters, their configuration, loading, saving and merging. Only the forward of a plain LoRA layer is
replaced. Everything else runs PEFT's own forward: variants such as DoRA, other tuners, and layers with hooks.
[`adapters_of`] gives the reason.
"""

import sys
from functools import wraps
from typing import Any

import torch

from ..ops.projection import Adapter
from .untouched import is_bare_linear, is_untouched


# The types of PEFT's adapters, and the variants of LoRA, that act on each token alone, as tests measure for all of PEFT's
# registry. Others may mix the tokens of a row (Lily averages its router over them), run a second model (Shadow), keep
# scales in the layout of the row (X-LoRA) or take an argument for each row (Poly).
PER_TOKEN = frozenset(
    "ADALORA ADAMSS ADAPTION_PROMPT BEFT BOFT C3A DEFT DELORA FOURIERFT FROD GLORA GRALORA HIRA HRA IA3 LN_TUNING LOHA "
    "LOKR LORA MISS OFT OSF PEANUT PSOFT PVERA RANDLORA ROAD SHIRA SUPERTUNING TINYLORA TRAINABLE_TOKENS UNILORA VBLORA "
    "VERA WAVEFT".split()
)
VARIANTS_PER_TOKEN = ("Arrow", "BdLora", "Dora", "Kasa", "MiCA", "Monteclora", "QALora", "Velora")


def adapter_per_row(model: torch.nn.Module) -> str | None:
    """Describe an adapter of the model that may act once per row instead of on each token alone, if there is one.

    Inactive adapters count, because a trainer may activate them later.
    """
    for module in model.modules():
        # PEFT sets it on its wrappers, and on each model that it puts adapters into.
        configs = getattr(module, "peft_config", None)
        adapters = [
            *(configs.values() if isinstance(configs, dict) else ()),
            *vars(module).get("lora_variant", {}).values(),
        ]
        if reason := next(filter(None, map(_per_row, adapters)), None):
            return reason
    return None


def _per_row(adapter: Any) -> str | None:
    """The reason why an adapter with this configuration, or this variant of LoRA, may act once per row."""
    if hasattr(adapter, "peft_type"):
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        if adapter.is_prompt_learning:
            return f"PEFT prompt learning ({kind}), which prepends its virtual tokens once per row"
        if getattr(adapter, "alora_invocation_tokens", None):
            return "an activated LoRA (alora_invocation_tokens), which searches for its invocation once per row"
        known = kind in PER_TOKEN
    else:
        kind = type(adapter).__name__
        known = kind.startswith(VARIANTS_PER_TOKEN)
    return None if known else f"PEFT's {kind}, which is not known to act on each token alone"


def acts_per_token(layer: torch.nn.Module) -> bool:
    """Whether a module of `peft.tuners` acts on each token alone. The name of its package is that of the adapter's type."""
    return type(layer).__module__.split(".")[2].upper() in PER_TOKEN


def save_builtin_classes() -> None:
    """Let adapters without a task type name the stock class of their model, which loads without this package.

    PEFT saves the class of the model and its module, and `AutoPeftModel` imports them from Transformers only. Has no
    effect on other models, without PEFT, or a second time.
    """
    cls = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if cls is None or cls in _saving_builtin_classes:
        return
    original, package = cls._get_base_model_class, __package__.partition(".")[0]

    @wraps(original)
    def base_model_class(self: Any, *args: Any, **kwargs: Any) -> type:
        classes = original(self, *args, **kwargs).__mro__
        return next(x for x in classes if x.__module__.partition(".")[0] != package)

    cls._get_base_model_class = base_model_class
    _saving_builtin_classes.add(cls)


_saving_builtin_classes: set[type] = set()


class AdapterMixin:
    """Makes PEFT save the stock class of a model when it puts adapters into the model."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "peft_config":
            save_builtin_classes()
        super().__setattr__(name, value)


def lora_class(module: str, name: str) -> type | None:
    """Return a class of PEFT, or `None` if PEFT has not imported its module."""
    return getattr(sys.modules.get(f"peft.tuners.{module}"), name, None)


def is_lora(layer: torch.nn.Module) -> bool:
    """Whether the module is a LoRA layer of PEFT, of any kind."""
    base = lora_class("lora.layer", "LoraLayer")
    return base is not None and isinstance(layer, base)


def adapters_of(layer: torch.nn.Module) -> tuple[Adapter, ...] | str:
    """Return the active adapters of a LoRA layer, or the reason why this layer runs PEFT's own forward."""
    classes = lora_class("lora.layer", "Linear"), lora_class("lora.bnb", "Linear4bit")
    classes += (lora_class("lora.torchao", "TorchaoLoraLinear"),)
    if type(layer) not in classes:
        return f"it is a {type(layer).__name__}"
    # This runs hundreds of times per step. Attributes of a module are slower than its dictionaries.
    if not is_untouched(layer, *classes):
        return "it is hooked, wrapped or compiled"
    state = vars(layer)
    if state.get("fan_in_fan_out") or not state.get("cast_input_dtype_enabled", True):
        return "its weight is transposed, or its input is not cast"
    if state["merged_adapters"] or state["_disable_adapters"]:
        both = state["merged_adapters"] and state["_disable_adapters"]
        return "its merged adapters have to be unmerged" if both else ()
    downs, ups, dropouts = (state["_modules"][name]._modules for name in ("lora_A", "lora_B", "lora_dropout"))
    found = []
    for name in layer.active_adapters:
        if name not in downs:
            continue
        if name in state["lora_variant"]:
            return f"adapter {name} is a {type(state['lora_variant'][name]).__name__}"
        if not isinstance(state["scaling"][name], (int, float)):
            return f"the scale of adapter {name} is a tensor"
        down, up, dropout = _matrix_of(downs[name]), _matrix_of(ups[name]), dropouts[name]
        if down is None or up is None:
            return f"adapter {name} is hooked, wrapped or not linear"
        if not is_untouched(dropout, torch.nn.Dropout, torch.nn.Identity):
            return f"adapter {name} has a dropout that is hooked, wrapped or of another kind"
        p = dropout.p if dropout.training and type(dropout) is torch.nn.Dropout else 0.0
        if down[1] is not None or p == 1:
            return f"adapter {name} has a bias before its second layer, or drops everything"
        found.append(Adapter(down[0], up[0], state["scaling"][name], p, up[1]))
    return tuple(found)


def _matrix_of(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return the weight and the bias of a linear layer that these parameters fully determine, or `None`."""
    parameters = layer._parameters
    if not is_bare_linear(layer) or "weight" not in parameters:
        return None
    return parameters["weight"], parameters.get("bias")


def adapter_of_parameter(layer: torch.nn.Module) -> Adapter | None | str:
    """Return the active adapter of PEFT's wrapper of a parameter `[E, out, in]`, or the reason why PEFT has to run.

    It is `None` if no adapter is active.
    """
    if not is_untouched(layer, type(layer)):
        return "it is hooked, wrapped or compiled"
    state = vars(layer)
    if state["merged_adapters"] or state["_disable_adapters"]:
        both = state["merged_adapters"] and state["_disable_adapters"]
        return "its merged adapters have to be unmerged" if both else None
    downs, ups = (state["_modules"][name]._modules for name in ("lora_A", "lora_B"))
    active = [name for name in layer.active_adapters if name in downs]
    if len(active) != 1:
        return "several adapters are active" if active else None
    (name,) = active
    down, up, scale = _matrix_of(downs[name]), _matrix_of(ups[name]), state["scaling"][name]
    if down is None or up is None:
        return f"adapter {name} is hooked, wrapped or not linear"
    if not state["_did_swap_in_out_features"] or not isinstance(scale, (int, float)) or up[1] is not None:
        return f"adapter {name} has another layout, a bias or a scale that is a tensor"
    return Adapter(down[0], up[0], scale)
