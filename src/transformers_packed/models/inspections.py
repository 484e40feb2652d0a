"""What CUDA graphs have to know of layers: why they cannot run as a graph, and whether they are still what was recorded."""

from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from ..ops.autograd import saved_tensor_hooks
from ..ops.offload import HostCheckpoints
from .checkpointing import keep_long_attention
from .experts import isolates
from .host_parameters import host_of
from .quantized_weights import has_parts, tensors_of
from .releases import checkpoint_of
from .untouched import hooks_of, modules_of, records_outputs


# Attributes whose changes are seen in another way, and types of values that layers read from Python.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, str)
_WEIGHTS = (torch.nn.Parameter, torch.Tensor)


class InspectedLayers:
    """Consecutive layers, as one walk through their modules found them. The host takes this walk in each step.

    `reason` says why they cannot run as a graph on this device, or is empty. The rest is complete without a reason.
    """

    def __init__(self, layers: list[torch.nn.Module], device: torch.device):
        self._modules: list[torch.nn.Module] = []
        # A recording returns gradients to these parameters. A reference to each keeps its identity from another one.
        self._parameters: list[torch.nn.Parameter] = []
        # Modes, and where a graph reads tensors.
        self._state: list[Any] = []
        self._settings: list[tuple[dict, str, Any]] = []
        self.reason = next(self._reasons(layers, device), "")

    def remember_settings(self) -> None:
        """List the Python values that layers may read, such as a dropout rate, each with its dictionary and name."""
        self._settings = [one for module in self._modules for one in _settings(module)]

    def are_still(self, now: "InspectedLayers") -> bool:
        """Whether a graph of these layers computes what the layers do `now`."""
        return (
            self._state == now._state
            and are_same(self._modules, now._modules)
            and are_same(self._parameters, now._parameters)
            and all(_is_same(where.get(name), value) for where, name, value in self._settings)
        )

    def _reasons(self, layers: list[torch.nn.Module], device: torch.device) -> Iterator[str]:
        """Yield why the layers cannot run as a graph, and list what a graph depends on."""
        if reason := reason_against_checkpointing(layers):
            yield reason
        if saved_tensor_hooks() is not None:
            yield "a saved-tensor hook is active"
        if not all(isolates(layer.mlp.experts) for layer in layers if hasattr(layer.mlp, "experts")):
            yield "the kernels of the experts depend on the routing"
        for layer in layers:
            again = layer.gradient_checkpointing
            for module in modules_of(layer):
                if host_of(module) is not None:
                    yield "weights are in host memory"
                if _is_hooked(module):
                    yield f"a {type(module).__name__} is hooked, wrapped or compiled"
                if again and isinstance(module, _DropoutNd) and module.p and module.training:
                    yield "gradient checkpointing would have to repeat the dropout of its layers"
                # Most modules of adapters have none.
                if module._parameters or module._buffers:
                    yield from self._reasons_of_tensors(module, device)
                self._modules.append(module)
                # torch looks for a missing attribute of a module in three more places.
                self._state += module.training, vars(module).get("gradient_checkpointing", False)

    def _reasons_of_tensors(self, module: torch.nn.Module, device: torch.device) -> Iterator[str]:
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            plain = type(parameter) in _WEIGHTS
            if not (plain or has_parts(parameter)) or parameter.device != device:
                yield f"the layers have a {type(parameter).__name__} on {parameter.device}"
            self._parameters.append(parameter)
            # Or the tensors that hold it in fewer bits.
            for tensor in (parameter,) if plain else tensors_of(parameter):
                self._state += tensor.data_ptr(), tensor.dtype, tensor.requires_grad
        self._state += (buffer.data_ptr() for buffer in module._buffers.values() if buffer is not None)


def are_same(some: list, others: list) -> bool:
    """Whether two lists have the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))


def reason_against_checkpointing(layers: Iterable[torch.nn.Module]) -> str:
    """Return why a graph would not compute layers again as their checkpointing does, or an empty string."""
    for layer in layers:
        if not layer.gradient_checkpointing:
            continue
        function: Any = checkpoint_of(layer)
        while _automatic(function):
            # A graph keeps inputs of layers in its own memory.
            function = function.args[-1]
        options = getattr(function, "keywords", {})
        if getattr(function, "func", function) is not checkpoint or "context_fn" in options:
            return "gradient checkpointing offloads or selects what it saves, or cuts rows"
    return ""


def _automatic(function: Callable | None) -> bool:
    run = getattr(function, "func", None)
    return run is keep_long_attention or (isinstance(run, HostCheckpoints) and run.automatic)


def _settings(module: torch.nn.Module) -> Iterator[tuple[dict, str, Any]]:
    for name, value in vars(module).items():
        if name in _OF_EVERY_MODULE:
            continue
        if isinstance(value, _PLAIN):
            yield vars(module), name, value
        elif type(value) is dict:
            # PEFT's adapters have dictionaries of scales and dropout rates.
            yield vars(module), name, value
            yield from ((value, key, one) for key, one in value.items() if isinstance(one, _PLAIN))


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (isinstance(before, _PLAIN) and now == before)


def _is_hooked(module: torch.nn.Module) -> bool:
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return True
    return not all(map(records_outputs, hooks_of(module)))
