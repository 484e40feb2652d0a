"""How a Trainer trains, as a [`Setup`] that `setup.py` decides, and its changes, made and undone.

[`configure_packing`] changes a Trainer only here.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from ..models.registry import has_our_classes, inner_model, set_switches, unpatch_model
from ..ops.invariance import is_batch_invariant, set_batch_invariant
from ..parallel.groups import SequenceParallel, destroy_groups
from .facts import Facts
from .restore import without_autocast
from .typed import Trainer


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


class Applied(TrainerCallback):
    """Holds what was done to a Trainer, as one of its callbacks, so that another set-up can undo it.

    Args:
        setup ([`Setup`]):
            What was applied.
        stock (`list[torch.nn.Module]`):
            The models that had no classes of ours.
        changes (`list[Change]`):
            The attributes of modules, parameters and configurations that were changed while models were prepared.
        was_invariant (`bool`):
            Whether [`batch_invariant`] was active before.
    """

    def __init__(self, setup: Setup, stock: list[torch.nn.Module], changes: list[Change], was_invariant: bool):
        self.setup, self.stock, self.changes, self.was_invariant = setup, stock, changes, was_invariant


def applied_to(trainer: Trainer) -> Applied | None:
    """What was applied to a Trainer last."""
    return next((x for x in trainer.callback_handler.callbacks if isinstance(x, Applied)), None)


def apply(trainer: Trainer, setup: Setup, undone: Applied | None = None) -> list[torch.nn.Module]:
    """Prepare the models, and set all attributes that `setup` lists. After an error, nothing has changed.

    Models of an earlier set-up that [`undo_last`] has `undone` become stock models again, unless this one prepares them.
    Those that are wrapped for training keep classes of ours, and are returned.
    """
    models, before_us = setup.models if setup.prepare else (), [] if undone is None else undone.stock
    stock = [model for model in models if model in before_us or not has_our_classes(model)]
    before = {(id(target), name): value for target, name, value in _attributes(models)}
    parallel = None
    if setup.parallel is not None:
        # First, because the process groups may not form, and not every preparation can be undone.
        parallel = SequenceParallel(device_type=trainer.args.device.type, **setup.parallel)
    try:
        with without_autocast(trainer, setup.models[:-1]):
            for model, prepare in product(models, setup.prepare):
                prepare(model)
    except Exception:
        _undo_changes(_changes_of(models, before))
        _unpatch(stock)
        if parallel is not None:
            destroy_groups(parallel)
        raise
    if parallel is not None:
        trainer.sequence_parallel = parallel
    was_invariant = is_batch_invariant()
    if setup.facts.options.batch_invariant:
        set_batch_invariant(True)
    for target, name, value, _ in setup.changes:
        # The list grows later, when the user adds callbacks.
        setattr(target, name, list(value) if name == "callbacks" else value)
    # The arguments always say which mode is active.
    if models or any(change.target is not trainer.args for change in setup.changes):
        trainer.callback_handler.callbacks.append(Applied(setup, stock, _changes_of(models, before), was_invariant))
    if undone is None:
        return []
    with without_autocast(trainer, undone.setup.models[:-1]):
        return _unpatch(model for model in undone.stock if model not in models)


def undo(trainer: Trainer, setup: Setup) -> None:
    """Undo [`apply`]. A model that is wrapped for training keeps its classes, and then computes padded batches as such."""
    undo_last(trainer)
    trainer.args.packing = trainer.args.padding_free = False
    with without_autocast(trainer, setup.models[:-1]):
        for model in _unpatch(setup.models):
            set_switches(model, packs_padding=False, skips_logits=False)


def undo_last(trainer: Trainer) -> list[str]:
    """Undo the last [`apply`] on a Trainer but for the classes of models, and return what else stays, in words.

    A head that has trained is not thrown away. What the user has changed since stays too.
    """
    applied, handler = applied_to(trainer), trainer.callback_handler
    if applied is None:
        return []
    handler.callbacks = [x for x in handler.callbacks if x is not applied]
    _undo_changes(applied.setup.changes)
    if applied.setup.facts.options.batch_invariant:
        set_batch_invariant(applied.was_invariant)
    if applied.setup.parallel is not None:
        destroy_groups(trainer.sequence_parallel)
        del trainer.sequence_parallel
    added = [x for x in applied.changes if x.before is Change and isinstance(x.value, torch.nn.Module)]
    kept = added if trainer.state.global_step else []
    _undo_changes(x for x in applied.changes if not any(x is change for change in kept))
    for change in kept:
        change.value.requires_grad_(False)
    return ["the head of multi-token prediction, which has trained, stays in the model"] if kept else []


def _undo_changes(changes: Iterable[Change]) -> None:
    for target, name, value, before in reversed(list(changes)):
        if name == "callbacks":
            # The user may have added some since, or removed some.
            now = getattr(target, name)
            kept = [x for x in before if x in now or x not in value]
            before = kept + [x for x in now if x not in before and x not in value]
        elif getattr(target, name, Change) is not value:
            # The user has replaced it since.
            continue
        if before is Change:
            delattr(target, name)
        else:
            setattr(target, name, before)


def _changes_of(models: Iterable[torch.nn.Module], before: dict[tuple[int, str], Any]) -> list[Change]:
    """The attributes of models that have changed. An attribute that was not there has no value before."""
    now = [Change(*each, before.get((id(each[0]), each[1]), Change)) for each in _attributes(models)]
    # Parameters of a new module leave with it.
    return [x for x in now if x.value is not x.before and (x.name != "requires_grad" or x.before is not Change)]


def _attributes(models: Iterable[torch.nn.Module]) -> Iterator[tuple[Any, str, Any]]:
    """What preparing a model may change, beside the classes of modules and what changes with these.

    These are plain attributes and submodules, whether parameters train, and the cache of the configurations.
    """
    for model in models:
        config = inner_model(model).config
        for part in {id(x): x for x in (config, config.get_text_config())}.values():
            yield part, "use_cache", getattr(part, "use_cache", None)
        for parameter in model.parameters():
            yield parameter, "requires_grad", parameter.requires_grad
        for module in model.modules():
            for name, value in (vars(module) | module._modules).items():
                # The dictionaries are those of torch, and a forward belongs to a class.
                if not isinstance(value, dict) and name != "forward":
                    yield module, name, value


def _unpatch(models: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """Convert models to stock classes, and return those that are wrapped for training, which keep ours."""
    kept = []
    for model in models:
        try:
            unpatch_model(model)
        except ValueError:
            kept.append(model)
    return kept
