"""Correct and fast packed (padding-free) training of hybrid linear-attention models in Transformers.

Importing the package changes nothing in Transformers and imports no kernel package; `register()` lets the Auto
classes build its models.
"""

from .boundaries import SequenceBoundaries
from .data.collator import DataCollatorWithFlattening
from .models.auto import register, registered, unregister


__version__ = "0.1.0"

__all__ = [
    "DataCollatorWithFlattening",
    "SequenceBoundaries",
    "register",
    "registered",
    "unregister",
]
