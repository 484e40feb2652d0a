"""What the package needs of a release of Transformers, and adapters to releases that lack it or name it otherwise.

Each adapter names the release that makes it unnecessary. No other module looks for a release or a missing name.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from ..errors import input_error
from .families import OWN


# The parts of Transformers' modules that our methods use. Without them a model would fail in the middle of a forward.
_REQUIRED = {
    "transformers.cache_utils": (
        "Cache.update_conv_state",
        "Cache.update_recurrent_state",
    ),
    "transformers.integrations.accelerate": ("force_accelerate_hooks",),
    "transformers.integrations.moe": ("_default_apply_gate", "grouped_mm_experts_forward"),
    "transformers.integrations.finegrained_fp8": ("ALL_FP8_EXPERTS_FUNCTIONS", "fp8_grouped_mm_experts_forward"),
    "transformers.utils.output_capturing": ("_CAN_RECORD_REGISTRY",),
    "transformers.utils.generic": ("is_flash_attention_requested", "TransformersKwargs.__annotations__"),
    **{family.stock: family.required for family in OWN},
}
# The first release with which the families without dedicated classes are tested.
OTHER_FAMILIES = "5.20"
# The names of the cache as an argument of models and attention layers and in outputs, and as an argument of linear-attention
# layers. 5.24 renamed both to `cache`, and takes the earlier names until 5.40.
CACHE, LINEAR_CACHE = (
    ("cache", "cache")
    if "cache" in BaseModelOutputWithPast.__dataclass_fields__
    else ("past_key_values", "cache_params")
)
_EARLIER_CACHES = ("past_key_values", "cache_params")
# All names of a forward's cache.
CACHES = ("cache", *_EARLIER_CACHES, "state")
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_names() -> None:
    """Raise an `ImportError` that lists every required name the installed Transformers lacks."""
    missing = []
    for module_name, paths in _REQUIRED.items():
        for path in paths:
            try:
                found = import_module(module_name)
                for part in path.split("."):
                    found = getattr(found, part)
            except (ImportError, AttributeError):
                missing.append(f"{module_name}.{path}")
    _check(missing, "lacks", "requires")


def check_signatures(replacements: Mapping[type, type]) -> None:
    """Raise an `ImportError` that lists every argument of a stock method that our method in its place does not have."""
    new = [argument for builtin, ours in replacements.items() for argument in _new_arguments(builtin, ours)]
    _check(new, "has the new", "would ignore")


def _new_arguments(builtin: type, ours: type) -> list[str]:
    found = []
    for name, method in vars(ours).items():
        original = getattr(builtin, name, None)
        # Another package may have replaced the method, which tells nothing about the release.
        is_stock = inspect.isfunction(original) and original.__module__.startswith("transformers.")
        if isinstance(method, FunctionType) and is_stock:
            known = inspect.signature(method).parameters
            new = [x for x, p in inspect.signature(original).parameters.items() if p.kind not in _VARIABLE]
            # A method with `*args`, such as a wrapper that somebody has put around it, passes all arguments on.
            if not any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in known.values()):
                found += [f"argument {x} of {builtin.__name__}.{name}" for x in new if x not in known]
    return found


def _check(names: list[str], has: str, verb: str) -> None:
    if names:
        raise ImportError(
            f"transformers {transformers.__version__} {has} {', '.join(names)}, which transformers_packed {verb}. "
            "Install a supported release: pip install 'transformers>=5.16.1,<6'."
        )


def takes_cache(name: str) -> Callable[[Callable], Callable]:
    """Let a method with the argument `cache` take it by all its names, and show the `name` of this release."""

    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            for earlier in _EARLIER_CACHES:
                if earlier in kwargs and "cache" in kwargs:
                    raise TypeError(f"{method.__name__}() got both cache and {earlier}")
                if earlier in kwargs:
                    kwargs["cache"] = kwargs.pop(earlier)
            return method(*args, **kwargs)

        names = {"cache": name}
        signature = inspect.signature(method)
        parameters = [p.replace(name=names.get(p.name, p.name)) for p in signature.parameters.values()]
        vars(renamed)["__signature__"] = signature.replace(parameters=parameters)
        renamed.__annotations__ = {names.get(key, key): x for key, x in method.__annotations__.items()}

        # Hooks copy the attributes of a bound forward. These must not include a signature with `self`.
        @wraps(renamed, updated=())
        def forward(*args: Any, **kwargs: Any) -> Any:
            return renamed(*args, **kwargs)

        return forward

    return decorate


def get_recurrent_state(cache: Cache, layer_idx: int) -> torch.Tensor | None:
    """Return the recurrent state of a layer, `None` before its first token: `Cache.get_recurrent_state` of 5.21."""
    if hasattr(cache, "get_recurrent_state"):
        return cache.get_recurrent_state(layer_idx)
    return cache.layers[layer_idx].recurrent_states[0] if cache.has_previous_state(layer_idx) else None


def is_rebalancing(sampler: object) -> bool:
    """Whether a sampler deals batches out to the processes itself: a `BatchRebalanceSampler`, which 5.17 added."""
    cls = getattr(import_module("transformers.trainer_pt_utils"), "BatchRebalanceSampler", None)
    return cls is not None and isinstance(sampler, cls)


def checkpointing_argument() -> str:
    """Return the argument of `TrainingArguments` for gradient checkpointing, which 5.23 renamed."""
    fields = transformers.TrainingArguments.__dataclass_fields__
    return next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in fields)


def has_post_expert_norm(experts: torch.nn.Module) -> bool:
    """Whether a mixture normalizes the outputs of its experts, for which 5.20 added an attribute."""
    return getattr(experts, "has_post_expert_norm", False)


def recorder_key(model: torch.nn.Module) -> torch.nn.Module | str:
    """Return the key of a model in the registry of recordable outputs. Before 5.23 it is the name of its class."""
    return str(type(model)) if type(_CAN_RECORD_REGISTRY) is dict else model


def supports_other_families() -> bool:
    """Whether this release is new enough for the families without dedicated classes."""
    return Version(transformers.__version__) >= Version(OTHER_FAMILIES)


def check_other_families(family: str) -> None:
    """Raise a `ValueError` unless this release is new enough for `family`."""
    if not supports_other_families():
        expected = f"transformers >= {OTHER_FAMILIES} for packed rows of {family}"
        raise input_error(expected, transformers.__version__, "Update it, or use padded batches.")
