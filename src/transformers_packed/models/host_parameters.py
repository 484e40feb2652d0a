"""Weights in host memory: their parameters, and the copies that layers and products read.

A module with weights in host memory has two attributes. `host_tensors` is a [`HostTensors`]. `_apply` leaves the weights where
they are when PyTorch, accelerate or a Trainer moves the model. The modules of a decoder layer share the [`HostTensors`] of the
layer, which copies their weights together.

The op for experts asks for copies in each product. Linear layers have copies as parameters while their decoder layer runs,
also when a checkpoint runs it again, so whatever calls or wraps them finds weights on its device. A backward of the layer asks
for the copies again before it begins. [`reads_host_weights`] does both. `host_experts.py` and `host_layers.py` move weights.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, wraps
from inspect import unwrap
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..errors import input_error
from ..foreign import swapped
from ..ops.host_weights import HostTensors, Place, is_apart
from .quantized_weights import copied_weights, has_parts, is_in_4bit, tensors_of, with_tensors
from .releases import COPIES, ORIGINAL


WEIGHTS = ("gate_up_proj", "down_proj")
# Of a linear layer.
WEIGHT = "weight"
# Bytes of a linear layer's weight below which it goes to the GPU with the model.
SMALLEST = 1 << 20
_HOST, _APPLY = "host_tensors", "_apply"
# The keys of the weights of linear layers of a decoder layer: those that it reads, and those beside which PEFT trains copies.
_LINEARS, _ORIGINALS = "linear layers", "originals"
# The forwards of [`reads_host_weights`].
_READERS: set[Callable] = set()
_LOADS = {"experts": False, "layers": False}
_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")


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
    """Return the tensors of a module that stay in host memory, or `None` for other modules."""
    return vars(module).get(_HOST)


def parts_of(module: Any) -> list[str]:
    """List the parameters of a module that stay in host memory."""
    return [] if host_of(module) is None else [part for name in (*WEIGHTS, WEIGHT) for part in _parts_of(module, name)]


def needs_copies(module: torch.nn.Module, device: torch.device) -> bool:
    """Whether a product on this device needs copies of the module's weights."""
    return host_of(module) is not None and is_apart(device)


def copies_of(module: torch.nn.Module, name: str, device: torch.device) -> Callable[[], list[torch.Tensor]]:
    """Return what copies the tensors of a weight of experts to a device, or finds them there.

    Raises:
        `ValueError`: the weight is trained.
    """
    _check_still_frozen(module, [module], name)
    host = host_of(module)
    if host is None or not host.holds(name, _tensors_of(module, name)):
        # The module is a copy of another one, or its weights have been replaced.
        host = move_to_host(module)
    return partial(host.on, device, name)


def with_copies(module: Any, device: torch.device) -> AbstractContextManager:
    """Let the parameters of experts be copies on a device meanwhile."""
    copies: dict[str, torch.Tensor] = {}
    for name in WEIGHTS:
        copies |= _as_parameters(module, name, iter(copies_of(module, name, device)()))
    return swapped(module._parameters, **copies)


def _as_parameters(module: Any, name: str, tensors: Iterator[torch.Tensor]) -> dict[str, torch.nn.Parameter]:
    """Return parameters like those of a weight with the next tensors."""
    return {part: _parameter(module._parameters[part], tensors) for part in _parts_of(module, name)}


def _parameter(like: Any, tensors: Iterator[torch.Tensor]) -> torch.nn.Parameter:
    weight = with_tensors(like, tensors) if has_parts(like) else next(tensors)
    # Those of bitsandbytes are parameters already.
    return weight if isinstance(weight, torch.nn.Parameter) else torch.nn.Parameter(weight, requires_grad=False)


def reads_host_weights(forward: Callable) -> Callable:
    """Method decorator: linear layers have copies of weights in host memory while this forward of a decoder layer runs."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        layer: Any = args[0]
        host = host_of(layer)
        if host is None:
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            got, fix = "torch.compile", "Leave the layers on the GPU."
            raise input_error("layers in host memory to run without compilation", got, fix)
        device = (args[1] if len(args) > 1 else kwargs["hidden_states"]).device
        with _layer_with_copies(layer, host, device):
            output = forward(*args, **kwargs)
        if is_apart(device):
            _ask_before_backward(output, partial(host.on, device, _LINEARS))
        return output

    _READERS.add(run)
    return run


def can_read_host_weights(layer: torch.nn.Module) -> bool:
    """Whether the forward of a decoder layer is one of [`reads_host_weights`]."""
    return unwrap(type(layer).forward, stop=_READERS.__contains__) in _READERS


@contextmanager
def _layer_with_copies(layer: torch.nn.Module, host: HostTensors, device: torch.device) -> Iterator[None]:
    found = _linears_of(layer)
    every = [linear for linears in found.values() for linear in linears]
    _check_still_frozen(layer, every, WEIGHT)
    if not all(host.holds(key, _all_tensors_of(linears)) for key, linears in found.items()):
        # The layer is a copy of another one, or weights have been replaced.
        move_linears_to_host(layer, every)
    # A list that nobody has asked for before starts all copies of the layer again, so it comes first.
    keys = [_ORIGINALS, _LINEARS] if _ORIGINALS in found and _reads_originals(layer) else [_LINEARS]
    with ExitStack() as stack:
        for key in keys:
            tensors = iter(host.on(device, key) if is_apart(device) else host.lists[key])
            for linear in found[key]:
                stack.enter_context(swapped(linear._parameters, **_as_parameters(linear, WEIGHT, tensors)))
        yield


def _ask_before_backward(output: Any, ask: Callable[[], Any]) -> None:
    """Call `ask` before the backward of these outputs.

    Some functions keep weights where no hook of autograd sees them, and read them before anything is computed again.
    """

    def hook(_: torch.Tensor) -> None:
        ask()

    for x in tree_leaves(output):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            x.register_hook(hook)


def _linears_of(layer: torch.nn.Module) -> dict[str, list[torch.nn.Module]]:
    """List the linear layers of a decoder layer whose weights are in host memory, by the key of these."""
    found: dict[str, list[torch.nn.Module]] = {_LINEARS: []}
    for name, module in layer.named_modules():
        if host_of(module) is not None and _parts_of(module, WEIGHT):
            found.setdefault(_ORIGINALS if ORIGINAL in name.split(".") else _LINEARS, []).append(module)
    return found


def _reads_originals(layer: torch.nn.Module) -> bool:
    """Whether PEFT may call a module beside its copies: without adapters, for one without a copy, or for some samples."""
    wrappers: list[Any] = [module for module in layer.modules() if ORIGINAL in module._modules]
    return any(
        wrapper.disable_adapters
        or wrapper._forward_pre_hooks
        or not {*wrapper.active_adapters} <= {*wrapper._modules.get(COPIES, ())}
        for wrapper in wrappers
    )


def move_linears_to_host(layer: torch.nn.Module, linears: list[Any], place: Place | None = None) -> HostTensors:
    """Move the weights of linear layers of a decoder layer to pages of host memory, by default their own, and keep them there.

    Raises:
        `ValueError`: a weight is of a kind without copies.
    """
    for linear in linears:
        check_weights(linear)
    host = host_of(layer) or HostTensors()
    setattr(layer, _HOST, host)
    for linear in linears:
        keep_in_place(linear, host)
    for key, some in _linears_of(layer).items():
        if key == _ORIGINALS and key not in host.lists:
            host.unread.add(key)
        moved = iter(host.keep(key, _all_tensors_of(some), place))
        for linear in some:
            _set_moved(linear, WEIGHT, moved, host)
        # These count changes of the parameters in place, also of those that have got other data.
        host.follow(key, _all_tensors_of(some))
    return host


def move_to_host(module: Any, place: Place | None = None) -> HostTensors:
    """Move the weights of a module of experts to pages of host memory, by default their own, and keep them there.

    Raises:
        `ValueError`: a weight is trained, or of a kind without copies.
    """
    check_weights(module)
    host = keep_in_place(module)
    for name in WEIGHTS:
        tensors = _tensors_of(module, name)
        if not host.holds(name, tensors):
            _set_moved(module, name, iter(host.keep(name, tensors, place)), host)
            host.follow(name, _tensors_of(module, name))
    return host


def _set_moved(module: Any, name: str, moved: Iterator[torch.Tensor], host: HostTensors) -> None:
    with torch.inference_mode(False):
        for part in _parts_of(module, name):
            weight: Any = _in_memory_of(moved, module._parameters[part], host)
            module._parameters[part] = weight
            if is_in_4bit(weight):
                # bitsandbytes' layer has it too, for parameters that have lost it.
                module.quant_state = weight.quant_state


def keep_in_place(module: Any, host: HostTensors | None = None) -> HostTensors:
    """Let moves of the model leave the weights of a module where they are, before they are in pages or after.

    They share `host` with other weights of a decoder layer if it is given.
    """
    host = host or host_of(module) or HostTensors()
    if host_of(module) is not host:
        setattr(module, _HOST, host)
        setattr(module, _APPLY, partial(_left, module))
    return host


def loading_to_host(layers: bool = False) -> AbstractContextManager:
    """Keep experts that bitsandbytes quantizes on a GPU in host memory meanwhile, each as soon as it is quantized.

    With `layers`, large linear layers of decoder layers too.
    """
    return swapped(_LOADS, experts=True, layers=layers)


def loaded(module: torch.nn.Module, weights: Any) -> Any:
    """Return weights of experts where they stay when a model is loaded."""
    if not _LOADS["experts"]:
        return weights
    keep_in_place(module)
    return weights.copied(lambda x: x.cpu())


def loaded_linear(name: str, module: Any, weight: Any) -> Any:
    """Return the weight of a linear layer in 4 bit, the parameter `name` of a model, where it stays when it is loaded."""
    if not _LOADS["layers"] or not is_in_4bit(weight) or not _LAYER.search(name) or not is_large([weight]):
        return weight
    keep_in_place(module)
    moved = copied_weights(weight, lambda x: x.cpu())
    module.quant_state = moved.quant_state
    return moved


def is_large(weights: Iterable[torch.Tensor]) -> bool:
    """Whether weights of a linear layer are worth copies."""
    return sum(tensor.nbytes for weight in weights for tensor in tensors_of(weight)) >= SMALLEST


def _left(module: torch.nn.Module, function: Callable, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply` that leaves the weights where they are. It refuses to change their dtype."""
    parts = parts_of(module)
    for part in parts:
        before = module._parameters[part].dtype  # type: ignore[union-attr]
        if (dtype := function(torch.empty(0, dtype=before)).dtype) != before:
            fix = "Load the model in this dtype."
            raise input_error("weights in host memory in the dtype in which they were loaded", dtype, fix)
    if (host := host_of(module)) is not None:
        # They are copied again where the model runs next.
        host.give_up()
    with swapped(module._parameters, **dict.fromkeys(parts)):
        return type(module)._apply(module, function, recurse)


def check_weights(module: torch.nn.Module) -> None:
    """Raise a `ValueError` if a weight of experts or of a linear layer is trained, or of a kind without copies."""
    parts = [part for weight in (*WEIGHTS, WEIGHT) for part in _parts_of(module, weight)]
    is_linear = WEIGHT in parts
    for name, weight in module.named_parameters(recurse=False):
        kind = type(weight)
        known = kind in (torch.nn.Parameter, HostWeight) or has_parts(weight)
        if name in parts and not known or not (name in parts or is_linear):
            what = "a linear layer" if is_linear else f"experts with {' and '.join(WEIGHTS)} alone"
            expected = f"{what} in host memory, plain or quantized by this package"
            raise input_error(expected, f"{name}, a {kind.__name__}", "Leave the weights on the GPU.")
        if name in parts and weight.requires_grad:
            fix = "Call it after get_peft_model, which freezes them, or leave the weights on the GPU."
            raise input_error("frozen weights in host memory", f"a trained {name}", fix)


def _check_still_frozen(root: torch.nn.Module, modules: list[torch.nn.Module], name: str) -> None:
    """Raise a `ValueError` if somebody trains a weight of modules in `root` that has moved to host memory."""
    for module in modules:
        for weight in weights_of(module, name):
            if weight.requires_grad:
                path = next(path for path, other in root.named_modules(prefix=type(root).__name__) if other is module)
                expected = "weights in host memory that stay frozen"
                fix = "Freeze it again, or let it train before other weights move there: it then stays on the GPU."
                raise input_error(expected, f"{path}.{name}, which trains now", fix)


def weights_of(module: Any, name: str) -> list[torch.nn.Parameter]:
    """List the parameters of a weight."""
    return [module._parameters[part] for part in _parts_of(module, name)]


def sizes_of_weights(modules: Iterable[Any]) -> list[int]:
    """List the bytes of all tensors of experts and of linear layers."""
    return [x.nbytes for module in modules for name in (*WEIGHTS, WEIGHT) for x in _tensors_of(module, name)]


def _parts_of(module: Any, name: str) -> list[str]:
    """List the parameters that hold a weight: the weight, and its scales if they are apart."""
    return [part for part in (name, f"{name}_scale_inv") if module._parameters.get(part) is not None]


def _tensors_of(module: Any, name: str) -> list[torch.Tensor]:
    return [x.detach() for weight in weights_of(module, name) for x in tensors_of(weight)]


def _all_tensors_of(linears: list[Any]) -> list[torch.Tensor]:
    return [x for linear in linears for x in _tensors_of(linear, WEIGHT)]


def _in_memory_of(moved: Iterator[torch.Tensor], parameter: Any, host: HostTensors) -> torch.nn.Parameter:
    """Return a parameter with the next tensors of `moved`."""
    if has_parts(parameter):
        return _parameter(parameter, moved)
    if isinstance(parameter, HostWeight):
        # Whoever has replaced its data may put it back, such as the check before the first step.
        weight, weight.data = parameter, next(moved)
    else:
        weight = HostWeight(next(moved), requires_grad=False)
    weight.host = host
    return weight
