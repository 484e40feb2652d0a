"""Read the parameters of PEFT's LoRA layers, so that a fused op computes what these layers would compute.

PEFT keeps the adapters, their configuration, loading, saving and merging. Only the forward of a plain LoRA layer is
replaced. Everything else runs PEFT's own forward: other variants such as DoRA, other tuners, hooks, and layers that
[`reason_against`] names.
"""

import sys

import torch

from ..ops.linear import Adapter
from .untouched import is_untouched


def _class(module: str, name: str) -> type | None:
    """Return a class of PEFT, or `None` if PEFT has not imported its module."""
    return getattr(sys.modules.get(f"peft.tuners.{module}"), name, None)


def is_lora(layer: torch.nn.Module) -> bool:
    """Whether the module is a LoRA layer of PEFT, of any kind."""
    base = _class("lora.layer", "LoraLayer")
    return base is not None and isinstance(layer, base)


def reason_against(layer: torch.nn.Module) -> str:
    """Return the reason why this LoRA layer runs PEFT's own forward, or an empty string."""
    classes = [_class("lora.layer", "Linear"), _class("lora.bnb", "Linear4bit")]
    if type(layer) not in classes:
        return f"it is a {type(layer).__name__}"
    if not is_untouched(layer, *classes):
        return "it is hooked, wrapped or compiled"
    if getattr(layer, "fan_in_fan_out", False) or not layer.cast_input_dtype_enabled:
        return "its weight is transposed, or its input is not cast"
    if layer.disable_adapters:
        return "its merged adapters have to be unmerged" if layer.merged else ""
    if layer.merged:
        return ""
    for name in _active(layer):
        if name in layer.lora_variant:
            return f"adapter {name} is a {type(layer.lora_variant[name]).__name__}"
        down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        if not (is_untouched(down, torch.nn.Linear) and is_untouched(up, torch.nn.Linear)) or down.bias is not None:
            return f"adapter {name} is hooked, wrapped or not linear"
        if not is_untouched(dropout, torch.nn.Dropout, torch.nn.Identity) or getattr(dropout, "p", 0) == 1:
            return f"adapter {name} has a {type(dropout).__name__} of its own kind"
    return ""


def adapters_of(layer: torch.nn.Module) -> tuple[Adapter, ...]:
    """Return the active adapters of a LoRA layer that [`reason_against`] accepts."""
    if layer.disable_adapters or layer.merged:
        return ()
    found = []
    for name in _active(layer):
        down, up, dropout = layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name]
        p = dropout.p if dropout.training and isinstance(dropout, torch.nn.Dropout) else 0.0
        found.append(Adapter(down.weight, up.weight, layer.scaling[name], p, up.bias))
    return tuple(found)


def _active(layer: torch.nn.Module) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]
