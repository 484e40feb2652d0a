"""How a Trainer trains, as values. `setup.py` decides them, and `apply.py` follows them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..models.losses.loss import Loss
from .options import Options
from .trainers import TrainerRecord


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
        options ([`Options`]):
            What the user asked for.
        models (`tuple`):
            The models to prepare: the one that trains, and before it those that compute its padded batches too.
        prepare (`tuple[Callable]`):
            What is done to each of them, and to the models of `model_init`, in this order.
        changes (`tuple[Change]`):
            All other changes.
        record ([`TrainerRecord`]):
            What is known of the Trainer's class.
        padded (`Callable`, *optional*):
            The collator of the padded batches that the rows stand for.
        parallel (`dict`, *optional*):
            Arguments of the [`SequenceParallel`] whose processes share rows.
        losses (`list[Loss]`):
            What a step trains that the stock model does not.
    """

    mode: str
    line: str
    options: Options
    models: tuple[torch.nn.Module, ...] = ()
    prepare: tuple[Prepare, ...] = ()
    changes: tuple[Change, ...] = ()
    record: TrainerRecord = TrainerRecord()
    padded: Callable | None = None
    parallel: dict[str, Any] | None = None
    losses: list[Loss] = field(default_factory=list)
