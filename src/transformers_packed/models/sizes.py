"""Sizes of the layers of hybrids, read from their configurations: what plans of rows, memory and processes count."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Attention:
    """Full attention with an output gate: its heads, and the linear layers of a module."""

    heads: int
    kv_heads: int
    dim: int
    linear_layers: int = 4


@dataclass(frozen=True)
class DeltaRule:
    """The gated delta rule: its heads, the tokens of its convolution, and the linear layers of a module."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    window: int
    linear_layers: int

    @property
    def keys(self) -> int:
        """Key values per token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Value values per token."""
        return self.heads * self.value_dim


@dataclass(frozen=True)
class Experts:
    """A mixture of `number` experts, of which each token uses `chosen` beside the shared one."""

    number: int
    chosen: int
    width: int
    shared: int


@dataclass(frozen=True)
class Layer:
    """The parts of a layer. `mlp` is the width of an MLP, or a mixture, with so many linear layers for adapters."""

    mixer: Attention | DeltaRule
    mlp: int | Experts
    mlp_linear_layers: int = 3


@dataclass(frozen=True)
class Sizes:
    """The sizes of a text model."""

    hidden: int
    vocabulary: int
    attention: Attention
    delta_rule: DeltaRule
    layers: tuple[Layer, ...]

    @property
    def heads(self) -> tuple[int, int]:
        """The heads of queries and keys in attention."""
        return self.attention.heads, self.attention.kv_heads

    @property
    def linear_heads(self) -> tuple[int, int]:
        """The heads of keys and values in the gated delta rule."""
        return self.delta_rule.key_heads, self.delta_rule.heads


def hybrid_sizes(text: PreTrainedConfig, linear_layers: int, mlp_linear_layers: int = 3) -> Sizes:
    """Read the sizes of a hybrid of gated delta rule and full attention, with so many linear layers for adapters.

    `linear_layers` are those of a delta rule, and `mlp_linear_layers` those of an MLP or a shared expert without its gate.
    """
    attention = Attention(text.num_attention_heads, text.num_key_value_heads, text.head_dim)
    delta_rule = DeltaRule(
        key_heads=text.linear_num_key_heads,
        heads=text.linear_num_value_heads,
        key_dim=text.linear_key_head_dim,
        value_dim=text.linear_value_head_dim,
        window=text.linear_conv_kernel_dim,
        linear_layers=linear_layers,
    )
    mixers: dict[str, Attention | DeltaRule] = {"linear_attention": delta_rule, "full_attention": attention}
    mlps = [_mlp(text, number) for number in range(len(text.layer_types))]
    layers = tuple(
        Layer(mixers[kind], mlp, mlp_linear_layers + isinstance(mlp, Experts))
        for kind, mlp in zip(text.layer_types, mlps, strict=True)
    )
    return Sizes(text.hidden_size, text.vocab_size, attention, delta_rule, layers)


def _mlp(text: PreTrainedConfig, number: int) -> int | Experts:
    sparse = getattr(text, "num_experts", None) and number not in (getattr(text, "mlp_only_layers", None) or ())
    if not sparse or (number + 1) % (getattr(text, "decoder_sparse_step", None) or 1):
        return text.intermediate_size
    width, shared = text.moe_intermediate_size, text.shared_expert_intermediate_size
    return Experts(text.num_experts, text.num_experts_per_tok, width, shared)


def sizes_for_ops(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the arguments of [`availability`] for any text model. What it does not have keeps its default."""
    size = lambda name: getattr(config, name, None)  # noqa: E731
    found = {
        "delta_head_dim": size("linear_key_head_dim") or size("linear_head_dim"),
        "value_head_dim": size("linear_value_head_dim"),
        # In multi-head latent attention, `head_dim` is that of rotary embeddings.
        "attention_head_dim": size("qk_head_dim") or size("head_dim"),
    }
    if size("num_experts") and size("moe_intermediate_size"):
        found["expert_sizes"] = size("hidden_size"), size("moe_intermediate_size")
    return {name: value for name, value in found.items() if value}


def take_few_layers(text: PreTrainedConfig, float8: bool) -> None:
    """Change a configuration to few layers: kernels depend on the kinds of layers, not on their number."""
    kinds = list(dict.fromkeys(text.layer_types))
    # The first layer may have no gradient of its input. In float8, the first and the last layer keep their dtype.
    text.layer_types = [*kinds, *kinds, kinds[0]] if float8 else [*kinds, kinds[0]]
    text.num_hidden_layers = len(text.layer_types)
