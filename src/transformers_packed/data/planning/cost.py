"""The cost of a document in a hybrid model: a linear part, and a quadratic part in the full-attention layers."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike
from transformers import PreTrainedConfig

from ...boundaries import CHUNK_SIZE
from ...errors import input_error
from ...models.families import default_config, sizes_of
from ...models.sizes import Attention, DeltaRule, Experts


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
    def from_config(cls, config: PreTrainedConfig, quadratic_weight: float = _QUADRATIC_WEIGHT) -> "PackingCost":
        """Count the operations of a forward pass of a hybrid of a delta rule and attention.

        The families are Qwen3-Next, Qwen3.5/3.6/3.8, Qwen3.5/3.6/3.8-MoE, OLMo-Hybrid, Kimi-Linear and Bailing-Hybrid.

        Each multiply-add counts as two operations. The count covers every projection, the convolution, the chunked
        delta rule, causal attention, the MLP or the routed experts, and the head. It ignores norms and
        activations. An operation of scores and values takes longer than one of a projection, so it has a weight.

        Args:
            config (`PreTrainedConfig`):
                The configuration of the model. For a composite configuration, the text part counts.
            quadratic_weight (`float`, *optional*, defaults to 3.0):
                Weight of the operations of scores and values. With 1, the cost is the number of operations.

        Raises:
            `ValueError`: the configuration is that of another family.
        """
        sizes = sizes_of(config, "Pass the coefficients instead: PackingCost(linear=..., quadratic=...).")
        linear, chunked, quadratic = 2.0 * sizes.hidden * sizes.vocabulary, 0.0, 0.0
        for layer in sizes.layers:
            linear += _feed_forward(layer.mlp, sizes.hidden) + _projections(layer.mixer)
            if isinstance(layer.mixer, DeltaRule):
                chunked += _delta_rule(layer.mixer)
            else:
                # Scores and their product with the values, over half of the square because of the causal mask.
                quadratic += quadratic_weight * layer.mixer.heads * (layer.mixer.dim + layer.mixer.value_dim)
        return cls(linear=linear, quadratic=quadratic, chunked=chunked)

    def documents(self, lengths: ArrayLike) -> np.ndarray:
        """The cost of each document as float64, for an array of lengths in tokens of any shape."""
        lengths = np.asarray(lengths, np.float64)
        whole_chunks = np.ceil(lengths / CHUNK_SIZE) * CHUNK_SIZE
        return self.linear * lengths + self.chunked * whole_chunks + self.quadratic * lengths**2


@cache
def default_cost() -> PackingCost:
    """The cost of Transformers' default configuration of Qwen3.5, roughly the 9B model."""
    return PackingCost.from_config(default_config())


def _projections(mixer: Attention | DeltaRule) -> float:
    """Operations per token outside of attention and delta rule themselves."""
    projected = 2.0 * sum(inputs * outputs for inputs, outputs in mixer.linears)
    if isinstance(mixer, DeltaRule):
        # The convolution runs over queries, keys and values.
        projected += 2 * mixer.window * (2 * mixer.keys + mixer.values)
    return projected


def _delta_rule(rule: DeltaRule) -> float:
    """Operations per token of the chunked gated delta rule."""
    # Within a chunk: key and query products, the triangular inverse and its two products, and the output. The state is
    # read twice and written once.
    within = CHUNK_SIZE * (3 * rule.key_dim + 2 * rule.value_dim) + CHUNK_SIZE**2 / 3
    return 2 * rule.heads * (within + 3 * rule.key_dim * rule.value_dim)


def _feed_forward(mlp: int | Experts, hidden: int) -> float:
    """Operations per token of the layer's MLP, or of its router, shared expert and selected experts."""
    if isinstance(mlp, int):
        return 6.0 * hidden * mlp
    return 6.0 * hidden * (mlp.chosen * mlp.width + mlp.shared) + 2.0 * hidden * mlp.gates
