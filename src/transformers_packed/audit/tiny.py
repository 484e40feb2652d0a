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
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "num_hidden_layers": 4,
    "encoder_layers": 1,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # With few heads many scores are exactly 0, and which of equal ones are chosen depends on the length of the row.
    "index_n_heads": 32,
    "index_head_dim": 16,
    "initializer_range": 0.15,
    "init_std": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Less than a row, so that they matter; a type that has none by default is left without.
_WINDOWS = {
    "sliding_window": 24,
    "sliding_window_size": 24,
    "local_attention": 48,
    "window_size": 24,
    "attention_window_size": 24,
    "attention_chunk_size": 24,
    "index_topk": 24,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "block_size": 16,
}
# Patterns of layers: every kind that the type's full-sized default has is there.
_PATTERNS = ("layer_types", "mlp_layer_types", "layers_block_type")
_FULL_AND_SLIDING = ["full_attention", "sliding_attention"] * 2
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
_BLT = {"hidden_size_global": 64}
# By model type, what it needs besides: to be valid, to be small, or to have all its kinds of layers.
_OVERRIDES: dict[str, dict] = {
    "bamba": {"attn_layer_indices": [1, 3], **_MAMBA2},
    "blenderbot": {"max_position_embeddings": 1024},
    "blt": {"encoder_hash_byte_group_vocab": 256, "encoder_config": _BLT, "decoder_config": _BLT},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": _FULL_AND_SLIDING,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _FULL_AND_SLIDING[:2]},
    },
    # The model asks the attention's part for a setting that it does not have by default.
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96},
    },
    "deepseek_v4": {
        "o_lora_rank": 16,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "doge": {"keep_window_size": 24},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ctrl": {"n_positions": 1024, "dff": 96},
    "dots3_note": {
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": {
        "shared_experts_intermediate_size": 32,
        "sliding_window": 24,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 128, **_MAMBA2},
    "gemma3n_text": {
        "layer_types": _FULL_AND_SLIDING[::-1],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_text": {
        "layer_types": _FULL_AND_SLIDING[::-1],
        "vocab_size_per_layer_input": 256,
        "hidden_size_per_layer_input": 16,
    },
    "gemma4_unified_text": {"layer_types": _FULL_AND_SLIDING[::-1]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, **_MAMBA2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "laguna": {"layer_types": _FULL_AND_SLIDING},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "longcat_flash": {
        "num_layers": 2,
        "head_dim": 8,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},
    "mellum": {"layer_types": _FULL_AND_SLIDING},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 32,
        "rotary_dim": 8,
        "index_n_heads": 2,
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
    "mllama_text_model": {"cross_attention_layers": [1]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 16,
    },
    "opt": {"word_embed_proj_dim": 64},
    "prophetnet": {"num_decoder_layers": 2, "num_encoder_layers": 1},
    "qwen4_exp_text": {
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 512,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "hc_lowrank": 8,
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 24,
        "indexer_compress_ratio": 4,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "num_buckets": 8, "attention_head_size": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": ["linear_attention", "hybrid"] * 2 + ["linear_attention"]},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_d_state": 16,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """The configuration of a tiny model of a type that Transformers knows, with the parts of a composite one tiny too."""
    cls = CONFIG_MAPPING[model_type]
    values = _tiny_values(cls)
    overrides = dict(_OVERRIDES.get(model_type, {}))
    for name, part in _parts(cls).items():
        values[name] = {
            "model_type": part.model_type,
            **_tiny_values(part),
            **_OVERRIDES.get(part.model_type, {}),
            **overrides.pop(name, {}),
        }
    return cls(**values | overrides)


def _parts(cls: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    """The configurations inside one of this class, by name."""
    if not getattr(cls, "sub_configs", None):
        return {}
    default = cls()
    found = {name: getattr(default, name, None) for name in cls.sub_configs}
    return {name: type(part) for name, part in found.items() if isinstance(part, PreTrainedConfig)}


def _tiny_values(cls: type[PreTrainedConfig]) -> dict:
    known = inspect.signature(cls.__init__).parameters
    own_name = {name: cls.attribute_map.get(name, name) for name in (*_TINY, *_WINDOWS)}
    values = {own_name[name]: value for name, value in _TINY.items() if own_name[name] in known}
    for name, value in _WINDOWS.items():
        if own_name[name] in known and known[own_name[name]].default is not None:
            values[own_name[name]] = value
    if "kv_lora_rank" in known:
        # Latent attention has a key for each head.
        values["num_key_value_heads"] = values["num_attention_heads"]
        if "q_lora_rank" in known and known["q_lora_rank"].default is None:
            del values["q_lora_rank"]
    if any(name in known for name in _PATTERNS):
        default = cls()
        for name in _PATTERNS:
            kinds = list(dict.fromkeys(getattr(default, name, None) or ())) if name in known else []
            if len(kinds) > 1:
                values[name] = [kinds[n % len(kinds)] for n in range(_TINY["num_hidden_layers"])]
    return values


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
            raise input_error("a causal language model", f"the type {name}", "Name a text decoder's type.")
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            tiny_config(name), dtype=getattr(torch, dtype or "float32"), **options
        )
        for parameter in model.parameters():
            # What is multiplied by a parameter that begins as 0 would not show.
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
    return model.to(device)
