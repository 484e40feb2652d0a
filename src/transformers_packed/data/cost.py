"""Alias of `planning.cost`, for plans that were pickled with this module path."""

from .planning.cost import PackingCost  # noqa: F401
