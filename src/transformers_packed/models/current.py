"""The packed row that a model is computing: how modules learn of boundaries that nobody hands down to them.

The built-in layers of most families pass no boundaries on, so the model at the top announces them for the length of its
forward, and mixers ask for them. Gradient checkpointing runs layers again in backward, when that forward has ended and
others may have followed: what is run again gets the boundaries of its own forward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

from ..boundaries import SequenceBoundaries


_current: ContextVar[SequenceBoundaries | None] = ContextVar("packed_row", default=None)

# Where Transformers and PyTorch keep the function that runs a layer under checkpointing.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")


class _Running:
    """How many packed forwards run in this process: all that a compiled graph needs to look at, and can guard on."""

    count = 0


running = _Running()


def current_boundaries() -> SequenceBoundaries | None:
    """The boundaries of the packed row that is being computed, or `None`."""
    return _current.get()


@contextmanager
def boundaries_set_to(boundaries: SequenceBoundaries | None) -> Iterator[None]:
    """What [`current_boundaries`] tells inside the `with` block."""
    token = _current.set(boundaries)
    running.count += 1
    try:
        yield
    finally:
        running.count -= 1
        _current.reset(token)


@contextmanager
def packed_row(model: torch.nn.Module, boundaries: SequenceBoundaries) -> Iterator[None]:
    """Announce `boundaries` to the modules of `model` inside the `with` block, and when its layers are run again."""
    changed = []
    if model.training:
        for module in model.modules():
            for name in _CHECKPOINTS:
                checkpoint = vars(module).get(name)
                if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpoint:
                    changed.append((module, name, checkpoint))
                    setattr(module, name, partial(_checkpoint, module, boundaries, checkpoint))
    try:
        with boundaries_set_to(boundaries):
            yield
    finally:
        for module, name, checkpoint in changed:
            setattr(module, name, checkpoint)


def _checkpoint(module, boundaries: SequenceBoundaries, checkpoint: Callable, function: Callable, *args, **kwargs):
    return checkpoint(partial(_run_again, module, boundaries, function), *args, **kwargs)


def _run_again(module, boundaries: SequenceBoundaries, function: Callable, *args, **kwargs) -> Any:
    # Layers inside this one may be checkpointed too.
    with packed_row(module, boundaries):
        return function(*args, **kwargs)
