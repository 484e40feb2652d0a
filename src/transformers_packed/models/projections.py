"""Linear layers of a model as parameters for the fused ops, or as modules to call."""

import torch
from transformers.utils import logging

from ..ops.backends import triton
from ..ops.dispatch import ran
from ..ops.float8 import DTYPE
from ..ops.linear import fused_linears, product_dtype
from ..ops.projection import Projection, QuantizedWeight
from .float8 import is_in_float8, warn_about
from .lora import adapters_of, is_lora
from .untouched import is_bare_linear, is_untouched


logger = logging.get_logger(__name__)


def projection_of(
    layer: torch.nn.Module, hidden_states: torch.Tensor
) -> tuple[Projection, torch.dtype] | tuple[None, None]:
    """Return the parameters that fully determine the output of this linear layer, and the dtype of its products.

    The layer may have LoRA adapters of PEFT, and a quantized base layer. If it has to be called, both are `None`.
    """
    adapters, base, none = (), layer, (None, None)
    if type(layer) is not torch.nn.Linear and is_lora(layer):
        adapters, base = adapters_of(layer), layer.base_layer
        if isinstance(adapters, str):
            _record_peft(adapters)
            warn_about(base, hidden_states)
            return none
    weight = base.weight if is_bare_linear(base) else _quantized_weight(base)
    in_float8 = is_in_float8(base, hidden_states)
    if not isinstance(weight, torch.Tensor) and (weight is None or weight.float8 is None):
        warn_about(base, hidden_states)
        in_float8 = False
    if weight is None:
        if base is not layer:
            _record_peft(f"its base layer is a {type(base).__name__}, or is hooked or wrapped")
        return none
    projection = Projection(weight, base.bias, adapters, in_float8)
    dtype = product_dtype(hidden_states, projection)
    if dtype is None and base is not layer:
        _record_peft(f"its input is {hidden_states.dtype} and its base weight is {weight.dtype}")
    return (projection, dtype) if dtype else none


def _record_peft(reason: str) -> None:
    """Record that a LoRA layer runs PEFT's own forward, and log each reason once."""
    ran("linear_lora", "peft")
    logger.warning_once(f"linear_lora: a layer runs PEFT's own forward, because {reason}.")


def _quantized_weight(layer: torch.nn.Module) -> QuantizedWeight | None:
    """Return the weight of a layer that bitsandbytes has quantized to 4 bit, or torchao to float8."""
    if type(layer) is torch.nn.Linear:
        return _float8_weight(layer)
    if type(layer).__module__ != "bitsandbytes.nn.modules":
        return None
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    if not is_untouched(layer, Linear4bit, parameters=(Params4bit, torch.nn.Parameter)):
        return None
    weight, state = layer.weight, layer.weight.quant_state
    if state is None or layer.compute_dtype is None:
        return None
    return QuantizedWeight(state.shape, layer.compute_dtype, lambda: dequantize_4bit(weight.data, state))


def _float8_weight(layer: torch.nn.Linear) -> QuantizedWeight | None:
    """Return a frozen weight that torchao has quantized by `Float8WeightOnlyConfig`, in e4m3 with a scale per row."""
    # Pruning and old weight norms compute the weight from other parameters.
    weight = layer._parameters.get("weight")
    kind = type(weight)
    if kind.__name__ != "Float8Tensor" or not kind.__module__.startswith("torchao."):
        return None
    if not is_untouched(layer, torch.nn.Linear, parameters=(kind, torch.nn.Parameter)) or weight.requires_grad:
        return None
    data, scale = weight.qdata, weight.scale
    rows = data.dtype == DTYPE and data.is_contiguous() and scale.shape == (len(data), 1)
    # With `act_quant_kwargs`, torchao would cast the input too, in evaluation as well.
    if not rows or scale.dtype != torch.float32 or weight.act_quant_kwargs is not None:
        return None
    return QuantizedWeight(weight.shape, weight.dtype, weight.dequantize, (data, scale[:, 0]))


def projection_to_fuse(layer: torch.nn.Module, hidden_states: torch.Tensor) -> Projection | None:
    """Return the layer's parameters if the preceding op can compute this linear layer too, which saves GPU memory."""
    if not _may_fuse(layer, hidden_states):
        return None
    projection, dtype = projection_of(layer, hidden_states)
    return projection if dtype == hidden_states.dtype else None


def _may_fuse(layer: torch.nn.Module, hidden_states: torch.Tensor) -> bool:
    """Whether an op computes a layer. On a CPU, it does so in float8 only."""
    if torch.compiler.is_compiling():
        return False
    return triton.on_gpu(hidden_states) or is_in_float8(getattr(layer, "base_layer", layer), hidden_states)


def project(hidden_states: torch.Tensor, *layers: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """Apply each of these linear layers to `hidden_states`, in a single autograd step if possible."""
    outputs, groups = {}, {}
    for i, layer in enumerate(layers):
        fuse = _may_fuse(layer, hidden_states)
        projection, dtype = projection_of(layer, hidden_states) if fuse else (None, None)
        if projection is None:
            outputs[i] = layer(hidden_states)
        else:
            groups.setdefault(dtype, {})[i] = projection
    for dtype, group in groups.items():
        outputs |= zip(group, fused_linears(hidden_states, group.values(), dtype), strict=True)
    return tuple(outputs[i] for i in range(len(layers)))
