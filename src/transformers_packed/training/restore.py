"""Leave models, Trainers and data loaders as they were, after something has run on them before the first step."""

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate.utils import is_compiled_module
from torch.nn.parallel import DistributedDataParallel

from ..audit.model_state import frozen
from ..data.samples import has_items
from ..foreign import swapped
from ..models.host_experts import names_in_host_memory
from ..models.losses import OWN, losses_of, trains_trunk
from ..models.packed_model import PackedModelMixin
from ..models.registry import inner_model
from ..models.releases import dataloaders_of, prepare_again, undo_prepare
from ..models.untouched import gathers_weights
from .compare import Exact, precision_of
from .state import State, same_state
from .typed import Trainer


_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Attributes in which data loaders and collators keep a wrapped collator.
_INSIDE = ("collate_fn", "data_collator", "base_dataloader")


def against_other_rows(trainer: Trainer) -> str | None:
    """Why a model cannot compute rows and be [`as_before`], beside those of its training."""
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed runs forward and backward itself"
    if trainer.args.n_gpu > 1:
        return "DataParallel runs the model"
    # By hooks that `as_before` does not know.
    return "the optimizer updates weights in backward" if "lomo" in str(trainer.args.optim).lower() else None


def inside_ddp(wrapped: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside of DDP, with or without a compiler around it, or the model itself without DDP."""
    ddp = _ddp_in(wrapped)
    return wrapped if ddp is None else ddp.module


def _ddp_in(wrapped: torch.nn.Module) -> DistributedDataParallel | None:
    (inner,) = wrapped.children() if is_compiled_module(wrapped) else (wrapped,)
    return inner if isinstance(inner, DistributedDataParallel) else None


@contextmanager
def beside_ddp(wrapped: torch.nn.Module) -> Iterator[None]:
    """Let the trained parameters inside of DDP be others with the same memory meanwhile, if it searches for unused ones.

    DDP notes in a backward of its inner module too which parameters have a gradient, and adds this to its first step.
    A step without images, for example, would then wait for the gradients of a vision tower.
    """
    ddp = _ddp_in(wrapped)
    if ddp is None or not ddp.find_unused_parameters:
        yield
        return
    others = {x: torch.nn.Parameter(x.detach()) for x in wrapped.parameters() if x.requires_grad}
    # A parameter may have several places.
    places = [(y, name, x) for y in wrapped.modules() for name, x in y._parameters.items() if x in others]
    with ExitStack() as stack:
        for module, name, parameter in places:
            stack.enter_context(swapped(module._parameters, **{name: others[parameter]}))
        yield


def not_packing(model: torch.nn.Module) -> AbstractContextManager:
    """Compute padded batches as such meanwhile, also in the models that losses read."""
    modules = chain.from_iterable(one.modules() for one in _with_others(model))
    return swapped(*(vars(x) for x in modules if isinstance(x, PackedModelMixin)), packs_padding=False)


def _with_others(model: torch.nn.Module) -> list[torch.nn.Module]:
    """A model, and those that its losses read."""
    return [model, *(other for loss in losses_of(model) for other in loss.models)]


def without_cache(model: torch.nn.Module) -> AbstractContextManager:
    """Make no cache meanwhile. A padded batch would need kernels for it that training does not need."""
    return swapped(vars(inner_model(model).config.get_text_config()), use_cache=False)


def exact_for(model: torch.nn.Module, args: Any = None) -> Exact | None:
    """How to tell whether a difference is rounding: float32 follows 16 bits, and float64 follows float32.

    `args` are those of a Trainer, which runs autocast. Nothing follows products in float8.
    """
    precision = precision_of(model, args)
    if precision == "float8" or next(x for x in model.parameters() if x.is_floating_point()).dtype == torch.float64:
        return None
    dtype = torch.float32 if precision == "half" else torch.float64
    refused = "weights are sharded" if gathers_weights(model) else None
    if any(map(names_in_host_memory, _with_others(model))):
        # Wider ones may not fit there, and the system ends a process that has no memory.
        refused = "weights are in host memory"
    name, use = str(dtype).removeprefix("torch."), partial(in_dtype, model, dtype)
    epsilon = torch.finfo(torch.bfloat16 if precision == "half" else torch.float32).eps
    return Exact(
        name, use, lambda: (precision_of(model), exact_for(model)), partial(other_rounding, model, epsilon), refused
    )


@contextmanager
def other_rounding(model: torch.nn.Module, epsilon: float) -> Iterator[None]:
    """Change each number of the embeddings by a random relative amount of up to `epsilon` in every step meanwhile."""

    def change(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * (1 + epsilon * (2 * torch.rand_like(output, dtype=torch.float32) - 1)).to(output.dtype)

    with inner_model(model).get_input_embeddings().register_forward_hook(change):
        yield


@contextmanager
def in_dtype(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Compute in a wider dtype meanwhile, without autocast, with copies of weights, and without their gradients."""
    tensors: list[torch.Tensor] = [x for one in _with_others(model) for x in (*one.parameters(), *one.buffers())]
    narrow = [x for x in tensors if x.dtype in _FLOATS and x.dtype.itemsize < dtype.itemsize]
    before = [(tensor, tensor.data) for tensor in narrow]
    # A compiler is around what accelerate has prepared.
    (prepared,) = model.children() if is_compiled_module(model) else (model,)
    attributes = dict(vars(prepared))
    undo_prepare(prepared)
    undone = {name: value for name, value in attributes.items() if vars(prepared).get(name) is not value}
    try:
        for tensor, data in before:
            tensor.data = data.to(dtype)
        with frozen(model):
            yield
    finally:
        for tensor, data in before:
            tensor.data = data
        vars(prepared).update(undone)


def trunk_too(model: torch.nn.Module) -> AbstractContextManager:
    """Compute the trunk with gradients and the model's own losses meanwhile, if no loss trains the trunk."""
    losses = losses_of(model)
    if not losses or trains_trunk(losses):
        return nullcontext()
    return swapped(vars(inner_model(model)), losses=(*OWN, *losses))


@contextmanager
def same_trainer(trainer: Trainer, model: torch.nn.Module, loader: Any) -> Iterator[State]:
    """Put back what a Trainer, its callbacks, its modules and its data keep, and let the Trainer log nothing meanwhile."""
    datasets = [trainer.train_dataset, trainer.eval_dataset, getattr(loader, "dataset", None)]
    # Of a stream, samples that were read are handed on. FSDP keeps in modules what belongs to weights that it has gathered.
    others = [x for x in datasets if not isinstance(x, dict) and not has_items(x)]
    others += model.modules() if gathers_weights(model) else ()
    datasets = [x for x in datasets if not any(x is other for other in others)]
    kept = [*model.parameters(), *model.buffers()]
    roots = trainer, model, getattr(loader, "collate_fn", None)
    with same_state(*roots, data=datasets, kept=kept, but=others) as state, ExitStack() as stack:
        # A loss of the user may log, and one that is not finite is a finding.
        vars(trainer)["log"], trainer.args.logging_nan_inf_filter = say_nothing, False
        # Loaders of the evaluation are listed, so that accelerate can set their epochs.
        loaders = dataloaders_of(trainer.accelerator)
        stack.callback(loaders.__setitem__, slice(None), list(loaders))
        yield state


@contextmanager
def same_data(trainer: Trainer) -> Iterator[None]:
    """Put back random states on the CPU, and what datasets keep, for whoever reads samples before the training does."""
    evaluated = trainer.eval_dataset
    datasets = [trainer.train_dataset, *(evaluated.values() if isinstance(evaluated, dict) else [evaluated])]
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), same_state(data=filter(has_items, datasets)):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def without_autocast(trainer: Trainer, references: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Give reference models their own forward meanwhile. TRL has prepared them, and the policy only in `train`."""
    prepared = [model for model in references if undo_prepare(model)]
    try:
        yield
    finally:
        for model in prepared:
            prepare_again(trainer.accelerator, model)


def say_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def replace_collator(loader: Any, old: Any, new: Any) -> None:
    """Replace a collator in a data loader, directly or inside of wrappers."""
    for name in _INSIDE:
        inside = getattr(loader, name, None)
        if inside is old:
            setattr(loader, name, new)
        elif inside is not None:
            replace_collator(inside, old, new)


@contextmanager
def replaced_collator(loader: Any, old: Any, new: Any) -> Iterator[None]:
    replace_collator(loader, old, new)
    try:
        yield
    finally:
        replace_collator(loader, new, old)
