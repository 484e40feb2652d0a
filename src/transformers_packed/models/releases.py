"""What earlier releases of Transformers lack or name otherwise: one function each, with the release that needs none.

No other module asks for a release. Names that no release below 5.24 may lack are in `registry._REQUIRED`.
"""

import importlib

import torch
import transformers
from transformers.cache_utils import Cache


def get_recurrent_state(cache: Cache, layer_idx: int) -> torch.Tensor | None:
    """Return the recurrent state of a layer, `None` before its first token: `Cache.get_recurrent_state` of 5.21."""
    if hasattr(cache, "get_recurrent_state"):
        return cache.get_recurrent_state(layer_idx)
    return cache.layers[layer_idx].recurrent_states[0] if cache.has_previous_state(layer_idx) else None


def is_rebalancing(sampler: object) -> bool:
    """Whether a sampler deals batches out to the processes itself: a `BatchRebalanceSampler`, which 5.17 added."""
    cls = getattr(importlib.import_module("transformers.trainer_pt_utils"), "BatchRebalanceSampler", None)
    return cls is not None and isinstance(sampler, cls)


def checkpointing_argument() -> str:
    """Return the argument of `TrainingArguments` for gradient checkpointing, which 5.23 renamed."""
    fields = transformers.TrainingArguments.__dataclass_fields__
    return next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in fields)
