"""What bitsandbytes quantizes when it loads our models: experts too, but no layers whose errors grow along a document."""

from collections.abc import Iterator
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from .adapters import AdapterMixin
from .families import EXPERT_CLASSES, EXPERT_WEIGHTS, OWN, family_of
from .installed import late, reading_checkpoints
from .quantized_weights import ExpertsIn4bit, set_weights
from .releases import initialize_module


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
        with nullcontext() if quantization_config else reading_checkpoints():
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


def nf4(dtype: torch.dtype) -> BitsAndBytesConfig:
    """The quantization of the commands: NF4 with double quantization, and products in `dtype`."""
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def keeps_dtype(name: str) -> bool:
    """Whether the linear layer of this name stays as it is when our classes are loaded in 4 bit."""
    return not {*_HEADS, *SENSITIVE}.isdisjoint(name.split("."))


def initialized_modules(model: Any, device: torch.device) -> Iterator[tuple[str, torch.nn.Module]]:
    """Give the modules of a model on the meta device random weights, and yield each one then, with its name.

    Parts come first, because a mixture gives its router weights.
    """
    for name, module in reversed(list(model.named_modules())):
        module.to_empty(device=device, recurse=False)
        initialize_module(model, module)
        yield name, module


def initialize_in_4bit(model: Any, config: BitsAndBytesConfig, device: torch.device) -> None:
    """Give a model on the meta device random weights, in 4 bit where our classes load them so, one module at a time.

    Experts of a stock class get the same values in its dtype, because Transformers does not quantize them.
    """
    for name, module in initialized_modules(model, device):
        if type(module) is torch.nn.Linear and not keeps_dtype(name):
            new: Any = in_4bit(module, config)
            new.weight = late("host_parameters").loaded_linear(f"{name}.weight", new, new.weight)
            model.set_submodule(name, new)
        for parameter in EXPERT_WEIGHTS if type(module).__name__ in EXPERT_CLASSES else ():
            parameter = parameter.rpartition(".")[2]
            old = getattr(module, parameter).data
            new = ExpertsIn4bit.of(old, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant)
            if isinstance(model, QuantizationMixin):
                set_weights(module, parameter, late("host_parameters").loaded(module, new))
            else:
                old.copy_(new.compute())
    model.tie_weights()
    # PEFT reads it.
    model.is_loaded_in_4bit = True


def in_4bit(layer: torch.nn.Linear, config: BitsAndBytesConfig) -> torch.nn.Module:
    """Return the layer with its weight in 4 bit."""
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
