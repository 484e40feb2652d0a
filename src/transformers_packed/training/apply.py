"""Change a Trainer as a [`Setup`] says, and undo it. [`configure_packing`] changes a Trainer only here."""

import torch

from ..models.registry import has_our_classes, set_switches, unpatch_model
from ..parallel.groups import SequenceParallel, destroy_groups
from .preference import without_autocast
from .setup import Change, Setup
from .typed import Trainer


def apply(trainer: Trainer, setup: Setup) -> None:
    """Prepare the models, and set all attributes that `setup` lists. After an error, nothing has changed."""
    stock = [model for model in setup.models if not has_our_classes(model)]
    parallel = None
    if setup.parallel is not None:
        # First, because the process groups may not form, and not every preparation can be undone.
        parallel = SequenceParallel(device_type=trainer.args.device.type, **setup.parallel)
    try:
        with without_autocast(trainer, setup.models[:-1]):
            for model in setup.models:
                for prepare in setup.prepare:
                    prepare(model)
    except Exception:
        _unpatch(stock)
        if parallel is not None:
            destroy_groups(parallel)
        raise
    if parallel is not None:
        trainer.sequence_parallel = parallel
    for target, name, value, _ in setup.changes:
        # A list grows later, when the user adds callbacks.
        setattr(target, name, list(value) if isinstance(value, list) else value)


def undo(trainer: Trainer, setup: Setup) -> None:
    """Undo [`apply`]. A model that is wrapped for training keeps its classes, and then computes padded batches as such."""
    for target, name, value, before in reversed(setup.changes):
        if isinstance(before, list):
            # Callbacks, some of which the user may have added since.
            before = [x for x in getattr(target, name) if x in before or x not in value]
        elif getattr(target, name) is not value:
            # The user has replaced it since.
            continue
        if before is Change:
            delattr(target, name)
        else:
            setattr(target, name, before)
    if setup.parallel is not None:
        destroy_groups(trainer.sequence_parallel)
        del trainer.sequence_parallel
    trainer.args.packing = trainer.args.padding_free = False
    with without_autocast(trainer, setup.models[:-1]):
        _unpatch(setup.models)


def _unpatch(models: list[torch.nn.Module] | tuple[torch.nn.Module, ...]) -> None:
    for model in models:
        try:
            unpatch_model(model)
        except ValueError:
            set_switches(model, packs_padding=False, skips_logits=False)
