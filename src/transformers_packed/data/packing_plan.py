"""Alias of `planning.plan`, for plans and datasets that were pickled with this module path."""

from .planning.plan import PackingPlan  # noqa: F401
