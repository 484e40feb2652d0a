"""Undo the changes that a framework makes to Transformers' classes, and patch its models.

Frameworks replace methods of Transformers' classes to pack rows or to compute adapters. A plugin restores the methods
whose work this package does, and refuses all others with the option that sets them.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType

import torch
from transformers.utils import logging

from ..errors import input_error
from ..models.families import OWN, families_of, modeling_module
from ..models.family import PATCHED
from ..models.registry import patch_model
from ..models.replacements import REPLACEMENTS


logger = logging.get_logger(__name__)

# Modules with wrappers that Transformers itself applies to its methods.
_WRAPPERS = ("transformers.", "kernels.", "huggingface_hub.")


def _methods(cls: type) -> dict[str, FunctionType]:
    return {name: method for name, method in vars(cls).items() if isinstance(method, FunctionType)}


for family in OWN:
    modeling_module(family.name)
# Frameworks import their plugins when they read the configuration, before they change any class.
STOCK = {stock: _methods(stock) for stock in REPLACEMENTS}


@dataclass(frozen=True)
class Framework:
    """The changes that a framework makes to Transformers' classes.

    Args:
        plugin (`str`):
            The name of the plugin in the log, which lists the methods that are restored.
        undone (`tuple[str, ...]`):
            The modules whose changes are undone.
        fixes (`Mapping[str, str]`):
            The fix for each module whose changes are refused. A name stands for all modules that start with it.
        marks (`tuple[str, ...]`):
            Attributes that the framework sets on a class along with its changes. They are removed, and methods beside
            them that were compiled from a changed source are undone.
    """

    plugin: str
    undone: tuple[str, ...]
    fixes: Mapping[str, str]
    marks: tuple[str, ...]

    def patch(self, model: torch.nn.Module) -> bool:
        """Restore the stock methods of a model's classes and patch the model. Returns whether it needs boundaries.

        Raises:
            `ValueError`: the model cannot be packed, or a method was changed by another module, or before this module
                was imported.
        """
        needs_boundaries = bool(families_of(model, *PATCHED))
        if needs_boundaries:
            self._restore(model)
        patch_model(model)
        return needs_boundaries

    def _restore(self, model: torch.nn.Module) -> None:
        classes = {base for module in model.modules() for base in type(module).__mro__}
        classes = {cls for cls in classes if cls.__module__.startswith("transformers.models.")}
        # Frameworks change the classes of all families at once, and `patch_model` checks all of them.
        for cls in sorted(classes | STOCK.keys(), key=lambda cls: cls.__qualname__):
            marked = any(mark in vars(cls) for mark in self.marks)
            for name, method in _methods(cls).items():
                source, recompiled = method.__module__, inspect.getfile(method) == "<string>"
                if source.startswith(_WRAPPERS) and not recompiled:
                    continue
                stock = STOCK.get(cls, {}).get(name)
                undone = source in self.undone
                if not undone and recompiled:
                    source, undone = f"a changed source ({method.__name__})", marked
                if undone and stock is not None and stock is not method:
                    setattr(cls, name, stock)
                    logger.warning_once(f"{self.plugin}: {cls.__name__}.{name} of {source} is not used.")
                elif cls in classes:
                    raise self._refused(f"{cls.__name__}.{name}", source)
            for mark in self.marks:
                if mark in vars(cls):
                    delattr(cls, mark)

    def _refused(self, method: str, source: str) -> ValueError:
        known = (fix for prefix, fix in self.fixes.items() if source.startswith(prefix) and source not in self.undone)
        fix = next(known, "Turn off what sets it, and train in a new process.")
        return input_error("Transformers' own methods in the model to patch", f"{method} of {source}", fix)
