"""The memory of a GPU in a step, by the formulae of docs/reference/memory.md. Bytes are per GPU, computation in bfloat16."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from ...models.checkpoint_kinds import kept_by
from ...models.families import EXPERT_WEIGHTS, sizes_of
from ...models.lora import adapted_layers
from ...models.matrices import hidden_matrices
from ...models.memory import (
    ALL_TRAINED,
    FULL,
    HALF,
    Lora,
    attention_output,
    head_memory,
    in_host_memory,
    layer_memory,
    loss_memory,
    segment_memory,
)
from ...models.mtp_head import MtpHead
from ...models.optimizers import DEFAULT, OPTIMIZERS, Optimizer
from ...models.sizes import Experts, Layer, Sizes
from ...ops.offload import LONG_DOCUMENT


@dataclass(frozen=True)
class Parameters:
    """The number of parameters: in total, outside of layers, in the largest layer, in hidden matrices, and in adapters of rank 1.

    `embeddings` are those of input embeddings that are not tied to the language modeling head, `head` those of a head of
    multi-token prediction, if it is trained. `quantized` are those that the checkpoint has in fewer bits, or that loading
    in 4 bit quantizes. The adapters are those of linear layers and of experts. `layers` are those of each linear layer and
    weight of experts in each decoder layer, and whether they are among the quantized ones.
    """

    total: int
    root: int
    layer: int
    matrices: int
    quantized: int
    adapters: int
    expert_adapters: int
    embeddings: int
    head: int = 0
    layers: tuple[tuple[tuple[int, bool], ...], ...] = ()

    @classmethod
    def of(cls, config: PreTrainedConfig, mtp: bool = False) -> "Parameters":
        """Count the parameters of a model on the meta device, including its vision tower if it has one.

        Adapters are those of `transformers-packed train`. With `mtp`, the model has a head of multi-token prediction.
        """
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with torch.device("meta"):
            model = auto.from_config(config)
        experts = [x for name, x in model.named_parameters() if name.endswith(EXPERT_WEIGHTS)]
        adapters = sum(x.in_features + x.out_features for x in adapted_layers(model).values())
        expert_adapters = sum(len(x) * sum(x.shape[1:]) for x in experts)
        kept = kept_by(config, model)
        linear = (x.weight for name, x in model.named_modules() if type(x) is torch.nn.Linear and not kept(name))
        quantized = sum(x.numel() for x in (*linear, *experts))
        weight, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embeddings = 0 if weight is output else weight.numel()
        by_layer = _weights_of_layers(model, kept)
        # Neither adapters nor fewer bits are for the head.
        head = _add_head(model) if mtp else 0
        stacks = (module for name, module in model.named_modules() if name.endswith((".layers", ".blocks")))
        layers = [_count(layer) for stack in stacks for layer in stack]
        total = _count(model)
        matrices = sum(model.get_parameter(name).numel() for name in hidden_matrices(model))
        found = total, total - sum(layers), max(layers), matrices, quantized, adapters, expert_adapters
        return cls(*found, embeddings, head, by_layer)

    def trained(self, lora: Lora) -> int:
        """The number of trained parameters."""
        if lora.freezes:
            return lora.rank * (self.adapters + lora.experts * self.expert_adapters) + self.head
        return self.total

    def bytes(self, width: float, lora: Lora) -> float:
        """The size of all parameters, in weights of `width` bytes. Beside adapters, a head is in float32 as they are."""
        frozen = width * self.total + (lora.stored.bytes - width if lora.stored else 0) * self.quantized
        return frozen + FULL * self.trained(lora) - width * self.head if lora.rank else frozen


def _weights_of_layers(model: Any, kept: Callable[[str], bool]) -> tuple[tuple[tuple[int, bool], ...], ...]:
    """Return `layers` of [`Parameters`]."""
    names = {module: name for name, module in model.named_modules()}

    def of(layer: torch.nn.Module) -> tuple[tuple[int, bool], ...]:
        linears = {f"{names[layer]}.{name}": x for name, x in layer.named_modules() if type(x) is torch.nn.Linear}
        experts = [x for name, x in layer.named_parameters() if f"{names[layer]}.{name}".endswith(EXPERT_WEIGHTS)]
        found = [(x.weight.numel(), not kept(name)) for name, x in linears.items()]
        return *found, *((x.numel(), True) for x in experts)

    return tuple(map(of, model.get_decoder().layers))


@dataclass(frozen=True)
class StepMemory:
    """Bytes on one GPU: tensors that FSDP2 shards, tensors that it gathers for running layers, and activations.

    Args:
        weights (`float`):
            The sharded parameters.
        gradients (`float`):
            The sharded gradients of trained parameters. With gradient release, those of a layer and of the head.
        moments (`float`):
            The sharded states of the optimizer, such as the moments of AdamW.
        gathered (`float`):
            The full weights of two layers and the gradients of one, with LoRA those of adapters only. If the embeddings
            are the head too, also their weights and gradients.
        saved (`float`):
            Activations saved for backward.
        working (`float`):
            The larger of the loss computation and the backward of one layer. Gradient checkpointing first recomputes
            the forward of this layer.
        most (`float`):
            The most bytes of gradients, activations and what FSDP2 gathers at the same time, which is less than their sum.
        host (`float`, *optional*, defaults to 0.0):
            Pinned host memory for checkpoints. It is not part of the total.
        weights_on_host (`float`, *optional*, defaults to 0.0):
            Pinned host memory for weights, which the processes of a machine share. It is not part of the total, but those of
            two layers are part of `weights`.
    """

    weights: float
    gradients: float
    moments: float
    gathered: float
    saved: float
    working: float
    most: float
    host: float = 0.0
    weights_on_host: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.moments + self.most


class _Layer(NamedTuple):
    """Bytes that a layer saves, makes in its backward, and always holds, and those of the output of its attention.

    If it is computed `again`, without its input.
    """

    kept: float
    made: float
    again: bool
    always: float
    output: float

    @property
    def held(self) -> float:
        return self.always if self.again else self.kept


def is_sharded(lora: Lora, optimizer: Optimizer) -> bool:
    """Whether FSDP2 can shard the weights. Otherwise each GPU has all parameters."""
    return optimizer.shards and not lora.stored and not lora.on_host


def step_memory(
    sizes: Sizes,
    parameters: Parameters,
    max_length: int,
    size: int,
    gpus: int,
    width: int,
    checkpointed: list[bool],
    offload: bool = False,
    attention: str | None = None,
    lora: Lora = ALL_TRAINED,
    optimizer: Optimizer = OPTIMIZERS[DEFAULT],
    rows: int = 1,
    expert_parallel: int = 1,
    keep_attention: bool = False,
    segment_tokens: int | None = None,
) -> StepMemory:
    """The memory of one GPU when `size` of `gpus` share a row. `width` is the size of a parameter in bytes.

    `checkpointed` says which layers are, that of a head of multi-token prediction last. With `offload`, the GPU holds few
    checkpoints at a time, and no outputs of attention, which `keep_attention` keeps. With `segment_tokens`, checkpointed
    layers compute segments of a row of one document. `rows` are those of a step. Experts are spread over
    `expert_parallel` GPUs, each of which has as many tokens.
    """
    whole = not is_sharded(lora, optimizer)
    # DDP keeps the gradients in its buckets.
    throughout = optimizer.releases or rows > 1 or (whole and gpus > 1)
    gpus, tokens = 1 if whole else gpus, -(-max_length // size)
    # FSDP2 casts weights to bfloat16, and autocast only the inputs and weights of products.
    stream = HALF if gpus > 1 else width
    weights, gradients, states = _of_parameters(sizes, parameters, width, lora, optimizer)
    given = max_length, size, attention, stream
    segment = min(segment_tokens or tokens, tokens)
    kept_on_gpu = keep_attention and not offload
    ways = _layers(sizes, *given, checkpointed, lora, expert_parallel, kept_on_gpu, parameters.head > 0, segment)
    # Checkpointing always keeps the input of a layer.
    checkpoint, checkpoints = stream * tokens * sizes.hidden, sum(way.again for way in ways)
    on_device = on_gpu(lora) if offload else len(ways)
    # With offload, none is on its way back at the loss.
    waiting = on_device - 1 if offload else checkpoints
    saved = sum(way.held for way in ways) + min(checkpoints, waiting) * checkpoint
    # One in use and one on its way. Those of segments come back from the host one by one, but the last one is a view of
    # the row of its layer.
    piece = stream * (segment if offload else tokens) * sizes.hidden
    held = [(on_device - 2) * checkpoint + 2.0 * piece] * len(ways)
    held[-1] += checkpoint - piece
    both_losses = parameters.head > 0 and not lora.mtp_only
    # One product takes the hidden states of both in one tensor.
    loss = loss_memory(sizes, (1 + both_losses) * tokens, lora.freezes, stream) + 2 * both_losses * checkpoint
    at_loss, at_layers, at_end = _gathered(sizes, parameters, lora, gpus, expert_parallel)
    root, of_layers = _of_backward(parameters, gradients, width, lora, len(sizes.layers))
    if throughout:
        root, of_layers = gradients, [0.0] * len(ways)
    backward = _most_in_backward(ways, [x / gpus for x in of_layers], checkpoint, held, root / gpus)
    most_at_loss = saved + loss + at_loss + (gradients / gpus if throughout else 0)
    return StepMemory(
        weights=weights / gpus,
        gradients=gradients / gpus,
        moments=states / gpus,
        gathered=max(at_loss, at_layers),
        saved=saved,
        working=max(loss, *(way.kept + way.made for way in ways)),
        most=max(most_at_loss, backward + at_layers, gradients / gpus + checkpoint + at_end),
        host=_on_host(ways, checkpoint, keep_attention or max_length >= LONG_DOCUMENT) if offload else 0.0,
        weights_on_host=in_host_memory(sizes, parameters.layers, width, lora)[0],
    )


def _on_host(ways: list[_Layer], checkpoint: float, keeps_attention: bool) -> float:
    """Bytes of checkpoints, and of attention that is kept with them, as that of long documents is unasked."""
    again = [way for way in ways if way.again]
    return sum(checkpoint + way.output if keeps_attention else checkpoint for way in again)


def _layers(
    sizes: Sizes,
    max_length: int,
    size: int,
    attention: str | None,
    stream: int,
    checkpointed: list[bool],
    lora: Lora,
    expert_parallel: int,
    keep_attention: bool,
    has_head: bool,
    segment: int,
) -> list[_Layer]:
    """The layers that save activations, that of a head of multi-token prediction last.

    Checkpointed ones compute segments of so many tokens.
    """
    tokens = -(-max_length // size)

    def of(layer: Layer, again: bool, is_head: bool) -> _Layer:
        cut, always = segment if again and segment < tokens else None, 0.0
        if is_head:
            kept, made, always = head_memory(sizes, max_length, size, attention, lora.mtp_only, stream, cut)
        elif cut:
            kept, made, always = segment_memory(sizes, layer, tokens, cut, lora, stream)
        else:
            kept, made = layer_memory(sizes, layer, max_length, size, attention, lora, stream)
        if expert_parallel > 1 and isinstance(layer.mlp, Experts):
            # The tokens that arrive for each choice, and the outputs of experts that come back.
            kept += HALF * 2 * (cut or tokens) * sizes.hidden * layer.mlp.chosen
        if again and not cut:
            kept -= stream * tokens * sizes.hidden
        output = attention_output(layer, tokens)
        more = keep_attention * output
        # The backward of a whole row has its output in any case.
        return _Layer(kept, made + more if cut else made, again, always + more, output)

    layers = [(layer, False) for layer in sizes.layers] + [(sizes.head, True)] * has_head
    ways = [of(layer, again, is_head) for (layer, is_head), again in zip(layers, checkpointed, strict=True)]
    return ways[-1:] if lora.mtp_only else ways


def _of_backward(
    parameters: Parameters, gradients: float, width: int, lora: Lora, layers: int
) -> tuple[float, list[float]]:
    """Bytes of the gradients that exist before the backward of layers, and of those that come with each of these.

    Those of embeddings come last, or with those of the language modeling head if they are tied.
    """
    head = float((FULL if lora.rank else width) * parameters.head)
    of_head = [head] if parameters.head else []
    if lora.mtp_only:
        return 0.0, of_head
    root, last = 0, 0
    if not lora.rank:
        root, last = width * (parameters.root - parameters.embeddings), width * parameters.embeddings
    return float(root), [(gradients - root - last - head) / layers] * layers + of_head


def _of_parameters(
    sizes: Sizes, parameters: Parameters, width: int, lora: Lora, optimizer: Optimizer
) -> tuple[float, float, float]:
    """Bytes of all parameters, of the gradients of the trained ones, and of the states of the optimizer."""
    value, trained, head = FULL if lora.rank else width, parameters.trained(lora), sizes.vocabulary * sizes.hidden
    gradients = value * trained
    if optimizer.releases:
        # Tied embeddings add to the gradient of the head at the end of the backward. Others come after those of layers.
        both = max(parameters.layer, head) if parameters.embeddings else parameters.layer + head
        gradients = min(gradients, width * both)
    # Of a head of multi-token prediction, all but its norms are hidden matrices.
    special = (0, min(trained, parameters.matrices)) if lora.freezes else (head, parameters.matrices)
    on_host, two_layers = in_host_memory(sizes, parameters.layers, width, lora)
    weights = parameters.bytes(width, lora) - on_host + two_layers
    return weights, gradients, optimizer.states(value, trained, *special)


def _gathered(
    sizes: Sizes, parameters: Parameters, lora: Lora, gpus: int, expert_parallel: int
) -> tuple[float, float, float]:
    """Bytes of weights and gradients that FSDP2 by accelerate gathers for the loss, for running layers, and at the end."""
    if gpus == 1:
        return 0.0, 0.0, 0.0
    experts = max(sizes.expert_parameters, default=0)
    # A process's own experts are not gathered if no other one has them.
    layer = parameters.layer - experts + (experts / expert_parallel if gpus > expert_parallel else 0)
    gradients = 3 * parameters.trained(lora) / len(sizes.layers) if lora.rank else layer
    # Embeddings are gathered by themselves, or with the head and until the end if they are tied. The loss counts the
    # gradient of the head.
    outside = parameters.root - parameters.embeddings
    tied = 0 if parameters.embeddings else outside * (1 if lora.freezes else 2)
    end = 0 if lora.freezes else 2 * parameters.embeddings
    return HALF * outside, HALF * (tied + 2 * layer + gradients), HALF * end


def _most_in_backward(
    ways: list[_Layer], of_layers: list[float], checkpoint: float, on_device: list[float], gradients: float
) -> float:
    """The most bytes of activations and gradients in the backward of a layer.

    Args:
        ways (`list`), of_layers (`list`):
            The layers, and bytes of their gradients.
        checkpoint (`float`), on_device (`list`):
            Bytes of a checkpoint, and how many bytes of checkpoints the GPU holds at most in the backward of each layer.
        gradients (`float`):
            Bytes of the gradients that exist before the backward of the layers.
    """
    most, below, checkpoints = 0.0, sum(way.held for way in ways), sum(way.again for way in ways)
    for way, own, limit in zip(reversed(ways), reversed(of_layers), reversed(on_device), strict=True):
        below, gradients = below - way.held, gradients + own
        # Checkpoints include the input of a layer that is computed again.
        most = max(most, gradients + below + min(checkpoints * checkpoint, limit) + way.kept + way.made)
        checkpoints -= way.again
    return most


def checkpointed_layers(config: PreTrainedConfig, every_n_layers: int, head: bool = False) -> list[bool]:
    """Return which layers Transformers checkpoints with `every_n_layers`, or none for 0, and that of a `head` last."""
    # It counts the layers of the whole model, and those of a vision tower come first.
    first = getattr(getattr(config, "vision_config", None), "depth", 0)
    numbers = range(first, first + len(sizes_of(config).layers) + head)
    return [every_n_layers > 0 and number % every_n_layers == 0 for number in numbers]


def on_gpu(lora: Lora) -> int:
    """Checkpoints that `offload` leaves on the GPU: one in use, one on its way, and with adapters the embeddings.

    Transformers then lets embeddings require a gradient, for which autograd keeps them.
    """
    return 3 if lora.rank else 2


def _add_head(model: Any) -> int:
    """Add a head of multi-token prediction to a model on the meta device, and count its parameters."""
    with torch.device("meta"):
        model.mtp = MtpHead(model)
    return _count(model.mtp)


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
