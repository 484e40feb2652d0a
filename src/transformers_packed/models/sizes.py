"""Sizes of the layers of hybrids, read from their configurations: what plans of rows, memory and processes count."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig


# The inputs and outputs of each linear layer of a module, that of its output last.
Linears = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Attention:
    """Full attention: its heads, the sizes of their queries and keys and of their values, and its linear layers.

    `kept` are the values per token that a layer keeps for backward, beside the input of its output layer.
    """

    heads: int
    kv_heads: int
    dim: int
    value_dim: int
    linears: Linears
    kept: int
    has_gate: bool = False


@dataclass(frozen=True)
class DeltaRule:
    """The delta rule: its heads, the tokens of its convolution, and its linear layers.

    It decays each head of its state, or with `by_channel` each channel of the keys.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    window: int
    linears: Linears
    by_channel: bool = False

    @property
    def keys(self) -> int:
        """Key values per token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Value values per token."""
        return self.heads * self.value_dim

    @property
    def state(self) -> int:
        """The values of a state."""
        return self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class Experts:
    """A mixture of `number` experts, of which each token uses `chosen` beside the shared one.

    `gates` are the outputs of the router and of the gate of the shared expert, `kept` the values per token that these two
    keep for backward.
    """

    number: int
    chosen: int
    width: int
    shared: int
    gates: int
    kept: int


@dataclass(frozen=True)
class Layer:
    """The parts of a layer. `mlp` is the width of an MLP, or a mixture, with so many linear layers for adapters."""

    mixer: Attention | DeltaRule
    mlp: int | Experts
    mlp_linear_layers: int = 3


@dataclass(frozen=True)
class Sizes:
    """The sizes of a text model, with one kind of attention and one of the delta rule."""

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
    def mixtures(self) -> list[Experts]:
        """The mixtures of the layers that have one."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts)]

    @property
    def head(self) -> Layer:
        """The layer of a head of multi-token prediction: attention, and experts if other layers have some."""
        return Layer(self.attention, self.mixtures[0] if self.mixtures else self.layers[-1].mlp)

    @property
    def expert_parameters(self) -> list[int]:
        """The number of parameters of the routed experts in each mixture."""
        return [3 * self.hidden * mixture.width * mixture.number for mixture in self.mixtures]

    @property
    def linear_heads(self) -> tuple[int, int]:
        """The heads of keys and values in the delta rule."""
        return self.delta_rule.key_heads, self.delta_rule.heads


def qwen_sizes(text: PreTrainedConfig, together: bool = False, mlp_linear_layers: int = 3) -> Sizes:
    """Read the sizes of a Qwen hybrid.

    Args:
        text (`PreTrainedConfig`):
            The text configuration.
        together (`bool`, *optional*, defaults to `False`):
            Whether two linear layers make all inputs of the delta rule.
        mlp_linear_layers (`int`, *optional*, defaults to 3):
            The linear layers for adapters in an MLP, or in a shared expert without its gate.
    """

    def outputs(keys: int, values: int, heads: int) -> tuple[int, ...]:
        return (2 * (keys + values), 2 * heads) if together else (2 * keys + values, values, heads, heads)

    return _hybrid(text, _attention(text, has_gate=True), _gated_delta_rule(text, outputs), mlp_linear_layers)


def olmo_sizes(text: PreTrainedConfig) -> Sizes:
    """Read the sizes of OLMo-Hybrid."""
    rule = _gated_delta_rule(text, lambda keys, values, heads: (keys, keys, values, values, heads, heads))
    return _hybrid(text, _attention(text, has_gate=False), rule)


def _attention(text: PreTrainedConfig, has_gate: bool) -> Attention:
    """Read the sizes of attention, in which the projection of queries also computes the gate if there is one."""
    hidden, heads, kv_heads = text.hidden_size, text.num_attention_heads, text.num_key_value_heads
    dim = getattr(text, "head_dim", None) or hidden // heads
    query, key = heads * dim, kv_heads * dim
    gate = query if has_gate else 0
    linears = (hidden, query + gate), (hidden, key), (hidden, key), (query, hidden)
    # Queries, their gate, keys and values after projection; queries and keys after norm and rotation; a copy of the gate.
    kept = 2 * query + 3 * key + 2 * gate
    return Attention(heads, kv_heads, dim, dim, linears, kept, has_gate)


def latent_sizes(text: PreTrainedConfig, low_rank_gates: bool, has_gate: bool) -> Sizes:
    """Read the sizes of a hybrid of Kimi delta attention and latent attention.

    Args:
        text (`PreTrainedConfig`):
            The text configuration.
        low_rank_gates (`bool`):
            Whether two linear layers make the decay of the delta rule, and two its output gate. Otherwise one does.
        has_gate (`bool`):
            Whether attention has an output gate for each head.
    """
    hidden, heads, rank = text.hidden_size, text.num_attention_heads, text.kv_lora_rank
    query, outputs = heads * text.qk_head_dim, heads * text.v_head_dim
    expanded = heads * (text.qk_nope_head_dim + text.v_head_dim)
    # Queries, keys and the latent before and after its norm. Kernels get values and return outputs of the size of keys.
    kept = 2 * query + 2 * rank + (2 * query if text.v_head_dim < text.qk_head_dim else expanded)
    queries: Linears = ((hidden, query),)
    # Queries of low rank, which not all releases have.
    if low := getattr(text, "q_lora_rank", None):
        kept, queries = kept + 2 * low, ((hidden, low), (low, query))
    gates: Linears = ((hidden, heads),) if has_gate else ()
    # The gate in float32 and in the dtype of the layer.
    kept += 3 * heads if has_gate else 0
    linears = (*queries, (hidden, rank + text.qk_rope_head_dim), (rank, expanded), *gates, (outputs, hidden))
    attention = Attention(heads, heads, text.qk_head_dim, text.v_head_dim, linears, kept, has_gate)
    number, dim = text.linear_num_heads, text.linear_head_dim
    width = number * dim
    gate = ((hidden, dim), (dim, width)) if low_rank_gates else ((hidden, width),)
    rule = DeltaRule(
        key_heads=number,
        heads=number,
        key_dim=dim,
        value_dim=dim,
        window=text.linear_conv_kernel_dim,
        linears=(*((hidden, width),) * 3, (hidden, number), *gate, *gate, (width, hidden)),
        by_channel=True,
    )
    return _hybrid(text, attention, rule)


def _gated_delta_rule(text: PreTrainedConfig, outputs: Callable[[int, int, int], tuple[int, ...]]) -> DeltaRule:
    """Read the sizes of the gated delta rule. Of its keys, values and value heads, `outputs` tells those of its linear layers."""
    hidden, keys = text.hidden_size, text.linear_num_key_heads * text.linear_key_head_dim
    values = text.linear_num_value_heads * text.linear_value_head_dim
    linears = (*((hidden, n) for n in outputs(keys, values, text.linear_num_value_heads)), (values, hidden))
    return DeltaRule(
        key_heads=text.linear_num_key_heads,
        heads=text.linear_num_value_heads,
        key_dim=text.linear_key_head_dim,
        value_dim=text.linear_value_head_dim,
        window=text.linear_conv_kernel_dim,
        linears=linears,
    )


def _hybrid(text: PreTrainedConfig, attention: Attention, rule: DeltaRule, mlp_linear_layers: int = 3) -> Sizes:
    mixers: dict[str, Attention | DeltaRule] = {"linear_attention": rule, "full_attention": attention}
    layers = []
    for number, kind in enumerate(text.layer_types):
        mlp = _mlp(text, number)
        gates = mlp.gates - mlp.number if isinstance(mlp, Experts) else 0
        layers.append(Layer(mixers[kind], mlp, mlp_linear_layers + gates))
    return Sizes(text.hidden_size, text.vocab_size, attention, rule, tuple(layers))


def _mlp(text: PreTrainedConfig, number: int) -> int | Experts:
    experts: Any = getattr(text, "num_experts", None)
    kinds = getattr(text, "mlp_layer_types", None)
    if kinds is not None:
        if kinds[number] == "dense":
            return text.intermediate_size
        experts, shared = text.num_local_experts, text.n_shared_experts * text.moe_intermediate_size
        # The router computes in float32: a copy of its input, the scores of experts, and a mask of one byte each.
        kept = 2 * text.hidden_size + 5 * experts // 2
        return Experts(experts, text.num_experts_per_tok, text.moe_intermediate_size, shared, experts, kept)
    sparse = experts and number not in (getattr(text, "mlp_only_layers", None) or ())
    if not sparse or (number + 1) % (getattr(text, "decoder_sparse_step", None) or 1):
        return text.intermediate_size
    width, shared = text.moe_intermediate_size, text.shared_expert_intermediate_size
    # The logits of the router, and the output of the shared expert before its gate.
    return Experts(experts, text.num_experts_per_tok, width, shared, experts + 1, experts + text.hidden_size)


def sizes_for_ops(config: PreTrainedConfig) -> dict[str, int]:
    """Return the sizes of [`ops.dispatch.Setting`] for any text model. What it does not have keeps its default."""
    size = lambda name: getattr(config, name, None)  # noqa: E731
    key_dim, experts = size("linear_key_head_dim") or size("linear_head_dim"), size("num_experts")
    found = {
        "key_dim": key_dim,
        "value_dim": size("linear_value_head_dim") or key_dim,
        # In multi-head latent attention, `head_dim` is that of rotary embeddings.
        "head_dim": size("qk_head_dim") or size("head_dim"),
        "hidden_size": experts and size("moe_intermediate_size") and size("hidden_size"),
        "expert_width": experts and size("moe_intermediate_size"),
    }
    return {name: value for name, value in found.items() if value}


def take_few_layers(text: PreTrainedConfig, float8: bool) -> None:
    """Change a configuration to few layers: kernels depend on the kinds of layers, not on their number."""
    mlps = getattr(text, "mlp_layer_types", None)
    kinds = list(dict.fromkeys(zip(text.layer_types, mlps or text.layer_types, strict=True)))
    # The first layer may have no gradient of its input. In float8, the first and the last layer keep their dtype.
    chosen = [*kinds, *kinds, kinds[0]] if float8 else [*kinds, kinds[0]]
    text.layer_types, text.num_hidden_layers = [kind for kind, _ in chosen], len(chosen)
    if mlps:
        text.mlp_layer_types = [mlp for _, mlp in chosen]
