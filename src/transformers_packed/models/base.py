"""How our classes take the place of Transformers' own: by class, never by layout.

Each of our classes carries the name of the built-in class that it derives from, adds methods, and adds no parameter
and no attribute. So a built-in module becomes ours when its `__class__` is set, and weights, plans, adapters and hooks
stay as they are. `convert` does that for a whole model: models of ours call it when they are built. `patch_model` does
it to models that exist.
"""

from types import FunctionType
from typing import Any

import torch
import transformers
from transformers.utils import logging
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY


logger = logging.get_logger(__name__)

REPLACEMENTS: dict[type, type] = {}
# Those of them that are only faster: documents are kept apart without them.
ONLY_FASTER: set[type] = set()
# Where a module keeps what hooks into it, and torch what hooks into all of them.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = [getattr(torch.nn.modules.module, f"_global{name}") for name in _HOOKS]
# Parameters that are nothing but their values. Of FSDP1 they are views of its own.
_PLAIN = (torch.nn.Parameter, torch.Tensor)


def replaces_builtin(cls: type) -> type:
    """Class decorator: `cls` stands in for the built-in class of the same name that it derives from."""
    (builtin,) = (base for base in cls.__bases__ if base.__name__ == cls.__name__)
    for name, method in vars(cls).items():
        # What a method returns differs between families that share its code; tools ask for it.
        returned = getattr(getattr(builtin, name, None), "__annotations__", {}).get("return")
        if isinstance(method, FunctionType) and returned is not None:
            method.__annotations__.setdefault("return", returned)
    # A modular file is the source of a modeling file; importing it must not put its classes in their place.
    if ".modular_" not in cls.__module__:
        REPLACEMENTS[builtin] = cls
    return cls


def only_faster(cls: type) -> type:
    """Class decorator: as [`replaces_builtin`], but a module that cannot become `cls` may stay what it is."""
    # Another library, such as Liger, may have put a class of its own in the place of the built-in one: that one stays.
    if any(base.__name__ == cls.__name__ for base in cls.__bases__):
        ONLY_FASTER.add(replaces_builtin(cls))
    return cls


def transformers_model(model: torch.nn.Module) -> torch.nn.Module | None:
    """The outermost model of Transformers inside `model` (PEFT, DDP, `torch.compile`), if there is one."""
    return next((module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)), None)


def has_our_classes(model: torch.nn.Module) -> bool:
    """Whether a module of `model` is of a class in `REPLACEMENTS` that keeps documents apart, or one derived from it."""
    ours = tuple(set(REPLACEMENTS.values()) - ONLY_FASTER)
    return any(isinstance(module, ours) for module in model.modules())


def become(module: torch.nn.Module, cls: type) -> None:
    """Set the module's class, one of a pair in `REPLACEMENTS`, and what Transformers keeps per class of a model."""
    module.__class__ = cls
    # What a model can record is looked up by its class; an entry that is there already stays.
    if hasattr(module, "_can_record_outputs") and not _CAN_RECORD_REGISTRY.get(module):
        _CAN_RECORD_REGISTRY[module] = module._can_record_outputs


def hooks_of(module: torch.nn.Module) -> list:
    """What is called beside the module's forward: its own hooks, and those that torch calls for every module."""
    state = vars(module)
    return [hook for hooks in [*(state[name] for name in _HOOKS), *_GLOBAL_HOOKS] for hook in hooks.values()]


def is_untouched(module: torch.nn.Module, *classes: type) -> bool:
    """Whether a call of the module does what one of `classes` does with plain parameters of its own, and nothing else.

    A fused op that computes the same may take the module's place only then. What hooks into, wraps, replaces,
    parametrises or shards a module shows: as a hook, a `forward` of its own (accelerate, tensor parallelism, kernels),
    a compiled call, another class (adapters, parametrizations, FSDP2, quantization) or parameters of another type.
    """
    # Asked hundreds of times in a step, so without lists.
    state = vars(module)
    if type(module) not in classes or "forward" in state or module._compiled_call_impl is not None:
        return False
    for name in _HOOKS:
        if state[name]:
            return False
    for hooks in _GLOBAL_HOOKS:
        if hooks:
            return False
    for parameter in state["_parameters"].values():
        if parameter is not None and type(parameter) not in _PLAIN:
            return False
    return True


def is_bare_linear(module: torch.nn.Module) -> bool:
    """Whether the weight and the bias of this linear layer say all that it does."""
    return is_untouched(module, torch.nn.Linear)


def is_sharded_linear(module: torch.nn.Module) -> bool:
    """Whether the module is a linear layer that nothing but FSDP2 hooks into, sharded by itself."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    state = vars(module)
    return (
        isinstance(module, FSDPModule)
        and torch.nn.Linear in type(module).__bases__
        and "forward" not in state
        and len(state["_forward_hooks"]) == len(state["_forward_pre_hooks"]) == 1
        and not (state["_backward_hooks"] or state["_backward_pre_hooks"])
    )


def has_only_a_weight(module: torch.nn.Module) -> bool:
    """Whether the module is a [`is_bare_linear`] without a bias."""
    return is_bare_linear(module) and module.bias is None


def weight_to_fuse(layer: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor | None:
    """The weight of this linear layer where the op before it computes the layer too, which saves memory on a GPU."""
    # The ops bring triton along, which importing this package may not.
    from ..ops.backends.triton import on_gpu

    return layer.weight if on_gpu(hidden_states) and has_only_a_weight(layer) else None


def project(hidden_states: torch.Tensor, *layers: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """What each of these linear layers makes of `hidden_states`, in one step of autograd where that is possible."""
    from ..ops.linear import can_share_input, shared_input_linears

    if not torch.compiler.is_compiling() and all(map(has_only_a_weight, layers)):
        weights = [layer.weight for layer in layers]
        if can_share_input(hidden_states, weights):
            return shared_input_linears(hidden_states, *weights)
    return tuple(layer(hidden_states) for layer in layers)


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

    @property
    def packs_padding(self) -> bool:
        """Whether a padded batch runs as a packed row where no cache is involved; set on a model, it holds for its parts."""
        return vars(self).get("_packs_padding", True)

    @packs_padding.setter
    def packs_padding(self, value: bool) -> None:
        for module in self.modules():
            if isinstance(module, PackedModelMixin):
                vars(module)["_packs_padding"] = value

    @classmethod
    def is_custom_code(cls) -> bool:
        # The weights are the built-in's, so Transformers' weight conversions and initialisation apply as they stand.
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # The check reads the source of the class's module, so it has to be the built-in class's.
        builtin = next(base for base in cls.__mro__ if base.__module__.startswith("transformers."))
        return builtin._can_set_experts_implementation()
