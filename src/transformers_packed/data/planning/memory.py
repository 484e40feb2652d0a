"""The number of processes per row and their communication: `plan_sequence_parallel`.

All figures follow from the configuration. docs/reference/memory.md has the formulas and compares them with
measurements. Bytes are per GPU. Computation is in bfloat16.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from ...errors import Rule, check_rules, count, input_error
from ...models.checkpoint_kinds import stored_as
from ...models.families import family_of, sizes_of
from ...models.memory import ALL_TRAINED, HALF, NF4, WIDTHS, Lora, in_host_memory, on_host_of, way_of_attention
from ...models.mtp_head import check_declared
from ...models.optimizers import DEFAULT, OPTIMIZERS, check_optimizer
from ...models.segments import check_size
from ...models.sizes import Sizes
from ...ops.moe import MAX_RANK
from ...parallel.groups import check_methods
from ...parallel_methods import AttentionMethod, DeltaRuleMethod
from .exchanges import exchanges
from .segments import choose_layers, choose_segment
from .step_memory import Parameters, StepMemory, checkpointed_layers, is_sharded, step_memory


_GIB, _MIB = 2**30, 2**20
_WAYS = "without gradient checkpointing", "with gradient checkpointing", "with offload"
# The rest of the memory is reserved for allocator fragmentation, CUDA and NCCL.
FILLED = 0.9


@dataclass(frozen=True)
class SequenceParallelPlan:
    """The result of [`plan_sequence_parallel`].

    Args:
        config (`PreTrainedConfig`):
            The configuration of the model.
        parameters ([`Parameters`]):
            The number of parameters.
        max_length (`int`):
            Tokens per row.
        gpus (`int`):
            The number of GPUs.
        memory (`float`):
            Memory per GPU in GiB.
        options (`dict`):
            For each number `P` of processes per row that the GPUs allow, three [`StepMemory`]: without gradient
            checkpointing, with it, and with all checkpoints in host memory (`offload`).
        needed (three `int`, *optional*):
            The smallest `P` that fits in each of these ways. `None` if no `P` fits.
        every_n_layers (three `int`, *optional*):
            For these `P`, the option `every_n_layers` with the fewest checkpointed layers that fit. `None` without
            checkpointing.
        methods (`dict`):
            `gated_delta_rule` and `attention`, as in [`SequenceParallel`].
        lora ([`Lora`]):
            The adapters that are trained.
        optimizer (`str`):
            The optimizer, as in [`plan_sequence_parallel`].
        expert_parallel (`int`):
            The number of GPUs over which experts are spread.
        weights (`str`):
            The dtype of the weights, as in [`plan_sequence_parallel`].
        keep_attention (`bool`):
            Whether gradient checkpointing keeps the outputs of attention.
        segment_tokens (`int`, *optional*):
            Tokens of the segments in which checkpointed layers compute a row.
        segments (three `int`, *optional*):
            If a row of one GPU does not fit, the tokens of the longest segments with which it does, in each of these ways.
            `None` if none are necessary, or if none fit.
    """

    config: PreTrainedConfig
    parameters: Parameters
    max_length: int
    gpus: int
    memory: float
    options: dict[int, tuple[StepMemory, StepMemory, StepMemory]]
    needed: tuple[int | None, ...]
    every_n_layers: tuple[int | None, ...]
    methods: dict[str, str | None]
    lora: Lora = ALL_TRAINED
    optimizer: str = DEFAULT
    expert_parallel: int = 1
    weights: str = "bfloat16"
    keep_attention: bool = False
    segment_tokens: int | None = None
    segments: tuple[int | None, ...] = (None,) * len(_WAYS)

    @property
    def size(self) -> int:
        """The recommended `P`: the smallest that fits, with gradient checkpointing and offload if necessary."""
        return min(size for size in self.needed if size is not None)

    def _verdict(self, way: int) -> str:
        """The smallest `P` of one of the ways, with its options."""
        size, every, segment = self.needed[way], self.every_n_layers[way], self.segments[way]
        cut = f"; P = 1 with segment_tokens={segment}" if segment else ""
        if size is None:
            return f"none fits{cut}"
        if every is None:
            return f"P = {size}"
        # Buffers are up to a sixteenth larger than a checkpoint.
        chosen = checkpointed_layers(self.config, every, self.parameters.head > 0)
        chosen = chosen[-1:] if self.lora.mtp_only else chosen
        host = self.options[size][way].host * sum(chosen) / len(chosen) * 17 / 16
        kept = ", keep_attention=True" if self.keep_attention else ""
        kept += f", segment_tokens={self.segment_tokens}" if self.segment_tokens else ""
        in_host = f", {gib(host)} GiB of host memory per GPU" if host else ""
        return f"P = {size}, every_n_layers={every}{kept}{in_host}{cut}"

    def summary(self) -> str:
        """The plan as text."""
        need, states = self.options[self.size][0], "AdamW" if self.optimizer == DEFAULT else self.optimizer
        trained, share = self.parameters.trained(self.lora), 1 - 1 / self.gpus
        sizes, spread = sizes_of(self.config), self.expert_parallel
        experts = sum(sizes.expert_parameters)
        # Each expert is gathered by the GPUs that have it, in parts.
        moved = (self.parameters.total - experts) * share + experts / spread * (1 - spread / self.gpus)
        if is_sharded(self.lora, OPTIMIZERS[self.optimizer]):
            where = "FSDP2 shards per GPU"
            gathered = [f"FSDP2 gathers per GPU: {gib(need.gathered)} GiB of weights and gradients at a time"]
            transfers = (
                f"FSDP2 transfers per GPU: {_mib(HALF * moved)} MiB of weights in forward, the "
                f"same in backward, and {_mib(HALF * (trained * share if self.lora.freezes else moved))} MiB of gradients"
            )
        else:
            where, gathered = "Not sharded, on each GPU", []
            transfers = f"DDP transfers per GPU: {_mib(2 * need.gradients * share)} MiB of gradients"
        if need.weights_on_host:
            two = in_host_memory(sizes, self.parameters.layers, WIDTHS[self.weights], self.lora)[1]
            gathered = [
                f"{self.lora.on_host.title()}: {gib(need.weights_on_host)} GiB of host memory for each machine, of which each GPU has {gib(two)} GiB at a time"
            ]
        stored = self.lora.stored
        quantized = (
            f" ({self.parameters.quantized / 1e9:.2f} B in {stored.title})" if stored not in (None, NF4) else ""
        )
        cut = f" in segments of {self.segment_tokens:,}" if self.segment_tokens else ""
        lines = [
            f"{self.config.model_type} with {_counts(self.parameters, self.lora, quantized)}, rows of {self.max_length:,} tokens{cut}, {count(self.gpus, 'GPU')} of {self.memory:g} GiB (up to {FILLED:.0%} used)",
            f"{where}: weights {gib(need.weights)} GiB ({self.weights}), gradients {gib(need.gradients)} GiB, {states} "
            f"{gib(need.moments)} GiB",
            *gathered,
            "",
            "P is the number of GPUs that share a row. The last three columns are GiB per GPU: without gradient checkpointing,",
            "with it, and with all checkpoints in host memory.",
            "  P  rows at once  tokens per GPU  no checkpointing  checkpointing  in host memory",
        ]
        for size, ways in self.options.items():
            first, *others = (gib(m.total) + (" " if _fits(m, self.memory) else "*") for m in ways)
            tokens, columns = -(-self.max_length // size), f"{others[0]:>14} {others[1]:>15}"
            lines.append(f"{size:>3}  {self.gpus // size:>12,}  {tokens:>14,}  {first:>16} {columns}".rstrip())
        verdicts = [f"Smallest P {name}: {self._verdict(way)}" for way, name in enumerate(_WAYS)]
        lines += [f"* more than {FILLED:.0%} of the memory", "", *verdicts, ""]
        if self.size > 1:
            attention = way_of_attention(sizes_of(self.config).attention, self.size, self.methods["attention"])
            methods = f'gated_delta_rule="{self.methods["gated_delta_rule"]}" and attention="{attention}"'
            lines.append(f"Each GPU receives per row with P = {self.size}, {methods}:")
            found = exchanges(self.config, self.max_length, self.size, **self.methods)
            for exchange in found:
                times = f"{exchange.layers} x {_mib(exchange.bytes)} MiB"
                lines.append(f"  {exchange.name:<45} {times:>20} = {_mib(exchange.layers * exchange.bytes):>9} MiB")
            total = _mib(sum(exchange.layers * exchange.bytes for exchange in found))
            lines.append(
                f"  Total: {total} MiB in forward, the same in backward, and once more with gradient checkpointing"
            )
        lines.append(transfers)
        if spread > 1:
            # To the experts and back; one of the GPUs is the token's own.
            tokens = -(-self.max_length // self.size) * sizes.mixtures[0].chosen * (1 - 1 / spread)
            each, times = _mib(2 * HALF * tokens * sizes.hidden), len(sizes.mixtures)
            lines.append(
                f"Experts over {spread} GPUs receive and return {times} x {each} MiB per GPU in forward, the same in backward"
            )
        return "\n".join(lines)


def plan_sequence_parallel(
    config: PreTrainedConfig,
    max_length: int,
    gpus: int,
    memory: float,
    *,
    weights: str = "bfloat16",
    lora_rank: int = 0,
    lora_experts: bool = False,
    load_in_4bit: bool = False,
    optimizer: str = DEFAULT,
    gradient_accumulation_steps: int = 1,
    expert_parallel: int = 1,
    mtp: bool = False,
    mtp_only: bool = False,
    keep_attention: bool = False,
    segment_tokens: int | None = None,
    experts_in_host_memory: bool = False,
    layers_in_host_memory: bool = False,
    gated_delta_rule: DeltaRuleMethod = "state",
    attention: AttentionMethod | None = None,
) -> SequenceParallelPlan:
    """Find the number of processes that must share a packed row to train under FSDP2.

    Args:
        config (`PreTrainedConfig`):
            The configuration of a Qwen3-Next, Qwen3.5/3.6/3.8, Qwen3.5/3.6/3.8-MoE, OLMo-Hybrid, Kimi-Linear or
            Bailing-Hybrid model. For a vision-language model, the plan counts the parameters of the vision tower but not
            its activations.
        max_length (`int`):
            Tokens per row.
        gpus (`int`):
            The number of GPUs.
        memory (`float`):
            Memory per GPU in GiB.
        weights (`str`, *optional*, defaults to `"bfloat16"`):
            The dtype of the parameters, their gradients and the moments of torch's AdamW. The computation is always in
            bfloat16.
        lora_rank (`int`, *optional*, defaults to 0):
            Train LoRA adapters of this rank on all linear layers. They, their gradients and moments are in float32, and
            `weights` is the dtype of the frozen parameters.
        lora_experts (`bool`, *optional*, defaults to `False`):
            Train adapters of the experts of a mixture too, of a rank up to 64.
        load_in_4bit (`bool`, *optional*, defaults to `False`):
            Keep frozen linear layers and experts in NF4 with double quantization. Nothing is then sharded, as with a
            checkpoint that is quantized already, whose configuration says so.
        optimizer (`str`, *optional*, defaults to `"adamw_torch_fused"`):
            A name of `models.optimizers.OPTIMIZERS`. Nothing is sharded with those of torchao and bitsandbytes.
        gradient_accumulation_steps (`int`, *optional*, defaults to 1):
            The rows of a step. In a step of one row, the gradients of a layer exist only after its backward.
        expert_parallel (`int`, *optional*, defaults to 1):
            The number of GPUs over which Transformers' `DistributedConfig(ep_size=...)` spreads the experts of a mixture.
            Each GPU is assumed to get as many tokens.
        mtp (`bool`, *optional*, defaults to `False`):
            Train the head of multi-token prediction too.
        mtp_only (`bool`, *optional*, defaults to `False`):
            Train it alone. The rest is frozen and runs without gradients.
        keep_attention (`bool`, *optional*, defaults to `False`):
            Let gradient checkpointing keep the outputs of softmax attention.
        segment_tokens (`int`, *optional*):
            Let checkpointed layers compute rows in segments of so many tokens. No row is then shared.
        experts_in_host_memory (`bool`, *optional*, defaults to `False`):
            Keep frozen experts in host memory, as [`keep_experts_in_host_memory`] does. Nothing is then sharded.
        layers_in_host_memory (`bool`, *optional*, defaults to `False`):
            Keep frozen decoder layers there, with their experts, as [`keep_layers_in_host_memory`] does.
        gated_delta_rule (`str`, *optional*):
            As in [`SequenceParallel`].
        attention (`str`, *optional*):
            As in [`SequenceParallel`].

    Returns:
        [`SequenceParallelPlan`]

    Raises:
        `ValueError`: an unsupported model, an optimizer that cannot train this way, or no number of processes fits. The message names the required memory.

    Example:

    ```python
    >>> from transformers import Qwen3_5TextConfig
    >>> from transformers_packed.data.planning.memory import plan_sequence_parallel
    >>> plan = plan_sequence_parallel(Qwen3_5TextConfig(), 262144, gpus=16, memory=80)
    >>> plan.needed
    (None, 2, 1)

    ```
    """
    rows, stored = gradient_accumulation_steps, NF4 if load_in_4bit else stored_as(config)
    on_host = on_host_of(experts_in_host_memory, layers_in_host_memory)
    lora, mtp = Lora(lora_rank, lora_experts, stored, mtp_only, on_host), mtp or mtp_only
    sizes = sizes_of(config, "Train this model without sequence parallelism.")
    positive = {"max_length": max_length, "gpus": gpus, "memory": memory, "gradient_accumulation_steps": rows}
    rules = (
        (weights not in WIDTHS, 'weights "bfloat16" or "float32"', repr(weights), ""),
        *((not value > 0, f"{name} above 0", value, "") for name, value in positive.items()),
        (
            experts_in_host_memory and not sizes.mixtures,
            "a mixture of experts, with experts_in_host_memory",
            config.model_type,
            "Leave it out.",
        ),
        *_of_adapters(config, sizes, lora, load_in_4bit),
    )
    check_rules(rules)
    adamw = check_optimizer(optimizer, "float32" if lora.rank else weights, rows, adapters=lora.rank > 0)
    if mtp:
        check_declared(config, True)
    if expert_parallel != 1:
        _check_spread(expert_parallel, gpus, sizes, config.model_type, lora, optimizer, mtp)
    divisors = _divisors(gpus, max_length, sizes, segment_tokens)
    fitting, unfit = _that_fit_heads(divisors, sizes, gated_delta_rule, attention)
    parameters = Parameters.of(config, mtp)

    def need(size: int, every_n_layers: int, offload: bool, segment: int | None = segment_tokens) -> StepMemory:
        given = sizes, parameters, max_length, size, gpus, WIDTHS[weights]
        checkpointed = checkpointed_layers(config, every_n_layers, mtp)
        options = offload, attention, lora, adamw, rows, expert_parallel, keep_attention, segment
        return step_memory(*given, checkpointed, *options)

    def fewest(size: int | None, offload: bool) -> int | None:
        """Return `every_n_layers` with the fewest checkpointed layers that fit."""
        if size is None:
            return None
        return choose_layers(lambda n: need(size, n, offload).total, len(sizes.layers), _available(memory))

    options = {size: (need(size, 0, False), need(size, 1, False), need(size, 1, True)) for size in fitting}
    needed = tuple(next((p for p, ways in options.items() if _fits(ways[n], memory)), None) for n in range(len(_WAYS)))
    every = (None, fewest(needed[1], False), fewest(needed[2], True))
    methods = {"gated_delta_rule": gated_delta_rule, "attention": attention}
    found = config, parameters, max_length, gpus, memory, options, needed, every, methods, lora, optimizer
    plan = SequenceParallelPlan(*found, expert_parallel, weights, keep_attention, segment_tokens)
    plan = replace(plan, segments=_segments(plan, lambda offload, tokens: need(1, 1, offload, tokens)))
    if not any(needed):
        raise _nothing_fits(plan, unfit)
    return plan


def _of_adapters(config: PreTrainedConfig, sizes: Sizes, lora: Lora, load_in_4bit: bool) -> Iterator[Rule]:
    """The rules of adapters, and of weights that are quantized below them."""
    full, found = "Full fine-tuning trains all weights as they are.", stored_as(config)
    title = found.title if found else ""
    yield lora.rank < 0, "lora_rank of at least 0", lora.rank, ""
    yield lora.rank and lora.mtp_only, "lora_rank=0 with mtp_only", lora.rank, "Adapters would not be trained."
    yield lora.experts and not lora.rank, "lora_rank with lora_experts", lora.rank, full
    yield load_in_4bit and not lora.rank, "lora_rank with load_in_4bit", lora.rank, full
    yield load_in_4bit and found, "a checkpoint in 16 or 32 bits with load_in_4bit", f"one in {title}", "Leave it out."
    yield found and not lora.freezes, f"lora_rank with a checkpoint in {title}", lora.rank, "Its weights are frozen."
    expected, fix = "a mixture of experts, with lora_experts", "Leave lora_experts out."
    yield lora.experts and not sizes.mixtures, expected, config.model_type, fix
    name, able = f"{lora.on_host}_in_host_memory", lora.on_host != "layers" or family_of(config).has_host_layers
    yield not able, f"a family whose layers can be in host memory, with {name}", config.model_type, "Leave it out."
    yield (
        lora.on_host and not lora.rank,
        f"lora_rank with {name}",
        lora.rank,
        f"Trained {lora.on_host} stay on the GPU.",
    )
    expected = f"lora_rank of at most {MAX_RANK} with lora_experts"
    yield lora.experts and lora.rank > MAX_RANK, expected, lora.rank, "Lower it."


def _check_spread(
    expert_parallel: int, gpus: int, sizes: Sizes, model: str, lora: Lora, optimizer: str, mtp: bool
) -> None:
    """Raise the error of experts that cannot be spread over so many GPUs."""
    number = sizes.mixtures[0].number if sizes.mixtures else 0
    uneven = expert_parallel < 1 or gpus % expert_parallel or number % expert_parallel
    reasons = {
        "lora_experts": lora.experts,
        f"{lora.on_host}_in_host_memory": lora.on_host,
        "load_in_4bit": lora.stored == NF4,
        f"weights in {lora.stored and lora.stored.title}": lora.stored,
        # Its experts would stay whole.
        "a head of multi-token prediction": mtp,
    }
    reasons[f"optimizer={optimizer}"] = not OPTIMIZERS[optimizer].shards
    whole = next((name for name, is_whole in reasons.items() if is_whole), "")
    rules = (
        (not number, "a mixture of experts, with expert_parallel", model, "Leave it out."),
        (uneven, f"expert_parallel that divides {gpus} GPUs and {number} experts", expert_parallel, ""),
        (whole, "expert_parallel=1", f"{expert_parallel} with {whole}", f"Leave {whole} out."),
    )
    check_rules(rules)


def _divisors(gpus: int, max_length: int, sizes: Sizes, segment_tokens: int | None) -> list[int]:
    """The numbers of processes among which a row can be shared evenly."""
    # Each part must cover the receptive field of the convolution.
    most = max(1, max_length // max(1, sizes.delta_rule.window - 1))
    if segment_tokens is not None:
        check_size(segment_tokens)
        # Parts of a row are not cut again.
        most = 1
    return [size for size in range(1, min(gpus, most) + 1) if gpus % size == 0]


def _segments(
    plan: SequenceParallelPlan, need: Callable[[bool, int | None], StepMemory]
) -> tuple[int | None, int | None, int | None]:
    """The longest segments with which a row of one GPU fits by each way, if it does not without them.

    `need` is the memory with `offload` and with segments of so many tokens.
    """

    def longest(offload: bool) -> int | None:
        if plan.segment_tokens or plan.needed[1 + offload] == 1:
            return None
        available = _available(plan.memory)
        tokens, fits = choose_segment(lambda n: need(offload, n).total, plan.max_length, available)
        return tokens if fits else None

    return None, longest(False), longest(True)


def _that_fit_heads(
    numbers: list[int], sizes: Sizes, gated_delta_rule: str, attention: str | None
) -> tuple[list[int], ValueError | None]:
    """Return the numbers of processes that can compute the layers by these methods, and the first error of the others."""
    fitting, unfit = [], None
    for size in numbers:
        try:
            check_methods(size, gated_delta_rule, attention, sizes.heads, sizes.linear_heads)
        except ValueError as error:
            # One process can, unless there is no such method.
            if size == 1:
                raise
            unfit = unfit or error
        else:
            fitting.append(size)
    return fitting, unfit


def _nothing_fits(plan: SequenceParallelPlan, unfit: ValueError | None) -> ValueError:
    """Create the error for a plan without an option that fits. `unfit` is why a number of processes is no option."""
    parameters, least = plan.parameters, min((ways[2] for ways in plan.options.values()), key=lambda need: need.total)
    sharded = least.weights + least.gradients + least.moments
    cut = next((f"segment_tokens={n}{' and offload' * (way == 2)}" for way, n in enumerate(plan.segments) if n), None)
    fix = f"Pass {cut}, use more GPUs or shorter rows" if cut else "Use more GPUs or shorter rows"
    return input_error(
        f"at least {_rounded_up(least.total / FILLED)} GiB per GPU for rows of {plan.max_length:,} tokens and "
        f"{_counts(parameters, plan.lora)} on {count(plan.gpus, 'GPU')} "
        f"({gib(sharded)} for weights, gradients "
        f"and {'AdamW' if plan.optimizer == DEFAULT else plan.optimizer}, {gib(least.gathered)} gathered, {gib(least.saved + least.working)} for the row's tokens)",
        f"{plan.memory:g}",
        f"{fix}{'.' if unfit is None else f'; a larger P does not fit the heads. {unfit}'}",
    )


def _counts(parameters: Parameters, lora: Lora, quantized: str = "") -> str:
    """The parameters of the model, in adapters and in a head of multi-token prediction, in words."""
    head, adapters = parameters.head, parameters.trained(lora) - parameters.head
    text = f"{(parameters.total - head) / 1e9:.2f} B parameters{quantized}"
    text += f" and {adapters / 1e6:,.0f} M in adapters" if lora.rank else ""
    alone = ", trained alone" if lora.mtp_only else ""
    return text + (f" and {head / 1e6:,.0f} M in a head of multi-token prediction{alone}" if head else "")


def _fits(need: StepMemory, memory: float) -> bool:
    return need.total <= _available(memory)


def _available(memory: float) -> float:
    return FILLED * memory * _GIB


def gib(count: float) -> str:
    """Return bytes in GiB, for a line."""
    return f"{count / _GIB:,.1f}"


def _rounded_up(count: float) -> str:
    """GiB with one decimal, or with two significant digits if there are less than 1."""
    decimals = max(1, 1 - math.floor(math.log10(count / _GIB)))
    return f"{math.ceil(count / _GIB * 10**decimals) / 10**decimals:,.{decimals}f}"


def _mib(count: float) -> str:
    return f"{count / _MIB:,.1f}"
