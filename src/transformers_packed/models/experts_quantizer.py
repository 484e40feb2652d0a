"""Transformers' quantizer to 4 bit for our models, which loads slowly: it imports all quantizers."""

from typing import Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from .families import EXPERT_CLASSES, EXPERT_WEIGHTS
from .host_parameters import loaded, loaded_linear
from .quantization import QuantizationMixin
from .quantized_weights import ExpertsIn4bit, dequantize, write_entries


_ENTRIES = ["absmax", "quant_map", "nested_absmax", "nested_quant_map"]
_ENTRIES += ["quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4"]


class ExpertsQuantizer(Bnb4BitHfQuantizer):
    """Transformers' quantizer to 4 bit, which quantizes the experts of our models too.

    `llm_int8_skip_modules=["experts"]` keeps them as they are. Each weight is quantized as soon as it is loaded.
    """

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        if super().param_needs_quantization(model, param_name, **kwargs):
            return True
        if not isinstance(model, QuantizationMixin) or not param_name.endswith(EXPERT_WEIGHTS):
            return False
        path = param_name.rpartition(".")[0]
        names = (path, param_name) if type(model.get_submodule(path)).__name__ in EXPERT_CLASSES else ()
        return bool(names) and all(should_convert_module(name, self.modules_to_not_convert) for name in names)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self, super().get_quantize_ops())

    def get_weight_conversions(self) -> list:
        names = [(name, [*(f"{name}.{entry}" for entry in _ENTRIES), name]) for name in EXPERT_WEIGHTS]
        ours = [WeightConverter(entries, name, [_Deserialize(self)]) for name, entries in names]
        theirs = super().get_weight_conversions()
        for conversion in theirs:
            conversion.operations.append(_Stay(self))
        return [*theirs, *(ours if self.pre_quantized else ())]

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        dequantize(model, dtype)
        return super()._dequantize(model, dtype)


class _Quantize(ConversionOps):
    """Quantize a weight of experts. `theirs` quantizes any other weight."""

    # Transformers' operation imports bitsandbytes, so it comes as an argument.
    def __init__(self, quantizer: ExpertsQuantizer, theirs: ConversionOps):
        self.hf_quantizer, self.theirs = quantizer, theirs

    def convert(self, input_dict: dict, **kwargs: Any) -> dict:  # type: ignore[override]
        ((name, value),) = input_dict.items()
        if not name.endswith(EXPERT_WEIGHTS):
            return _where_they_stay(self.theirs.convert(input_dict, **kwargs), kwargs["model"])
        config = self.hf_quantizer.quantization_config
        value = value[0] if isinstance(value, list) else value
        weights = ExpertsIn4bit.of(value, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant)
        return {name: _parameter(kwargs["model"], name, weights)}


class _Deserialize(ConversionOps):
    """Join the entries of a weight of experts. A weight alone was not quantized."""

    # Transformers finds the quantizer by this name, and then does not cast the entries.
    def __init__(self, quantizer: ExpertsQuantizer):
        self.hf_quantizer = quantizer

    def convert(self, input_dict: dict, **kwargs: Any) -> dict:  # type: ignore[override]
        entries = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        name = next(name for name in EXPERT_WEIGHTS if name in entries)
        if len(entries) == 1:
            return entries
        from bitsandbytes.functional import QuantState

        packed = entries.pop(name)
        entries = {key.removeprefix(f"{name}."): value for key, value in entries.items()}
        weights = ExpertsIn4bit(packed, QuantState.from_dict(entries, packed.device))
        return {name: _parameter(kwargs["model"], kwargs["full_layer_name"], weights)}


class _Stay(ConversionOps):
    """Leave the weight of a linear layer, which bitsandbytes has quantized earlier, where it stays."""

    def __init__(self, quantizer: ExpertsQuantizer):
        self.hf_quantizer = quantizer

    def convert(self, input_dict: dict, **kwargs: Any) -> dict:  # type: ignore[override]
        path = kwargs["full_layer_name"].rpartition(".")[0]
        found = {f"{path}.{name}": weight for name, weight in input_dict.items()}
        moved = _where_they_stay(found, kwargs["model"])
        return {name: moved[f"{path}.{name}"] for name in input_dict}


def _where_they_stay(weights: dict, model: Any) -> dict:
    modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in weights}
    return {name: loaded_linear(name, modules[name], weight) for name, weight in weights.items()}


def _parameter(model: Any, name: str, weights: ExpertsIn4bit) -> torch.nn.Parameter:
    module = model.get_submodule(name.rpartition(".")[0])
    write_entries(module)
    return torch.nn.Parameter(loaded(module, weights), requires_grad=False)
