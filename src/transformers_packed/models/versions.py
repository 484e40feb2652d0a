"""Adapters to releases of Transformers that lack a part or name it otherwise.

Each adapter names the release that makes it unnecessary. No other module looks for a release, but `Family.is_supported`.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from ..errors import input_error


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


def takes_cache(name: str) -> Callable[[Callable], Callable]:
    """Let the forward of a layer take the argument `cache` by all its names, and show the `name` of this release.

    Given the boundaries of a packed row, the layer runs outside of compiled graphs. A wrapper around the class's `forward`
    would take the place of the one with which Transformers checkpoints layers.
    """

    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def renamed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling() and kwargs.get("boundaries") is not None:
                return outside(renamed, *args, **kwargs)
            for earlier in _EARLIER_CACHES:
                if earlier in kwargs and "cache" in kwargs:
                    raise TypeError(f"{method.__name__}() got both cache and {earlier}")
                if earlier in kwargs:
                    kwargs["cache"] = kwargs.pop(earlier)
            return method(*args, **kwargs)

        names = {"cache": name}
        signature = inspect.signature(method)
        parameters = [p.replace(name=names.get(p.name, p.name)) for p in signature.parameters.values()]
        renamed.__annotations__ = {names.get(key, key): x for key, x in method.__annotations__.items()}
        return with_signature(renamed, signature.replace(parameters=parameters))

    return decorate


def outside(forward: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a forward for a packed row outside of compiled graphs.

    A compiler would replace the fused ops by their references, split the graph at each op that reads boundaries, and keep
    all logits.
    """
    # A late import: it imports torch's compiler.
    from ..ops.dispatch import outside_of_graphs

    return outside_of_graphs(forward, *args, **kwargs)


def with_signature(function: Callable, signature: inspect.Signature) -> Callable:
    """Return a function that calls this one, and shows another signature."""
    vars(function)["__signature__"] = signature

    # Hooks copy the attributes of a bound forward. These must not include a signature with `self`.
    @wraps(function, updated=())
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return forward


def get_recurrent_state(cache: Cache, layer_idx: int) -> torch.Tensor | None:
    """Return the recurrent state of a layer, `None` before its first token: `Cache.get_recurrent_state` of 5.21."""
    if hasattr(cache, "get_recurrent_state"):
        return cache.get_recurrent_state(layer_idx)
    layer: Any = cache.layers[layer_idx]
    return layer.recurrent_states[0] if cache.has_previous_state(layer_idx) else None


def is_rebalancing(sampler: object) -> bool:
    """Whether a sampler deals batches out to the processes itself: a `BatchRebalanceSampler`, which 5.17 added."""
    cls = getattr(import_module("transformers.trainer_pt_utils"), "BatchRebalanceSampler", None)
    return cls is not None and isinstance(sampler, cls)


def checkpointing_argument() -> str:
    """Return the argument of `TrainingArguments` for gradient checkpointing, which 5.23 renamed."""
    return "activation_checkpointing" if can_select_checkpoints() else "gradient_checkpointing"


# The first releases whose gradient checkpointing has the options `every_n_layers` and `offload`, and leaves the hooks of a
# layer outside, which then run once for a row.
_SELECTS, _CUTS = "5.23", "5.24"


def can_select_checkpoints() -> bool:
    """Whether gradient checkpointing has the options `every_n_layers` and `offload`."""
    return Version(transformers.__version__) >= Version(_SELECTS)


def can_cut_rows() -> bool:
    """Whether layers under gradient checkpointing can compute a row in segments."""
    return Version(transformers.__version__) >= Version(_CUTS)


def check_checkpointing(option: str, flag: str = "") -> None:
    """Raise a `ValueError` if this release lacks an option of gradient checkpointing, which a command names by its `flag`."""
    cuts = option == "segment_tokens"
    if not (can_cut_rows() if cuts else can_select_checkpoints()):
        expected = f"Transformers {_CUTS if cuts else _SELECTS} or later for {flag or option}"
        raise input_error(expected, f"Transformers {transformers.__version__}", "pip install --upgrade transformers.")


def has_post_expert_norm(experts: torch.nn.Module) -> bool:
    """Whether a mixture normalizes the outputs of its experts, for which 5.20 added an attribute."""
    return getattr(experts, "has_post_expert_norm", False)


def joins_stored_experts() -> bool:
    """Whether Transformers joins the experts of a checkpoint whose weights have several tensors each, as 5.21 does."""
    return hasattr(import_module("transformers.quantizers.base").HfQuantizer, "serialized_names")


def averages_experts() -> bool:
    """Whether gradients of experts that are spread over processes are those of one process, as 5.23 makes them."""
    return Version(transformers.__version__) >= Version("5.23")


def supports_other_families() -> bool:
    """Whether this release is new enough for the families without dedicated classes."""
    return Version(transformers.__version__) >= Version(OTHER_FAMILIES)


def check_other_families(family: str) -> None:
    """Raise a `ValueError` unless this release is new enough for `family`."""
    if not supports_other_families():
        expected = f"transformers >= {OTHER_FAMILIES} for packed rows of {family}"
        raise input_error(expected, transformers.__version__, "Update it, or use padded batches.")
