"""Alias of `generic` for old pickles, which refer to its classes as `transformers_packed.models.mixers.<name>`."""

from .generic import __getattr__  # noqa: F401
