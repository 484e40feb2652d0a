"""A model to audit from its name: a checkpoint, or a model type built tiny from its configuration."""

import inspect
from pathlib import Path

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import input_error


# What a configuration takes of this is set. Weights are large, so that every layer shows in the logits.
_TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.15,
    "init_std": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# By model type, what it needs besides.
_OVERRIDES: dict[str, dict] = {
    # By default every layer would be attention.
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "opt": {"word_embed_proj_dim": 64},
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The configuration of a tiny model of a type that Transformers knows; of a composite one its text part is tiny."""
    cls = CONFIG_MAPPING[model_type]
    parts = getattr(cls, "sub_configs", {})
    if "text_config" in parts:
        text = parts["text_config"]
        values = _tiny_values(text) | _OVERRIDES.get(text.model_type, {})
        return cls(text_config=values, **_OVERRIDES.get(model_type, {}))
    return cls(**_tiny_values(cls) | _OVERRIDES.get(model_type, {}))


def _tiny_values(cls: type[PreTrainedConfig]) -> dict:
    known = inspect.signature(cls.__init__).parameters
    names = {name: cls.attribute_map.get(name, name) for name in _TINY}
    return {names[name]: value for name, value in _TINY.items() if names[name] in known}


def load_model(
    name: str,
    *,
    attn: str | None = None,
    dtype: str | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    seed: int = 0,
) -> PreTrainedModel:
    """The model of a checkpoint (a directory or a name on the Hub), or a tiny one of a model type.

    Args:
        name (`str`):
            A directory, a model type such as `"qwen3_5_text"` or `"llama"`, or else a name on the Hub.
        attn (`str`, *optional*):
            The attention implementation.
        dtype (`str`, *optional*):
            By default the checkpoint's, and float32 for a model type.
        device (`str`, *optional*, defaults to `"cpu"`):
            Where the model goes.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether code of the checkpoint's own may run.
        seed (`int`, *optional*, defaults to 0):
            Of a tiny model's weights.

    Raises:
        `ValueError`: the type is no causal language model.
        `OSError`: there is no such checkpoint.
    """
    options = {"attn_implementation": attn} if attn else {}
    if Path(name).is_dir() or name not in CONFIG_MAPPING:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        causal = type(config) in AutoModelForCausalLM._model_mapping or hasattr(config, "auto_map")
        auto = AutoModelForCausalLM if causal else AutoModelForImageTextToText
        model = auto.from_pretrained(name, dtype=dtype or "auto", trust_remote_code=trust_remote_code, **options)
    else:
        if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise input_error(
                "audit", expected="a causal language model", got=f"the type {name}", fix="Name a text decoder's type."
            )
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            tiny_config(name), dtype=getattr(torch, dtype or "float32"), **options
        )
    return model.to(device)
