"""What the configuration of a quantized checkpoint says about its weights."""

import fnmatch
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from ..errors import input_error
from .installed import CHECKPOINTS
from .memory import FULL, HALF, NF4, Stored
from .quantization import keeps_dtype
from .versions import joins_stored_experts


# Formats of compressed-tensors that our models load.
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized")
_NVFP4 = Stored("NVFP4", 1 / 2 + 1 / 16)


def quantization_of(config: Any) -> str | None:
    """Return how the weights of a checkpoint are quantized, such as `"fp8"`, by Transformers' names."""
    method = _values(config).get("quant_method")
    return None if method is None else str(getattr(method, "value", method))


def stored_as(config: Any) -> Stored | None:
    """Return how the quantized weights of a checkpoint are stored, or `None` if they are not.

    Raises:
        `ValueError`: this package does not load them as they are.
    """
    method, values = quantization_of(config), _values(config)
    if method is None:
        return None
    if method in CHECKPOINTS and not joins_stored_experts():
        raise input_error(f"transformers >= 5.21 for a checkpoint by {method}", transformers.__version__, "Update it.")
    found = _KINDS[method](values) if method in _KINDS else None
    if found is None:
        details = [f"{name}={values[name]}" for name in _DETAILS if values.get(name) is not None]
        expected = f"weights in 16 or 32 bit, or by {', '.join(_KINDS)}, in 4 or 8 bit"
        raise input_error(expected, " ".join([method, *details]), "Pass the checkpoint that it was made from.")
    return found


def is_dequantized_at_loading(config: Any, device: torch.device) -> bool:
    """Return whether Transformers dequantizes the weights of a checkpoint because the device has no products in FP8."""
    if quantization_of(config) != "fp8":
        return False
    return device.type == "cpu" or (device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9))


def kept_by(config: Any, model: Any) -> Callable[[str], bool]:
    """Return whether the linear layer of a name is in 16 or 32 bits: in a quantized checkpoint, or when a model loads in 4 bit."""
    method, values = quantization_of(config), _values(config)
    if method in (None, "bitsandbytes"):
        return keeps_dtype
    head = model.get_output_embeddings()
    heads, skipped = {name for name, module in model.named_modules() if module is head}, list(_SKIPPED[method](values))

    def is_kept(name: str) -> bool:
        # The checkpoint may be of a model with images.
        names = name, re.sub(r"^model\.", "model.language_model.", name)
        return name in heads or any(is_skipped(x) for is_skipped in skipped for x in names)

    return is_kept


def store_in_blocks(config: Any, model: Any) -> None:
    """Give a model without weights the classes of layers and experts with which Transformers loads a checkpoint in FP8."""
    if quantization_of(config) != "fp8":
        return
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    is_kept = kept_by(config, model)
    kept = [f"^{re.escape(name)}$" for name, _ in model.named_modules() if is_kept(name)]
    replace_with_fp8_linear(model, kept, FineGrainedFP8Config.from_dict(_values(config)), pre_quantized=True)


def quantizes_inputs(config: Any) -> bool:
    """Whether servers of the checkpoint quantize the inputs of its layers, too."""
    groups = _values(config).get("config_groups") or {}
    return quantization_of(config) == "modelopt" or any(x.get("input_activations") for x in groups.values())


def format_of_gptq(values: dict) -> str:
    """Return the layout of a checkpoint by GPTQ or AutoRound by its `quantization_config`. Releases name it differently."""
    if "packing_format" in values:
        packing = values["packing_format"]
        return "gptq" if "gptq" in packing and "gptqmodel" not in packing else "gptq_v2"
    return values.get("checkpoint_format") or values.get("format") or "gptq"


def _values(config: Any) -> dict:
    stored = getattr(config, "quantization_config", None)
    return (stored if isinstance(stored, dict) else stored.to_dict()) if stored is not None else {}


def _bitsandbytes(values: dict) -> Stored:
    return NF4 if values.get("load_in_4bit") else Stored("8 bit", 1)


def _fp8(values: dict) -> Stored:
    return Stored("FP8", 1 + FULL / (128 * 128))


def _compressed_tensors(values: dict) -> Stored | None:
    # Transforms of inputs, and weights without their zeros, are not read here.
    sparse = (values.get("sparsity_config") or {}).get("format", "dense") != "dense"
    if sparse or values.get("transform_config"):
        return None
    groups = [group for group in (values.get("config_groups") or {}).values() if group.get("weights")]
    formats = {group.get("format") or values.get("format") for group in groups}
    if not groups or not formats <= set(_FORMATS):
        return None
    # Where layers differ, the most bytes count.
    known = [stored for stored in (_of_weights(group["weights"]) for group in groups) if stored is not None]
    return max(known, key=lambda stored: stored.bytes) if len(known) == len(groups) else None


def _of_weights(weights: dict) -> Stored | None:
    bits, group = weights.get("num_bits", 0), weights.get("group_size") or 0
    if weights.get("type") == "float":
        return {4: _NVFP4, 8: _fp8(weights)}.get(bits)
    return _integers(bits, group, zeros=not weights.get("symmetric", True))


def _modelopt(values: dict) -> Stored | None:
    return {"NVFP4": _NVFP4, "FP8": _fp8(values)}.get(values.get("quant_algo", ""))


def _awq(values: dict) -> Stored | None:
    bits = values.get("bits", values.get("w_bit"))
    is_known = bits == 4 and str(values.get("version", "gemm")).lower() == "gemm"
    return _integers(bits, values.get("group_size", values.get("q_group_size"))) if is_known else None


def _gptq(values: dict) -> Stored | None:
    is_known = format_of_gptq(values) in ("gptq", "gptq_v2") and not values.get("is_marlin_format")
    return _integers(values.get("bits"), values.get("group_size")) if is_known else None


def _auto_round(values: dict) -> Stored | None:
    packing = values.get("packing_format", "")
    is_known = values.get("data_type", "int") == "int" and re.fullmatch(
        r"auto_round(:(auto_)?(gptq|gptqmodel|awq))?", packing
    )
    return _integers(values.get("bits"), values.get("group_size")) if is_known else None


def _integers(bits: int | None, group: int | None, zeros: bool = True) -> Stored | None:
    if bits not in (4, 8):
        return None
    # Without groups, a row has a scale.
    each = (HALF + zeros) / group if group and group > 0 else 0
    return Stored(f"{bits} bit", bits / 8 + each)


# Functions of a `quantization_config` that yield whether a layer of a name is not quantized.


def _by_parts(values: dict) -> Iterator[Callable[[str], Any]]:
    # Late, because its package imports those of all quantizations.
    from transformers.quantizers.quantizers_utils import should_convert_module

    names = values.get("modules_to_not_convert") or []
    yield lambda layer: not should_convert_module(layer, names)


def _by_patterns(values: dict) -> Iterator[Callable[[str], Any]]:
    for name in values.get("ignore") or values.get("exclude_modules") or ():
        if name.startswith("re:"):
            yield re.compile(name.removeprefix("re:")).match
        elif "*" in name:
            yield re.compile(fnmatch.translate(name)).match
        else:
            yield re.compile(rf"(.*\.)?{re.escape(name)}(\..*)?$").match


def _by_dynamic(values: dict) -> Iterator[Callable[[str], Any]]:
    yield from (re.compile(x.removeprefix("-:")).match for x in values.get("dynamic") or {} if x.startswith("-:"))


def _by_bits_and_blocks(values: dict) -> Iterator[Callable[[str], Any]]:
    yield from (
        re.compile(name).match for name, x in (values.get("extra_config") or {}).items() if x.get("bits", 0) > 8
    )
    if names := values.get("block_name_to_quantize"):
        blocks = tuple(_of_text(x.strip()) for x in (names.split(",") if isinstance(names, str) else names))
        yield lambda layer: not _of_text(layer).startswith(blocks)


def _of_text(name: str) -> str:
    """Return the name of a layer in a model without images."""
    return name.replace("language_model.", "")


_KINDS = {
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
}
_SKIPPED = {
    "fp8": _by_parts,
    "compressed-tensors": _by_patterns,
    "modelopt": _by_patterns,
    "awq": _by_parts,
    "gptq": _by_dynamic,
    "auto-round": _by_bits_and_blocks,
}
_DETAILS = (
    "transform_config",
    "sparsity_config",
    "is_marlin_format",
    "format",
    "quant_algo",
    "bits",
    "version",
    "checkpoint_format",
    "packing_format",
)
