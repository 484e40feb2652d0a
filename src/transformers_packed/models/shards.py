"""How Transformers' `DistributedConfig` splits a model over processes."""

import re
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel


# The dimension of a mesh whose processes gather a layer before they compute it.
_FSDP = "fsdp"
_SUMMED = "replicated_with_grad_allreduce"


def summed_per_backward(model: PreTrainedModel) -> Iterator[str]:
    """The trained parameters whose gradients tensor parallelism sums after each backward, in the accumulated gradient.

    Gradients of micro-batches before the last one are then summed several times.
    """
    layers = {name for name, style in (getattr(model, "tp_plan", None) or {}).items() if style == _SUMMED}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and re.sub(r"\.\d+(?=\.)", ".*", name.rpartition(".")[0]) in layers:
            yield name


def split_adapters(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """The layers whose adapters of PEFT do not fit, and the dimensions of the mesh that split their weights.

    PEFT 0.21 gives an adapter the shape of the process's part of the weight, unless FSDP alone shards it. HSDP gathers the
    weight all the same, and other adapters of experts are as long as all experts.
    """
    for name, module in model.named_modules():
        base = getattr(module, "base_layer", None)
        for parameter in base.parameters(recurse=False) if isinstance(base, torch.nn.Module) else ():
            mesh = getattr(parameter, "device_mesh", None)
            names = () if mesh is None else mesh.mesh_dim_names or ()
            if not set(names) <= {_FSDP}:
                yield name, ", ".join(names)
