"""What `fuzz.py` does to modules of a model: changes that affect the result, and hooks that record tensors."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fuzz_data import real
from fuzz_setup import Setup
from torch import nn
from torch.nn.utils import parametrize


_INPUTS = ("input_ids", "inputs_embeds", "hidden_states", "x")  # keywords of module inputs
HOOKS = ("forward", "forward_pre", "full_backward", "full_backward_pre")


# Changes to a module. Each one affects the result.


def _scaled(output: Any, factor: float = 1.1) -> Any:
    if isinstance(output, tuple):
        return (_scaled(output[0], factor), *output[1:])
    return output * factor if isinstance(output, torch.Tensor) and output.is_floating_point() else output


class Scale(nn.Module):
    def forward(self, weight):
        return weight * 1.1


class Around(nn.Module):
    """A wrapper that replaces a module and calls it."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return _scaled(self.inner(*args, **kwargs))


def _own_forward(model: nn.Module, name: str, module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: _scaled(forward(*args, **kwargs))


def _subclass(model: nn.Module, name: str, module: nn.Module) -> None:
    base = type(module)
    module.__class__ = type(
        f"Scaled{base.__name__}", (base,), {"forward": lambda self, *a, **k: _scaled(base.forward(self, *a, **k))}
    )


def _put(make: Callable) -> Callable:
    return lambda model, name, module: model.set_submodule(name, make(module))


CHANGES: dict[str, Callable[[nn.Module, str, nn.Module], Any]] = {
    "scaling_forward_hook": lambda _, __, module: module.register_forward_hook(lambda m, a, out: _scaled(out)),
    "scaling_forward_pre_hook": lambda _, __, module: module.register_forward_pre_hook(
        lambda m, a: _scaled(a) if a else a
    ),
    "scaling_backward_hook": lambda _, __, module: module.register_full_backward_hook(lambda m, into, out: _all(into)),
    "scaling_backward_pre_hook": lambda _, __, module: module.register_full_backward_pre_hook(
        lambda m, out: _all(out)
    ),
    "own_forward": _own_forward,
    "subclass": _subclass,
    "around": _put(Around),
    "identity": _put(lambda module: nn.Identity()),
    "activation": _put(lambda module: nn.Tanh()),
    "parametrized": lambda _, __, module: parametrize.register_parametrization(module, "weight", Scale()),
    "weight_norm": lambda _, __, module: nn.utils.parametrizations.weight_norm(module),
    "spectral_norm": lambda _, __, module: nn.utils.parametrizations.spectral_norm(module, n_power_iterations=1),
    "frozen": lambda _, __, module: module.requires_grad_(False),
    "global": lambda _, __, module: None,  # a hook on every module: see `Recorder`
}


def _all(gradients: tuple) -> tuple:
    return tuple(None if x is None else _scaled(x) for x in gradients)


class Recorder:
    """The tensors that hooks receive for each micro-batch, at its real tokens."""

    def __init__(self, setup: Setup):
        self.seen: dict[tuple[str, str], list] = {}
        self.setup = setup
        self.batch: dict | None = None  # the current micro-batch

    def hook(self, model: nn.Module, kind: str, name: str) -> Any:
        if kind == "global":
            seen, members = self.seen.setdefault((kind, ""), []), set()

            def count(module, *_):
                if self.batch is not None:
                    # Count only modules of the model: functions create temporary modules, such as activations.
                    members.update(members or map(id, model.modules()))
                    seen.extend([type(module).__name__] * (id(module) in members))

            return nn.modules.module.register_module_forward_hook(count)
        calls = self.seen.setdefault((kind, name), [])

        def record(module, *args):
            if self.batch is not None:
                # The gradients of outputs come last. Inputs may be keywords in any order.
                values = args[-1] if "backward" in kind else [args[0], [args[1].get(key) for key in _INPUTS]]
                # Expert inputs are ordered by expert and include padding, so only the calls are compared.
                tensor = None if ".experts" in name else next(tensors(values), None)
                channels_first = isinstance(module, nn.Conv1d)
                if tensor is not None and ".visual." not in name:  # patches, not tokens
                    tensor = real(tensor, self.batch, channels_first)
                calls.append(None if tensor is None else tensor.detach().clone())

        keywords = {"with_kwargs": True} if "forward" in kind else {}
        return getattr(model.get_submodule(name), f"register_{kind}_hook")(record, **keywords)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from tensors(inner)
