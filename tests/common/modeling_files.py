"""Import every modeling file with classes that `register` replaces, without registering."""

from transformers_packed.models.installed import REGISTERED


list(REGISTERED.rows())
