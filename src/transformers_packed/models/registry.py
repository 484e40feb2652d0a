"""Replace Transformers' classes with ours, without changing the layout of a model.

Each of our classes has the name of the stock class that it derives from. It adds methods, but no parameters and no
attributes. Setting its `__class__` therefore converts a stock module, and weights, plans, adapters and hooks stay
unchanged. `register` makes Transformers' Auto classes build our models, and `patch_model` converts an existing model.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from copy import deepcopy
from importlib import import_module
from inspect import getattr_static
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from ..errors import input_error
from .adapters import save_builtin_classes
from .families import OWN, families_of_class, family_of
from .family import Isolated, Own, Refused
from .inputs import with_boundaries
from .quantization import QuantizationMixin
from .releases import (
    check_names,
    check_signatures,
    forward_inside_hooks,
    forward_inside_trl,
    has_hooks,
    is_trl_forward,
    record_outputs,
    registered_classes,
    supports_other_families,
    with_hooks,
)
from .trl_head import beside_trl, use_our_products


logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=torch.nn.Module)

# Our class for each stock class.
REPLACEMENTS: dict[type, type] = {}
# Our classes that only speed up a model, which keeps documents apart without them.
FAST_PATHS: set[type] = set()


def replaces_builtin(cls: type) -> type:
    """Class decorator: `cls` replaces the stock class of the same name that it derives from.

    A class with a method `forward_with_boundaries` gets a forward with the stock signature that calls this method.
    """
    (builtin,) = (base for base in cls.__bases__ if base.__name__ == cls.__name__)
    if hasattr(cls, "forward_with_boundaries"):
        cls.forward = with_boundaries(cls, builtin)
    for name, method in vars(cls).items():
        # Families that share a method's code differ in its return annotation, which tools read.
        returned = getattr(getattr(builtin, name, None), "__annotations__", {}).get("return")
        if isinstance(method, FunctionType) and returned is not None:
            method.__annotations__.setdefault("return", returned)
    # A modular file is only the source of a modeling file, so importing it must not register its classes.
    if ".modular_" not in cls.__module__:
        REPLACEMENTS[builtin] = cls
    return cls


def fast_path(cls: type) -> type:
    """Class decorator: like [`replaces_builtin`], but a module that cannot become `cls` may keep its class."""
    # Keep a class that another library, such as Liger, has put in place of the stock one.
    if any(base.__name__ == cls.__name__ for base in cls.__bases__):
        FAST_PATHS.add(replaces_builtin(cls))
    return cls


def transformers_model(model: torch.nn.Module | None) -> "transformers.PreTrainedModel | None":
    """Return the outermost Transformers model inside `model` (PEFT, DDP, `torch.compile`), if there is one."""
    modules = () if model is None else model.modules()
    return next((module for module in modules if isinstance(module, transformers.PreTrainedModel)), None)


def inner_model(model: torch.nn.Module | None) -> "transformers.PreTrainedModel":
    """Return [`transformers_model`] of a model that has one, as checks have found."""
    inner = transformers_model(model)
    assert inner is not None, type(model).__name__
    return inner


def has_our_classes(model: torch.nn.Module) -> bool:
    """Whether `model` has classes of ours that keep documents apart, and no stock module that such a class replaces.

    A model with both is not ours: its stock part may train on targets across documents, or take documents for images.
    """
    apart = tuple(set(REPLACEMENTS.values()) - FAST_PATHS)
    if not any(isinstance(module, apart) for module in model.modules()):
        return False
    _generic().announce_families_of(model)
    replaced = tuple(builtin for builtin, ours in REPLACEMENTS.items() if ours not in FAST_PATHS)
    apart = tuple(map(REPLACEMENTS.__getitem__, replaced))
    return not any(isinstance(module, replaced) and not isinstance(module, apart) for module in model.modules())


def become(module: torch.nn.Module, cls: type) -> None:
    """Set the module's class to the other class of its pair in `REPLACEMENTS`, and update Transformers' registry."""
    save_builtin_classes()
    module.__class__ = cls
    record_outputs(module)


def convert(model: torch.nn.Module) -> None:
    """Convert every stock module in `model` with a replacement to our class, in place."""
    for module in model.modules():
        ours = REPLACEMENTS.get(type(module))
        if ours is not None:
            become(module, ours)


class PackedModelMixin(QuantizationMixin):
    """Base of all our model classes. Converts the layers of a model to our classes when the model is created."""

    # The stock classes do not declare this, so only our models accept flex_attention in `set_attn_implementation`.
    _supports_flex_attn = True

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        convert(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # With use_liger_kernel, Trainer assigns Liger's forward to a registered model in `train`, and this is the only
        # place to intercept it. Liger's norms and MLPs may stay, because they process each token separately.
        module = getattr(getattr(value, "__func__", None), "__module__", None) or ""
        if name == "forward" and module.startswith("liger_kernel."):
            logger.warning_once(
                f"{type(self).__name__} keeps its forward: Liger's fused_linear_cross_entropy ignores document "
                "boundaries and would train on targets across them."
            )
            return
        super().__setattr__(name, value)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights by the names of this model, or by those that `save_pretrained` writes.

        The two differ for experts and for the language model of a composite checkpoint. `Trainer` resumes with this
        method and `strict=False`, which would leave these weights out with no more than a warning.
        """
        own = self.state_dict().keys()
        if not state_dict.keys() <= own:
            state_dict = self._from_saved_names(state_dict, own)
        return super().load_state_dict(state_dict, strict, assign)

    def _from_saved_names(self, state_dict: Mapping[str, Any], own: Set[str]) -> Mapping[str, Any]:
        """`state_dict` by the names of this model, converted as `from_pretrained` does; unknown names stay."""
        parameters = {name: x.to("meta") for name, x in self.named_parameters()}
        saved = revert_weight_conversion(self, parameters).keys()
        if not state_dict.keys() & (saved - own):
            return state_dict
        if missing := sorted(saved - state_dict.keys()):
            fix = "Save checkpoints in one file, or under FSDP, which keeps the names of the model."
            raise input_error("all weights that save_pretrained wrote", f"a part of them, without {missing[0]}", fix)
        weights = {name: x for name, x in state_dict.items() if name in saved or name in own}
        loaded = type(self).from_pretrained(None, config=deepcopy(self.config), state_dict=weights, dtype=self.dtype)
        return loaded.state_dict() | {name: x for name, x in state_dict.items() if name not in weights}

    @property
    def packs_padding(self) -> bool:
        """Whether padded batches run as packed rows if no cache is used. Setting it also sets it on all submodels."""
        return vars(self).get("_packs_padding", True)

    @packs_padding.setter
    def packs_padding(self, value: bool) -> None:
        self._set_everywhere("_packs_padding", value)

    @property
    def shares_prompts(self) -> bool:
        """Whether documents of a padded batch share the prompts that they start with. Set for all submodels too."""
        return vars(self).get("_shares_prompts", False)

    @shares_prompts.setter
    def shares_prompts(self, value: bool) -> None:
        self._set_everywhere("_shares_prompts", value)

    def _set_everywhere(self, name: str, value: bool) -> None:
        for module in self.modules():
            if isinstance(module, PackedModelMixin):
                vars(module)[name] = value

    @classmethod
    def is_custom_code(cls) -> bool:
        # The weights are those of the stock class, so Transformers' weight conversion and initialization apply.
        return False

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # The check reads the source of the class's module, so it needs the stock class.
        return _builtin(cls)._can_set_experts_implementation()

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        if isinstance(family_of(type(self)).apart, Own):
            requested_experts = _experts().NAME if requested_experts is None else requested_experts
        return super().get_correct_experts_implementation(requested_experts)


def _builtin(cls: type) -> type:
    """Return the stock class that one of our model classes derives from."""
    return next(base for base in cls.__mro__ if base.__module__.startswith("transformers."))


def register() -> None:
    """Make `AutoModel`, `AutoModelForCausalLM` and the other Auto classes build this package's models.

    After this call, `from_pretrained` and `from_config` return our classes for Qwen3-Next, Qwen3.5, Qwen3.5-MoE and all
    other families of `models/families.py` that mix documents. Our classes have the same names, parameters and results
    as the stock classes, and they keep the documents of a packed row apart. A stock class that creates its text model
    by an Auto class gets a model of ours around it too, also if you call the class directly. Registering again has no
    effect.

    Raises:
        `ImportError`: the installed Transformers lacks an API that our models use.
        `ValueError`: another class is already registered for one of the configurations.

    Example:

    ```python
    >>> import transformers_packed
    >>> from transformers import AutoModelForCausalLM, Qwen3_5TextConfig
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> with transformers_packed.registered():
    ...     type(AutoModelForCausalLM.from_config(config)).__module__
    'transformers_packed.models.qwen3_5.modeling_qwen3_5'

    ```
    """
    check_transformers()
    entries = list(_entries())
    for classes, config, ours in entries:
        current = classes.get(config, ours)
        if current is not ours:
            got = f"{current.__module__}.{current.__name__}"
            raise input_error(
                f"no other class registered for {config.__name__}", got, "Remove it before calling register()."
            )
    for classes, config, ours in entries:
        # `register` of Auto classes ignores the configurations of Transformers itself before 5.20.
        classes[config] = ours
    if not _hooks:
        _hooks.append(register_module_module_registration_hook(_complete))


def unregister() -> None:
    """Undo [`register`], so that the Auto classes build the stock models. Has no effect without a registration."""
    for classes, config, ours in _entries():
        if classes.get(config) is ours:
            del classes[config]
    while _hooks:
        _hooks.pop().remove()


# The hook of PyTorch that calls `_complete` after `register`.
_hooks: list[RemovableHandle] = []


def _complete(model: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
    """Convert a stock model when a model of ours becomes a part of it.

    Many stock classes, such as those of vision-language models and classifiers, create their text model by an Auto class.
    If one is created directly, its text model would be ours and the rest stock.
    """
    if isinstance(part, PackedModelMixin) and not isinstance(model, PackedModelMixin):
        ours = _generic().class_around(type(model))
        if ours is not None:
            become(model, ours)


@contextmanager
def registered() -> Iterator[None]:
    """Context manager that calls [`register`] on entry and undoes it on exit. An earlier registration is kept."""
    before = all(classes.get(config) is ours for classes, config, ours in _entries())
    register()
    try:
        yield
    finally:
        if not before:
            unregister()


def _entries() -> Iterator[tuple]:
    """Yield (registered classes of an Auto class, configuration class, our model class) for every registration."""
    for family in OWN:
        modeling = modeling_module(family.name)
        for config_name, classes in family.auto_classes.items():
            for auto_name, class_name in classes.items():
                registered = registered_classes(getattr(modeling_auto, auto_name))
                yield registered, getattr(transformers, config_name), getattr(modeling, class_name)
    if supports_other_families():
        yield from _generic().auto_entries()


def modeling_module(family: str) -> ModuleType:
    """Import the generated modeling file of a family of `OWN`, which adds its classes to `REPLACEMENTS`."""
    return import_module(f"{__package__}.{family}.modeling_{family}")


def _generic() -> ModuleType:
    """Import the module of all other families late: it depends on this module and imports kernel packages."""
    return import_module(f"{__package__}.generic")


def _experts() -> ModuleType:
    """Import the implementation of experts late, because it imports the ops."""
    return import_module(f"{__package__}.experts")


def check_transformers() -> None:
    """Import our classes. Raise an `ImportError` unless the installed Transformers has what they need, and no more."""
    check_names()
    for family in OWN:
        modeling_module(family.name)
    check_signatures(REPLACEMENTS)


def patch_model(model: Model) -> Model:
    """Convert an existing model in place, so that it keeps the documents of a packed row apart.

    Every stock module with a replacement in this package changes its class. No tensor is copied, moved or replaced.
    In a stock model, the default `experts_implementation` of Transformers becomes `"transformers_packed"`. Others are
    kept. Qwen3-Next, Qwen3.5 and Qwen3.5-MoE have dedicated classes. Other Transformers families that mix documents
    get classes by their records in `models/families.py`. A causal language model that already keeps documents apart,
    with position ids that restart and without a cache, stays unchanged.

    The model may be inside another one (PEFT, `torch.compile`, DistributedDataParallel, your own class), use gradient
    checkpointing, or be distributed with accelerate's `device_map`. Patching again has no effect.

    Patch a model before anything that wraps its layers or its forward: FSDP, `Accelerator.prepare` with mixed
    precision (which `Trainer` calls in `train`), and libraries that set their own forward.

    Args:
        model (`torch.nn.Module`):
            The model, on any device and in any dtype.

    Returns:
        `torch.nn.Module`: the same object.

    Raises:
        `ValueError`: the model's family cannot be packed or was never audited (see [`audit_model`]), the model is
            sharded by FSDP, or a module cannot be converted because its class is a subclass or copy of a stock class
            or because it has its own `forward`. The model is unchanged in all these cases.
        `ImportError`: the installed Transformers lacks an API that our models use.

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
    changes = _changes_of_patch(model)
    before = has_our_classes(model)
    _apply(changes)
    for module in model.modules():
        if isinstance(module, tuple(REPLACEMENTS.values())):
            use_our_products(module)
    if not has_our_classes(model):
        outermost = transformers_model(model)
        if outermost is not None and getattr(outermost.config.get_text_config(), "use_cache", False):
            logger.warning_once(f"patch_model: {cache_warning(outermost)}")
    elif not before:
        # In a model of our classes, Transformers' default is a choice of the user.
        _experts().switch_implementation(model, ours=True)
    return model


def check_patch(model: torch.nn.Module) -> bool:
    """Whether [`patch_model`] would leave `model` with our classes, without a change to the model.

    It is `False` for a stock model that keeps documents apart and stays unchanged. Raises the errors of
    [`patch_model`].
    """
    return _has_ours_after(model, _changes_of_patch(model))


def _changes_of_patch(model: torch.nn.Module) -> list["_Change"]:
    """Return what [`patch_model`] changes, or raise its error."""
    check_transformers()
    if isinstance(model, torch.nn.Module):
        _generic().announce_families_of(model)
    ours = tuple(REPLACEMENTS.values())
    names = {cls.__name__ for cls in ours if cls not in FAST_PATHS}
    # Generated copies of a stock class, as some libraries create them, are detected by name.
    related = lambda cls: not issubclass(cls, ours) and any(base.__name__ in names for base in cls.__mro__)  # noqa: E731
    changes = _changes(model, REPLACEMENTS, related)
    if not _has_ours_after(model, changes):
        _check_isolated(model)
    return changes


def _has_ours_after(model: torch.nn.Module, changes: list["_Change"]) -> bool:
    return any(change.cls not in FAST_PATHS for change in changes) or has_our_classes(model)


def cache_warning(model: torch.nn.Module) -> str:
    """Return the warning for a stock model that keeps documents apart only without a cache."""
    return (
        f"{type(model).__name__} keeps documents apart with its attention mask, but with a cache the mask ignores "
        "documents. Trainer disables the cache. Outside of Trainer, pass use_cache=False."
    )


def _check_isolated(model: torch.nn.Module) -> None:
    """Raise a `ValueError` unless the stock `model` keeps documents apart."""
    outermost = transformers_model(model)
    got, fix = type(model).__name__, "Only Transformers models can be patched."
    if outermost is not None:
        ways = [family.apart for family in families_of_class(type(outermost))]
        got, fix = type(outermost).__name__, "Run audit_model to check whether it needs a patch."
        if any(isinstance(way, Isolated) for way in ways):
            return
        reasons = [way.why for way in ways if isinstance(way, Refused)]
        if reasons:
            got, fix = f"{got}: {reasons[0]}", "Use padded batches."
    raise input_error("a causal language model of a family that can be packed", got, fix)


def unpatch_model(model: Model) -> Model:
    """Undo [`patch_model`] in place: convert every module of our classes to its stock class.

    Models that were created with our classes, through `register` or directly, also become stock models. A model
    without our classes stays unchanged.

    Args:
        model (`torch.nn.Module`):
            The model.

    Returns:
        `torch.nn.Module`: the same object.

    Raises:
        `ValueError`: the model is sharded by FSDP, or a module cannot be converted because its class is a subclass of
            ours or because it has its own `forward`. The model is unchanged in these cases.

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
    _apply(_changes(model, classes, related=lambda cls: issubclass(cls, tuple(classes))))
    _experts().switch_implementation(model, ours=False)
    return model


class _Change(NamedTuple):
    """A module, the class that it becomes, and its instance attributes that change with the class."""

    module: torch.nn.Module
    cls: type
    attributes: dict[str, Any]


def _changes(model: torch.nn.Module, classes: dict[type, type], related: Callable[[type], bool]) -> list[_Change]:
    """Return the changes that convert every module whose class is a key of `classes` to the class found there.

    `related` tells whether modules of a class need converting too. If such a class is not in `classes`, a `ValueError`
    is raised.
    """
    if not isinstance(model, torch.nn.Module):
        raise input_error("a torch.nn.Module", type(model).__name__, "Pass the model itself.")
    modules = [(name or "(the model itself)", module) for name, module in model.named_modules()]
    affected = [(name, module) for name, module in modules if type(module) in classes or related(type(module))]
    for name, module in modules if affected else ():
        if any(base.__module__.startswith("torch.distributed.fsdp") for base in type(module).__mro__):
            got = f"module {name} under FSDP ({type(module).__name__})"
            raise input_error("a model without FSDP", got, "Convert the model before sharding it.")
    changes = []
    for name, module in affected:
        old = type(module)
        if old not in classes:
            got = f"module {name} of a subclass or copy of a stock class, {old.__module__}.{old.__qualname__}"
            fix = f"Load the model without the code that sets it, or derive the class from ours in {__package__}."
            raise input_error("modules of Transformers' own classes", got, fix)
        try:
            attributes = _attributes(name, module, classes[old])
        except ValueError:
            if classes[old] not in FAST_PATHS:
                raise
        else:
            changes.append(_Change(module, classes[old], attributes))
    return changes


def _apply(changes: list[_Change]) -> None:
    for module, cls, attributes in changes:
        become(module, cls)
        vars(module).update(attributes)


def _attributes(name: str, module: torch.nn.Module, cls: type) -> dict[str, Any]:
    """Return the instance attributes that must change with the module's class: a `forward` bound to the old class.

    accelerate's hooks set a `forward` that calls the bound method. Removing a hook leaves the bound method as
    `forward`. TRL's trainers set a `forward` that scores tokens without logits and otherwise calls the bound method.
    """
    own, old = vars(module), type(module)
    for key, value in own.items():
        replaced = getattr_static(old, key, None) is not getattr_static(cls, key, None)
        if replaced and callable(value) and key != "forward":
            raise _set_before(name, old, key)
    if "forward" not in own or old.forward is cls.forward:
        return {}
    wrapper = own["forward"]
    theirs = getattr(wrapper, "trl_forward", wrapper)
    if not has_hooks(module) and is_trl_forward(theirs):
        if theirs is wrapper and not _is_forward_of(module, forward_inside_trl(theirs)):
            raise _set_before(name, old, "forward")
        return {"forward": beside_trl(theirs, module, cls.forward, our_products=cls in REPLACEMENTS.values())}
    if not _is_forward_of(module, forward_inside_hooks(module)):
        raise _set_before(name, old, "forward")
    return with_hooks(module, MethodType(cls.forward, module))


def _is_forward_of(module: torch.nn.Module, forward: Any) -> bool:
    """Whether `forward` is that of the module's class, bound to the module."""
    return isinstance(forward, MethodType) and (forward.__self__, forward.__func__) == (module, type(module).forward)


def _set_before(name: str, cls: type, key: str) -> ValueError:
    fix = f"Convert it before setting {key} (Accelerator.prepare, tensor parallelism, Liger, Unsloth, kernels)."
    got = f"module {name} ({cls.__name__}) with its own {key}"
    return input_error(f"modules that run the {key} of their class", got, fix)
