"""Models of this package: `register` makes Transformers' Auto classes build them, and `patch_model` converts a model."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers.utils import logging

from ..errors import input_error
from .families import OWN, families_of_class, modeling_module
from .family import Isolated, Refused
from .installed import REGISTERED, hold, install_registration, is_registered, late, unregister
from .packed_model import PackedModelMixin
from .quantized_weights import adopt
from .releases import MODELS, check_names, check_signatures
from .replacements import FAST_PATHS, REPLACEMENTS, Change, Model, apply_changes, become, find_changes
from .trl_head import use_our_products


logger = logging.get_logger(__name__)


def transformers_model(model: torch.nn.Module | None) -> "transformers.PreTrainedModel | None":
    """Return the outermost Transformers model inside `model` (PEFT, DDP, `torch.compile`), if there is one."""
    modules = () if model is None else model.modules()
    return next((module for module in modules if isinstance(module, transformers.PreTrainedModel)), None)


def inner_model(model: torch.nn.Module | None) -> "transformers.PreTrainedModel":
    """Return [`transformers_model`] of a model that has one, as checks have found."""
    inner = transformers_model(model)
    if inner is None:
        raise input_error("a model of Transformers", type(model).__name__)
    return inner


def set_switches(model: torch.nn.Module, **values: bool) -> None:
    """Set attributes such as `packs_padding` of the Transformers model in `model`, unless it is a stock model."""
    inner = inner_model(model)
    if isinstance(inner, PackedModelMixin):
        for name, value in values.items():
            setattr(inner, name, value)


def has_our_classes(model: torch.nn.Module) -> bool:
    """Whether `model` has classes of ours that keep documents apart, and no stock module that such a class replaces.

    A model with both is not ours: its stock part may train on targets across documents, or take documents for images.
    """
    apart = tuple(set(REPLACEMENTS.values()) - FAST_PATHS)
    if not any(isinstance(module, apart) for module in model.modules()):
        return False
    late("generic").announce_families_of(model)
    replaced = tuple(builtin for builtin, ours in REPLACEMENTS.items() if ours not in FAST_PATHS)
    apart = tuple(map(REPLACEMENTS.__getitem__, replaced))
    return not any(isinstance(module, replaced) and not isinstance(module, apart) for module in model.modules())


def register() -> None:
    """Make `AutoModel`, `AutoModelForCausalLM` and the other Auto classes build this package's models.

    After this call, `from_pretrained` and `from_config` return our classes for Qwen3-Next, Qwen3.5/3.6/3.8,
    Qwen3.5/3.6/3.8-MoE, OLMo-Hybrid, Kimi-Linear, Bailing-Hybrid, Qwen4-Exp and all other families of
    `models/families.py` that mix documents. Our classes have the same names, parameters and results as the stock
    classes, and they keep the documents of a packed row apart. A stock class that creates its text model by an Auto class
    gets a model of ours around it too, also if you call the class directly. Registering again has no effect.

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
    for classes, config, ours in REGISTERED.rows():
        current = classes.get(config, ours)
        if current is not ours:
            got, fix = f"{current.__module__}.{current.__name__}", "Remove it before calling register()."
            raise input_error(f"no other class registered for {config.__name__}", got, fix)
    install_registration()


def complete(model: torch.nn.Module, name: str, part: torch.nn.Module | None) -> None:
    """Convert a stock model when a model of ours becomes a part of it.

    Many stock classes, such as those of vision-language models and classifiers, create their text model by an Auto class.
    If one is created directly, its text model would be ours and the rest stock.
    """
    if isinstance(part, PackedModelMixin) and not isinstance(model, PackedModelMixin):
        ours = late("generic").class_around(type(model))
        if ours is not None:
            become(model, ours)


@contextmanager
def registered() -> Iterator[None]:
    """Context manager that calls [`register`] on entry and undoes it on exit. An earlier registration is kept."""
    before = is_registered()
    register()
    try:
        yield
    finally:
        if not before:
            unregister()


def check_transformers() -> None:
    """Import our classes. Raise an `ImportError` unless the installed Transformers has what they need, and no more."""
    check_names((*MODELS, *_names_in_code()))
    for family in OWN:
        modeling_module(family.name)
    check_signatures(REPLACEMENTS)


@cache
def _names_in_code() -> tuple[str, ...]:
    """What the code of our classes names in stock modules. Its import would stop at the first name that is missing."""
    names = []
    for family in OWN:
        path = Path(__file__).with_name(family.name) / f"modeling_{family.name}.py"
        used = set(re.findall(r"\bbuiltin\.(\w+)", path.read_text(encoding="utf-8")))
        names += [f"{family.stock}:{name}" for name in (*sorted(used), *family.methods)]
    return tuple(names)


def patch_model(model: Model) -> Model:
    """Convert an existing model in place, so that it keeps the documents of a packed row apart.

    Every stock module with a replacement in this package changes its class. No tensor is copied, moved or replaced.
    In a stock model, the default `experts_implementation` of Transformers becomes `"transformers_packed"`. Others are
    kept. The families of `OWN` in `models/families.py` have dedicated classes. Other Transformers families that mix
    documents get classes by their records in `models/families.py`. A causal language model that already keeps documents apart,
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
            sharded by FSDP, PEFT has adapters on experts that bitsandbytes has replaced, or a module cannot be
            converted because its class is a subclass or copy of a stock class or because it has its own `forward`. The
            model is unchanged in all these cases.
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
    apply_changes(changes)
    for change in changes:
        # A part of a model needs what other libraries find by name, too.
        hold(change.module)
    for module in late("experts").replaced_experts(model):
        adopt(module)
    for module in model.modules():
        if isinstance(module, tuple(REPLACEMENTS.values())):
            use_our_products(module)
    if not has_our_classes(model):
        outermost = transformers_model(model)
        if outermost is not None and getattr(outermost.config.get_text_config(), "use_cache", False):
            logger.warning_once(f"patch_model: {cache_warning(outermost)}")
    elif not before:
        # In a model of our classes, Transformers' default is a choice of the user.
        late("experts").switch_implementation(model, ours=True)
    return model


def check_patch(model: torch.nn.Module) -> bool:
    """Whether [`patch_model`] would leave `model` with our classes, without a change to the model.

    It is `False` for a stock model that keeps documents apart and stays unchanged. Raises the errors of
    [`patch_model`].
    """
    return _has_ours_after(model, _changes_of_patch(model))


def _changes_of_patch(model: torch.nn.Module) -> list[Change]:
    """Return what [`patch_model`] changes, or raise its error."""
    check_transformers()
    if isinstance(model, torch.nn.Module):
        late("generic").announce_families_of(model)
    ours = tuple(REPLACEMENTS.values())
    names = {cls.__name__ for cls in ours if cls not in FAST_PATHS}
    # Generated copies of a stock class, as some libraries create them, are detected by name.
    related = lambda cls: not issubclass(cls, ours) and any(base.__name__ in names for base in cls.__mro__)  # noqa: E731
    changes = find_changes(model, REPLACEMENTS, related)
    late("experts").replaced_experts(model)
    if not _has_ours_after(model, changes):
        _check_isolated(model)
    return changes


def _has_ours_after(model: torch.nn.Module, changes: list[Change]) -> bool:
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
        stock = getattr(transformers, got, None)
        if stock not in (None, type(outermost)):
            fix = f"Load it with transformers.{got}: another package registered its class with AutoModel."
            got = f"{type(outermost).__module__}.{got}"
        if any(isinstance(way, Isolated) for way in ways):
            return
        reasons = [way.why for way in ways if isinstance(way, Refused)]
        if reasons:
            got, fix = f"{got}: {reasons[0]}", "Use padded batches."
    raise input_error("a causal language model of a family that can be packed", got, fix)


def unpatch_model(model: Model) -> Model:
    """Undo [`patch_model`] in place: convert every module of our classes to its stock class.

    Models that were created with our classes, through `register` or directly, also become stock models. A model
    without our classes stays unchanged. With the last model of our classes, nothing in other libraries differs from
    before. Weights of experts that were put into 4 bit stay so, and so does what was asked for by name ([`add_mtp`],
    [`use_float8`]), to be used by another [`patch_model`].

    Args:
        model (`torch.nn.Module`):
            The model.

    Returns:
        `torch.nn.Module`: the same object.

    Raises:
        `ValueError`: the model is sharded by FSDP, weights are in host memory, or a module cannot be converted because
            its class is a subclass of ours or because it has its own `forward`. The model is unchanged in these cases.

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
    changes = find_changes(model, classes, related=lambda cls: issubclass(cls, tuple(classes)))
    if any(map(late("host_parameters").host_of, model.modules())):
        got, fix = "weights in host memory, which stock classes do not copy to the GPU", "Load the model again."
        raise input_error("weights on the model's device", got, fix)
    apply_changes(changes)
    late("experts").switch_implementation(model, ours=False)
    return model
