"""Tiny models of all model types, to audit them."""

import inspect
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import input_error


# The settings of a tiny model, by value. A configuration gets the settings that it accepts. Indexers have 32 heads:
# with few heads many scores are exactly 0, and the choice among equal scores depends on the row's length.
_SIZES = {
    256: "vocab_size unpadded_vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab",
    96: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim dense_intermediate_size dff",
    64: "hidden_size word_embed_proj_dim ple_embed_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
    "expert_ffn_hidden_size index_n_heads indexer_n_heads",
    24: "q_lora_rank keep_window_size indexer_budget",
    16: "head_dim v_head_dim qk_nope_head_dim kv_lora_rank o_lora_rank linear_value_head_dim linear_head_dim "
    "index_head_dim indexer_head_dim attention_head_size swa_head_dim mamba_d_head mamba_head_dim mamba_d_state "
    "ssm_state_size state_size hidden_size_per_layer_input router_hidden_size",
    8: "qk_rope_head_dim rotary_dim linear_key_head_dim mamba_n_heads mamba_num_heads index_block_size "
    "make_ngram_vocab_size_divisible_by hc_lowrank",
    4: "num_hidden_layers decoder_layers num_attention_heads encoder_attention_heads decoder_attention_heads "
    "swa_num_attention_heads linear_num_heads linear_num_value_heads num_experts num_local_experts n_routed_experts "
    "heads_per_ngram indexer_compress_ratio",
    2: "num_key_value_heads swa_num_key_value_heads linear_num_key_heads num_experts_per_tok zero_expert_num "
    "index_topk_blocks eos_token_id",
    1: "encoder_layers n_group topk_group n_groups first_k_dense_replace num_dense_layers "
    "indexer_kv_heads split_ngram_parts bos_token_id",
    0: "pad_token_id",
    # Large weights make every layer affect the logits.
    0.15: "initializer_range init_std",
}
_TINY: dict[str, float] = {name: value for value, names in _SIZES.items() for name in names.split()}
# Shorter than a row, so that they have an effect. Types whose default is no window keep it.
_WINDOW_SIZES = {
    48: "local_attention",
    24: "sliding_window sliding_window_size window_size attention_window_size attention_chunk_size index_topk",
    16: "chunk_size mamba_chunk_size block_size",
}
_WINDOWS = {name: size for size, names in _WINDOW_SIZES.items() for name in names.split()}
# Layer patterns, which keep every kind of layer of the type's full-sized default.
_PATTERNS = ("layer_types", "mlp_layer_types", "layers_block_type")
_FULL_AND_SLIDING = ["full_attention", "sliding_attention"] * 2
_ROPE = dict.fromkeys(_FULL_AND_SLIDING, {"rope_type": "default", "rope_theta": 1e4})
_LINEAR_AND_HYBRID = ["linear_attention", "hybrid"] * 2
# Additional settings by model type, to be valid, to be small, or to include all kinds of layers.
_OVERRIDES: dict[str, dict] = {
    # Its router chooses a group, and experts of it.
    "bailing_hybrid": {"num_local_experts": 8, "n_group": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blenderbot": {"max_position_embeddings": 1024},
    "blt": {"encoder_config": {"hidden_size_global": 64}, "decoder_config": {"hidden_size_global": 64}},
    "cohere_compass_text": {"layer_types": _FULL_AND_SLIDING, "rope_parameters": _ROPE},
    # The model reads a setting that its attention configuration does not have by default.
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96},
    },
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dots1": {"n_shared_experts": 1},
    "ctrl": {"n_positions": 1024},
    "dots3_note": {
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
    },
    # These are not in its signature or have no default.
    "dots3_note_text": {
        "sliding_window": 24,
        "swa_q_lora_rank": 24,
        "swa_kv_lora_rank": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"layer_types": _FULL_AND_SLIDING[::-1], "num_kv_shared_layers": 2},
    "gemma4_text": {"layer_types": _FULL_AND_SLIDING[::-1]},
    "gemma4_unified_text": {"layer_types": _FULL_AND_SLIDING[::-1]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": _FULL_AND_SLIDING},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 2, "head_dim": 8, "ffn_hidden_size": 96},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": _FULL_AND_SLIDING},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "shared_intermediate_size": 32,
        "index_n_heads": 2,
    },
    "mllama_text_model": {"cross_attention_layers": [1]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"]},
    "prophetnet": {"num_decoder_layers": 2, "num_encoder_layers": 1},
    "qwen4_exp_text": {"ple_layer_ids": [1], "ngram_vocab_size_base": 512},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "num_buckets": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 5, "layers_block_type": [*_LINEAR_AND_HYBRID, "linear_attention"]},
    "zamba2": {"layers_block_type": _LINEAR_AND_HYBRID, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Create the configuration of a tiny model of a Transformers model type, with tiny nested configurations."""
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
    """Return the nested configuration classes of a configuration class, by name."""
    if not getattr(cls, "sub_configs", None):
        return {}
    default = cls()
    found = {name: getattr(default, name, None) for name in cls.sub_configs}
    return {name: type(part) for name, part in found.items() if isinstance(part, PreTrainedConfig)}


def _tiny_values(cls: type[PreTrainedConfig]) -> dict:
    known = inspect.signature(cls.__init__).parameters
    # The signature has a setting under its own name, or under the common one that stands for it.
    own_name = {name: name if name in known else cls.attribute_map.get(name, name) for name in (*_TINY, *_WINDOWS)}
    values: dict[str, Any] = {own_name[name]: value for name, value in _TINY.items() if own_name[name] in known}
    for name, value in _WINDOWS.items():
        if own_name[name] in known and known[own_name[name]].default is not None:
            values[own_name[name]] = value
    if "kv_lora_rank" in known:
        # Latent attention has one key per head.
        values["num_key_value_heads"] = values["num_attention_heads"]
        if "q_lora_rank" in known and known["q_lora_rank"].default is None:
            del values["q_lora_rank"]
    for pattern in (name for name in _PATTERNS if name in known):
        kinds = list(dict.fromkeys(getattr(cls(), pattern, None) or ()))
        if len(kinds) > 1:
            values[pattern] = [kinds[n % len(kinds)] for n in range(int(_TINY["num_hidden_layers"]))]
    return values


def tiny_model(model_type: str, *, dtype: str = "float32", seed: int = 0, **options: Any) -> PreTrainedModel:
    """Create a tiny model of a model type with random weights.

    Args:
        model_type (`str`):
            A model type such as `"qwen3_5_text"` or `"llama"`.
        dtype (`str`, *optional*, defaults to `"float32"`):
            The dtype of the weights.
        seed (`int`, *optional*, defaults to 0):
            The random seed of the weights.
        options (`Any`, *optional*):
            Further arguments of `AutoModelForCausalLM.from_config`, such as `attn_implementation`.

    Raises:
        `ValueError`: the model type is not a causal language model.
    """
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise input_error("a causal language model", f"the type {model_type}")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), dtype=getattr(torch, dtype), **options)
    for parameter in model.parameters():
        # A parameter that is initialized to 0 would hide everything it multiplies.
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model
