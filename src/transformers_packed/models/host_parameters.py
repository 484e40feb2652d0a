"""Experts whose weights are in host memory: their parameters, and the copies that the op reads. `host_experts.py` moves them.

A module of experts in host memory has two attributes. `host_tensors` is a [`HostTensors`]. `_apply` leaves the weights where
they are when PyTorch, accelerate or a Trainer moves the model.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ..errors import input_error
from ..foreign import swapped
from ..ops.host_weights import HostTensors, is_apart
from .quantized_weights import StoredWeight, tensors_of, with_tensors


WEIGHTS = ("gate_up_proj", "down_proj")
_HOST, _APPLY = "host_tensors", "_apply"
_LOADS = {"to_host": False}


class HostWeight(torch.nn.Parameter):
    """A frozen parameter in host memory.

    Whoever reads its `data` may change it, as PEFT does in a merge, and PyTorch does not count such changes. The copies on
    devices are then made again.
    """

    host: HostTensors | None = None

    @property
    def data(self) -> torch.Tensor:
        self._note()
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        self._note()
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]

    def _note(self) -> None:
        if self.host is not None:
            self.host.changes += 1


def host_of(module: Any) -> HostTensors | None:
    """Return the tensors of experts that stay in host memory, or `None` for other modules."""
    return vars(module).get(_HOST)


def needs_copies(module: torch.nn.Module, device: torch.device) -> bool:
    """Whether a product on this device needs copies of the module's weights."""
    return host_of(module) is not None and is_apart(device)


def copies_of(module: torch.nn.Module, name: str, device: torch.device) -> Callable[[], list[torch.Tensor]]:
    """Return what copies the tensors of a weight of experts to a device, or finds them there.

    Raises:
        `ValueError`: the weight is trained.
    """
    for part in _parts_of(module, name):
        _check_frozen(part, module._parameters[part])
    at, host = WEIGHTS.index(name), host_of(module)
    if host is None or not host.holds(at, _tensors_of(module, name)):
        # The module is a copy of another one, or its weights have been replaced.
        host = move_to_host(module)
    return partial(host.on, device, at)


def with_copies(module: Any, device: torch.device) -> AbstractContextManager:
    """Let the module's parameters be copies on a device meanwhile."""
    copies: dict[str, torch.Tensor] = {}
    for name in WEIGHTS:
        tensors = iter(copies_of(module, name, device)())
        for part in _parts_of(module, name):
            weight = module._parameters[part]
            copies[part] = with_tensors(weight, tensors) if isinstance(weight, StoredWeight) else next(tensors)
    return swapped(module._parameters, **copies)


def move_to_host(module: Any) -> HostTensors:
    """Move the weights of a module of experts to pages of host memory, one at a time, and keep them there.

    Raises:
        `ValueError`: a weight is trained, or of a kind without copies.
    """
    check_weights(module)
    host = keep_in_place(module)
    for at, name in enumerate(WEIGHTS):
        if len(host.lists) > at and host.holds(at, _tensors_of(module, name)):
            continue
        moved = iter(host.keep(at, _tensors_of(module, name)))
        with torch.inference_mode(False):
            for part in _parts_of(module, name):
                module._parameters[part] = _in_memory_of(moved, module._parameters[part], host)
    return host


def keep_in_place(module: Any) -> HostTensors:
    """Let moves of the model leave the weights of a module of experts where they are, before they are in pages or after."""
    host = host_of(module)
    if host is None:
        host = HostTensors()
        setattr(module, _HOST, host)
        setattr(module, _APPLY, partial(_left, module))
    return host


def loading_to_host() -> AbstractContextManager:
    """Keep experts that bitsandbytes quantizes on a GPU in host memory meanwhile, each as soon as it is quantized."""
    return swapped(_LOADS, to_host=True)


def loaded(module: torch.nn.Module, weights: Any) -> Any:
    """Return weights of experts where they stay when a model is loaded."""
    if not _LOADS["to_host"]:
        return weights
    keep_in_place(module)
    return weights.copied(lambda x: x.cpu())


def _left(module: torch.nn.Module, function: Callable, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply` that leaves the weights where they are. It refuses to change their dtype."""
    for weight in module._parameters.values():
        if weight is not None and (dtype := function(torch.empty(0, dtype=weight.dtype)).dtype) != weight.dtype:
            fix = "Load the model in this dtype."
            raise input_error("experts in host memory in the dtype in which they were loaded", dtype, fix)
    return module


def check_weights(module: torch.nn.Module) -> None:
    """Raise a `ValueError` if a weight of a module of experts is trained, or of a kind without copies."""
    parts = [part for weight in WEIGHTS for part in _parts_of(module, weight)]
    for name, weight in module.named_parameters(recurse=False):
        kind = type(weight)
        known = kind in (torch.nn.Parameter, HostWeight) or isinstance(weight, StoredWeight)
        if name not in parts or not known:
            expected = f"experts with {' and '.join(WEIGHTS)} alone in host memory, plain or quantized by this package"
            raise input_error(expected, f"{name}, a {kind.__name__}", "Leave the experts on the GPU.")
        _check_frozen(name, weight)


def _check_frozen(name: str, weight: Any) -> None:
    if weight.requires_grad:
        fix = "Call it after get_peft_model, which freezes them, or leave the experts on the GPU."
        raise input_error("frozen experts in host memory", f"a trained {name}", fix)


def _parts_of(module: Any, name: str) -> list[str]:
    """List the parameters that hold a weight: the weight, and its scales if they are apart."""
    return [part for part in (name, f"{name}_scale_inv") if module._parameters.get(part) is not None]


def _tensors_of(module: Any, name: str) -> list[torch.Tensor]:
    parts = _parts_of(module, name)
    return [x.detach() for part in parts for x in tensors_of(module._parameters[part])]


def _in_memory_of(moved: Any, parameter: Any, host: HostTensors) -> torch.nn.Parameter:
    """Return a parameter with the next tensors of `moved`."""
    if isinstance(parameter, StoredWeight):
        return torch.nn.Parameter(with_tensors(parameter, moved), requires_grad=False)
    if isinstance(parameter, HostWeight):
        # Whoever has replaced its data may put it back, such as the check before the first step.
        weight, weight.data = parameter, next(moved)
    else:
        weight = HostWeight(next(moved), requires_grad=False)
    weight.host = host
    return weight
