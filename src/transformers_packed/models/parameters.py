"""The number of elements of parameters that are partitioned or stored in 4 bit."""

import math

import torch


def num_elements(parameter: torch.Tensor) -> int:
    """Return the number of elements of a whole parameter.

    DeepSpeed's ZeRO-3 leaves an empty tensor of a partitioned parameter, and bitsandbytes stores two elements per byte.
    The parts of FSDP2 count as the whole in PyTorch itself.
    """
    if hasattr(parameter, "ds_numel"):
        return parameter.ds_numel
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else math.prod(state.shape)


def trained_share(model: torch.nn.Module) -> float:
    """Return the number of elements that are trained, as a fraction of all elements of the model."""
    sizes = [(num_elements(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trained in sizes if trained) / sum(size for size, _ in sizes)
