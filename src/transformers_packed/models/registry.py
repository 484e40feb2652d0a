"""How our classes take the place of Transformers' own: by class, never by layout.

Each of our classes has the name of the built-in class that it derives from, adds methods, and adds no parameter and no
attribute. So a built-in module becomes ours when its `__class__` is set, and weights, plans, adapters and hooks stay as
they are. That happens in one of two ways: `register` lets Transformers' Auto classes build our models, and `patch_model`
converts a model that exists.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from copy import deepcopy
from functools import partial, update_wrapper, wraps
from importlib import import_module
from inspect import getattr_static, getclosurevars
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto
from transformers.utils import logging
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from ..errors import input_error
from .families import FAMILIES, ISOLATED, REFUSED
from .inputs import with_boundaries


logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound=torch.nn.Module)

# Built-in class, and ours.
REPLACEMENTS: dict[type, type] = {}
# Those of ours that are a fast path only: documents are kept apart without them.
FAST_PATHS: set[type] = set()

# What our methods use of the built-in modules: without it a model would fail in the middle of a forward.
_REQUIRED = {
    "transformers.cache_utils": (
        "Cache.get_recurrent_state",
        "Cache.update_conv_state",
        "Cache.update_recurrent_state",
    ),
    "transformers.integrations.accelerate": ("force_accelerate_hooks",),
    "transformers.utils.output_capturing": ("_CAN_RECORD_REGISTRY",),
    "transformers.utils.generic": ("is_flash_attention_requested", "TransformersKwargs.__annotations__"),
    "transformers.models.qwen3_next.modeling_qwen3_next": (
        "Qwen3NextGatedDeltaNet.fix_query_key_value_ordering",
        "apply_mask_to_padding_states",
        "apply_rotary_pos_emb",
        "eager_attention_forward",
    ),
    "transformers.models.qwen3_5.modeling_qwen3_5": (
        "Qwen3_5ForSequenceClassification",
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5Model.compute_3d_position_ids",
        "Qwen3_5Model.get_image_features",
        "Qwen3_5Model.get_rope_index",
        "Qwen3_5Model.get_video_features",
        "Qwen3_5TextForSequenceClassification",
        "apply_mask_to_padding_states",
        "apply_rotary_pos_emb",
        "eager_attention_forward",
    ),
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe": ("Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeModel"),
}


def replaces_builtin(cls: type) -> type:
    """Class decorator: `cls` stands in for the built-in class of the same name that it derives from.

    A class with a method `forward_with_boundaries` gets the built-in's forward, which calls that method.
    """
    (builtin,) = (base for base in cls.__bases__ if base.__name__ == cls.__name__)
    if hasattr(cls, "forward_with_boundaries"):
        cls.forward = with_boundaries(cls, builtin)
    for name, method in vars(cls).items():
        # What a method returns differs between families that share its code; tools ask for it.
        returned = getattr(getattr(builtin, name, None), "__annotations__", {}).get("return")
        if isinstance(method, FunctionType) and returned is not None:
            method.__annotations__.setdefault("return", returned)
    # A modular file is the source of a modeling file; importing it must not put its classes in their place.
    if ".modular_" not in cls.__module__:
        REPLACEMENTS[builtin] = cls
    return cls


def fast_path(cls: type) -> type:
    """Class decorator: as [`replaces_builtin`], but a module that cannot become `cls` may stay what it is."""
    # Another library, such as Liger, may have put a class of its own in the place of the built-in one: that one stays.
    if any(base.__name__ == cls.__name__ for base in cls.__bases__):
        FAST_PATHS.add(replaces_builtin(cls))
    return cls


def transformers_model(model: torch.nn.Module) -> torch.nn.Module | None:
    """The outermost model of Transformers inside `model` (PEFT, DDP, `torch.compile`), if there is one."""
    return next((module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)), None)


def has_our_classes(model: torch.nn.Module) -> bool:
    """Whether a module of `model` is of a class in `REPLACEMENTS` that keeps documents apart, or one derived from it."""
    ours = tuple(set(REPLACEMENTS.values()) - FAST_PATHS)
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
        # Trainer's use_liger_kernel assigns Liger's forward to a registered model in `train`, where nothing of ours is
        # called between. What Liger does to norms and MLPs, which see each token alone, may stay.
        module = getattr(getattr(value, "__func__", None), "__module__", None) or ""
        if name == "forward" and module.startswith("liger_kernel."):
            logger.warning_once(
                f"{type(self).__name__} keeps its forward: that of Liger's fused_linear_cross_entropy would not keep "
                "targets within their documents."
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


def register() -> None:
    """Make `AutoModel`, `AutoModelForCausalLM` and the other Auto classes build this package's models.

    From then on `from_pretrained` and `from_config` on a configuration of Qwen3-Next, Qwen3.5 or one of the families
    in `families.MIXERS` and `families.UNPACKED` return our classes, which have the built-in names, parameters and
    results and keep the documents of a packed row apart. Registering again changes nothing.

    Raises:
        `ImportError`: the installed Transformers lacks something that our models use.
        `ValueError`: somebody else's class is registered for one of the configurations.

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
    for mapping, config, ours in entries:
        current = mapping._extra_content.get(config, ours)
        if current is not ours:
            got = f"{current.__module__}.{current.__name__}"
            raise input_error(f"no other class registered for {config.__name__}", got, "Call register() without it.")
    for mapping, config, ours in entries:
        mapping.register(config, ours, exist_ok=True)


def unregister() -> None:
    """Undo [`register`]: the Auto classes build the built-in models again. Without a registration nothing happens."""
    for mapping, config, ours in _entries():
        if mapping._extra_content.get(config) is ours:
            del mapping._extra_content[config]


@contextmanager
def registered() -> Iterator[None]:
    """[`register`] for the length of a `with` block; an earlier registration stays afterwards."""
    before = all(mapping._extra_content.get(config) is ours for mapping, config, ours in _entries())
    register()
    try:
        yield
    finally:
        if not before:
            unregister()


def _entries() -> Iterator[tuple]:
    """(mapping of an Auto class, configuration class, our model class) for all that we register."""
    for family, configs in FAMILIES.items():
        modeling = modeling_module(family)
        for config_name, classes in configs.items():
            for auto_name, class_name in classes.items():
                mapping = getattr(modeling_auto, auto_name)._model_mapping
                yield mapping, getattr(transformers, config_name), getattr(modeling, class_name)
    yield from _generic().auto_entries()


def modeling_module(family: str) -> ModuleType:
    """The generated modeling file of one of `FAMILIES`; importing it puts its classes into `REPLACEMENTS`."""
    return import_module(f"{__package__}.{family}.modeling_{family}")


def _generic() -> ModuleType:
    """All other families. As modeling files, it derives from what is here, and brings along kernels' packages."""
    return import_module(f"{__package__}.generic")


def check_transformers() -> None:
    """Raise an `ImportError` that names everything the installed Transformers lacks."""
    missing = []
    for module_name, paths in _REQUIRED.items():
        for path in paths:
            try:
                found = import_module(module_name)
                for part in path.split("."):
                    found = getattr(found, part)
            except (ImportError, AttributeError):
                missing.append(f"{module_name}.{path}")
    if missing:
        raise ImportError(
            f"transformers {transformers.__version__} lacks {', '.join(missing)}, which transformers_packed uses. Install "
            "a supported release: pip install 'transformers>=5.23,<6'."
        )


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
    check_transformers()
    for family in FAMILIES:
        modeling_module(family)
    if isinstance(model, torch.nn.Module):
        _generic().announce_families_of(model)
    ours = tuple(REPLACEMENTS.values())
    names = {cls.__name__ for cls in ours if cls not in FAST_PATHS}
    # Copies of a built-in class, as libraries generate them, are told by the name.
    related = lambda cls: not issubclass(cls, ours) and any(base.__name__ in names for base in cls.__mro__)  # noqa: E731
    _switch(model, REPLACEMENTS, related)
    if not has_our_classes(model):
        _check_isolated(model)
    return model


def cache_warning(model: torch.nn.Module) -> str:
    """What to know of a stock model that keeps documents apart and makes a cache."""
    return (
        f"{type(model).__name__} keeps documents apart by its masks, and beside a cache it makes them without regard to "
        "documents. Trainer turns the cache off; elsewhere pass use_cache=False."
    )


def _check_isolated(model: torch.nn.Module) -> None:
    """Raise unless `model` keeps documents apart without us."""
    outermost = transformers_model(model)
    got, fix = type(model).__name__, "Only models of Transformers can be patched."
    if outermost is not None:
        families = list(filter(None, map(_generic().family_of, type(outermost).__mro__)))
        got, fix = type(outermost).__name__, "Measure with audit_model whether it needs a patch."
        if any(family in ISOLATED for family in families):
            if getattr(outermost.config.get_text_config(), "use_cache", False):
                logger.warning_once(f"patch_model: {cache_warning(outermost)}")
            return
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
    _switch(model, classes, related=lambda cls: issubclass(cls, tuple(classes)))
    return model


def _switch(model: torch.nn.Module, classes: dict[type, type], related: Callable[[type], bool]) -> None:
    """Give every module of a class in `classes` the class found there, or raise with the model unchanged.

    `related` tells the classes of modules that would have to be switched too; those not in `classes` are an error.
    """
    if not isinstance(model, torch.nn.Module):
        raise input_error("a torch.nn.Module", type(model).__name__, "Pass the model itself.")
    modules = [(name or "(the model itself)", module) for name, module in model.named_modules()]
    affected = [(name, module) for name, module in modules if type(module) in classes or related(type(module))]
    for name, module in modules if affected else ():
        if any(base.__module__.startswith("torch.distributed.fsdp") for base in type(module).__mro__):
            got = f"module {name} under FSDP ({type(module).__name__})"
            raise input_error("a model that is not sharded yet", got, "Convert the model before sharding it.")
    changes = []
    for name, module in affected:
        old = type(module)
        if old not in classes:
            got = f"module {name} of a subclass or copy of one, {old.__module__}.{old.__qualname__}"
            fix = f"Load the model without what put that class there, or derive the class from ours, in {__package__}."
            raise input_error("modules of the classes of Transformers themselves", got, fix)
        try:
            attributes = _attributes(name, module, classes[old])
        except ValueError:
            if classes[old] not in FAST_PATHS:
                raise
        else:
            changes.append((module, classes[old], attributes))
    for module, cls, attributes in changes:
        become(module, cls)
        vars(module).update(attributes)


def _attributes(name: str, module: torch.nn.Module, cls: type) -> dict[str, Any]:
    """What has to change in the module's own attributes with its class: a `forward` that is bound to the old one.

    accelerate's hooks set a `forward` that calls a bound `_old_forward`; without the hook that remains as `forward`.
    TRL's trainers set one that scores tokens without logits, or else calls what was bound.
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
    if "_hf_hook" not in own and "fused_lm_head" in (getattr(theirs, "__kwdefaults__", None) or ()):
        # TRL keeps what it runs beside its head in a closure alone: nothing else tells another forward from the class's.
        held = getclosurevars(theirs.__func__).nonlocals.get("original_forward")
        if theirs is wrapper and not _is_forward_of(module, held):
            raise _set_before(name, old, "forward")
        return {"forward": _beside_trl(theirs, module, cls)}
    hooked = isinstance(wrapper, partial) and getattr(wrapper.func, "__module__", None) == "accelerate.hooks"
    bound = own.get("_old_forward") if hooked else wrapper
    if not _is_forward_of(module, bound):
        raise _set_before(name, old, "forward")
    bound = MethodType(cls.forward, module)
    if not hooked:
        return {"forward": bound}
    rewrapped = update_wrapper(partial(wrapper.func, *wrapper.args, **wrapper.keywords), bound)
    return {"forward": rewrapped, "_old_forward": bound}


def _is_forward_of(module: torch.nn.Module, forward: Any) -> bool:
    """Whether this is the forward of the module's class, bound to the module."""
    return isinstance(forward, MethodType) and (forward.__self__, forward.__func__) == (module, type(module).forward)


def _set_before(name: str, cls: type, key: str) -> ValueError:
    fix = "Convert it before what set it (Accelerator.prepare, tensor parallelism, Liger, Unsloth, kernels)."
    got = f"module {name} ({cls.__name__}) with a {key} of its own"
    return input_error(f"modules that run the {key} of their class", got, fix)


def _beside_trl(theirs: MethodType, module: torch.nn.Module, cls: type) -> MethodType:
    """TRL's `forward` of `module` where it scores tokens; other calls, for which it holds the old forward, run that of `cls`."""
    function = theirs.__func__

    @wraps(cls.forward)
    def forward(self, *args, fused_lm_head=False, **kwargs):
        if fused_lm_head:
            return function(self, *args, fused_lm_head=True, **kwargs)
        return cls.forward(self, *args, **kwargs)

    forward.trl_forward = theirs
    return MethodType(forward, module)
