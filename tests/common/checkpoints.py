"""Quantized checkpoints of small models, written by compressed-tensors, or in the layouts of ModelOpt, AWQ and GPTQ."""

import json
import re
from functools import partial
from pathlib import Path

import torch
from common.blocks import LAYERS
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file


GROUP = 16
_NAME = re.compile(rf"\.({'|'.join(LAYERS)}|in_proj_qkvz)\.weight$")
# Layers that are not quantized, in compressed-tensors' words.
KEPT = ["lm_head", r"re:.*\.in_proj_(a|b|ba)$", r"re:.*\.shared_expert_gate$", r"re:.*mlp\.gate$"]
_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def compressed(weight, method: str, **options):
    """What compressed-tensors writes, and the weight that it reads."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**options))
    args, weight = scheme.weights, weight.bfloat16()
    rows, columns = weight.shape
    if args.strategy == "block":
        high, wide = args.block_structure
        parts = weight.unflatten(0, (-1, high)).unflatten(2, (-1, wide)).transpose(1, 2).flatten(2)
    elif args.strategy == "channel":
        parts = weight[:, None]
    elif args.strategy == "tensor":
        parts = weight.flatten()[None]
    else:
        parts = weight.view(rows, -1, args.group_size)
    least, most = parts.amin(-1), parts.amax(-1)
    whole = (
        {"weight_global_scale": generate_gparam(least.min(), most.max())} if options.get("group_size") == 16 else {}
    )
    whole = whole if args.type == "float" and args.num_bits == 4 else {}
    scale, zero = calculate_qparams(least, most, args, global_scale=whole.get("weight_global_scale"))
    scale = scale if whole else scale.bfloat16()
    tensors = {"weight": weight, "weight_scale": scale, **whole} | (
        {} if args.symmetric else {"weight_zero_point": zero}
    )
    compressor = BaseCompressor.get_value_from_registry(method)
    tensors = compressor.compress(tensors, scheme)
    return tensors, compressor.decompress(tensors, scheme)["weight"]


def of_modelopt(weight):
    """NVFP4 in ModelOpt's layout, which has the inverse of the whole scale."""
    tensors, _ = compressed(weight, "nvfp4-pack-quantized", **NVFP4)
    whole, scale = 1 / tensors.pop("weight_global_scale"), tensors["weight_scale"]
    packed = tensors.pop("weight_packed")
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((codes, -codes))[torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()]
    plain = (values * (scale.float() * whole).repeat_interleave(GROUP, 1)).bfloat16()
    return tensors | {"weight": packed, "weight_scale_2": whole.reshape(()), "input_scale": torch.ones(())}, plain


def _groups(weight, bits, order):
    """Unsigned numbers `[out, in]`, scales and zeros `[out, G]` in float16, and the weight that they stand for."""
    rows, columns = weight.shape
    top, scale, zero = 2**bits - 1, torch.empty(rows, columns // GROUP), torch.empty(rows, columns // GROUP)
    for group in range(columns // GROUP):
        part = weight[:, order == group]
        scale[:, group] = ((part.amax(1) - part.amin(1)) / top).half()
        zero[:, group] = (-part.amin(1) / scale[:, group]).round().clamp(1, top)
    each = scale[:, order], zero[:, order]
    values = (weight / each[0] + each[1]).round().clamp(0, top)
    return values.int(), scale.half(), zero.int(), ((values - each[1]) * each[0]).half()


def _packed(values, bits, dim=1):
    """Numbers of a dimension in int32, the first one in the low bits."""
    number = 32 // bits
    values = values.unflatten(dim, (-1, number))
    shifts = torch.arange(0, 32, bits).view(-1, *[1] * (values.ndim - dim - 2))
    return (values.long() << shifts).sum(dim + 1).to(torch.int32)


def of_awq(weight):
    order = torch.arange(weight.shape[1]) // GROUP
    values, scale, zero, plain = _groups(weight, 4, order)
    values, zero = (x.t().unflatten(1, (-1, 8))[..., _AWQ].flatten(1) for x in (values, zero))
    return {"qweight": _packed(values, 4), "qzeros": _packed(zero, 4), "scales": scale.t()}, plain


def of_gptq(weight, bits=4, ordered=False, version=1):
    order = torch.arange(weight.shape[1]) // GROUP
    order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))] if ordered else order
    values, scale, zero, plain = _groups(weight, bits, order)
    tensors = {"qweight": _packed(values.t(), bits, 0), "qzeros": _packed(zero.t() - int(version == 1), bits)}
    return tensors | {"scales": scale.t(), "g_idx": order.int()}, plain


NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
NVFP4 |= {"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
COMPRESSED = {
    "w4a16": ("pack-quantized", INT4 | {"symmetric": True}),
    "w4a16_zeros": ("pack-quantized", INT4 | {"symmetric": False}),
    "w4a16_rows": ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"}),
    "w8a16": ("pack-quantized", INT4 | {"num_bits": 8, "symmetric": True}),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}),
    "fp8_rows": ("float-quantized", FP8 | {"strategy": "channel"}),
    "fp8_whole": ("float-quantized", FP8 | {"strategy": "tensor"}),
    "fp8_blocks": ("float-quantized", FP8 | {"strategy": "block", "block_structure": [16, 16]}),
    "nvfp4": ("nvfp4-pack-quantized", NVFP4),
}


def _config_of(method: str, options: dict) -> dict:
    weights = json.loads(QuantizationArgs(**options).model_dump_json())
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": method}}
    config = {"quant_method": "compressed-tensors", "format": method, "quantization_status": "compressed"}
    return config | {"config_groups": groups, "ignore": KEPT}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
_GPTQ |= {"dynamic": {r"-:.*in_proj_[ab]": {}, r"-:.*shared_expert_gate": {}}}
_AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
_AWQ_CONFIG |= {"modules_to_not_convert": ["in_proj_a", "in_proj_b", "in_proj_ba", "shared_expert_gate"]}
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "block_name_to_quantize": "model.layers"}
_AUTO_ROUND |= {"packing_format": "auto_round:auto_gptq"}
_AUTO_ROUND |= {"extra_config": {r".*in_proj_[ab].*": {"bits": 16}, r".*shared_expert_gate": {"bits": 16}}}
# The writer of a weight, and the configuration of the checkpoint.
FORMATS = {name: (partial(compressed, method=x, **y), _config_of(x, y)) for name, (x, y) in COMPRESSED.items()}
FORMATS |= {
    "modelopt": (
        of_modelopt,
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "*.in_proj_[ab]*", "*.shared_expert_gate"],
        },
    ),
    "awq": (of_awq, _AWQ_CONFIG),
    "gptq": (of_gptq, _GPTQ),
    "gptq_order": (partial(of_gptq, ordered=True), _GPTQ | {"desc_act": True}),
    "gptq_v2": (partial(of_gptq, version=2), _GPTQ | {"checkpoint_format": "gptq_v2"}),
    "auto_round": (of_gptq, _AUTO_ROUND),
    "gptq_8_bit": (partial(of_gptq, bits=8, ordered=True), _GPTQ | {"bits": 8, "desc_act": True}),
}


def write(model: torch.nn.Module, folder: str, name: str) -> dict[str, torch.Tensor]:
    """Write the model with quantized layers. Return the tensors of the same model with plain weights, by name."""
    model.save_pretrained(folder)
    path, (function, quantization) = Path(folder), FORMATS[name]
    plain, stored = load_file(path / "model.safetensors"), {}
    for key, weight in plain.items():
        if not _NAME.search(key):
            stored[key] = weight
            continue
        tensors, values = function(weight)
        plain[key] = values.to(weight.dtype)
        stored |= {key.removesuffix("weight") + part: x.contiguous() for part, x in tensors.items()}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return plain
