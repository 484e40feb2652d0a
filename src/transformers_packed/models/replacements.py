"""Replace Transformers' classes with ours, without changing the layout of a model.

Each of our classes has the name of the stock class that it derives from. It adds methods, but no parameters and no
attributes. Setting its `__class__` therefore converts a stock module, and weights, plans, adapters and hooks stay
unchanged.
"""

from collections.abc import Callable
from inspect import getattr_static
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch
import transformers

from ..errors import input_error
from .inputs import with_boundaries
from .installed import hold, release
from .releases import forward_inside_hooks, forward_inside_trl, has_hooks, is_trl_forward, record_outputs, with_hooks
from .trl_head import beside_trl
from .untouched import is_fsdp


Model = TypeVar("Model", bound=torch.nn.Module)

# Our class for each stock class.
REPLACEMENTS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}
# Our classes that only speed up a model, which keeps documents apart without them.
FAST_PATHS: set[type] = set()


def replaces_builtin(cls: Any) -> type:
    """Class decorator: `cls` replaces the stock class of the same name that it derives from.

    A class with a method `forward_with_boundaries` gets a forward with the stock signature that calls this method.
    """
    (builtin,) = (base for base in cls.__bases__ if base.__name__ == cls.__name__)
    if hasattr(cls, "forward_with_boundaries"):
        cls.forward = with_boundaries(cls, builtin)
    for name, method in vars(cls).items():
        # Families that share a method's code differ in its return annotation, which tools read.
        returned = getattr(getattr(builtin, name, None), "__annotations__", {}).get("return")
        if isinstance(method, FunctionType) and returned is not None:
            method.__annotations__.setdefault("return", returned)
    # A modular file is only the source of a modeling file, so importing it must not register its classes.
    if ".modular_" not in cls.__module__:
        REPLACEMENTS[builtin] = cls
    return cls


def fast_path(cls: type) -> type:
    """Class decorator: like [`replaces_builtin`], but a module that cannot become `cls` may keep its class."""
    # Keep a class that another library, such as Liger, has put in place of the stock one.
    if any(base.__name__ == cls.__name__ for base in cls.__bases__):
        FAST_PATHS.add(replaces_builtin(cls))
    return cls


def become(module: torch.nn.Module, cls: type) -> None:
    """Set the module's class to the other class of its pair in `REPLACEMENTS`.

    What only our class knows leaves with it, such as graphs and switches.
    """
    old = type(module)
    module.__class__ = cls
    if isinstance(module, transformers.PreTrainedModel) and issubclass(cls, old):
        hold(module)
    if not issubclass(cls, old):
        for name in [name for name in vars(module) if hasattr(old, name) and not hasattr(cls, name)]:
            del vars(module)[name]
        release(module)
    record_outputs(module)


def convert(model: torch.nn.Module) -> None:
    """Convert every stock module in `model` with a replacement to our class, in place."""
    for module in model.modules():
        ours = REPLACEMENTS.get(type(module))
        if ours is not None:
            become(module, ours)


class Change(NamedTuple):
    """A module, the class that it becomes, and its instance attributes that change with the class."""

    module: torch.nn.Module
    cls: type
    attributes: dict[str, Any]


def find_changes(model: torch.nn.Module, classes: dict[type, type], related: Callable[[type], bool]) -> list[Change]:
    """Return the changes that convert every module whose class is a key of `classes` to the class found there.

    `related` tells whether modules of a class need converting too. If such a class is not in `classes`, a `ValueError`
    is raised.
    """
    if not isinstance(model, torch.nn.Module):
        raise input_error("a torch.nn.Module", type(model).__name__, "Pass the model itself.")
    modules = [(name or "(the model itself)", module) for name, module in model.named_modules()]
    affected = [(name, module) for name, module in modules if type(module) in classes or related(type(module))]
    for name, module in modules if affected else ():
        if is_fsdp(module):
            got = f"module {name} under FSDP ({type(module).__name__})"
            fix = "Convert the model before sharding it, or load it inside `with registered():`."
            raise input_error("a model without FSDP", got, fix)
    changes = []
    for name, module in affected:
        old = type(module)
        if old not in classes:
            got = f"module {name} of a subclass or copy of a stock class, {old.__module__}.{old.__qualname__}"
            fix = f"Load the model without the code that sets it, or derive the class from ours in {__package__}."
            raise input_error("modules of Transformers' own classes", got, fix)
        try:
            attributes = _attributes(name, module, classes[old])
        except ValueError:
            if classes[old] not in FAST_PATHS:
                raise
        else:
            changes.append(Change(module, classes[old], attributes))
    return changes


def apply_changes(changes: list[Change]) -> None:
    for module, cls, attributes in changes:
        become(module, cls)
        vars(module).update(attributes)


def _attributes(name: str, module: torch.nn.Module, cls: type[torch.nn.Module]) -> dict[str, Any]:
    """Return the instance attributes that must change with the module's class: a `forward` bound to the old class.

    accelerate's hooks set a `forward` that calls the bound method. Removing a hook leaves the bound method as
    `forward`. TRL's trainers set a `forward` that scores tokens without logits and otherwise calls the bound method.
    """
    own, old = vars(module), type(module)
    for key, value in own.items():
        if key == "forward" or not callable(value):
            continue
        if getattr_static(old, key, None) is not getattr_static(cls, key, None):
            raise _set_before(name, old, key)
    if "forward" not in own or old.forward is cls.forward:
        return {}
    wrapper = own["forward"]
    theirs = getattr(wrapper, "trl_forward", wrapper)
    if not has_hooks(module) and is_trl_forward(theirs):
        if theirs is wrapper and not _is_forward_of(module, old, forward_inside_trl(theirs)):
            raise _set_before(name, old, "forward")
        ours = cls in REPLACEMENTS.values()
        if not ours and _is_forward_of(module, cls, forward_inside_trl(theirs)):
            return {"forward": theirs}
        return {"forward": beside_trl(theirs, module, cls.forward, our_products=ours)}
    if not _is_forward_of(module, old, forward_inside_hooks(module)):
        raise _set_before(name, old, "forward")
    return with_hooks(module, MethodType(cls.forward, module))


def _is_forward_of(module: torch.nn.Module, cls: type[torch.nn.Module], forward: Any) -> bool:
    """Whether `forward` is that of a class, bound to the module."""
    return isinstance(forward, MethodType) and (forward.__self__, forward.__func__) == (module, cls.forward)


def _set_before(name: str, cls: type, key: str) -> ValueError:
    fix = f"Convert it before setting {key} (Accelerator.prepare, tensor parallelism, Liger, Unsloth, kernels)."
    got = f"module {name} ({cls.__name__}) with its own {key}"
    return input_error(f"modules that run the {key} of their class", got, fix)
