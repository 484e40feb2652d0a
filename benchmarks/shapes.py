"""Shapes of models for the benchmarks: their configurations, their samples, their FLOPs, and their kernels by group."""

import re

import torch


COMMON = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "pad_token_id": 0,
    "use_cache": False,
}
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "linear_num_value_heads", "tie_word_embeddings",
)  # fmt: skip
MODELS = {
    name: COMMON | dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        "tiny": (64, 128, 4, 2, 1, 4, True),
        "0.8B": (1024, 3584, 24, 8, 2, 16, True),
        "2B": (2048, 6144, 24, 8, 2, 16, True),
        "4B": (2560, 9216, 32, 16, 4, 32, True),
        "9B": (4096, 12288, 32, 16, 4, 32, False),
        "27B": (5120, 17408, 64, 24, 4, 48, False),
    }.items()
}
# Every layer has experts. The two differ in vocabulary, depth and experts.
_EXPERTS = COMMON | {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}
MODELS["35B-A3B"] = _EXPERTS | {
    "model_type": "qwen3_5_moe_text",
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
MODELS["Next-80B"] = _EXPERTS | {
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "num_hidden_layers": 48,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}
# Routers and the gate of the shared expert keep their weights.
LORA_MLP = ("gate_proj", "up_proj", "down_proj")
LORA_LAYERS = (
    "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj",
    "q_proj", "k_proj", "v_proj", "o_proj", *LORA_MLP,
)  # fmt: skip
LORA_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
# For a CPU.
_TINY = {
    "vocab_size": 2048,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
}
MODELS["tiny"] |= _TINY
_TINY |= {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MODELS["tiny-moe"] = MODELS["35B-A3B"] | _TINY
MODELS["tiny-next"] = MODELS["Next-80B"] | _TINY
# Kernels by name; the first that matches counts.
GROUPS = {
    "gated delta rule": r"gdr|gdn|gated_delta|chunk_|kkt|wy_|cumsum|l2norm|prepare_h|group_reduce|decay",
    "convolution": r"conv",
    "attention": r"flash_fwd|flash_bwd|flash::|fmha|attention|rotary",
    "loss": r"softmax_minus|cross_entropy|nll|log_softmax|liger_cross",
    "experts": r"groupproblemshape|grouped_|fused_moe|token_aggregation"
    r"|^_(rows_times_experts|gate_up|narrow_(rows|gradient)|combine|gate_backward_rows|gather|plan|place|route)\b",
    "norms and gates": r"norm|rms|_gate_|swiglu|silu",
    "matmul": r"gemm|nvjet|cutlass|xmma|wgmma|sm90_|matmul|cublas",
    "routing": r"sort|topk|gather|index|scatter|histogram|bincount",
}
_PATTERNS = {group: re.compile(pattern) for group, pattern in GROUPS.items()}


def group_of(kernel: str) -> str:
    """The group of a kernel, or "other". The lookup in the embedding and its gradient count as routing."""
    return next((group for group, pattern in _PATTERNS.items() if pattern.search(kernel.lower())), "other")


def with_layers(config: dict, layers: int | None) -> dict:
    """The same model with another number of layers; each fourth one has full attention."""
    return config | {"num_hidden_layers": layers} if layers else config


def sample_lengths(distribution: str, tokens: int, seed: int = 0) -> list[int]:
    """Document lengths that add up to `tokens`: lognormal with mean 480, or all 512."""
    if distribution == "equal":
        return [512] * (tokens // 512)
    generator = torch.Generator().manual_seed(seed)
    lengths = []
    while sum(lengths) < tokens:
        length = int((torch.randn((), generator=generator) * 0.8 + 5.85).exp())
        lengths.append(min(max(length, 8), tokens - sum(lengths)))
    return lengths


def split_tokens(generator: torch.Generator, count: int, tokens: int, sigma: float = 1.0) -> torch.Tensor:
    """`count` lognormal lengths of at least 2 that add up to `tokens`."""
    shares = (sigma * torch.randn(count, generator=generator)).exp()
    lengths = 2 + (shares / shares.sum() * (tokens - 2 * count)).long()
    lengths[0] += tokens - lengths.sum()
    return lengths


def model_flops(config: dict, lengths: list[int], frozen: bool = False, head: bool = True) -> float:
    """FLOPs of forward and backward: products with weights, the delta rule's recurrence, attention in documents, the head.

    A layer with experts counts its router, the shared expert with its gate, and the experts that a token selects.
    Frozen weights need no gradient, which is a third of their products. The products of adapters are left out.
    """
    hidden, tokens = config["hidden_size"], sum(lengths)
    value_heads, key_heads, dim = (
        config["linear_num_value_heads"],
        config["linear_num_key_heads"],
        config["linear_key_head_dim"],
    )
    linear = 2 * (
        hidden * (2 * key_heads * dim + 2 * value_heads * dim + 2 * value_heads) + value_heads * dim * hidden
    )
    recurrence = 8 * (2 * key_heads * dim + value_heads * dim) + 8 * value_heads * dim**2
    heads, key_value_heads, head_dim = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    full = 2 * hidden * head_dim * (3 * heads + 2 * key_value_heads)
    within = 4 * heads * head_dim * sum(n * n for n in lengths) / 2
    if "num_experts" in config:
        selected = config["num_experts_per_tok"] * config["moe_intermediate_size"]
        mlp = 6 * hidden * (selected + config["shared_expert_intermediate_size"])
        mlp += 2 * hidden * (config["num_experts"] + 1)
    else:
        mlp = 6 * hidden * config["intermediate_size"]
    layers = config["num_hidden_layers"]
    full_layers = layers // 4
    linear_layers = layers - full_layers
    weights = layers * mlp + linear_layers * linear + full_layers * full
    weights += 2 * hidden * config["vocab_size"] if head else 0
    rest = linear_layers * recurrence * tokens + full_layers * within
    return (2 if frozen else 3) * weights * tokens + 3 * rest
