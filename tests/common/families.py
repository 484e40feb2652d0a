"""Tiny models of the families with `Mixers` or `Unpacked`, each with every kind of its layers."""

import inspect

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES


LENGTHS = (65, 1, 3, 70, 2)
# Each configuration uses those that it supports. Large weights make every layer affect the logits.
_TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 16,
    "index_head_dim": 8,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "block_size": 16,
    "sliding_window": 24,
    # Functional dropout has no module and cannot be changed later.
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
_LINEAR_AND_FULL = ["linear_attention", "full_attention"]
_INKLING = {
    "layer_types": ["hybrid_sliding", "hybrid"],
    "sliding_window_size": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "rel_extent": 32,
    "log_scaling_n_floor": 8,
    "unpadded_vocab_size": 97,
}
_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "init_std": 0.15,
    "max_position_embeddings": 512,
}
# By family: its model type if the name differs, and further settings.
_SPECIAL = {
    # Its router chooses a group, and experts of it.
    "bailing_hybrid": (
        None,
        {
            "layer_types": _LINEAR_AND_FULL,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "num_local_experts": 8,
            "n_group": 2,
        },
    ),
    "bamba": (None, {"attn_layer_indices": [1], **_MAMBA2}),
    "falcon_h1": (None, {"mamba_d_ssm": 64, **_MAMBA2}),
    "granitemoehybrid": (None, {"layer_types": _LINEAR_AND_FULL, **_MAMBA2}),
    "glm5_next": (
        None,
        {
            "text_config": {
                "layer_types": ["linear_attention", "indexed_attention"],
                "num_key_value_heads": 4,
                "qk_rope_head_dim": 0,
                "head_dim": 0,
                "index_kpool": 4,
                "index_topk": 24,
            }
        },
    ),
    "inkling": ("inkling_text", _INKLING),
    "inkling2": ("inkling2_text", _INKLING),
    "inkling2_loop": (
        "inkling2_loop_text",
        _INKLING
        | {
            "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
            "num_hidden_layers": 4,
            "n_layers_per_attn_res_block": 1,
            "loop_layer_index_start": 1,
            "loop_layer_index_end": 3,
            "loop_num_passes": 2,
            "loop_gate_rank": 8,
        },
    ),
    "jamba": (None, {"attn_layer_period": 2, "attn_layer_offset": 1}),
    "kimi_linear": (None, {"layer_types": _LINEAR_AND_FULL, "num_key_value_heads": 4}),
    "lara_mini": (None, {"layer_types": _LINEAR_AND_FULL}),
    "lfm2": (None, {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (None, {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "lfm3": (None, {"layer_types": ["conv", "full_attention"]}),
    "mamba2": (None, {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8}),
    "minimax": (None, {"layer_types": _LINEAR_AND_FULL}),
    "nemotron_h": (
        None,
        {
            "layers_block_type": ["linear_attention", "full_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 8,
        },
    ),
    "olmo_hybrid": (None, {"layer_types": _LINEAR_AND_FULL}),
    "qwen4_exp": (
        "qwen4_exp_text",
        {
            "layer_types": ["linear_attention", "indexed_attention"],
            "ple_layer_ids": [1],
            "ple_embed_dim": 32,
            "heads_per_ngram": 4,
            "ngram_vocab_size_base": 512,
            "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 1,
            "hc_lowrank": 8,
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 24,
            "indexer_compress_ratio": 4,
        },
    ),
    "recurrent_gemma": (None, {"num_hidden_layers": 3, "attention_window_size": 24}),
    "rwkv": (None, {"rescale_every": 0}),
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "marian", "mbart", "mvp"), (None, _DECODER)),
    **dict.fromkeys(("pegasus", "plbart", "trocr", "xglm"), (None, _DECODER)),
    "blenderbot_small": ("blenderbot-small", _DECODER),
    "gpt_oss": (None, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}),
    "minimax_m3_vl": (
        "minimax_m3_vl_text",
        {
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 16,
            "rotary_dim": 4,
            "index_n_heads": 2,
            "index_block_size": 8,
            "index_topk_blocks": 2,
        },
    ),
    "openai": ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "opt": (None, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "deepseek_v4": (None, {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}),
    # The cache rounds the total size of all heads up to a multiple of 64.
    "xlstm": (None, {"num_heads": 4, "hidden_size": 128}),
    "zamba": (None, {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}),
    "zamba2": (None, {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 8, "mamba_d_state": 8}),
    "zaya": (None, {"num_experts_per_tok": 1, "router_hidden_size": 16}),
}
_NOT_TEXT = {
    "depth": 1,
    "num_heads": 4,
    "encoder_layers": 1,
    "d_model": 32,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "output_channels": 32,
    "mlp_dim": 48,
    "out_hidden_size": 32,
    "projection_intermediate_size": 16,
}


def tiny_config(family: str, **options):
    """Build a configuration of the family with two layers, or with one of each kind if there are more kinds."""
    model_type, special = _SPECIAL.get(family, (None, {}))
    name = model_type or family
    # flash-linear-attention registers classes of its own for Mamba and Mamba-2.
    cls = getattr(transformers, CONFIG_MAPPING_NAMES[name]) if name in CONFIG_MAPPING_NAMES else CONFIG_MAPPING[name]
    values = _values(cls)
    if getattr(cls, "sub_configs", None):
        default = cls()
        parts = {name: getattr(default, name, None) for name in cls.sub_configs}
        for name, part in parts.items():
            if isinstance(part, PreTrainedConfig):
                tiny = _TINY if name == "text_config" else _TINY | _NOT_TEXT
                values[name] = {"model_type": part.model_type, **_values(type(part), tiny), **special.get(name, {})}
    return cls(**values | {name: value for name, value in special.items() if name != "text_config"} | options)


def _values(cls: type, tiny: dict = _TINY) -> dict:
    known = inspect.signature(cls.__init__).parameters
    names = {name: name if name in known else cls.attribute_map.get(name, name) for name in tiny}
    return {names[name]: value for name, value in tiny.items() if names[name] in known}


def tiny_model(family: str, attn_implementation: str | None = None, **options) -> torch.nn.Module:
    """Build a stock language model of the family in train mode, without dropout, with random norms and biases."""
    torch.manual_seed(0)
    auto = AutoModelForImageTextToText if family == "glm5_next" else AutoModelForCausalLM
    model = auto.from_config(
        tiny_config(family, **options), dtype=torch.float32, attn_implementation=attn_implementation
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "dt_bias" in name or "ple.conv1d" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def documents(lengths=LENGTHS, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (n,), generator=generator) for n in lengths]
