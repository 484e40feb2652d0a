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


def own_with(weight: float) -> tuple[Loss, ...]:
    """Return the losses of `OWN` with this weight, and none with 0."""
    return tuple(type(loss)(weight) for loss in OWN) if weight else ()


def own_weight(losses: Iterable[Loss]) -> float:
    """Return the weight of those that the stock model computes too, which [`check_list`] has found to be one."""
    return next((loss.weight for loss in losses if loss.is_own), 1.0)


def check_list(losses: tuple[Loss, ...]) -> None:
    """Raise a `ValueError` for a list that a forward with logits would not train, since it computes all of `OWN`."""
    own, weight = [(type(loss), loss.weight) for loss in losses if loss.is_own], own_weight(losses)
    is_whole = own == [(type(loss), weight) for loss in OWN] and (weight == 1 or bool(added(losses)))
    if not losses or own and not is_whole:
        names = ", ".join(f"{loss.title} ({loss.weight})" for loss in losses) or "none"
        expected = "model.losses with all of OWN and weight 1, or one weight beside other losses, or with others alone"
        raise input_error(expected, names)


def added(losses: Iterable[Loss]) -> list[Loss]:
    """Return those that the stock model does not compute."""
    return [loss for loss in losses if not loss.is_own]
