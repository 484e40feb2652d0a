"""The parameters of PEFT's LoRA layers, for the fused ops.

PEFT keeps the adapters, their configuration, loading, saving and merging. Only the forward of a plain LoRA layer is
replaced. Everything else runs PEFT's own forward: variants such as DoRA, other tuners, and layers with hooks.
[`adapters_of`] gives the reason. [`adapted_layers`] and `EXPERT_WEIGHTS` of `families.py` are where the commands put adapters.
"""

import sys
from typing import Any

import torch

from ..ops.terms import Adapter
from .families import family_of
from .releases import has_swapped_features
from .untouched import is_bare_linear, is_untouched


# The names that PEFT gives to LoRA's factors, in the names of parameters.
FACTORS = frozenset({"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"})


def adapted_layers(model: Any) -> dict[str, torch.nn.Linear]:
    """Return the linear layers for adapters of a model, by name: all but the head and those that PEFT takes for experts.

    PEFT's "all-linear" is on the experts and the router of some families too, or not, by release.
    """
    head, taken = model.get_output_embeddings(), family_of(model.config.get_text_config()).taken_for_experts
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and layer is not head and name.rpartition(".")[2] not in taken
    }


def lora_class(module: str, name: str) -> type | None:
    """Return a class of PEFT, or `None` if PEFT has not imported its module."""
    return getattr(sys.modules.get(f"peft.tuners.{module}"), name, None)


def is_lora(layer: torch.nn.Module) -> bool:
    """Whether the module is a LoRA layer of PEFT, of any kind."""
    base = lora_class("lora.layer", "LoraLayer")
    return base is not None and isinstance(layer, base)


def adapters_of(layer: Any) -> tuple[Adapter, ...] | str:
    """Return the active adapters of a LoRA layer, or the reason why this layer runs PEFT's own forward."""
    linear, four_bit = lora_class("lora.layer", "Linear"), lora_class("lora.bnb", "Linear4bit")
    classes = linear, four_bit, lora_class("lora.torchao", "TorchaoLoraLinear")
    if type(layer) not in classes:
        return f"it is a {type(layer).__name__}"
    # This runs hundreds of times per step. Attributes of a module are slower than its dictionaries.
    if not is_untouched(layer, type(layer)):
        return "it is hooked, wrapped or compiled"
    state = vars(layer)
    if state.get("fan_in_fan_out") or not state.get("cast_input_dtype_enabled", True):
        return "its weight is transposed, or its input is not cast"
    if state["merged_adapters"] or layer.disable_adapters:
        both = state["merged_adapters"] and layer.disable_adapters
        return "its merged adapters have to be unmerged" if both else ()
    layers = [state["_modules"][name]._modules for name in ("lora_A", "lora_B", "lora_dropout")]
    found = []
    for name in layer.active_adapters:
        if name in layers[0]:
            adapter = _adapter(state, name, *(parts[name] for parts in layers))
            if isinstance(adapter, str):
                return f"adapter {name} {adapter}"
            found.append(adapter)
    return tuple(found)


def _adapter(state: dict, name: str, down, up, dropout: torch.nn.Module) -> Adapter | str:
    """Return an adapter of a LoRA layer with these attributes, or what keeps a fused layer from running it."""
    scale = state["scaling"][name]
    if name in state["lora_variant"]:
        return f"is a {type(state['lora_variant'][name]).__name__}"
    if not isinstance(scale, (int, float)):
        return "has a scale that is a tensor"
    down, up = _matrix_of(down), _matrix_of(up)
    if down is None or up is None:
        return "is hooked, wrapped or not linear"
    if not is_untouched(dropout, torch.nn.Dropout, torch.nn.Identity):
        return "has a dropout that is hooked, wrapped or of another kind"
    p = dropout.p if dropout.training and type(dropout) is torch.nn.Dropout else 0.0
    if down[1] is not None or p == 1:
        return "has a bias before its second layer, or drops everything"
    return Adapter(down[0], up[0], scale, p, up[1])


def _matrix_of(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return the weight and the bias of a linear layer that these parameters fully determine, or `None`."""
    parameters = layer._parameters
    weight = parameters.get("weight")
    return None if weight is None or not is_bare_linear(layer) else (weight, parameters.get("bias"))


def adapter_of_parameter(layer: Any) -> Adapter | None | str:
    """Return the active adapter of PEFT's wrapper of a parameter `[E, out, in]`, or the reason why PEFT has to run.

    It is `None` if no adapter is active. PEFT's matrices have the ranks of an expert together in the first one, and the
    experts of a rank together in the second one. The adapter has views of them with the experts as first dimension.
    """
    if not is_untouched(layer, type(layer)):
        return "it is hooked, wrapped or compiled"
    state = vars(layer)
    if state["merged_adapters"] or layer.disable_adapters:
        both = state["merged_adapters"] and layer.disable_adapters
        return "its merged adapters have to be unmerged" if both else None
    downs, ups = (state["_modules"][name]._modules for name in ("lora_A", "lora_B"))
    active = [name for name in layer.active_adapters if name in downs]
    if len(active) != 1:
        return "several adapters are active" if active else None
    (name,) = active
    down, up, scale = _matrix_of(downs[name]), _matrix_of(ups[name]), state["scaling"][name]
    if down is None or up is None:
        return f"adapter {name} is hooked, wrapped or not linear"
    if not has_swapped_features(layer) or not isinstance(scale, (int, float)) or up[1] is not None:
        return f"adapter {name} has another layout, a bias or a scale that is a tensor"
    first, second, rank = down[0], up[0], state["r"][name]
    return Adapter(first.view(-1, rank, first.shape[1]), second.view(len(second), rank, -1).permute(2, 0, 1), scale)
