"""Sizes of released models, as arguments of their configurations, and configurations of quantized checkpoints."""

import copy

from transformers_packed.models.quantization import SENSITIVE


_NAMES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "linear_num_value_heads", "tie_word_embeddings",
)  # fmt: skip
# As in benchmarks/shapes.py. The defaults of the configuration are the sizes of 9B.
SIZES = {
    "0.8B": dict(zip(_NAMES, (1024, 3584, 24, 8, 2, 16, True), strict=True)),
    "4B": dict(zip(_NAMES, (2560, 9216, 32, 16, 4, 32, True), strict=True)),
    "9B": {},
    "27B": dict(zip(_NAMES, (5120, 17408, 64, 24, 4, 48, False), strict=True)),
}


def quantized(config, method, **options):
    config = copy.deepcopy(config)
    config.quantization_config = {"quant_method": method, **options}
    return config


def in_fp8(config):
    """The configuration of a checkpoint as released, whose small layers are in 16 bits."""
    return quantized(config, "fp8", modules_to_not_convert=list(SENSITIVE))


def in_nvfp4(config):
    return quantized(config, "modelopt", quant_algo="NVFP4", ignore=["lm_head", *(f"*.{x}" for x in SENSITIVE)])


def in_awq(config, **options):
    return quantized(config, "awq", bits=4, group_size=128, modules_to_not_convert=list(SENSITIVE), **options)
