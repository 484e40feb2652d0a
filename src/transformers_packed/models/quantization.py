"""What bitsandbytes quantizes when it loads our models: experts too, but no layers whose errors grow along a document."""

from copy import copy
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from .adapters import AdapterMixin
from .families import OWN, family_of
from .lora import EXPERT_WEIGHTS
from .quantized_weights import ExpertsIn4bit, set_weights, write_entries


# The names of the sensitive layers of all families.
SENSITIVE = tuple(dict.fromkeys(name for family in OWN for name in family.sensitive))
# Transformers skips the head by default, but not if `llm_int8_skip_modules` is set.
_HEADS = ("lm_head", "score", "qa_outputs", "mtp")


class QuantizationMixin(AdapterMixin):
    """Adds the head and a family's sensitive layers to the modules that bitsandbytes leaves in full precision.

    Linear layers are quantized, and experts in 4 bit. Convolutions and norms stay in full precision in any case.
    """

    @classmethod
    def from_pretrained(cls, *args: Any, quantization_config: Any = None, **kwargs: Any) -> Any:
        # The heads of other families have other names, so these keep the default of Transformers.
        family = family_of(cls)
        sensitive = () if family is None else family.sensitive
        if sensitive and quantization_config is not None:
            quantization_config = _with_skipped_modules(quantization_config, sensitive)
        return super().from_pretrained(*args, quantization_config=quantization_config, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(weights, ExpertsIn4bit) for weights in self.parameters()):
            # Some checkpoints have a tensor for each expert, which those in 4 bit cannot be split into.
            kwargs |= {"save_original_format": False}
        super().save_pretrained(*args, **kwargs)


def _with_skipped_modules(quantization_config: Any, sensitive: tuple[str, ...]) -> Any:
    """Return a copy of the configuration that skips these modules too. Only bitsandbytes' configurations have a list."""
    name, kinds = "llm_int8_skip_modules", ("load_in_4bit", "load_in_8bit")
    if isinstance(quantization_config, dict):
        if not any(quantization_config.get(kind) for kind in kinds):
            return quantization_config
        return quantization_config | {name: _joined(quantization_config.get(name), sensitive)}
    if not hasattr(quantization_config, name):
        return quantization_config
    changed = copy(quantization_config)
    setattr(changed, name, _joined(getattr(quantization_config, name), sensitive))
    return changed


def _joined(skipped: list[str] | None, sensitive: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys([*(skipped or ()), *_HEADS, *sensitive]))


_EXPERTS = {family.experts for family in OWN if family.experts}
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
        names = (path, param_name) if type(model.get_submodule(path)).__name__ in _EXPERTS else ()
        return bool(names) and all(should_convert_module(name, self.modules_to_not_convert) for name in names)

    def get_quantize_ops(self) -> ConversionOps:
        return _Quantize(self, super().get_quantize_ops())

    def get_weight_conversions(self) -> list:
        names = [(name, [*(f"{name}.{entry}" for entry in _ENTRIES), name]) for name in EXPERT_WEIGHTS]
        ours = [WeightConverter(entries, name, [_Deserialize(self)]) for name, entries in names]
        return [*super().get_weight_conversions(), *(ours if self.pre_quantized else ())]

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        for name, weights in list(model.named_parameters()):
            if isinstance(weights, ExpertsIn4bit):
                path, _, name = name.rpartition(".")
                values = weights.compute().to(dtype or weights.dtype)
                setattr(model.get_submodule(path), name, torch.nn.Parameter(values))
        return super()._dequantize(model, dtype)


class _Quantize(ConversionOps):
    """Quantize a weight of experts. `theirs` quantizes any other weight."""

    # Transformers' operation imports bitsandbytes, so it comes as an argument.
    def __init__(self, quantizer: ExpertsQuantizer, theirs: ConversionOps):
        self.hf_quantizer, self.theirs = quantizer, theirs

    def convert(self, input_dict: dict, **kwargs: Any) -> dict:  # type: ignore[override]
        ((name, value),) = input_dict.items()
        if not name.endswith(EXPERT_WEIGHTS):
            return self.theirs.convert(input_dict, **kwargs)
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


def _parameter(model: Any, name: str, weights: ExpertsIn4bit) -> torch.nn.Parameter:
    module = model.get_submodule(name.rpartition(".")[0])
    write_entries(module)
    return torch.nn.Parameter(weights, requires_grad=False)


# At import, because `from_pretrained` of our classes needs no registration. Other models are quantized as before.
AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = ExpertsQuantizer


def nf4(dtype: torch.dtype) -> BitsAndBytesConfig:
    """The quantization of the commands: NF4 with double quantization, and products in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def keeps_dtype(name: str) -> bool:
    """Whether the linear layer of this name stays as it is when our classes are loaded in 4 bit."""
    return not {*_HEADS, *SENSITIVE}.isdisjoint(name.split("."))


def initialize_in_4bit(model: Any, config: BitsAndBytesConfig, device: torch.device) -> None:
    """Give a model on the meta device random weights, in 4 bit where our classes load them so, one module at a time.

    Experts of a stock class get the same values in its dtype, because Transformers does not quantize them.
    """
    # Parts come first, because a mixture gives its router weights.
    for name, module in reversed(list(model.named_modules())):
        module.to_empty(device=device, recurse=False)
        model._init_weights(module)
        if type(module) is torch.nn.Linear and not keeps_dtype(name):
            model.set_submodule(name, _in_4bit(module, config))
        for parameter in EXPERT_WEIGHTS if type(module).__name__ in _EXPERTS else ():
            parameter = parameter.rpartition(".")[2]
            old = getattr(module, parameter).data
            new = ExpertsIn4bit.of(old, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant)
            if isinstance(model, QuantizationMixin):
                set_weights(module, parameter, new)
            else:
                old.copy_(new.compute())
    model.tie_weights()
    # PEFT reads it.
    model.is_loaded_in_4bit = True


def _in_4bit(layer: torch.nn.Linear, config: BitsAndBytesConfig) -> torch.nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    kind, double = config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant
    sizes, dtype = (layer.in_features, layer.out_features), config.bnb_4bit_compute_dtype
    new = Linear4bit(
        *sizes, bias=False, compute_dtype=dtype, quant_type=kind, compress_statistics=double, device="meta"
    )
    options: Any = {"requires_grad": False, "quant_type": kind, "compress_statistics": double, "module": new}
    weight: Any = Params4bit(layer.weight.data, **options)
    new.weight, new.bias = weight.to(layer.weight.device), layer.bias
    return new
