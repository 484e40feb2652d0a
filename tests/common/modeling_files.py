"""Import every modeling file with classes that `register` replaces, without registering."""

from transformers_packed.models import registry


list(registry._entries())
