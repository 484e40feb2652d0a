"""The cost of a document in a hybrid model: a linear part, and a quadratic part in the full-attention layers."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ...boundaries import CHUNK_SIZE
from ...errors import input_error


_NEEDED = (
    *("layer_types", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)

# The time of an operation of scores and values over that of another one, in forward and backward of the 0.8B shape on an
# H200 (benchmarks/row_cost.py).
_QUADRATIC_WEIGHT = 3.0


@dataclass(frozen=True)
class PackingCost:
    """The cost of a document of `n` tokens: `linear * n + chunked * ceil(n / 64) * 64 + quadratic * n ** 2`.

    The cost of a packed row is the sum over its documents, because documents do not attend to each other. Only ratios
    matter. [`PackingCost.from_config`] counts the floating-point operations of a forward pass, those of scores and
    values three times. The time of a training step is roughly proportional to it.

    Args:
        linear (`float`, *optional*, defaults to 1.0):
            Cost per token: projections, convolution, MLP and head.
        quadratic (`float`, *optional*, defaults to 0.0):
            Cost per squared document length: the full-attention layers.
        chunked (`float`, *optional*, defaults to 0.0):
            Cost per token after rounding each document up to whole chunks of 64 tokens: the gated delta rule.

    Raises:
        `ValueError`: a coefficient is negative or not finite, or `linear` is not positive.

    Example:

    ```python
    >>> from transformers_packed import PackingCost
    >>> PackingCost(linear=1.0, quadratic=0.01).documents([100, 200]).tolist()
    [200.0, 600.0]

    ```
    """

    linear: float = 1.0
    quadratic: float = 0.0
    chunked: float = 0.0

    def __post_init__(self):
        values = (self.linear, self.quadratic, self.chunked)
        if not (np.isfinite(values).all() and self.linear > 0 and min(values) >= 0):
            raise input_error("finite coefficients, linear above 0 and the others at least 0", self)

    @classmethod
    def from_config(cls, config: Any, quadratic_weight: float = _QUADRATIC_WEIGHT) -> "PackingCost":
        """Count the operations of a forward pass of a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE model.

        Each multiply-add counts as two operations. The count covers every projection, the convolution, the chunked
        gated delta rule, causal attention, the MLP or the routed experts, and the head. It ignores norms and
        activations. An operation of scores and values takes longer than one of a projection, so it has a weight.

        Args:
            config (`PreTrainedConfig`):
                The configuration of the model. For a composite configuration, the text part counts.
            quadratic_weight (`float`, *optional*, defaults to 3.0):
                Weight of the operations of scores and values. With 1, the cost is the number of operations.

        Raises:
            `ValueError`: the configuration is not that of a hybrid with gated delta rule and full attention.
        """
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        missing = [name for name in _NEEDED if getattr(config, name, None) is None]
        if missing:
            got = f"{type(config).__name__} without {', '.join(missing)}"
            fix = "Pass the coefficients instead: PackingCost(linear=..., quadratic=...)."
            raise input_error("the configuration of a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE model", got, fix)
        hidden, head_dim = config.hidden_size, config.head_dim
        query = config.num_attention_heads * head_dim
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = config.linear_num_key_heads * key_dim, config.linear_num_value_heads * value_dim

        # q, k, v, z, the two gates, and the output; the convolution runs over q, k and v.
        mixer = 2 * hidden * (2 * keys + 2 * values + 2 * config.linear_num_value_heads) + 2 * values * hidden
        mixer += 2 * config.linear_conv_kernel_dim * (2 * keys + values)
        # Within a chunk: key and query products, the triangular inverse and its two products, and the output. The
        # state is read twice and written once.
        within = CHUNK_SIZE * (3 * key_dim + 2 * value_dim) + CHUNK_SIZE**2 / 3
        core = 2 * config.linear_num_value_heads * (within + 3 * key_dim * value_dim)
        # The query projection also computes the output gate.
        attention = 2 * hidden * (2 * query + 2 * config.num_key_value_heads * head_dim) + 2 * query * hidden

        linear = chunked = quadratic = 0.0
        for index, kind in enumerate(config.layer_types):
            linear += _feed_forward(config, index) + (mixer if kind == "linear_attention" else attention)
            chunked += core if kind == "linear_attention" else 0
            # Scores and their product with the values, over half of the square because of the causal mask.
            quadratic += quadratic_weight * 2 * query if kind == "full_attention" else 0
        return cls(linear=linear + 2.0 * hidden * config.vocab_size, quadratic=quadratic, chunked=chunked)

    def documents(self, lengths: ArrayLike) -> np.ndarray:
        """The cost of each document as float64, for an array of lengths in tokens of any shape."""
        lengths = np.asarray(lengths, np.float64)
        whole_chunks = np.ceil(lengths / CHUNK_SIZE) * CHUNK_SIZE
        return self.linear * lengths + self.chunked * whole_chunks + self.quadratic * lengths**2


@cache
def default_cost() -> PackingCost:
    """The cost of Transformers' default `Qwen3_5TextConfig`, roughly the 9B model."""
    from transformers import Qwen3_5TextConfig

    return PackingCost.from_config(Qwen3_5TextConfig())


def has_experts(config: Any, layer: int) -> bool:
    """Whether a layer of a text model has a mixture of experts instead of an MLP."""
    sparse = getattr(config, "num_experts", None) and layer not in (getattr(config, "mlp_only_layers", None) or ())
    return bool(sparse) and (layer + 1) % (getattr(config, "decoder_sparse_step", None) or 1) == 0


def _feed_forward(config: Any, layer: int) -> float:
    """Operations per token of the layer's MLP, or of its router, shared expert and selected experts."""
    if has_experts(config, layer):
        width = config.num_experts_per_tok * config.moe_intermediate_size + config.shared_expert_intermediate_size
        return 6.0 * config.hidden_size * width + 2.0 * config.hidden_size * (config.num_experts + 1)
    return 6.0 * config.hidden_size * config.intermediate_size
