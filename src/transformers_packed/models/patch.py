"""`patch_model`: let a model that exists already keep the documents of a packed row apart. `unpatch_model` undoes it.

A module becomes ours when its `__class__` is set (see `base`), so parameters, buffers, adapters, hooks and the
optimizer's references stay what they are. What stands in the way is looked for first: a model is changed as a whole or
not at all.
"""

from collections.abc import Callable
from functools import partial, update_wrapper
from inspect import getattr_static, signature
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from transformers.utils import logging

from ..errors import input_error
from .auto import FAMILIES, check_transformers, modeling_module
from .base import ONLY_FASTER, REPLACEMENTS, become, has_our_classes, transformers_model
from .families import ISOLATED, MIXERS, REFUSED, UNPACKED


logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=torch.nn.Module)


def patch_model(model: Model) -> Model:
    """Make a live model keep the documents of a packed row apart, in place.

    Every built-in module for which this package has a class becomes that class; no tensor is copied, moved or
    replaced. Qwen3-Next, Qwen3.5 and Qwen3.5-MoE have classes written by hand, the other families of Transformers that
    do not isolate documents get theirs by the tables in `models/families.py`. A causal language model that keeps them
    apart by itself, by position ids that restart and without a cache, stays as it is.

    The model may be inside another one (PEFT, `torch.compile`, DistributedDataParallel, a class of your own), have
    gradient checkpointing on, and be spread by accelerate's `device_map`. Patching again changes nothing.

    Patch a model before what takes hold of its layers or its forward: FSDP, `Accelerator.prepare` with mixed precision
    (which `Trainer` calls in `train`), and libraries that set a forward of their own.

    Args:
        model (`torch.nn.Module`):
            The model, on any device and in any dtype.

    Returns:
        `torch.nn.Module`: the same object.

    Raises:
        `ValueError`: the model is of a family that cannot be packed or was never measured (see [`audit_model`]), is
        sharded by FSDP, or has a module that cannot be converted: one of a subclass or a copy of the built-in class,
        or one with a `forward` of its own. Nothing was changed then.
        `ImportError`: the installed Transformers lacks something that our models use.

    Example:

    ```python
    >>> import torch
    >>> from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    >>> from transformers_packed import patch_model
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> model = patch_model(Qwen3_5ForCausalLM(config))
    >>> row = torch.randint(0, 64, (1, 7))
    >>> model(input_ids=row, cu_seqlens=torch.tensor([0, 3, 7])).logits.shape  # two documents
    torch.Size([1, 7, 64])

    ```
    """
    check_transformers("patch_model")
    for family in FAMILIES:
        modeling_module(family)
    if isinstance(model, torch.nn.Module):
        _announce_families(model)
    ours = tuple(REPLACEMENTS.values())
    names = {cls.__name__ for cls in ours if cls not in ONLY_FASTER}
    _switch(
        "patch_model",
        model,
        REPLACEMENTS,
        # Copies of a built-in class, as libraries generate them, are told by the name.
        related=lambda cls: not issubclass(cls, ours) and any(base.__name__ in names for base in cls.__mro__),
    )
    if not has_our_classes(model):
        _check_isolated(model)
    return model


def _announce_families(model: torch.nn.Module) -> None:
    """Have our classes made for the families that `model` is of."""
    # These bring triton along, which importing this package may not.
    from transformers import PreTrainedModel

    from .mixers import announce, families_of, family_of, packed_class, text_model

    families = families_of(model) & {*MIXERS, *UNPACKED}
    for family in families:
        announce(family)
    if not families:
        return
    # A model around one of them, such as a vision-language model, masks targets and makes positions.
    texts = tuple(text_model(family) for family in families)
    for outer in model.modules():
        if isinstance(outer, PreTrainedModel) and type(outer) not in REPLACEMENTS and family_of(type(outer)):
            # Not wrappers around a decoder, which hand on whatever they are given.
            if "input_ids" in signature(type(outer).forward).parameters and any(
                isinstance(module, texts) for module in outer.modules()
            ):
                packed_class(family_of(type(outer)), type(outer).__name__)


def _check_isolated(model: torch.nn.Module) -> None:
    """Raise unless `model` keeps documents apart without us."""
    from .mixers import family_of

    got, fix = type(model).__name__, "Only models of Transformers can be patched."
    outermost = transformers_model(model)
    if outermost is not None:
        families = [family for family in map(family_of, type(outermost).__mro__) if family]
        if any(family in ISOLATED for family in families):
            if getattr(outermost.config.get_text_config(), "use_cache", False):
                logger.warning_once(
                    f"patch_model: {type(outermost).__name__} keeps documents apart by its masks, and beside a cache it "
                    "makes them without regard to documents. Trainer turns the cache off; elsewhere pass use_cache=False."
                )
            return
        got = type(outermost).__name__
        fix = "Measure with audit_model whether it keeps documents apart by itself; if so, it needs no patch."
        reasons = [REFUSED[family] for family in families if family in REFUSED]
        if reasons:
            got, fix = f"{got}: {reasons[0]}", "Use padded batches."
    raise input_error("a causal language model of a family that can be packed", got, fix)


def unpatch_model(model: Model) -> Model:
    """Undo [`patch_model`]: every module of ours becomes the built-in one again, in place, and behaves as before.

    That holds for models that were built as ours too, by `register` or directly: they become built-in models. A model
    without a module of ours stays as it is.

    Args:
        model (`torch.nn.Module`):
            The model.

    Returns:
        `torch.nn.Module`: the same object.

    Raises:
        `ValueError`: the model is sharded by FSDP, or has a module of ours that cannot be converted: one of a
        subclass, or one with a `forward` of its own. Nothing was changed then.

    Example:

    ```python
    >>> from transformers import Qwen3_5TextConfig
    >>> from transformers_packed import unpatch_model
    >>> from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel
    >>> model = Qwen3_5TextModel(Qwen3_5TextConfig(vocab_size=64, hidden_size=32, num_hidden_layers=4))
    >>> type(unpatch_model(model)).__module__
    'transformers.models.qwen3_5.modeling_qwen3_5'

    ```
    """
    classes = {ours: builtin for builtin, ours in REPLACEMENTS.items()}
    _switch("unpatch_model", model, classes, related=lambda cls: issubclass(cls, tuple(classes)))
    return model


def _switch(call: str, model: torch.nn.Module, classes: dict[type, type], *, related: Callable[[type], bool]) -> None:
    """Give every module of a class in `classes` the class found there, or raise with the model unchanged.

    `related` tells the classes of modules that would have to be switched too; those not in `classes` are an error.
    """
    if not isinstance(model, torch.nn.Module):
        raise input_error("a torch.nn.Module", type(model).__name__, "Pass the model itself.")
    modules = [(name or "(the model itself)", module) for name, module in model.named_modules()]
    affected = [(name, module) for name, module in modules if type(module) in classes or related(type(module))]
    if affected:
        for name, module in modules:
            if any(base.__module__.startswith("torch.distributed.fsdp") for base in type(module).__mro__):
                raise input_error(
                    "a model that is not sharded yet",
                    f"module {name} under FSDP ({type(module).__name__})",
                    f"Call {call} before sharding.",
                )
    changes = []
    for name, module in affected:
        old = type(module)
        if old not in classes:
            raise input_error(
                "modules of the classes of Transformers themselves",
                f"module {name} of a subclass or copy of one, {old.__module__}.{old.__qualname__}",
                f"Load the model without what put that class there, or derive the class from ours, in {__package__}.",
            )
        try:
            attributes = _attributes(call, name, module, classes[old])
        except ValueError:
            if classes[old] not in ONLY_FASTER:
                raise
        else:
            changes.append((module, classes[old], attributes))
    for module, cls, attributes in changes:
        become(module, cls)
        vars(module).update(attributes)


def _attributes(call: str, name: str, module: torch.nn.Module, cls: type) -> dict[str, Any]:
    """What has to change in the module's own attributes with its class: a `forward` that is bound to the old one.

    accelerate's hooks set a `forward` that calls a bound `_old_forward`; without the hook that remains as `forward`.
    TRL's trainers set one that runs the base model under a head of its own, or else what was bound.
    """
    own, old = vars(module), type(module)
    for key, value in own.items():
        replaced = getattr_static(old, key, None) is not getattr_static(cls, key, None)
        if replaced and callable(value) and key != "forward":
            raise _not_ours(call, name, old, key)
    if "forward" not in own or old.forward is cls.forward:
        return {}
    wrapper = own["forward"]
    if (rebound := _rebound(wrapper, module, cls)) is not None:
        return {"forward": rebound}
    hooked = isinstance(wrapper, partial) and getattr(wrapper.func, "__module__", None) == "accelerate.hooks"
    bound = own.get("_old_forward") if hooked else wrapper
    if not isinstance(bound, MethodType) or bound.__self__ is not module or bound.__func__ is not old.forward:
        raise _not_ours(call, name, old, "forward")
    bound = MethodType(cls.forward, module)
    if not hooked:
        return {"forward": bound}
    return {
        "forward": update_wrapper(partial(wrapper.func, *wrapper.args, **wrapper.keywords), bound),
        "_old_forward": bound,
    }


def _rebound(wrapper: Any, module: torch.nn.Module, cls: type) -> MethodType | None:
    """TRL's `forward` of `module` with that of `cls` inside, or `None` if `wrapper` is not TRL's."""
    function = getattr(wrapper, "__func__", None)
    if not isinstance(function, FunctionType) or not function.__globals__.get("__name__", "").startswith("trl."):
        return None
    cells = function.__closure__ or ()
    old = MethodType(type(module).forward, module)
    if not any(cell.cell_contents == old for cell in cells):
        return None
    closure = tuple(CellType(MethodType(cls.forward, module)) if cell.cell_contents == old else cell for cell in cells)
    rebound = FunctionType(function.__code__, function.__globals__, argdefs=function.__defaults__, closure=closure)
    rebound.__kwdefaults__ = function.__kwdefaults__
    return MethodType(update_wrapper(rebound, cls.forward), module)


def _not_ours(call: str, name: str, cls: type, key: str) -> ValueError:
    return input_error(
        f"modules that run the {key} of their class",
        f"module {name} ({cls.__name__}) with a {key} of its own",
        f"Call {call} before what set it (Accelerator.prepare, tensor parallelism, Liger, Unsloth, kernels), or "
        "delete the attribute from the module.",
    )
