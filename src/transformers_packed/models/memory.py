"""The memory of a text model's loss and layers in training, as functions of its sizes.

docs/reference/memory.md has the formulas and compares them with measurements. Bytes are per GPU, and the computation is
in bfloat16.

A layer that runs without a GPU cannot tell these numbers. PyTorch's reference of a delta rule makes its layer save 5.3 to
6.0 times what the kernels make it save, and that of attention 1.9 to 2.4 times. With gradient checkpointing, 4 to 21 % of
a step are what the kernels make in the backward of one layer, which no hook of saved tensors sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ..boundaries import CHUNK_SIZE as RULE_CHUNK_SIZE
from ..ops import convolution, dense_attention, earlier_keys
from ..ops.backends import flash_qla
from ..ops.cross_entropy import rows_of_chunk
from ..ops.recipes import WORTH_RECOMPUTING
from ..ops.terms import PIECE
from ..parallel.groups import attention_method
from .host_parameters import SMALLEST
from .sizes import Attention, DeltaRule, Experts, Layer, Sizes


# Bytes per value.
HALF, FULL = 2, 4
WIDTHS = {"bfloat16": HALF, "float32": FULL}
# The kernels for experts fill the rank of adapters up to a power of two from this one on.
_LEAST_RANK = 16


class Stored(NamedTuple):
    """How frozen weights are stored that are quantized: a title, and the bytes of a weight with its part of the scales."""

    title: str
    bytes: float


# bitsandbytes' NF4 with double quantization: per block of 64 its maximum in a byte, with a float32 per 256 blocks.
NF4 = Stored("NF4", 1 / 2 + 1 / 64 + FULL / (64 * 256))


@dataclass(frozen=True)
class Lora:
    """LoRA adapters of a rank on all linear layers, and with `experts` on experts. Without a rank, all is trained.

    With `mtp_only`, the head of multi-token prediction is trained alone, and the rest runs without gradients.
    `stored` is how frozen linear layers and experts are stored if they are quantized. `on_host` names what stays in host
    memory: frozen "experts", or frozen "layers" with their experts.
    """

    rank: int = 0
    experts: bool = False
    stored: Stored | None = None
    mtp_only: bool = False
    on_host: Literal["", "experts", "layers"] = ""

    @property
    def freezes(self) -> bool:
        """Whether the model's own weights are frozen."""
        return self.rank > 0 or self.mtp_only

    @property
    def expert_columns(self) -> int:
        """The columns of the products with the first matrices of experts' adapters, 0 without them."""
        return max(_LEAST_RANK, 1 << (self.rank - 1).bit_length()) if self.rank and self.experts else 0


# Full fine-tuning.
ALL_TRAINED = Lora()


def on_host_of(experts: bool, layers: bool) -> Literal["", "experts", "layers"]:
    """Return `on_host` of [`Lora`]. Layers include their experts."""
    return "layers" if layers else "experts" if experts else ""


def in_host_memory(
    sizes: Sizes, layers: Sequence[Sequence[tuple[int, bool]]], width: int, lora: Lora
) -> tuple[float, float]:
    """Bytes of the weights in host memory, and of those of two layers, which the GPU has at a time.

    `width` is the size of a parameter in bytes if it is not quantized. `layers` has the number of elements of each linear
    layer and weight of experts of a decoder layer, and whether it is quantized.
    """
    each = [width, lora.stored.bytes if lora.stored else width]
    if lora.on_host == "experts":
        found = [each[1] * number for number in sizes.expert_parameters]
    elif lora.on_host == "layers":
        weights = [[number * each[is_quantized] for number, is_quantized in layer] for layer in layers]
        found = [sum(x for x in layer if x >= SMALLEST) for layer in weights]
    else:
        found = []
    return float(sum(found)), float(sum(sorted(found)[-2:]))


def loss_memory(sizes: Sizes, tokens: int, frozen: bool = False, stream: int = HALF) -> float:
    """Peak bytes of the loss computation, including the final norm. `frozen` says that the head is not trained.

    `stream` is the width of the hidden states between layers in bytes.
    """
    hidden, vocabulary = sizes.hidden, sizes.vocabulary
    # A chunk's logits. A trained head has its float32 gradient beside them and, later, that gradient in bfloat16.
    head = HALF * vocabulary * min(tokens, rows_of_chunk(tokens, hidden, frozen))
    if not frozen:
        head = max(head, HALF * vocabulary * hidden) + FULL * vocabulary * hidden
    if stream != HALF:
        # Autocast's copy of the head.
        head += HALF * vocabulary * hidden
    # Input and output of the norm, the hidden states with a target, and these as the products take them, or gradients.
    return head + (3 * stream + HALF) * hidden * tokens


def layer_memory(
    sizes: Sizes,
    layer: Layer,
    max_length: int,
    size: int,
    attention: str | None,
    lora: Lora = ALL_TRAINED,
    stream: int = HALF,
) -> tuple[float, float]:
    """Bytes that a layer saves for backward on one GPU, and the peak of additional bytes in this backward.

    `stream` is the width of the hidden states between layers in bytes.
    """
    kept, mlp, mixer = _kept_and_made(sizes, layer, max_length, size, attention, lora, stream)
    return kept, max(mlp, mixer)


def _kept_and_made(
    sizes: Sizes, layer: Layer, max_length: int, size: int, attention: str | None, lora: Lora, stream: int
) -> tuple[float, float, float]:
    """Bytes that a layer saves for backward, and additional bytes in the backward of its MLP, and in that of its mixer."""
    tokens, hidden, whole_row = -(-max_length // size), sizes.hidden, 0
    if isinstance(layer.mixer, DeltaRule):
        kept, made = _of_delta_rule(layer.mixer)
    else:
        gathers = size > 1 and way_of_attention(layer.mixer, size, attention) == "gather"
        kept, made = _of_attention(layer.mixer, size, gathers)
        both = layer.mixer.dim + layer.mixer.value_dim
        whole_row = (max_length - tokens) * layer.mixer.kv_heads * both if gathers else 0
    mlp_kept, mlp_made = _of_mlp(layer.mlp, hidden, lora)
    # The input of the layer, the outputs of its two norms, and the input of the second norm.
    kept += (2 + 2 * stream // HALF) * hidden + mlp_kept
    if stream != HALF and isinstance(layer.mlp, Experts):
        # Autocast casts the output of the norm for the router, the experts, and the shared expert with its gate.
        kept += 3 * hidden
    if lora.rank:
        # The product of each adapter's first matrix: those of the mixer, and of the MLP or the shared expert.
        kept += lora.rank * (len(layer.mixer.linears) + layer.mlp_linear_layers)
        # Only adapters need the outputs of the norms, and the backward computes long ones again: that of the MLP before
        # and after its peak. Experts save theirs.
        if tokens * hidden >= WORTH_RECOMPUTING:
            kept, made = kept - (1 if isinstance(layer.mlp, Experts) else 2) * hidden, made + hidden
    # The backward of the MLP comes first, with the gradient of the layer's output. It then frees the MLP's
    # activations.
    mlp = tokens * (stream * hidden + HALF * mlp_made) + _copies(layer.mlp, hidden, lora)
    return HALF * (tokens * kept + whole_row), mlp, HALF * tokens * (made - mlp_kept)


def segment_memory(
    sizes: Sizes, layer: Layer, tokens: int, segment: int, lora: Lora = ALL_TRAINED, stream: int = HALF
) -> tuple[float, float, float]:
    """Bytes of a checkpointed layer that computes a row of one document in segments, beside the layer's input.

    The first are those that a segment saves when it is computed again, and the second the peak of additional bytes in the
    backward of the layer. The third are those that the layer keeps until then: what its segments hand on.
    """
    given, last, largest = stream * sizes.hidden, -(-tokens // segment) - 1, 0
    if not lora.freezes:
        # The gradient of a matrix before it is added to that of later segments.
        width = 2 * layer.mlp.width * layer.mlp.number if isinstance(layer.mlp, Experts) else layer.mlp
        largest = stream * sizes.hidden * width
    # What a segment hands on, and of it keys and values per token.
    handed, token = _handed_on(layer.mixer, segment)

    def most_in(number: int) -> float:
        """Bytes in the backward of a segment with what it saves. The last one may be shorter, and then join keys alone."""
        earlier, later = number * segment, last - number
        length = min(segment, tokens - earlier)
        kept, mlp, mixer = _kept_and_made(sizes, layer, length, 1, None, lora, stream)
        again, made = _of_earlier_tokens(layer.mixer, length, segment, number)
        # The gradients of keys and values by later segments. Those by the last segment are parts of one tensor.
        summed = 0 if later == 0 else tokens if later == 1 else earlier + segment
        # The gradients of the layer's output, of which its own one is a part, and of the inputs of later segments.
        row = given * (tokens + later * segment)
        own = kept - given * length + max(mlp - given * length + largest, mixer + made * earlier)
        return own + number * handed + again * earlier + token * summed + row

    # The bytes change by the same amount from each segment to the next, but for the last ones.
    most = max(most_in(number) for number in (0, last - 2, last - 1, last) if number >= 0)
    kept = _kept_and_made(sizes, layer, segment, 1, None, lora, stream)[0] - given * segment
    return kept, most - kept, last * handed


def _handed_on(mixer: Attention | DeltaRule, segment: int) -> tuple[int, int]:
    """Bytes that a segment of a document hands on, and of its keys and values per token."""
    if isinstance(mixer, DeltaRule):
        # The state, and the tokens of the convolution's window.
        return FULL * mixer.state + HALF * (mixer.window - 1) * (2 * mixer.keys + mixer.values), 0
    token = HALF * mixer.kv_heads * (mixer.dim + mixer.value_dim)
    return segment * token, token


def _of_earlier_tokens(mixer: Attention | DeltaRule, length: int, segment: int, cuts: int) -> tuple[int, int]:
    """Bytes that each token before a part of a document adds to what the part saves, and to what its backward makes.

    The part has `length` tokens, after as many segments as there are cuts.
    """
    if isinstance(mixer, DeltaRule):
        return 0, 0
    if _reads_pieces(mixer, length, segment, cuts):
        return 0, HALF * mixer.kv_heads * (mixer.dim + mixer.value_dim)
    # Kernels get keys and values in one tensor each, and values of the size of keys. They make gradients of them per query
    # head before they add these up.
    again, by_head = HALF * 2 * mixer.kv_heads * mixer.dim, HALF * 2 * mixer.heads * mixer.dim
    return again, again + (by_head if mixer.heads > mixer.kv_heads else 0)


def _reads_pieces(mixer: Attention, length: int, segment: int, cuts: int) -> bool:
    """Whether attention of a part of a document reads earlier segments where they are, on the GPU here or else on Hopper."""
    if torch.cuda.is_available() and not dense_attention.is_supported():
        return False
    # cuDNN has kernels for heads of up to 256.
    if mixer.dim != mixer.value_dim or mixer.dim > 256:
        return False
    return earlier_keys.is_faster(length, length, cuts * segment, cuts, mixer.heads * mixer.dim)


def head_memory(
    sizes: Sizes,
    max_length: int,
    size: int,
    attention: str | None,
    alone: bool,
    stream: int = HALF,
    segment: int | None = None,
) -> tuple[float, float, float]:
    """Bytes as in [`layer_memory`] for a head of multi-token prediction, and what it saves beside its layer.

    `alone` says that it is trained alone. With a `segment`, they are those of [`segment_memory`].
    """
    tokens, held = -(-max_length // size) * sizes.hidden, 0.0
    if segment is None:
        kept, made = layer_memory(sizes, sizes.head, max_length, size, attention, ALL_TRAINED, stream)
    else:
        kept, made, held = segment_memory(sizes, sizes.head, max_length, segment, ALL_TRAINED, stream)
    # The embeddings of the next tokens and, without a loss of the trunk that counts them, the hidden states, which two
    # norms save, and the outputs of these, which the first linear layer saves.
    beside = tokens * ((1 + alone) * stream + 2 * HALF)
    # The input and output of the last norm of the trunk, and the gradients of both hidden states, in one tensor.
    return kept + beside, made + (0 if alone else 4 * stream * tokens), beside + held


def attention_output(layer: Layer, tokens: int) -> float:
    """Bytes that softmax attention in a layer returns for its backward: the output, and a sum per token and head."""
    mixer = layer.mixer
    return tokens * mixer.heads * (HALF * mixer.dim + FULL) if isinstance(mixer, Attention) else 0.0


def _of_delta_rule(rule: DeltaRule) -> tuple[int, int]:
    """Values per token that a delta rule keeps, and makes in backward."""
    # What its linear layers make but the output layer; queries, keys and values after the convolution; and the output.
    kept = sum(outputs for _, outputs in rule.linears[:-1]) + 2 * rule.keys + 2 * rule.values
    if not convolution.takes_heads(rule.key_dim, rule.value_dim):
        # Queries and keys in float32, whose length is made one in PyTorch.
        kept += 2 * 2 * rule.keys
    if rule.by_channel:
        # In flash-linear-attention 0.6, per head: rows of two chunk matrices and the rate, and in float32 the scales of
        # queries, of keys and of the norm.
        return kept + (2 * RULE_CHUNK_SIZE + 1 + 2 * 3) * rule.heads, _made_by_channel(rule)
    # Per head: a row of the chunk matrix, the rate, and in float32 the decay, its cumulative sum in a chunk, and the scale
    # of the norm.
    kept += (RULE_CHUNK_SIZE + 1 + 2 * 3) * rule.heads
    # In FlashQLA: recomputed states of the size of two values, and gradients of queries and keys per value head, values,
    # the output and its gate, and the output again. flash-linear-attention makes up to five values more.
    return kept, (8 if flash_qla.takes_heads(rule.key_dim, rule.value_dim) else 13) * rule.values


def _made_by_channel(rule: DeltaRule) -> int:
    """Values per token in the backward of flash-linear-attention 0.6, counted in its code."""
    # The decay in float32; keys, queries and keys with a decay; and in float32 the gradients of queries, keys and decay, and
    # those that the next kernel makes of them.
    keys = 2 + 3 + 2 * 3 + 2 * 3
    # Two kinds of values; gradients of the values, the output and its gate; and the output again.
    values = 2 + 4
    # States at the start of each chunk and their gradients; gradients in float32 of two chunk matrices.
    states, chunks = 2 * rule.key_dim * rule.value_dim // RULE_CHUNK_SIZE, 2 * 2 * RULE_CHUNK_SIZE
    return rule.heads * (keys * rule.key_dim + values * rule.value_dim + states + chunks)


def _of_attention(attention: Attention, size: int, gathers: bool) -> tuple[int, int]:
    """Values per token that an attention layer keeps, and makes in backward."""
    both, output = attention.dim + attention.value_dim, attention.heads * attention.value_dim
    kept = attention.kept + output
    if size > 1 and not gathers:
        # With fewer heads than processes, each process has a copy of a head. The exchange of the output between heads adds
        # a copy.
        kept += max(0, size - attention.kv_heads) * (attention.dim + both) + output
    # Gradients of the output, its gate and the inputs; keys and values per query head; queries in float32.
    made = (7 if attention.has_gate else 6) * attention.heads * attention.dim
    return kept, made + attention.kv_heads * both


def _of_mlp(mlp: int | Experts, hidden: int, lora: Lora) -> tuple[int, int]:
    """Values per token that an MLP or a mixture keeps, and makes in backward."""
    if isinstance(mlp, int):
        # Frozen weights need no more than the gradients of gate and up.
        return 2 * mlp, (2 if lora.rank else 4) * mlp
    # For each choice the outputs of gate and up, the weight, and two indices in int64; gate and up of the shared expert.
    # The backward copies the gradients of the chosen rows, and adds those of gate, up and their product. The first adapter
    # keeps the product with its first matrix. The backward of the second one makes this product, and that of the gradient.
    low = lora.expert_columns
    kept = mlp.kept + mlp.chosen * (2 * mlp.width + 9 + low) + 2 * mlp.shared
    return kept, mlp.chosen * (3 * mlp.width + hidden + 2 * low) + 4 * mlp.shared


def _copies(mlp: int | Experts, hidden: int, lora: Lora) -> int:
    """Bytes of the copies of weights that the backward of an MLP makes, whatever the number of tokens."""
    if isinstance(mlp, int):
        return HALF * mlp * hidden if lora.stored else 0
    # Of adapters all matrices in bfloat16, and the gradient of the largest one in bfloat16 and twice in float32.
    largest = max(hidden, 2 * mlp.width)
    adapters = lora.expert_columns * (HALF * (2 * hidden + 3 * mlp.width) + (HALF + 2 * FULL) * largest)
    # Of quantized experts some at a time, of the larger weight.
    each = 2 * mlp.width * hidden
    computed = HALF * each * min(mlp.number, max(1, PIECE // each)) if lora.stored else 0
    return mlp.number * adapters + computed


def way_of_attention(layer: Attention, size: int, wanted: str | None) -> str:
    """Return how `size` GPUs share an attention layer, for rows of short documents."""
    return attention_method(size, layer.heads, layer.kv_heads, wanted, True)
