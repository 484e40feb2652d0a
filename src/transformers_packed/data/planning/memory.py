"""How many processes a row needs, and what they exchange: `plan_sequence_parallel`.

Everything is counted from the configuration; docs/sequence_parallel.md has the formulae, and how well they meet what was
measured. Bytes are those of one GPU. Computation is in bfloat16.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from ...errors import input_error
from ...ops.backends import CHUNK_SIZE as RULE_CHUNK_SIZE
from ...ops.cross_entropy import CHUNK_SIZE
from ...parallel.groups import attention_method, check_methods
from .cost import has_experts


_GIB = 2**30
# bfloat16, and float32.
_HALF, _FULL = 2, 4
# Of the memory; the rest is left to the allocator's gaps, CUDA and NCCL.
FILLED = 0.9


@dataclass(frozen=True)
class Parameters:
    """How many there are: all, those outside of layers, and those of the largest layer."""

    total: int
    root: int
    layer: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Parameters":
        """Counted on a model without memory, with its vision tower if it has one."""
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with torch.device("meta"):
            model = auto.from_config(config)
        layers: dict[str, int] = {}
        total = root = 0
        for name, parameter in model.named_parameters():
            total += parameter.numel()
            owner = next((part for part in ("layers.", "blocks.") if part in name), None)
            if owner is None:
                root += parameter.numel()
            else:
                before, _, after = name.partition(owner)
                layer = before + owner + after.split(".")[0]
                layers[layer] = layers.get(layer, 0) + parameter.numel()
        return cls(total, root, max(layers.values()))


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one GPU: what FSDP2 shards, what it gathers for the layers that run, and what the row's tokens take.

    Args:
        weights, gradients, moments (`float`):
            Of the sharded parameters and of AdamW.
        gathered (`float`):
            The whole weights and gradients outside of layers, two layers' weights, and one's gradients.
        saved (`float`):
            What forward keeps for backward.
        working (`float`):
            The larger of the loss at work and of the backward of a layer; with gradient checkpointing that layer's
            forward is made again first.
    """

    weights: float
    gradients: float
    moments: float
    gathered: float
    saved: float
    working: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class Exchange:
    """What each GPU receives in the forward of one layer; backward is as much again.

    Args:
        layers (`int`):
            How many layers do that.
        name (`str`):
            What crosses.
        bytes (`float`):
            In one layer.
    """

    layers: int
    name: str
    bytes: float


@dataclass(frozen=True)
class SequenceParallelPlan:
    """What [`plan_sequence_parallel`] found.

    Args:
        config (`PreTrainedConfig`):
            Of the model.
        parameters ([`Parameters`]):
            How many it has.
        row_length, gpus (`int`), memory (`float`):
            As asked for.
        options (`dict`):
            For each number `P` of processes per row that the GPUs allow, a pair of [`StepMemory`]: without and with gradient
            checkpointing.
        needed (pair of `int`, *optional*):
            The smallest `P` that fits without and with gradient checkpointing.
        methods (`dict`):
            `gated_delta_rule` and `attention`, as in [`SequenceParallel`].
    """

    config: PreTrainedConfig
    parameters: Parameters
    row_length: int
    gpus: int
    memory: float
    options: dict[int, tuple[StepMemory, StepMemory]]
    needed: tuple[int | None, int | None]
    methods: dict[str, str | None]

    @property
    def size(self) -> int:
        """The `P` to take: the smallest one, if need be with gradient checkpointing."""
        return min(size for size in self.needed if size is not None)

    def summary(self) -> str:
        """All of it as text."""
        without, _ = self.options[self.size]
        lines = [
            f"{self.config.model_type}, {self.parameters.total / 1e9:.2f} B parameters; rows of {self.row_length:,} tokens on "
            f"{self.gpus:,} GPUs of {self.memory:g} GiB, to be filled to {FILLED:.0%}",
            f"Per GPU, sharded by FSDP2 over all of them: weights {_gib(without.weights)}, gradients "
            f"{_gib(without.gradients)}, AdamW {_gib(without.moments)} GiB; gathered while it runs: {_gib(without.gathered)} GiB",
            "",
            "  P  rows at once  tokens per GPU  GiB without checkpointing  with",
        ]
        for size, pair in self.options.items():
            totals = [_gib(memory.total) + (" " if self._fits(memory) else "*") for memory in pair]
            line = f"{size:>3}  {self.gpus // size:>12,}  {-(-self.row_length // size):>14,}  {totals[0]:>25} {totals[1]:>6}"
            lines.append(line.rstrip())
        lines += ["* does not fit", "", *self._verdict(), ""]
        if self.size > 1:
            methods = f'"{self.methods["gated_delta_rule"]}", attention by "{self._attention()}"'
            lines.append(f"With P = {self.size} (gated delta rule by {methods}) each GPU receives for one row")
            total = 0.0
            for exchange in self.exchanges(self.size):
                total += exchange.layers * exchange.bytes
                times = f"{exchange.layers} x {_mib(exchange.bytes)} MiB"
                lines.append(f"  {exchange.name:<45} {times:>20} = {_mib(exchange.layers * exchange.bytes):>9} MiB")
            lines.append(
                f"  in forward, {_mib(total)} MiB; backward as much; a third time with gradient checkpointing"
            )
        lines.append(
            f"FSDP2 beside it: {_mib(self.parameters.total * _HALF * (1 - 1 / self.gpus))} MiB of weights in forward, again in "
            "backward, and as much of gradients"
        )
        return "\n".join(lines)

    def exchanges(self, size: int) -> list[Exchange]:
        """What the layers of a row exchange over `size` processes."""
        return exchanges(self.config, self.row_length, size, **self.methods)

    def _attention(self) -> str:
        config = self.config.get_text_config()
        return _attention_method(config, self.size, self.methods["attention"])

    def _fits(self, memory: StepMemory) -> bool:
        return memory.total <= FILLED * self.memory * _GIB

    def _verdict(self) -> list[str]:
        names = ("without gradient checkpointing", "with gradient checkpointing")
        return [
            f"Needed {name}: " + ("no P that these GPUs allow is enough" if size is None else f"P = {size}")
            for name, size in zip(names, self.needed, strict=True)
        ]


def plan_sequence_parallel(
    config: PreTrainedConfig,
    row_length: int,
    gpus: int,
    memory: float,
    *,
    weights: str = "bfloat16",
    gated_delta_rule: str = "state",
    attention: str | None = None,
) -> SequenceParallelPlan:
    """How many processes a packed row has to be shared by, so that training with AdamW under FSDP2 fits.

    Args:
        config (`PreTrainedConfig`):
            Of a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE model. Of a vision-language model the parameters of the vision tower are
            counted and its activations are not.
        row_length (`int`):
            Tokens of a row.
        gpus (`int`):
            How many there are.
        memory (`float`):
            GiB of each.
        weights (`str`, *optional*, defaults to `"bfloat16"`):
            The dtype of the parameters, their gradients and AdamW's moments; the computation is in bfloat16 anyway.
        gated_delta_rule, attention (`str`, *optional*):
            As in [`SequenceParallel`].

    Returns:
        [`SequenceParallelPlan`]

    Raises:
        `ValueError`: another kind of model, or nothing that fits, with what it would take.

    Example:

    ```python
    >>> from transformers import Qwen3_5TextConfig
    >>> from transformers_packed.parallel import plan_sequence_parallel
    >>> plan = plan_sequence_parallel(Qwen3_5TextConfig(), 262144, gpus=16, memory=80)
    >>> plan.needed
    (None, 4)

    ```
    """
    if weights not in ("bfloat16", "float32"):
        raise input_error('weights "bfloat16" or "float32"', repr(weights), "Choose one.")
    for name, value in (("row_length", row_length), ("gpus", gpus), ("memory", memory)):
        if not value > 0:
            raise input_error(f"{name} above 0", f"{value}", "Correct it.")
    text = config.get_text_config()
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    check_methods(text, 1, gated_delta_rule, attention)
    fitting, reason = [], None
    for size in sizes:
        try:
            check_methods(text, size, gated_delta_rule, attention)
        except ValueError as error:
            reason = reason or error
        else:
            # The convolution looks back that far.
            if size == 1 or row_length >= size * (text.linear_conv_kernel_dim - 1):
                fitting.append(size)
    parameters = Parameters.of(config)
    width = _HALF if weights == "bfloat16" else _FULL
    options = {
        size: tuple(
            step_memory(config, parameters, row_length, size, gpus, width, checkpointing, attention)
            for checkpointing in (False, True)
        )
        for size in fitting
    }
    limit = FILLED * memory * _GIB
    needed = tuple(
        next((size for size, pair in options.items() if pair[column].total <= limit), None) for column in (0, 1)
    )
    if needed == (None, None):
        least = min((pair[1] for pair in options.values()), key=lambda need: need.total)
        sharded = least.weights + least.gradients + least.moments
        raise input_error(
            f"{_gib(least.total / FILLED)} GiB per GPU, the least that rows of {row_length:,} tokens of "
            f"{parameters.total / 1e9:.2f} B parameters need on {gpus:,} of them ({_gib(sharded)} of weights, gradients "
            f"and AdamW, {_gib(least.gathered)} gathered, {_gib(least.saved + least.working)} for the row's tokens)",
            f"{memory:g}",
            f"Take more GPUs or shorter rows{'.' if reason is None else f'; a larger P does not fit the heads. {reason}'}",
        )
    methods = {"gated_delta_rule": gated_delta_rule, "attention": attention}
    return SequenceParallelPlan(config, parameters, row_length, gpus, memory, options, needed, methods)


def step_memory(
    config: PreTrainedConfig,
    parameters: Parameters,
    row_length: int,
    size: int,
    gpus: int,
    width: int,
    checkpointing: bool,
    attention: str | None = None,
) -> StepMemory:
    """The memory of one GPU when `size` of `gpus` share a row; `width` is that of a parameter in bytes."""
    text = config.get_text_config()
    tokens = -(-row_length // size)
    numbers = range(len(text.layer_types))
    kept = [_HALF * layer_elements(text, number, row_length, size, attention) for number in numbers]
    work = [_HALF * tokens * backward_elements(text, number) for number in numbers]
    # Checkpointing keeps a layer's input whether the rest is there or not.
    given = _HALF * tokens * text.hidden_size
    layer = max(k - given + w for k, w in zip(kept, work, strict=True)) if checkpointing else max(work)
    sharded = width * parameters.total / gpus
    gathered = _HALF * (2 * parameters.root + 3 * parameters.layer) if gpus > 1 else 0
    return StepMemory(
        weights=sharded,
        gradients=sharded,
        moments=2 * sharded,
        gathered=gathered,
        saved=len(kept) * given if checkpointing else sum(kept),
        working=max(loss_memory(text, tokens), layer),
    )


def loss_memory(text: PreTrainedConfig, tokens: int) -> float:
    """Bytes of the loss at work, with the last norm before it."""
    # The norm keeps its input and its output, the loss the tokens with a target and their gradients.
    hidden = _HALF * 4 * text.hidden_size * tokens
    # Beside the gradient of the head in float32 there are logits, and later its copy in bfloat16.
    return hidden + text.vocab_size * (
        _HALF * max(min(tokens, CHUNK_SIZE), text.hidden_size) + _FULL * text.hidden_size
    )


def layer_elements(text: PreTrainedConfig, number: int, row_length: int, size: int, attention: str | None) -> int:
    """How many bfloat16 numbers a layer keeps for its backward on one GPU."""
    tokens, hidden = -(-row_length // size), text.hidden_size
    # The layer's input, what its two norms make of it, and the input of the second.
    elements = 4 * hidden + _feed_forward(text, number)
    if text.layer_types[number] == "linear_attention":
        keys, values = _keys_and_values(text)
        heads = text.linear_num_value_heads
        # Queries, keys and values before and after the convolution, z, and the output. For each head a row of a chunk's
        # square, what decay and rate are made of, the rate, and in float32 the decay, its sum in a chunk, and the scale
        # of the norm.
        return tokens * (elements + 2 * (2 * keys + values) + 2 * values + (RULE_CHUNK_SIZE + 3 + 2 * 3) * heads)
    query = text.num_attention_heads * text.head_dim
    gathers = size > 1 and _attention_method(text, size, attention) == "gather"
    # With fewer heads than processes each of them has a copy.
    key = max(text.num_key_value_heads, 1 if gathers else size) * text.head_dim
    # Queries, their gate, keys and values as projected; queries and keys normed and rotated; the gate by itself, and the
    # output.
    elements = tokens * (elements + 2 * query + 2 * key + query + key + 2 * query)
    if gathers:
        return elements + (row_length - tokens) * 2 * key
    # The output before it is exchanged for other heads', and after.
    return elements + tokens * query if size > 1 else elements


def backward_elements(text: PreTrainedConfig, number: int) -> int:
    """How many bfloat16 numbers for each token a layer's backward makes, at most at a time, beyond what was kept."""
    if text.layer_types[number] == "linear_attention":
        # In flash-linear-attention, of a head's size each: states before chunks and their gradients (two sizes each), what
        # chunks write, made again in three steps, their gradients and those of the inputs, and of the output and z.
        mixer = 13 * _keys_and_values(text)[1]
    else:
        # Gradients of the output, its gate and the inputs, with keys and values once per query head, and those of the
        # queries in float32 before.
        mixer = (7 * text.num_attention_heads + 2 * text.num_key_value_heads) * text.head_dim
    # By then the second half of the layer has given back what it had kept. Its own backward comes first, with the
    # gradient of the layer's output.
    return max(text.hidden_size + _feed_forward_work(text, number), mixer - _feed_forward(text, number))


def _keys_and_values(text: PreTrainedConfig) -> tuple[int, int]:
    """The numbers of a token's keys, and of its values, in the gated delta rule."""
    return (
        text.linear_num_key_heads * text.linear_key_head_dim,
        text.linear_num_value_heads * text.linear_value_head_dim,
    )


def _feed_forward(text: PreTrainedConfig, number: int) -> int:
    """What the MLP, or the router, the shared and the chosen experts keep for a token."""
    if not has_experts(text, number):
        return 2 * text.intermediate_size
    return 2 * text.num_experts + _chosen_experts(text) + 2 * text.shared_expert_intermediate_size


def _feed_forward_work(text: PreTrainedConfig, number: int) -> int:
    """What their backward makes: the product of gate and `up` again, its gradient, and those of the two."""
    if not has_experts(text, number):
        return 4 * text.intermediate_size
    return _chosen_experts(text) + 4 * text.shared_expert_intermediate_size


def _chosen_experts(text: PreTrainedConfig) -> int:
    """What they keep, and as much in gradients."""
    return text.num_experts_per_tok * (3 * text.moe_intermediate_size + 2 * text.hidden_size)


def exchanges(
    config: PreTrainedConfig,
    row_length: int,
    size: int,
    *,
    gated_delta_rule: str = "state",
    attention: str | None = None,
) -> list[Exchange]:
    """What each of `size` GPUs receives in the forward of a row, by kind of layer."""
    text = config.get_text_config()
    tokens = -(-row_length // size)
    linear = text.layer_types.count("linear_attention")
    full = len(text.layer_types) - linear
    keys, values = _keys_and_values(text)
    heads, value_dim, others = text.linear_num_value_heads, text.linear_value_head_dim, size - 1
    # A tensor that is cut over heads and not over tokens: all but a P-th of this GPU's share comes from others.
    swapped = tokens * others / size
    halo = others * (text.linear_conv_kernel_dim - 1) * (2 * keys + values) * _HALF
    found = [Exchange(linear, "convolution: tokens before the cut", halo)]
    if gated_delta_rule == "state":
        state = others * heads * text.linear_key_head_dim * (value_dim + text.linear_key_head_dim) * _FULL
        found.append(Exchange(linear, "gated delta rule: states in float32", state))
    else:
        rule = swapped * ((2 * keys + values + heads) * _HALF + heads * _FULL + values * _HALF)
        found.append(Exchange(linear, "gated delta rule: tokens for heads, and back", rule))
    if _attention_method(text, size, attention) == "gather":
        gathered = others * tokens * 2 * text.num_key_value_heads * text.head_dim * _HALF
        found.append(Exchange(full, "attention: all keys and values", gathered))
    else:
        shared = text.num_attention_heads + max(text.num_key_value_heads, size)
        found.append(
            Exchange(full, "attention: tokens for heads, and back", swapped * 2 * shared * text.head_dim * _HALF)
        )
    if getattr(text, "output_router_logits", False):
        sparse = sum(has_experts(text, number) for number in range(len(text.layer_types)))
        logits = others * tokens * text.num_experts * _HALF
        found.append(Exchange(sparse, "experts: the routers' logits, for their loss", logits))
    return found


def _attention_method(text: PreTrainedConfig, size: int, attention: str | None) -> str:
    # Of a row that is cut in short pieces, as most are, on GPUs.
    return attention_method(size, text.num_attention_heads, text.num_key_value_heads, attention, True)


def _gib(count: float) -> str:
    return f"{count / _GIB:,.1f}"


def _mib(count: float) -> str:
    return f"{count / 2**20:,.1f}"
