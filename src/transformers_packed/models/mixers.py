"""Where the classes of `generic` were once: models pickled then name them `transformers_packed.models.mixers.<name>`."""

from .generic import __getattr__  # noqa: F401
