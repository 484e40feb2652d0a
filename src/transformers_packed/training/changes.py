"""How a Trainer trains, as values. `setup.py` decides them, and `apply.py` follows them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .facts import Facts


# What is done to a model.
Prepare = Callable[[torch.nn.Module], Any]


class Change(NamedTuple):
    """An attribute to set. `before` is its value on the object itself, or `Change` if it has none."""

    target: Any
    name: str
    value: Any
    before: Any

    @classmethod
    def of(cls, target: Any, **values: Any) -> "list[Change]":
        return [cls(target, name, value, vars(target).get(name, cls)) for name, value in values.items()]


@dataclass(frozen=True)
class Setup:
    """How a Trainer trains, and what has to change for it.

    Args:
        mode (`str`):
            `"off"`, `"padding_free"`, `"pack"`, or `"batches"` if the model packs padded batches itself.
        line (`str`):
            What the user reads.
        facts ([`Facts`]):
            What was known of the Trainer.
        models (`tuple`):
            The models to prepare: the one that trains, and before it those that compute its padded batches too.
        prepare (`tuple[Callable]`):
            What is done to each of them, and to the models of `model_init`, in this order.
        changes (`tuple[Change]`):
            All other changes.
        padded (`Callable`, *optional*):
            The collator of the padded batches that the rows stand for.
        parallel (`dict`, *optional*):
            Arguments of the [`SequenceParallel`] whose processes share rows.
    """

    mode: str
    line: str
    facts: Facts
    models: tuple[torch.nn.Module, ...]
    prepare: tuple[Prepare, ...] = ()
    changes: tuple[Change, ...] = ()
    padded: Callable | None = None
    parallel: dict[str, Any] | None = None
