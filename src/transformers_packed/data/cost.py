"""The old place of `planning.cost`, which plans pickled earlier name."""

from .planning.cost import PackingCost  # noqa: F401
