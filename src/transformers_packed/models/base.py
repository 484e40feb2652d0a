"""How our classes take the place of Transformers' own: by class, never by layout.

Each of our classes carries the name of the built-in class that it derives from, adds methods, and adds no parameter
and no attribute. So a built-in module becomes ours when its `__class__` is set, and weights, plans, adapters and hooks
stay as they are. `convert` does that for a whole model: models of ours call it when they are built. `patch_model` does
it to models that exist.
"""

from typing import Any

import torch
import transformers
from transformers.utils import logging
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY


logger = logging.get_logger(__name__)

REPLACEMENTS: dict[type, type] = {}


def replaces_builtin(cls: type) -> type:
    """Class decorator: `cls` stands in for the built-in class of the same name that it derives from."""
    (builtin,) = (base for base in cls.__bases__ if base.__name__ == cls.__name__)
    # A modular file is the source of a modeling file; importing it must not put its classes in their place.
    if ".modular_" not in cls.__module__:
        REPLACEMENTS[builtin] = cls
    return cls


def transformers_model(model: torch.nn.Module) -> torch.nn.Module | None:
    """The outermost model of Transformers inside `model` (PEFT, DDP, `torch.compile`), if there is one."""
    return next((module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)), None)


def has_our_classes(model: torch.nn.Module) -> bool:
    """Whether a module of `model` is of a class in `REPLACEMENTS` or one derived from it."""
    ours = tuple(REPLACEMENTS.values())
    return any(isinstance(module, ours) for module in model.modules())


def become(module: torch.nn.Module, cls: type) -> None:
    """Set the module's class, one of a pair in `REPLACEMENTS`, and what Transformers keeps per class of a model."""
    module.__class__ = cls
    # What a model can record is looked up by its class; an entry that is there already stays.
    if hasattr(module, "_can_record_outputs") and not _CAN_RECORD_REGISTRY.get(module):
        _CAN_RECORD_REGISTRY[module] = module._can_record_outputs


def convert(model: torch.nn.Module) -> None:
    """Turn every built-in module below `model` for which we have a class into ours, in place."""
    for module in model.modules():
        ours = REPLACEMENTS.get(type(module))
        if ours is not None:
            become(module, ours)


class PackedModelMixin:
    """What every model class of ours adds to the built-in one: its layers become ours when it is built."""

    # The built-in classes do not say so, hence only `set_attn_implementation` on a model of ours gets there.
    _supports_flex_attn = True

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        convert(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # Trainer's use_liger_kernel gets here. What Liger does to norms and MLPs looks at each token by itself.
        module = getattr(getattr(value, "__func__", None), "__module__", None) or ""
        if name == "forward" and module.startswith("liger_kernel."):
            logger.warning_once(
                f"{type(self).__name__} keeps its forward: that of Liger's fused_linear_cross_entropy would not keep "
                "targets within their documents."
            )
            return
        super().__setattr__(name, value)

    @classmethod
    def is_custom_code(cls) -> bool:
        # The weights are the built-in's, so Transformers' weight conversions and initialisation apply as they stand.
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # The check reads the source of the class's module, so it has to be the built-in class's.
        builtin = next(base for base in cls.__mro__ if base.__module__.startswith("transformers."))
        return builtin._can_set_experts_implementation()
