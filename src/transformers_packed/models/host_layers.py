"""Frozen decoder layers in host memory, for a model that does not fit on the GPU: [`keep_layers_in_host_memory`]."""

from collections import Counter
from typing import Any

import torch

from ..errors import Rule, check_rules
from ..parallel.host_pages import shared_pages
from .experts import is_known
from .host_experts import rules_of_experts, rules_of_weights
from .host_parameters import (
    WEIGHT,
    can_read_host_weights,
    check_weights,
    is_large,
    keep_in_place,
    move_linears_to_host,
    move_to_host,
    sizes_of_weights,
    weights_of,
)
from .lora import FACTORS
from .releases import COPIES
from .replacements import Model


def keep_layers_in_host_memory(model: Model) -> Model:
    """Keep the frozen weights of decoder layers in host memory, and copy those of a layer to the GPU while it runs.

    These are the weights of linear layers of at least 1 MiB, and of experts as in [`keep_experts_in_host_memory`]. The GPU
    then has those of two decoder layers at most: of the one that runs, and of the one that comes next, whose copy runs beside
    the computation. Adapters, norms, convolutions, small weights, embeddings and heads move to the GPU with the model.

    Call it on a model in host memory, before it moves to the GPU. The weights of a layer move to other pages of host memory,
    so the host never has all of them twice. The first copy to a GPU pins these pages.

    With a process group of `torch.distributed`, all of its processes call it. Those of one machine then have one set of pages
    for weights with the same bits, and a warning names what they cannot share. A change in one process, such as a merge,
    stays there.

    Args:
        model (`PreTrainedModel`):
            A model whose decoder layers are of this package: all families but OLMo-Hybrid. It may be inside PEFT's. Its linear
            layers are frozen: in bfloat16 or another floating dtype after `get_peft_model`, or quantized in any way that this
            package loads but bitsandbytes' 8 bit and torchao's. Linear layers that are trained stay on the GPU. Those beside
            which PEFT trains copies (`modules_to_save`) are copied to it only when adapters are off.

    Returns:
        `torch.nn.Module`: the same model.

    Raises:
        `ValueError`: the model has no such layers, all of their linear layers are trained, or its experts are, weights are
            sharded or of another kind, or accelerate moves them (`device_map`).
        `RuntimeError`: another process of this machine does not call it within the timeout of the group, or has an error in it.

    Example:

    ```python
    >>> from transformers import Qwen3_5TextConfig
    >>> from transformers_packed import keep_layers_in_host_memory
    >>> from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=512, intermediate_size=1024, num_hidden_layers=4)
    >>> model = keep_layers_in_host_memory(Qwen3_5ForCausalLM(config).requires_grad_(False))

    ```
    """
    layers = [module for module in model.modules() if can_read_host_weights(module)]
    check_rules(_rules(model, layers))
    places = Counter(id(x) for module in model.modules() for x in module._parameters.values() if x is not None)
    parts = [(layer, _linears_of(layer, places), _experts_of(layer)) for layer in layers]
    trained = not any(linears or experts for _, linears, experts in parts)
    fix = "Call it after get_peft_model, which freezes them, or leave the layers on the GPU."
    check_rules([(trained, "decoder layers with large frozen weights", "small or trained ones alone", fix)])
    for _, linears, experts in parts:
        for module in (*experts, *linears):
            check_weights(module)
    sizes = sizes_of_weights(module for _, linears, experts in parts for module in (*experts, *linears))
    with shared_pages(sizes) as place:
        for layer, linears, experts in parts:
            host = move_linears_to_host(layer, linears, place)
            for module in experts:
                keep_in_place(module, host)
                move_to_host(module, place)
    return model


def _experts_of(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """List the modules of experts that are neither trained nor adapters."""
    return [
        module
        for name, module in layer.named_modules()
        if is_known(module)
        and COPIES not in name.split(".")
        and not all(x.requires_grad for x in module.parameters(recurse=False))
    ]


def _linears_of(layer: torch.nn.Module, places: Counter) -> list[torch.nn.Module]:
    """List the linear layers whose weights move: large and frozen ones, in one place of the model, that are no adapters."""
    return [
        module
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear)
        and {*FACTORS, COPIES}.isdisjoint(name.split("."))
        and (weights := weights_of(module, WEIGHT))
        and is_large(weights)
        and not any(x.requires_grad or places[id(x)] > 1 for x in weights)
    ]


def _rules(model: Any, layers: list[Any]) -> list[Rule]:
    """The reasons why the layers of a model cannot stay in host memory, whatever their weights are."""
    lists = [list(x) for x in model.modules() if isinstance(x, torch.nn.ModuleList)]
    others = [
        x for each in lists if any(map(can_read_host_weights, each)) for x in each if not can_read_host_weights(x)
    ]
    found = others[0] if others else model
    gpu = "Load it after transformers_packed.register(), pass it to patch_model first, or leave its layers on the GPU."
    experts = [module for layer in layers for module in layer.modules() if is_known(module)]
    return [
        (others or not layers, "decoder layers of this package", type(found).__name__, gpu),
        *rules_of_weights(model, [x for layer in layers for x in layer.modules()], "layers"),
        *(rules_of_experts(experts) if experts else ()),
    ]
