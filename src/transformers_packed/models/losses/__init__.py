"""The losses of a language model's step: `model.losses`, of which each knows all that is its own.

A new loss is a class here and a line in `LOSSES`. The forward of a model, TRL's, a Trainer and its check loop over the list.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...errors import input_error
from .loss import CrossEntropyLoss, DivergenceLoss, RouterLoss
from .loss import Loss as Loss
from .loss import trains_trunk as trains_trunk
from .mtp import MtpLoss


LOSSES: tuple[type[Loss], ...] = (CrossEntropyLoss, RouterLoss, MtpLoss, DivergenceLoss)
# What the stock model computes, too.
OWN: tuple[Loss, ...] = (CrossEntropyLoss(), RouterLoss())
# The arguments of a forward with the divisors of the others.
ITEMS = tuple(kind.items for kind in LOSSES if not kind.is_own)


def losses_of(model: torch.nn.Module) -> tuple[Loss, ...]:
    """Return the losses of the language model of this package in `model`, if there is one."""
    found: Iterator[Any] = (module for module in model.modules() if hasattr(type(module), "skips_logits"))
    return next((module.losses for module in found), ())


def check_list(losses: tuple[Loss, ...]) -> None:
    """Raise a `ValueError` for a list that a forward with logits would not train, since it computes all of `OWN`."""
    own = [(type(loss), loss.weight) for loss in losses if loss.is_own]
    if not losses or own and own != [(type(loss), 1.0) for loss in OWN]:
        names = ", ".join(f"{loss.title} ({loss.weight})" for loss in losses) or "none"
        raise input_error("model.losses with all of OWN and weight 1, or with other losses alone", names)


def added(losses: Iterable[Loss]) -> list[Loss]:
    """Return those that the stock model does not compute."""
    return [loss for loss in losses if not loss.is_own]
