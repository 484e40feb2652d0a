"""How to compute a tensor again, so that the backward of its users need not save it."""

from collections.abc import Callable

import torch
from torch.utils.weak import WeakTensorKeyDictionary


# Elements of a tensor from which on computing it again costs less than the memory is worth: 16 MiB in bfloat16.
WORTH_RECOMPUTING = 1 << 23

# Of each tensor: its version, and the function, the source and the weight of `remember_recipe`.
_recipes = WeakTensorKeyDictionary()
_NONE = None, (None, None, None)


def remember_recipe(result: torch.Tensor, recompute: Callable, source: torch.Tensor, weight: torch.Tensor) -> None:
    """Note that `recompute(source, weight)` gives `result` again, if a backward will follow and `result` is large enough.

    `source` must be a tensor that another backward saves anyway.
    """
    if _is_worth(result) and not torch.compiler.is_compiling():
        _recipes[result] = result._version, (recompute, source.detach(), weight)


def recipe_of(tensor: torch.Tensor) -> tuple[Callable | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the function, the source and the weight for a large tensor that has not changed since, or 3 times `None`."""
    version, recipe = _recipes.get(tensor, _NONE) if _is_worth(tensor) else _NONE
    return recipe if version is not None and version == tensor._version else _NONE[1]


def _is_worth(tensor: torch.Tensor) -> bool:
    return tensor.numel() >= WORTH_RECOMPUTING and torch.is_grad_enabled()
