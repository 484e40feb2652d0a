"""Small models with the head dimensions of the released ones."""

import torch
from mixins.model import packed_batch
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig, set_seed

from transformers_packed.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers_packed.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers_packed.models.qwen3_next import modeling_qwen3_next as qwen3_next


# Kernels support these dimensions.
REAL_HEADS = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "pad_token_id": 0,
    "use_cache": False,
}
EXPERTS = {
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
# The numbers of heads of Qwen3.6-27B and Qwen3.8-27B: three value heads for a key head, six queries for a key.
HEADS_27B = {
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
}
FAMILIES = {
    "qwen3_next": (qwen3_next.Qwen3NextForCausalLM, Qwen3NextConfig, {"mlp_only_layers": [0, 1, 2, 3]}),
    "qwen3_next_moe": (qwen3_next.Qwen3NextForCausalLM, Qwen3NextConfig, EXPERTS),
    "qwen3_5": (qwen3_5.Qwen3_5ForCausalLM, Qwen3_5TextConfig, {}),
    "qwen3_5_27b": (qwen3_5.Qwen3_5ForCausalLM, Qwen3_5TextConfig, HEADS_27B),
    "qwen3_5_moe": (qwen3_5_moe.Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, EXPERTS),
}

# Sizes of a model of 4B parameters, for some of its layers.
SIZES_OF_4B = {
    "vocab_size": 97,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "pad_token_id": 0,
    "use_cache": False,
}


def model_on_gpu(
    family: str = "qwen3_5", dtype=torch.bfloat16, all_experts: bool = False, **options
) -> torch.nn.Module:
    """Build a model in train mode, with the same weights each time.

    With `all_experts`, all experts process all tokens, because rounding may change the experts that a router chooses.
    """
    cls, config_class, own = FAMILIES[family]
    if all_experts and "num_experts" in own:
        options["num_experts_per_tok"] = own["num_experts"]
    set_seed(0)
    return cls._from_config(config_class(**REAL_HEADS | own | options), dtype=dtype).cuda().train()


def random_documents(lengths, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 97, (n,), generator=generator) for n in lengths]


def on_gpu(batch: dict) -> dict:
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in batch.items()}


def row_on_gpu(lengths, seed: int = 1) -> dict:
    """Collate random documents. Their boundaries stay on the host, where the model reads them."""
    row = packed_batch(random_documents(lengths, seed), "cu_seqlens")
    return on_gpu(row) | {"cu_seqlens": row["cu_seqlens"]}
