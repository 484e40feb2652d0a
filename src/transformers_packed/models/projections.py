"""What a linear layer of a model is a sum of, for the fused ops, or the module to call.

[`terms_of`] decides for each layer and input whether an op computes the layer, and is the only place that does.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging

from ..ops.autograd import autocast_dtype
from ..ops.backends import triton
from ..ops.dequantization import dequantize_4bit, dequantize_blocks, dequantize_rows
from ..ops.dispatch import ran
from ..ops.float8 import float8_rows_of
from ..ops.linear import fused_linears, product_dtype
from ..ops.norm import gated_rms_norm
from ..ops.terms import Adapter, Dequantized, Float8Weight, Projection
from .float8 import is_in_float8, warn_about
from .lora import adapters_of, is_lora
from .untouched import is_bare_linear, is_untouched


logger = logging.get_logger(__name__)


def terms_of(layer: torch.nn.Module, hidden_states: torch.Tensor) -> tuple[Projection, torch.dtype] | None:
    """Return the parameters that fully determine the output of this linear layer, and the dtype of its products.

    The layer may have LoRA adapters of PEFT, and a base layer with any weight of `WEIGHTS`. If it has to be called, the
    result is `None`. The log then has the reason if the layer has adapters or would run in float8.
    """
    if torch.compiler.is_compiling():
        return None
    # On a CPU, no op is faster than calls, but products in float8, and weights in blocks of float8, are in an op only.
    if not triton.on_gpu(hidden_states):
        inner = getattr(layer, "base_layer", layer)
        if not is_in_float8(inner, hidden_states) and not _is_in_blocks(inner):
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
    known = (weight_of(base, in_float8, hidden_states) for weight_of in WEIGHTS)
    weight: Any = next((found for found in known if found is not None), None)
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
    if in_float8 and not isinstance(weight, Float8Weight):
        warn_about(base, hidden_states, "its weight is quantized")
    return projection, dtype


def _note_call(layer: torch.nn.Module, base: torch.nn.Module, hidden_states: torch.Tensor, reason: str) -> None:
    """Record that a layer is called which has adapters or would run in float8, and log each reason once."""
    if base is not layer:
        ran("linear_lora", "peft")
        logger.warning_once(f"linear_lora: a layer runs PEFT's own forward, because {reason}.")
    warn_about(base, hidden_states, reason)


def _plain(layer, in_float8, hidden_states):
    if not is_bare_linear(layer):
        return None
    return Float8Weight(layer.weight) if in_float8 else layer.weight


def _torchao_float8(layer, in_float8, hidden_states):
    """A frozen weight that torchao has quantized by `Float8WeightOnlyConfig`, in e4m3 with a scale per row."""
    if type(layer) is not torch.nn.Linear:
        return None
    # Pruning and old weight norms compute the weight from other parameters.
    weight = layer._parameters.get("weight")
    stored = float8_rows_of(weight)
    if stored is None or not is_untouched(layer, torch.nn.Linear, parameters=(type(weight), torch.nn.Parameter)):
        return None
    if in_float8:
        return Float8Weight(stored[0], stored[1].flatten(), weight.dtype)
    # Attributes of torchao's tensor are slow to read.
    dtype = weight.dtype
    return Dequantized(stored[0].shape, dtype, lambda: dequantize_rows(*stored, dtype))


def _bitsandbytes(layer, in_float8, hidden_states):
    """A weight that bitsandbytes has quantized to 4 bit."""
    if type(layer).__module__ != "bitsandbytes.nn.modules":
        return None
    from bitsandbytes.nn import Linear4bit, Params4bit

    if not is_untouched(layer, Linear4bit, parameters=(Params4bit, torch.nn.Parameter)):
        return None
    weight, state = layer.weight, layer.weight.quant_state
    if state is None or layer.compute_dtype is None:
        return None

    def compute() -> torch.Tensor:
        packed = weight.data
        if packed.dtype != torch.uint8:
            # The bytes may be stored as numbers of another dtype, which FSDP can shard.
            packed = packed.view(torch.uint8).view(-1, 1)
        return dequantize_4bit(packed, state).view(*state.shape)

    return Dequantized(state.shape, layer.compute_dtype, compute)


def _is_in_blocks(layer) -> bool:
    """Whether the layer is one of Transformers for a checkpoint in FP8, which runs on GPUs alone by itself."""
    return type(layer) is getattr(sys.modules.get("transformers.integrations.finegrained_fp8"), "FP8Linear", None)


def _in_blocks(layer, in_float8, hidden_states):
    """A weight in e4m3 with a scale for each block, or for all. It is frozen. The input is not cast to float8."""
    if not _is_in_blocks(layer) or layer.weight.dtype != torch.float8_e4m3fn or not is_untouched(layer, type(layer)):
        return None
    weight, scale = layer.weight.detach(), layer.weight_scale_inv.detach()
    scale, block = (scale.view(1, 1), weight.shape) if scale.ndim == 0 else (scale, layer.block_size)
    dtype = autocast_dtype(hidden_states) or hidden_states.dtype
    return Dequantized(weight.shape, dtype, lambda: dequantize_blocks(weight, scale, tuple(block), dtype))


# Who knows the weight of a layer, given whether its products run in float8, and its input. The first one that does returns
# it, the others return `None`. For LoRA on another class of PEFT, `adapters_of` lists the class too.
WEIGHTS: tuple[Callable[[torch.nn.Module, bool, torch.Tensor], Any], ...] = (
    _plain,
    _torchao_float8,
    _bitsandbytes,
    _in_blocks,
)


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


def project(hidden_states: torch.Tensor, *layers: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Apply each of these linear layers to `hidden_states`, in a single autograd step if possible."""
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
        outputs |= zip(group, fused_linears(hidden_states, list(group.values()), dtype), strict=True)
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
