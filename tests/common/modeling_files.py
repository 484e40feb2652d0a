"""Imports every modeling file that `register` replaces classes of, and registers nothing."""

from transformers_packed.models import registry


list(registry._entries())
