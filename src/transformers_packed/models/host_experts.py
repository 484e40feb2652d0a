"""Frozen experts in host memory, for a mixture that does not fit on the GPU: [`keep_experts_in_host_memory`]."""

from typing import Any

import torch

from ..errors import Rule, check_rules
from ..foreign import experts_of
from ..parallel.host_pages import shared_pages
from .experts import is_known
from .families import OWN, titles
from .host_parameters import check_weights, host_of, move_to_host, parts_of, sizes_of_weights
from .installed import EXPERTS
from .releases import has_hooks
from .replacements import Model
from .untouched import gathers_weights


def keep_experts_in_host_memory(model: Model) -> Model:
    """Keep the frozen weights of experts in host memory, and copy those of a layer to the GPU while it computes.

    The GPU then has the experts of two layers at most: those in use, and those of the layer that comes next, whose copy runs
    beside the computation. Adapters and all other weights move to the GPU with the model, and train there. The weights
    of experts stay where they are: in `model.to("cuda")`, in a Trainer, and in files that are saved.

    Call it on a model in host memory, before it moves to the GPU. The weights of a layer move to other pages of host memory,
    so the host never has all of them twice. The first copy to a GPU pins these pages.

    With a process group of `torch.distributed`, all of its processes call it. Those of one machine then have one set of pages
    for weights with the same bits, and a warning names what they cannot share. A change in one process, such as a merge,
    stays there.

    Args:
        model (`PreTrainedModel`):
            A model of this package with a mixture of experts, which may be inside PEFT's. Its experts are frozen: in bfloat16
            or another floating dtype after `get_peft_model`, or quantized in any way that this package loads but torchao's.

    Returns:
        `torch.nn.Module`: the same model.

    Raises:
        `ValueError`: the model has no experts that this package computes, they are trained or sharded, or accelerate moves
            them (`device_map`).
        `RuntimeError`: another process of this machine does not call it within the timeout of the group, or has an error in it.

    Example:

    ```python
    >>> from transformers import Qwen3_5MoeTextConfig
    >>> from transformers_packed import keep_experts_in_host_memory
    >>> from transformers_packed.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM
    >>> sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 64}
    >>> model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(vocab_size=64, **sizes)).requires_grad_(False)
    >>> model = keep_experts_in_host_memory(model)

    ```
    """
    found = [module for module in model.modules() if is_known(module)]
    able, gpu = titles([family for family in OWN if family.experts]), "Leave the experts on the GPU."
    rules = [
        (not found, f"a {able} model with experts", type(model).__name__, gpu),
        *rules_of_experts(found),
        *rules_of_weights(model, found, "experts"),
    ]
    check_rules(rules)
    for module in found:
        check_weights(module)
    with shared_pages(sizes_of_weights(found)) as place:
        for module in found:
            move_to_host(module, place)
    return model


def names_in_host_memory(model: torch.nn.Module) -> list[str]:
    """Return the names of parameters in host memory."""
    return [f"{path}.{name}" for path, module in model.named_modules() for name in parts_of(module)]


def bytes_in_host_memory(model: torch.nn.Module) -> int:
    """Return the bytes of the weights in host memory."""
    hosts = {id(host): host for module in model.modules() if (host := host_of(module)) is not None}
    return sum(pages.nbytes for host in hosts.values() for pages in host.pages.values())


def shared_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of the weights in host memory whose pages other processes of this machine may have too."""
    hosts = {id(host): host for module in model.modules() if (host := host_of(module)) is not None}
    return sum(host.shared_bytes for host in hosts.values())


def rules_of_weights(model: Any, modules: list[Any], what: str) -> list[Rule]:
    """The reasons why the weights of modules cannot stay in host memory. `what` names them."""
    gpu = f"Leave the {what} on the GPU."
    sharded = next((x for module in modules for x in module._parameters.values() if hasattr(x, "device_mesh")), None)
    return [
        (sharded is not None, f"whole {what} in host memory", f"{what} that several processes share", gpu),
        (gathers_weights(model), f"a model without FSDP and ZeRO-3 for {what} in host memory", "a sharded one", gpu),
        (any(map(has_hooks, modules)), f"{what} that stay in host memory", "a device_map, by which accelerate moves them", gpu),
    ]  # fmt: skip


def rules_of_experts(found: list[Any]) -> list[Rule]:
    """The reasons why the op of this package does not compute experts."""
    fix = "Load it after transformers_packed.register(), or pass it to patch_model first."
    others = ", ".join(sorted({str(experts_of(module.config)) for module in found} - {EXPERTS}))
    return [(others, f'experts_implementation="{EXPERTS}" for experts in host memory', others, fix)]
