"""Undo the changes that a framework makes to Transformers' classes.

Frameworks replace methods of Transformers' classes to pack rows or to compute adapters. A plugin restores the methods
whose work this package does, and refuses all others with the option that sets them.
"""

from collections.abc import Mapping
from types import FunctionType

import torch
from transformers.utils import logging

from ..errors import input_error
from ..models.families import FAMILIES
from ..models.registry import REPLACEMENTS, modeling_module


logger = logging.get_logger(__name__)

# Modules with wrappers that Transformers itself applies to its methods.
_WRAPPERS = ("transformers.", "kernels.", "huggingface_hub.")


def _methods(cls: type) -> dict[str, FunctionType]:
    return {name: method for name, method in vars(cls).items() if isinstance(method, FunctionType)}


for family in FAMILIES:
    modeling_module(family)
# Frameworks import their plugins when they read the configuration, before they change any class.
STOCK = {stock: _methods(stock) for stock in REPLACEMENTS}


def restore_stock_methods(
    model: torch.nn.Module, plugin: str, undone: tuple[str, ...], fixes: Mapping[str, str], marks: tuple[str, ...]
) -> None:
    """Undo a framework's changes to the classes of a model's modules.

    Args:
        model (`torch.nn.Module`):
            The model, with stock classes.
        plugin (`str`):
            The name of the plugin in the log, which lists the methods that are restored.
        undone (`tuple[str, ...]`):
            The modules whose changes are undone.
        fixes (`Mapping[str, str]`):
            The fix for each module whose changes are refused. A name stands for all modules that start with it.
        marks (`tuple[str, ...]`):
            Attributes of a class with which the framework marks its changes, and would not make them again.

    Raises:
        `ValueError`: a method was changed by another module, or before this one was imported.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    for cls in sorted(classes, key=lambda cls: cls.__qualname__):
        if not cls.__module__.startswith("transformers.models."):
            continue
        for name, method in _methods(cls).items():
            source = method.__module__
            if source.startswith(_WRAPPERS):
                continue
            stock = STOCK.get(cls, {}).get(name)
            if source in undone and stock is not None and stock is not method:
                setattr(cls, name, stock)
                logger.warning_once(f"{plugin}: {cls.__name__}.{name} of {source} is not used.")
                continue
            known = (fix for prefix, fix in fixes.items() if source.startswith(prefix) and source not in undone)
            fix = next(known, "Turn off what sets it, and train in a new process.")
            got = f"{cls.__name__}.{name} of {source}"
            raise input_error("Transformers' own methods in the model to patch", got, fix)
        for mark in marks:
            if mark in vars(cls):
                delattr(cls, mark)
