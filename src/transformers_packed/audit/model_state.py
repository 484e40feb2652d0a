"""The state of a model during an audit: training mode without randomness. The audit restores the original state."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from ..foreign import experts_of, swapped
from ..models.experts import isolates
from ..models.registry import inner_model


# Parts of the names of rates of dropout, layer drop, router jitter and noise.
_RANDOM = ("drop", "jitter", "noise")
# Standard deviation of the values of weights that would be zero.
_OFF_ZERO = 0.02


@contextmanager
def audit_state(model: torch.nn.Module, notes: list[str]) -> Iterator[None]:
    """Prepare `model` for an audit of leaks, and restore its state afterwards.

    The model is [`silenced`], and gradients are computed for embeddings only.
    Experts that are not this package's run as `batched_mm` if possible: in grouped matrix products the shapes depend on
    the other documents, which changes the last bits and sometimes the routing.
    """
    with silenced(model), frozen(model):
        _batch_experts(inner_model(model), notes)
        yield


@contextmanager
def silenced(model: torch.nn.Module) -> Iterator[None]:
    """Prepare `model` for training without randomness, and restore its state afterwards.

    Some models use other kernels and gradient checkpointing only in training, so the model is in training mode,
    without a cache (as under `Trainer`) and with every dropout set to 0.
    """
    inner = inner_model(model)
    # Some models switch kernels when their mode changes, which their attributes tell.
    with _same_attributes(model), as_before(model), quiet(model):
        for module in model.modules():
            # Batch norms would mix documents.
            module.training = not isinstance(module, _NormBase)
        if hasattr(inner.config, "use_cache"):
            inner.config.use_cache = False
        yield


@contextmanager
def as_before(model: torch.nn.Module) -> Iterator[None]:
    """Prepare the model for training, and restore gradients, buffers, modes and random states afterwards.

    Post-accumulate hooks of gradients do not run meanwhile: some update the weight. Other hooks of gradients run. A buffer
    that a forward replaces stays replaced, because attributes such as a cached length belong to it.
    """
    states = random.getstate(), np.random.get_state()
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not buffer.is_meta]
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    # Autograd keeps the dictionary of a parameter that has had one.
    hooked = [(hooks, dict(hooks)) for x in model.parameters() if (hooks := x._post_accumulate_grad_hooks)]
    devices = sorted({x.device.index for x in model.parameters() if x.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            model.zero_grad()
            for hooks, _ in hooked:
                hooks.clear()
            model.train()
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for hooks, kept in hooked:
                hooks.update(kept)
            for buffer, content in buffers:
                if not torch.equal(buffer, content):
                    buffer.data.copy_(content)
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def quiet(model: torch.nn.Module) -> Iterator[None]:
    """Turn off dropout and noise: layers of dropout, and the rates that modules and configurations keep as attributes."""
    with ExitStack() as stack:
        for item in (*model.modules(), *_configs(model)):
            rates = [name for name, value in vars(item).items() if _is_rate(item, name, value)]
            stack.enter_context(swapped(vars(item), **dict.fromkeys(rates, 0.0)))
        yield


def _is_rate(item: Any, name: str, value: Any) -> bool:
    if isinstance(item, _DropoutNd) and name == "p":
        return True
    # Integers may be sizes, but NEFTune's noise is often 5.
    is_number = isinstance(value, float) or (name == "neftune_noise_alpha" and value is not None)
    return is_number and any(part in name for part in _RANDOM)


def _has_memory(x: torch.Tensor) -> bool:
    """Whether its values may be read, unlike those on the meta device and those of storages that FSDP1 has emptied."""
    return not x.is_meta and x.untyped_storage().nbytes() >= x.nbytes


@contextmanager
def off_zero(model: torch.nn.Module) -> Iterator[None]:
    """Give trained weights that are all zero small values meanwhile.

    Adapters begin at zero, so that they change nothing before the first step. Until then, no gradient passes through them,
    and what they mix would show only later.
    """
    plain = (x for x in model.parameters() if type(x) is torch.nn.Parameter and x.requires_grad and _has_memory(x))
    zeros = [x for x in plain if x.is_floating_point() and x.dtype.itemsize > 1 and not x.any()]
    try:
        with torch.no_grad():
            for x in zeros:
                x.normal_(std=_OFF_ZERO, generator=torch.Generator(x.device).manual_seed(0))
        # An autocast around this keeps what it has cast, whatever the weights are since.
        torch.clear_autocast_cache()
        yield
    finally:
        with torch.no_grad():
            for x in zeros:
                x.zero_()
        torch.clear_autocast_cache()


@contextmanager
def _same_attributes(model: torch.nn.Module) -> Iterator[None]:
    """Restore what a forward stores in modules and configurations, such as cached lengths and other buffers."""
    modules = list(model.modules())
    namespaces = [vars(item) for item in (*modules, *_configs(model))] + [module._buffers for module in modules]
    entries = [(current, dict(current)) for current in namespaces]
    try:
        yield
    finally:
        for current, before in entries:
            if current.keys() != before.keys() or any(current[name] is not before[name] for name in before):
                current.clear()
                current.update(before)


@contextmanager
def frozen(model: torch.nn.Module) -> Iterator[None]:
    """Compute no gradients of parameters meanwhile."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _configs(model: torch.nn.Module) -> list[Any]:
    """Return every configuration of the modules in `model` and its nested configurations, without duplicates."""
    found = {}
    waiting = [vars(module).get("config") for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, transformers.PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += vars(config).values()
    return list(found.values())


def _batch_experts(model: transformers.PreTrainedModel, notes: list[str]) -> None:
    before = experts_of(model.config)
    if not any("expert" in name for name, _ in model.named_modules()) or before == "batched_mm":
        return
    experts = [module for module in model.modules() if hasattr(module, "is_concatenated")]
    if experts and all(map(isolates, experts)):
        return
    try:
        model.set_experts_implementation("batched_mm")
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        notes.append(f"experts kept their implementation, so their rounding counts as noise: {error}")
        return
    if any(experts_of(config) == "batched_mm" for config in _configs(model)):
        notes.append(f"experts ran as batched_mm (the model's setting: {before})")
