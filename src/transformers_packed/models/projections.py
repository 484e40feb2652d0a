"""What a linear layer of a model is a sum of, for the fused ops, or the module to call.

[`terms_of`] decides for each layer and input whether an op computes the layer, and is the only place that does.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging

from ..ops.backends import triton
from ..ops.dispatch import ran
from ..ops.linear import fused_linears, product_dtype
from ..ops.norm import gated_rms_norm
from ..ops.terms import Adapter, BlocksWeight, Float8Weight, Projection
from .float8_marks import is_in_float8, warn_about
from .lora import adapters_of, is_lora
from .stored_weights import is_in_blocks, weight_of_layer
from .untouched import is_untouched


logger = logging.get_logger(__name__)


def terms_of(layer: torch.nn.Module, hidden_states: torch.Tensor) -> tuple[Projection, torch.dtype] | None:
    """Return the parameters that fully determine the output of this linear layer, and the dtype of its products.

    The layer may have LoRA adapters of PEFT, and a base layer with any weight of `stored_weights.py`. If it has to be called, the
    result is `None`. The log then has the reason if the layer has adapters or would run in float8.
    """
    if torch.compiler.is_compiling():
        return None
    # On a CPU, no op is faster than calls, but products in float8, and weights in blocks of float8, are in an op only.
    if not triton.on_gpu(hidden_states):
        inner = getattr(layer, "base_layer", layer)
        if not is_in_float8(inner, hidden_states) and not is_in_blocks(inner):
            return None
    base: Any = layer
    adapters: tuple[Adapter, ...] = ()
    if type(layer) is not torch.nn.Linear and is_lora(layer):
        found, base = adapters_of(layer), base.base_layer
        if isinstance(found, str):
            _note_call(layer, base, hidden_states, found)
            return None
        adapters = found
    in_float8 = is_in_float8(base, hidden_states)
    weight = weight_of_layer(base, in_float8, hidden_states)
    if weight is None:
        subject = "it" if base is layer else "its base layer"
        reason = f"{subject} is hooked, wrapped or of another class ({type(base).__name__})"
        _note_call(layer, base, hidden_states, reason)
        return None
    projection = Projection(weight, base.bias, adapters)
    dtype = product_dtype(hidden_states, projection)
    if dtype is None:
        reason = f"its input is {hidden_states.dtype} and its base weight is {weight.dtype}"
        _note_call(layer, base, hidden_states, reason)
        return None
    if in_float8 and not isinstance(weight, Float8Weight | BlocksWeight):
        warn_about(base, hidden_states, "its weight is quantized")
    return projection, dtype


def _note_call(layer: torch.nn.Module, base: torch.nn.Module, hidden_states: torch.Tensor, reason: str) -> None:
    """Record that a layer is called which has adapters or would run in float8, and log each reason once."""
    if base is not layer:
        ran("linear_lora", "peft")
        logger.warning_once(f"linear_lora: a layer runs PEFT's own forward, because {reason}.")
    warn_about(base, hidden_states, reason)


def to_fuse(
    layer: torch.nn.Module, hidden_states: torch.Tensor
) -> Projection | Callable[[torch.Tensor], torch.Tensor]:
    """Return what an op that ends in this linear layer needs: its parameters, or a function to call after the op.

    Args:
        layer (`torch.nn.Module`):
            The linear layer.
        hidden_states (`torch.Tensor`):
            A tensor with the dtype, the device and the number of elements of the op's result.
    """
    terms = terms_of(layer, hidden_states)
    if terms is None:
        return layer
    projection, dtype = terms
    return projection if dtype == hidden_states.dtype else lambda x: project(x, layer)[0]


def project(hidden_states: torch.Tensor, *layers: torch.nn.Module, keep: bool = True) -> tuple[torch.Tensor, ...]:
    """Apply each of these linear layers to `hidden_states`, in a single autograd step if possible.

    `keep` is that of [`fused_linears`].
    """
    outputs: dict[int, torch.Tensor] = {}
    groups: dict[torch.dtype, dict[int, Projection]] = {}
    for i, layer in enumerate(layers):
        terms = terms_of(layer, hidden_states)
        if terms is None:
            outputs[i] = layer(hidden_states)
        else:
            projection, dtype = terms
            groups.setdefault(dtype, {})[i] = projection
    for dtype, group in groups.items():
        found = fused_linears(hidden_states, list(group.values()), dtype, keep)
        outputs |= zip(group, found, strict=True)
    return tuple(outputs[i] for i in range(len(layers)))


def gate_and_project(
    norm: Any, cls: type, layer: torch.nn.Module, output: torch.Tensor, gate: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Apply a gated norm to the heads `[B, T, heads, dim]`, and a linear layer, in one op if the norm is an untouched `cls`.

    `options` are those of [`gated_rms_norm`].
    """
    if is_untouched(norm, cls):
        linear_weight = to_fuse(layer, output)
        return gated_rms_norm(output, gate, norm.weight, norm.variance_epsilon, linear_weight=linear_weight, **options)
    rows = norm(output.flatten(0, 2), gate.flatten(0, 2)).view(*output.shape[:2], -1)
    return project(rows, layer)[0]
