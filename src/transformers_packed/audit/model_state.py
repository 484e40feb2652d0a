"""The state of a model during an audit: training mode without randomness. The audit restores the original state."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from ..models.experts import isolates
from ..models.registry import transformers_model


@contextmanager
def audit_state(model: torch.nn.Module, notes: list[str]) -> Iterator[None]:
    """Prepare `model` for an audit, and restore its state afterwards.

    Some models use other kernels and gradient checkpointing only in training, so the model is in training mode,
    without a cache (as under `Trainer`) and with every dropout set to 0. Gradients are computed for embeddings only.
    Experts that are not this package's run as `batched_mm` if possible: in grouped matrix products the shapes depend on
    the other documents, which changes the last bits and sometimes the routing.
    """
    modules = list(model.modules())
    configs = _configs(modules)
    # Any state that a forward stores in a module or a configuration (mode, cached lengths, ...) is an attribute.
    attributes = [(vars(item), dict(vars(item))) for item in (*modules, *configs)]
    buffers = [(m._buffers, dict(m._buffers), {k: _copy(v) for k, v in m._buffers.items()}) for m in modules]
    parameters = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    cuda = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    was_training = model.training
    with torch.random.fork_rng(devices=cuda):
        try:
            # Call `train` only if the mode changes, because some models switch kernels in it.
            if not was_training:
                model.train()
            for module in modules:
                module.training = True
                _silence(vars(module))
                if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                    module.p = 0.0
                elif isinstance(module, torch.nn.modules.batchnorm._NormBase):
                    module.training = False
            for config in configs:
                _silence(vars(config))
            inner = transformers_model(model)
            if hasattr(inner.config, "use_cache"):
                inner.config.use_cache = False
            _batch_experts(inner, notes)
            for parameter, _ in parameters:
                parameter.requires_grad_(False)
            yield
        finally:
            if not was_training:
                model.eval()
            for parameter, requires_grad in parameters:
                parameter.requires_grad_(requires_grad)
            for current, before in attributes:
                if current.keys() != before.keys() or any(current[name] is not before[name] for name in before):
                    current.clear()
                    current.update(before)
            for current, before, contents in buffers:
                current.clear()
                current.update(before)
                for name, content in contents.items():
                    if content is not None and not torch.equal(content, before[name]):
                        before[name].data.copy_(content)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None or tensor.is_meta else tensor.detach().clone()


def _configs(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Return every configuration of the modules and its nested configurations, without duplicates."""
    found = {}
    waiting = [vars(module).get("config") for module in modules]
    while waiting:
        config = waiting.pop()
        if isinstance(config, transformers.PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting += vars(config).values()
    return list(found.values())


def _silence(values: dict[str, Any]) -> None:
    """Set dropout, layer drop and router jitter to 0 in the attributes of a module or configuration."""
    for name, value in values.items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            values[name] = 0.0


def _batch_experts(model: torch.nn.Module, notes: list[str]) -> None:
    before = getattr(model.config, "_experts_implementation", None)
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
    if any(config._experts_implementation == "batched_mm" for config in _configs(model.modules())):
        notes.append(f"experts ran as batched_mm (the model's setting: {before})")
