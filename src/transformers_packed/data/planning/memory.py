"""The number of processes per row and their communication: `plan_sequence_parallel`.

All figures follow from the configuration. docs/explained/memory.md has the formulas and compares them with
measurements. Bytes are per GPU. Computation is in bfloat16.
"""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from ...boundaries import CHUNK_SIZE as RULE_CHUNK_SIZE
from ...errors import input_error
from ...ops.cross_entropy import CHUNK_SIZE, FROZEN_CHUNK_SIZE
from ...ops.recipes import WORTH_RECOMPUTING
from ...parallel.groups import attention_method, check_methods
from .cost import has_experts


_GIB, _MIB = 2**30, 2**20
# Bytes per value.
_HALF, _FULL = 2, 4
# The rest of the memory is reserved for allocator fragmentation, CUDA and NCCL.
FILLED = 0.9


@dataclass(frozen=True)
class Parameters:
    """The number of parameters: in total, outside of layers, in the largest layer, and in adapters of rank 1."""

    total: int
    root: int
    layer: int
    adapters: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Parameters":
        """Count the parameters of a model on the meta device, including its vision tower if it has one.

        Adapters are those of PEFT's `target_modules="all-linear"`: of all linear layers but the head.
        """
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with torch.device("meta"):
            model = auto.from_config(config)
        stacks = (module for name, module in model.named_modules() if name.endswith((".layers", ".blocks")))
        layers = [_count(layer) for stack in stacks for layer in stack]
        head = model.get_output_embeddings()
        linear = [x for x in model.modules() if isinstance(x, torch.nn.Linear) and x is not head]
        adapters = sum(x.in_features + x.out_features for x in linear)
        return cls(_count(model), _count(model) - sum(layers), max(layers), adapters)


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one GPU: tensors that FSDP2 shards, tensors that it gathers for running layers, and activations.

    Args:
        weights (`float`):
            The sharded parameters.
        gradients (`float`):
            The sharded gradients of trained parameters.
        moments (`float`):
            The sharded moments of AdamW.
        gathered (`float`):
            The full weights and gradients outside of layers, the weights of two layers, and the gradients of one
            layer. With LoRA only the weights.
        saved (`float`):
            Activations saved for backward.
        working (`float`):
            The larger of the loss computation and the backward of one layer. Gradient checkpointing first recomputes
            the forward of this layer.
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


@dataclass(frozen=True)
class SequenceParallelPlan:
    """The result of [`plan_sequence_parallel`].

    Args:
        config (`PreTrainedConfig`):
            The configuration of the model.
        parameters ([`Parameters`]):
            The number of parameters.
        row_length (`int`):
            Tokens per row.
        gpus (`int`):
            The number of GPUs.
        memory (`float`):
            Memory per GPU in GiB.
        options (`dict`):
            For each number `P` of processes per row that the GPUs allow, a pair of [`StepMemory`]: without and with
            gradient checkpointing.
        needed (pair of `int`, *optional*):
            The smallest `P` that fits without and with gradient checkpointing. `None` if no `P` fits.
        methods (`dict`):
            `gated_delta_rule` and `attention`, as in [`SequenceParallel`].
        lora_rank (`int`):
            The rank of the LoRA adapters that are trained, or 0 if all parameters are.
    """

    config: PreTrainedConfig
    parameters: Parameters
    row_length: int
    gpus: int
    memory: float
    options: dict[int, tuple[StepMemory, StepMemory]]
    needed: tuple[int | None, int | None]
    methods: dict[str, str | None]
    lora_rank: int = 0

    @property
    def size(self) -> int:
        """The recommended `P`: the smallest that fits, with gradient checkpointing if necessary."""
        return min(size for size in self.needed if size is not None)

    def exchanges(self, size: int) -> list[Exchange]:
        """The exchanges of all layers for one row over `size` processes."""
        return exchanges(self.config, self.row_length, size, **self.methods)

    def summary(self) -> str:
        """The plan as text."""
        first = self.options[self.size][0]
        lines = [
            f"{self.config.model_type} with {self.parameters.total / 1e9:.2f} B parameters"
            f"{_adapters(self.parameters, self.lora_rank)}, rows of {self.row_length:,} tokens, {self.gpus:,} {'GPU' if self.gpus == 1 else 'GPUs'} of {self.memory:g} GiB (up to {FILLED:.0%} used)",
            f"FSDP2 shards per GPU: weights {_gib(first.weights)} GiB, gradients {_gib(first.gradients)} GiB, AdamW "
            f"{_gib(first.moments)} GiB",
            f"FSDP2 gathers per GPU: {_gib(first.gathered)} GiB of weights and gradients at a time",
            "",
            "P is the number of GPUs that share a row. The last two columns are the memory per GPU.",
            "  P  rows at once  tokens per GPU  GiB without checkpointing  GiB with",
        ]
        for size, pair in self.options.items():
            without, with_it = (_gib(m.total) + (" " if _fits(m, self.memory) else "*") for m in pair)
            tokens = -(-self.row_length // size)
            lines.append(f"{size:>3}  {self.gpus // size:>12,}  {tokens:>14,}  {without:>25} {with_it:>9}".rstrip())
        lines += [f"* more than {FILLED:.0%} of the memory", ""]
        for name, size in zip(("without", "with"), self.needed, strict=True):
            verdict = "none fits" if size is None else f"P = {size}"
            lines.append(f"Smallest P {name} gradient checkpointing: {verdict}")
        lines.append("")
        if self.size > 1:
            attention = _attention_method(self.config.get_text_config(), self.size, self.methods["attention"])
            lines.append(
                f'Each GPU receives per row with P = {self.size}, gated_delta_rule="{self.methods["gated_delta_rule"]}" '
                f'and attention="{attention}":'
            )
            found = self.exchanges(self.size)
            for exchange in found:
                times = f"{exchange.layers} x {_mib(exchange.bytes)} MiB"
                lines.append(f"  {exchange.name:<45} {times:>20} = {_mib(exchange.layers * exchange.bytes):>9} MiB")
            total = _mib(sum(exchange.layers * exchange.bytes for exchange in found))
            lines.append(
                f"  Total: {total} MiB in forward, the same in backward, and once more with gradient checkpointing"
            )
        gathered = _mib(self.parameters.total * _HALF * (1 - 1 / self.gpus))
        trained = self.lora_rank * self.parameters.adapters or self.parameters.total
        lines.append(
            f"FSDP2 transfers per GPU: {gathered} MiB of weights in forward, the same in backward, and "
            f"{_mib(trained * _HALF * (1 - 1 / self.gpus))} MiB of gradients"
        )
        return "\n".join(lines)


def plan_sequence_parallel(
    config: PreTrainedConfig,
    row_length: int,
    gpus: int,
    memory: float,
    *,
    weights: str = "bfloat16",
    lora_rank: int = 0,
    gated_delta_rule: str = "state",
    attention: str | None = None,
) -> SequenceParallelPlan:
    """Find the number of processes that must share a packed row to train with AdamW under FSDP2.

    Args:
        config (`PreTrainedConfig`):
            The configuration of a Qwen3-Next, Qwen3.5 or Qwen3.5-MoE model. For a vision-language model, the plan
            counts the parameters of the vision tower but not its activations.
        row_length (`int`):
            Tokens per row.
        gpus (`int`):
            The number of GPUs.
        memory (`float`):
            Memory per GPU in GiB.
        weights (`str`, *optional*, defaults to `"bfloat16"`):
            The dtype of the parameters, their gradients and the moments of AdamW. The computation is always in
            bfloat16.
        lora_rank (`int`, *optional*, defaults to 0):
            Train LoRA adapters of this rank on all linear layers of a model without experts. They, their gradients and
            moments are in float32, and `weights` is the dtype of the frozen parameters.
        gated_delta_rule (`str`, *optional*):
            As in [`SequenceParallel`].
        attention (`str`, *optional*):
            As in [`SequenceParallel`].

    Returns:
        [`SequenceParallelPlan`]

    Raises:
        `ValueError`: an unsupported model, or no number of processes fits. The message names the required memory.

    Example:

    ```python
    >>> from transformers import Qwen3_5TextConfig
    >>> from transformers_packed.data.planning.memory import plan_sequence_parallel
    >>> plan = plan_sequence_parallel(Qwen3_5TextConfig(), 262144, gpus=16, memory=80)
    >>> plan.needed
    (None, 4)

    ```
    """
    widths = {"bfloat16": _HALF, "float32": _FULL}
    if weights not in widths:
        raise input_error('weights "bfloat16" or "float32"', repr(weights))
    for name, value in (("row_length", row_length), ("gpus", gpus), ("memory", memory)):
        if not value > 0:
            raise input_error(f"{name} above 0", value)
    if lora_rank < 0:
        raise input_error("lora_rank of at least 0", lora_rank)
    text, parameters = config.get_text_config(), None
    # Releases of PEFT differ in whether its adapters of "all-linear" are on experts too.
    if lora_rank and any(has_experts(text, number) for number in range(len(getattr(text, "layer_types", ())))):
        raise input_error("a model without experts, with lora_rank", config.model_type, "Plan full fine-tuning.")
    options, reason = {}, None
    for size in (size for size in range(1, gpus + 1) if gpus % size == 0):
        try:
            check_methods(text, size, gated_delta_rule, attention)
        except ValueError as error:
            if size == 1:
                raise
            reason = reason or error
            continue
        # Each part must cover the receptive field of the convolution.
        if size == 1 or row_length >= size * (text.linear_conv_kernel_dim - 1):
            parameters = parameters or Parameters.of(config)
            given = (config, parameters, row_length, size, gpus, widths[weights])
            options[size] = tuple(step_memory(*given, on, attention, lora_rank) for on in (False, True))
    needed = tuple(next((p for p, pair in options.items() if _fits(pair[n], memory)), None) for n in (0, 1))
    if needed == (None, None):
        least = min((pair[1] for pair in options.values()), key=lambda need: need.total)
        sharded = least.weights + least.gradients + least.moments
        raise input_error(
            f"at least {_gib(least.total / FILLED)} GiB per GPU for rows of {row_length:,} tokens and "
            f"{parameters.total / 1e9:.2f} B parameters{_adapters(parameters, lora_rank)} on {gpus:,} GPUs "
            f"({_gib(sharded)} for weights, gradients "
            f"and AdamW, {_gib(least.gathered)} gathered, {_gib(least.saved + least.working)} for the row's tokens)",
            f"{memory:g}",
            f"Use more GPUs or shorter rows{'.' if reason is None else f'; a larger P does not fit the heads. {reason}'}",
        )
    methods = {"gated_delta_rule": gated_delta_rule, "attention": attention}
    return SequenceParallelPlan(config, parameters, row_length, gpus, memory, options, needed, methods, lora_rank)


def step_memory(
    config: PreTrainedConfig,
    parameters: Parameters,
    row_length: int,
    size: int,
    gpus: int,
    width: int,
    checkpointing: bool,
    attention: str | None = None,
    lora_rank: int = 0,
) -> StepMemory:
    """The memory of one GPU when `size` of `gpus` share a row. `width` is the size of a parameter in bytes.

    `lora_rank` is the rank of the trained adapters, or 0 if all parameters are trained.
    """
    text = config.get_text_config()
    tokens = -(-row_length // size)
    numbers = range(len(text.layer_types))
    layers = [layer_memory(text, number, row_length, size, attention, lora_rank) for number in numbers]
    # Checkpointing always keeps the input of a layer.
    given = _HALF * tokens * text.hidden_size
    layer = max(kept - given + made if checkpointing else made for kept, made in layers)
    weights, adapters = width * parameters.total / gpus, _FULL * lora_rank * parameters.adapters / gpus
    trained = adapters or weights
    gathered = parameters.root + 2 * parameters.layer
    if not lora_rank:
        gathered += parameters.root + parameters.layer
    return StepMemory(
        weights=weights + adapters,
        gradients=trained,
        moments=2 * trained,
        gathered=_HALF * gathered if gpus > 1 else 0,
        saved=len(layers) * given if checkpointing else sum(kept for kept, _ in layers),
        working=max(loss_memory(text, tokens, lora_rank > 0), layer),
    )


def loss_memory(text: PreTrainedConfig, tokens: int, frozen: bool = False) -> float:
    """Peak bytes of the loss computation, including the final norm. `frozen` says that the head is not trained."""
    hidden, vocabulary = text.hidden_size, text.vocab_size
    # A chunk's logits. A trained head has its float32 gradient beside them and, later, that gradient in bfloat16.
    head = _HALF * vocabulary * min(tokens, FROZEN_CHUNK_SIZE if frozen else CHUNK_SIZE)
    if not frozen:
        head = max(head, _HALF * vocabulary * hidden) + _FULL * vocabulary * hidden
    # Input and output of the norm, the hidden states with a target, and their gradients.
    return head + _HALF * 4 * hidden * tokens


def layer_memory(
    text: PreTrainedConfig, number: int, row_length: int, size: int, attention: str | None, lora_rank: int = 0
) -> tuple[float, float]:
    """Bytes that a layer saves for backward on one GPU, and the peak of additional bytes in this backward."""
    tokens, hidden, whole_row = -(-row_length // size), text.hidden_size, 0
    if text.layer_types[number] == "linear_attention":
        keys, values = _keys_and_values(text)
        # Queries, keys and values before and after the convolution, z, and the output. Per head: a row of the chunk
        # matrix, the inputs of decay and rate, the rate, and in float32 the decay, its cumulative sum in a chunk, and
        # the scale of the norm.
        kept = 2 * (2 * keys + values) + 2 * values + (RULE_CHUNK_SIZE + 3 + 2 * 3) * text.linear_num_value_heads
        # In flash-linear-attention: recomputed states and chunk outputs, and gradients, each of the size of the heads.
        made = 13 * values
    else:
        query = text.num_attention_heads * text.head_dim
        gathers = size > 1 and _attention_method(text, size, attention) == "gather"
        # With fewer heads than processes, each process has a copy of a head.
        key = max(text.num_key_value_heads, 1 if gathers else size) * text.head_dim
        # Queries, their gate, keys and values after projection; queries and keys after norm and rotation; a copy of
        # the gate; and the output. The exchange of the output between heads adds a copy.
        kept = 5 * query + 3 * key + (query if size > 1 and not gathers else 0)
        whole_row = (row_length - tokens) * 2 * key if gathers else 0
        # Gradients of the output, its gate and the inputs; keys and values per query head; queries in float32.
        made = 7 * query + 2 * text.num_key_value_heads * text.head_dim
    if has_experts(text, number):
        top_k, width, shared = (
            text.num_experts_per_tok,
            text.moe_intermediate_size,
            text.shared_expert_intermediate_size,
        )
        # The logits of the router; for each choice the outputs of gate and up, the weight, and two indices in int64;
        # gate and up of the shared expert, and its output. The backward copies the gradients of the chosen rows, and
        # adds those of gate, up and their product.
        mlp_kept = text.num_experts + top_k * (2 * width + 9) + 2 * shared + hidden
        mlp_made = top_k * (3 * width + hidden) + 4 * shared
    else:
        mlp_kept, mlp_made = 2 * text.intermediate_size, 4 * text.intermediate_size
    # The input of the layer, the outputs of its two norms, and the input of the second norm.
    kept += 4 * hidden + mlp_kept
    if lora_rank:
        # The product of each adapter's first matrix.
        kept += lora_rank * _linear_layers(text, number)
        # Only adapters need the outputs of the norms, and the backward computes long ones again.
        if tokens * hidden >= WORTH_RECOMPUTING:
            kept, made, mlp_made = kept - 2 * hidden, made + hidden, mlp_made + hidden
    # The backward of the MLP comes first, with the gradient of the layer's output. It then frees the MLP's
    # activations.
    return _HALF * (tokens * kept + whole_row), _HALF * tokens * max(hidden + mlp_made, made - mlp_kept)


def _linear_layers(text: PreTrainedConfig, number: int) -> int:
    """The number of linear layers of a layer without experts."""
    linear_attention = 5 if text.model_type.startswith("qwen3_5") else 3
    return 3 + (linear_attention if text.layer_types[number] == "linear_attention" else 4)


def _adapters(parameters: Parameters, lora_rank: int) -> str:
    return f" and {lora_rank * parameters.adapters / 1e6:,.0f} M in adapters" if lora_rank else ""


def _keys_and_values(text: PreTrainedConfig) -> tuple[int, int]:
    """The number of key values and of value values per token in the gated delta rule."""
    keys, values = text.linear_num_key_heads, text.linear_num_value_heads
    return keys * text.linear_key_head_dim, values * text.linear_value_head_dim


def exchanges(
    config: PreTrainedConfig,
    row_length: int,
    size: int,
    *,
    gated_delta_rule: str = "state",
    attention: str | None = None,
) -> list[Exchange]:
    """The data that each of `size` GPUs receives in the forward of a row, by kind of layer."""
    text = config.get_text_config()
    tokens, others = -(-row_length // size), size - 1
    linear, full = (text.layer_types.count(kind) for kind in ("linear_attention", "full_attention"))
    keys, values = _keys_and_values(text)
    heads, key_dim = text.linear_num_value_heads, text.linear_key_head_dim
    # A tensor that is cut over heads instead of tokens: all but 1/P of this GPU's share comes from other GPUs.
    swapped = tokens * others / size
    halo = others * (text.linear_conv_kernel_dim - 1) * (2 * keys + values) * _HALF
    if gated_delta_rule == "state":
        rule = "states in float32", others * heads * key_dim * (text.linear_value_head_dim + key_dim) * _FULL
    else:
        rule = "all-to-all over heads", swapped * (_HALF * (2 * keys + 2 * values + heads) + _FULL * heads)
    if _attention_method(text, size, attention) == "gather":
        looked = "all keys and values", others * tokens * 2 * text.num_key_value_heads * text.head_dim * _HALF
    else:
        shared = text.num_attention_heads + max(text.num_key_value_heads, size)
        looked = "all-to-all over heads", swapped * 2 * shared * text.head_dim * _HALF
    found = [
        Exchange(linear, "convolution: preceding tokens", halo),
        Exchange(linear, f"gated delta rule: {rule[0]}", rule[1]),
        Exchange(full, f"attention: {looked[0]}", looked[1]),
    ]
    if getattr(text, "output_router_logits", False):
        sparse = sum(has_experts(text, number) for number in range(len(text.layer_types)))
        logits = others * tokens * text.num_experts * _HALF
        found.append(Exchange(sparse, "experts: router logits for the auxiliary loss", logits))
    return found


def _attention_method(text: PreTrainedConfig, size: int, attention: str | None) -> str:
    # Assume rows of short documents on GPUs.
    return attention_method(size, text.num_attention_heads, text.num_key_value_heads, attention, True)


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _fits(need: StepMemory, memory: float) -> bool:
    return need.total <= FILLED * memory * _GIB


def _gib(count: float) -> str:
    return f"{count / _GIB:,.1f}"


def _mib(count: float) -> str:
    return f"{count / _MIB:,.1f}"
