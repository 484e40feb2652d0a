"""Tiny models with fused weights, and which rows of these the stock layers take for each projection."""

from collections.abc import Iterator

import torch
from mixins.vision import EXPERTS, TEXT
from scripts.trainer_arms import CONFIGS
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, set_seed


MODELS = {
    "qwen3_5": CONFIGS["qwen3_5"],
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(**TEXT, **EXPERTS),
    "qwen3_next": CONFIGS["qwen3_next_moe"],
}
# The last name of weights of modules that are no matrices of a layer.
OTHERS = ("embed_tokens", "lm_head", "conv1d", "norm", "layernorm", "shared_expert_gate", "dt_bias", "A_log")


def tiny_model(family: str) -> torch.nn.Module:
    set_seed(0)
    return AutoModelForCausalLM.from_config(MODELS[family](), dtype=torch.float32)


def is_hidden(name: str) -> bool:
    return not name.removesuffix(".weight").endswith(OTHERS)


def rows_of_projections(model: torch.nn.Module, name: str) -> list[torch.Tensor]:
    """The rows of each projection in a weight, as the forward of the stock layer cuts its output."""
    path, _, last = name.removesuffix(".weight").rpartition(".")
    layer, weight = model.get_submodule(path), model.get_parameter(name)
    rows = torch.arange(weight.shape[-2])
    if last == "in_proj_qkv":
        return list(rows.split([layer.key_dim, layer.key_dim, layer.value_dim]))
    if last in ("in_proj_qkvz", "in_proj_ba"):
        fused = {"in_proj_qkvz": layer.in_proj_qkvz.out_features, "in_proj_ba": layer.in_proj_ba.out_features}
        given = [torch.arange(size).expand(1, 1, -1) for size in fused.values()]
        found = layer.fix_query_key_value_ordering(*given)
        return [x.flatten() for x in (found[:4] if last == "in_proj_qkvz" else found[4:])]
    if last == "q_proj":
        return [x.flatten() for x in rows.view(-1, 2 * layer.head_dim).chunk(2, -1)]
    return list(rows.chunk(2)) if last == "gate_up_proj" else [rows]


def matrices(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Copies of the matrices in a tensor of the shape of a weight, `[out, in]` each."""
    for rows in rows_of_projections(model, name):
        for expert in tensor if tensor.ndim > 2 else tensor[None]:
            yield expert[rows].clone()
