"""How to compute a tensor again, so that the backward of its users need not save it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary


# Elements of a tensor from which on computing it again costs less than the memory is worth: 16 MiB in bfloat16.
WORTH_RECOMPUTING = 1 << 23


class Recipe(NamedTuple):
    """`recompute(source, weight)` gives the tensor of the version `version` again."""

    version: int
    recompute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    source: torch.Tensor
    weight: torch.Tensor


_recipes = WeakTensorKeyDictionary()


def remember_recipe(result: torch.Tensor, recompute: Callable, source: torch.Tensor, weight: torch.Tensor) -> None:
    """Note that `recompute(source, weight)` gives `result` again, if it is large enough.

    `source` must be a tensor that another backward saves anyway.
    """
    if result.numel() >= WORTH_RECOMPUTING and not torch.compiler.is_compiling():
        _recipes[result] = Recipe(result._version, recompute, source.detach(), weight)


def recipe_of(tensor: torch.Tensor) -> Recipe | None:
    """Return the recipe of a large tensor that has not changed since."""
    recipe = _recipes.get(tensor) if tensor.numel() >= WORTH_RECOMPUTING else None
    return recipe if recipe is not None and recipe.version == tensor._version else None
