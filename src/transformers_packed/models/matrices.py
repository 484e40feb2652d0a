"""The hidden matrices of a model, which Muon trains: the one rule for which parameters they are, and where fused ones are cut.

DeepSeek-V4 and MaxText train routers by Muon too, and embeddings, heads, norms and biases by AdamW. Keller Jordan,
Megatron-LM and XTuner orthogonalize the projections in a fused weight separately.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..errors import input_error
from .families import EXPERT_WEIGHTS
from .lora import FACTORS


# How the rows of a weight are cut: how often the parts repeat, and the rows of each part in a repetition.
Cuts = tuple[int, tuple[int, ...]]
_WHOLE: Cuts = (1, ())
# What PEFT adds to the path of a layer that it wraps.
_WRAPPED = re.compile(r"\.(base_layer|modules_to_save\.[^.]+)$")


def _of_heads(layer: Any) -> Cuts:
    """Queries and gates of each head, if the layer of attention has twice as many as its output takes."""
    gated = layer.q_proj.weight.shape[0] == 2 * layer.o_proj.weight.shape[1]
    return (layer.o_proj.weight.shape[1] // layer.head_dim, (layer.head_dim,) * 2) if gated else _WHOLE


def _of_key_heads(layer: Any, *parts: int) -> Cuts:
    return layer.num_k_heads, tuple(x // layer.num_k_heads for x in parts)


# By the name of a weight in the layer that has it, and an attribute of that layer.
_CUTS: Mapping[tuple[str, str], Callable[[Any], Cuts]] = {
    ("in_proj_qkv.weight", "key_dim"): lambda x: (1, (x.key_dim, x.key_dim, x.value_dim)),
    ("in_proj_qkvz.weight", "key_dim"): lambda x: _of_key_heads(x, *(x.key_dim,) * 2, *(x.value_dim,) * 2),
    ("in_proj_ba.weight", "key_dim"): lambda x: _of_key_heads(x, *(x.num_v_heads,) * 2),
    ("q_proj.weight", "o_proj"): _of_heads,
    ("qkv.weight", "dim"): lambda x: (1, (x.dim,) * 3),
    ("gate_up_proj", "is_concatenated"): lambda x: (
        (1, (x.gate_up_proj.shape[1] // 2,) * 2)
        if x.has_gate and x.is_concatenated and not x.is_transposed
        else _WHOLE
    ),
}


def hidden_matrices(model: torch.nn.Module) -> dict[str, Cuts]:
    """Return the trained hidden matrices of a model by the names of their parameters, and how fused ones are cut.

    They are the weights of linear layers and routers in numbered layers, and `gate_up_proj` and `down_proj` of experts. A
    weight with one row is a vector. The factors of LoRA are none: their product is what a layer adds to its weight.

    Args:
        model (`torch.nn.Module`):
            A model, also inside of DDP, FSDP2 or PEFT. Weights are `[out, in]`, those of experts `[experts, out, in]`.

    Returns:
        `dict`: `(repetitions, rows of each part)`. A weight that is one matrix has no parts.

    Raises:
        `ValueError`: a wrapper has flattened a weight.

    Example:

    ```python
    >>> from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    >>> from transformers_packed.models.matrices import hidden_matrices
    >>> with torch.device("meta"):
    ...     model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(num_hidden_layers=1))
    >>> hidden_matrices(model)["model.layers.0.linear_attn.in_proj_qkv.weight"]
    (1, (2048, 2048, 4096))

    ```
    """
    modules = dict(model.named_modules())
    found = {}
    for name, weight in model.named_parameters():
        path, _, last = name.rpartition(".")
        words, module = path.split("."), modules[path]
        linear = last == "weight" and (isinstance(module, torch.nn.Linear) or type(module).__name__.endswith("Router"))
        hidden = any(map(str.isdigit, words)) and FACTORS.isdisjoint(words)
        if not weight.requires_grad or not hidden or not (linear or name.endswith(EXPERT_WEIGHTS)):
            continue
        if weight.ndim < 2:
            fix = "Train with DDP or FSDP2, which keep the shapes of weights."
            raise input_error(f"a matrix in {name}", f"a tensor of shape {tuple(weight.shape)}", fix)
        if weight.shape[-2] > 1:
            found[name] = _cuts(modules, path, last)
    return found


def _cuts(modules: Mapping[str, torch.nn.Module], path: str, last: str) -> Cuts:
    """How a weight is cut, by its module or the layer around it, where PEFT's wrappers are no modules."""
    above, _, child = _WRAPPED.sub("", path).rpartition(".")
    for layer, name in ((modules[path], last), (modules[above], f"{child}.{last}")):
        for (weight, attribute), cuts in _CUTS.items():
            if name == weight and hasattr(layer, attribute):
                return cuts(layer)
    return _WHOLE
