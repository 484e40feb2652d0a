"""Layers and experts of a checkpoint in FP8, as Transformers loads them: a scale for each block, or for all."""

import copy
import re

import torch
from mixins.patch import CONFIGS, builtin_model
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear

from transformers_packed import patch_model


LAYERS = ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")
LAYERS += ("gate_proj", "up_proj", "down_proj")
# The last blocks of some layers have fewer rows or columns.
BLOCK = (20, 24)


def store(model: torch.nn.Module, block=BLOCK, scale_format: str = "float") -> None:
    """Replace layers by those that Transformers has for a checkpoint in FP8, with the scales of random blocks."""
    before = dict(model.named_modules())
    kept = [name for name, x in before.items() if type(x) is torch.nn.Linear and not name.endswith(LAYERS)]
    config = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scale_format)
    replace_with_fp8_linear(model, [f"^{re.escape(name)}$" for name in kept], config, pre_quantized=True)
    for path, stored in model.named_modules():
        if isinstance(stored, (FP8Linear, FP8Experts)):
            stored.to_empty(device="cpu").requires_grad_(False)
            for name, scale in list(stored.named_parameters()):
                if name.endswith("_scale_inv"):
                    scale.data = (torch.rand(scale.shape) * 0.02 + 0.002).to(scale.dtype)
                    name = name.removesuffix("_scale_inv")
                    weight = getattr(before[path], name).data / scale_of_each(stored, name)
                    getattr(stored, name).data = weight.to(torch.float8_e4m3fn)
            if getattr(before[path], "bias", None) is not None:
                stored.bias.data = before[path].bias.data


def scale_of_each(module, name: str) -> torch.Tensor:
    """The scale of each element. Both halves of `gate_up_proj` have one each if the experts have no blocks."""
    scale, shape = getattr(module, f"{name}_scale_inv").data.float(), getattr(module, name).shape
    if scale.ndim == 0:
        return scale
    high, wide = module.block_size or shape[-2:]
    # Both halves of `gate_up_proj` have a scale.
    high = shape[-2] // 2 if name == "gate_up_proj" and high >= shape[-2] else high
    rows = scale.repeat_interleave(high, -2)[..., : shape[-2], :]
    return rows.repeat_interleave(wide, -1)[..., : shape[-1]]


def stored_and_plain(plain: torch.nn.Module, block=BLOCK, scale_format: str = "float"):
    """A copy of the model with layers in FP8, and the model with plain weights of the same values."""
    torch.manual_seed(0)
    stored = copy.deepcopy(plain)
    store(stored, block, scale_format)
    for path, module in stored.named_modules():
        for name in ("weight", "gate_up_proj", "down_proj") if isinstance(module, (FP8Linear, FP8Experts)) else ():
            if hasattr(module, name):
                weight = getattr(plain.get_submodule(path), name)
                weight.data = getattr(module, name).data.float() * scale_of_each(module, name)
    return stored, plain


def mixture(block=(128, 128), layers: int = 4, scale_format: str = "float", **sizes):
    """A mixture whose experts have blocks of 128 x 128, and the mixture with plain weights of the same values."""
    config = copy.deepcopy(CONFIGS["qwen3_5_moe"])
    kinds = (["linear_attention"] * 2 + ["full_attention"]) * layers
    changed = {
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": layers,
        "layer_types": kinds[:layers],
    }
    # With larger weights, rounding changes the experts of some tokens.
    changed["initializer_range"] = 0.02
    for name, value in (changed | sizes).items():
        setattr(config, name, value)
    return stored_and_plain(patch_model(builtin_model("qwen3_5_moe", config=config)), block, scale_format)
