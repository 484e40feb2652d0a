"""What the GPUs that share a row send each other, by kind of layer."""

from dataclasses import dataclass

from transformers import PreTrainedConfig

from ...models.families import sizes_of
from ...models.memory import FULL, HALF, way_of_attention


@dataclass(frozen=True)
class Exchange:
    """Data that each GPU receives in the forward of one layer. Backward receives the same amount.

    Args:
        layers (`int`):
            The number of layers with this exchange.
        name (`str`):
            The exchanged data.
        bytes (`float`):
            Bytes per layer.
    """

    layers: int
    name: str
    bytes: float


def exchanges(
    config: PreTrainedConfig,
    max_length: int,
    size: int,
    *,
    gated_delta_rule: str = "state",
    attention: str | None = None,
) -> list[Exchange]:
    """The data that each of `size` GPUs receives in the forward of a row, by kind of layer."""
    sizes = sizes_of(config)
    heads, rule = sizes.attention, sizes.delta_rule
    tokens, others = -(-max_length // size), size - 1
    full = sum(layer.mixer is heads for layer in sizes.layers)
    linear = len(sizes.layers) - full
    # A tensor that is cut over heads instead of tokens: all but 1/P of this GPU's share comes from other GPUs.
    swapped = tokens * others / size
    halo = others * (rule.window - 1) * (2 * rule.keys + rule.values) * HALF
    if gated_delta_rule == "state":
        kept = rule.state + rule.heads * rule.key_dim**2
        states: tuple[str, float] = "states in float32", others * kept * FULL
    else:
        # The decay of each head is in float32, and the projection for that of each channel is not.
        decay = HALF * rule.heads * rule.key_dim if rule.by_channel else FULL * rule.heads
        moved = HALF * (2 * rule.keys + 2 * rule.values + rule.heads) + decay
        states = "all-to-all over heads", swapped * moved
    both = heads.dim + heads.value_dim
    if way_of_attention(heads, size, attention) == "gather":
        looked: tuple[str, float] = "all keys and values", others * tokens * heads.kv_heads * both * HALF
    else:
        shared = heads.heads + max(heads.kv_heads, size)
        looked = "all-to-all over heads", swapped * shared * both * HALF
    found = [
        Exchange(linear, "convolution: preceding tokens", halo),
        Exchange(linear, f"gated delta rule: {states[0]}", states[1]),
        Exchange(full, f"attention: {looked[0]}", looked[1]),
    ]
    if getattr(config.get_text_config(), "output_router_logits", False):
        logits = others * tokens * sizes.mixtures[0].number * HALF if sizes.mixtures else 0
        found.append(Exchange(len(sizes.mixtures), "experts: router logits for the auxiliary loss", logits))
    return found
