"""Models with weights in bitsandbytes' NF4."""

import torch

from transformers_packed.models.families import EXPERT_WEIGHTS
from transformers_packed.models.quantization import in_4bit, keeps_dtype, nf4
from transformers_packed.models.quantized_weights import ExpertsIn4bit, set_weights


def store_in_nf4(model: torch.nn.Module, dtype: torch.dtype, least: int = 0) -> None:
    """Quantize experts, and linear layers from a size on, as when our classes are loaded. Products are in `dtype`."""
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and not keeps_dtype(name) and module.weight.numel() >= least:
            layer = in_4bit(module, nf4(dtype))
            # In evaluation on some CPUs, bitsandbytes needs layers of larger sizes.
            layer.support_avx512bf16_for_cpu = False
            model.set_submodule(name, layer)
        for weight in {x.rpartition(".")[2] for x in EXPERT_WEIGHTS} & module._parameters.keys():
            set_weights(module, weight, ExpertsIn4bit.of(getattr(module, weight).data, "nf4", True))
    # PEFT reads it.
    model.is_loaded_in_4bit = True
