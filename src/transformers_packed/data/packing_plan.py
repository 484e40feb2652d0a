"""The old place of `planning.plan`, which plans and datasets pickled earlier name."""

from .planning.plan import PackingPlan  # noqa: F401
