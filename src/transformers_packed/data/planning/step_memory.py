"""The memory of a GPU in a step, by the formulae of docs/explained/memory.md. Bytes are per GPU, computation in bfloat16."""

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from ...models.checkpoint_kinds import kept_by
from ...models.families import EXPERT_WEIGHTS, sizes_of
from ...models.lora import adapted_layers
from ...models.matrices import hidden_matrices
from ...models.memory import ALL_TRAINED, FULL, HALF, Lora, layer_memory, loss_memory
from ...models.optimizers import DEFAULT, OPTIMIZERS, Optimizer
from ...models.sizes import Experts, Sizes


@dataclass(frozen=True)
class Parameters:
    """The number of parameters: in total, outside of layers, in the largest layer, in hidden matrices, and in adapters of rank 1.

    `quantized` are those that the checkpoint has in fewer bits, or that loading in 4 bit quantizes. The adapters are those of linear layers and of experts.
    """

    total: int
    root: int
    layer: int
    matrices: int
    quantized: int
    adapters: int
    expert_adapters: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "Parameters":
        """Count the parameters of a model on the meta device, including its vision tower if it has one.

        Adapters are those of `transformers-packed train`.
        """
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with torch.device("meta"):
            model = auto.from_config(config)
        stacks = (module for name, module in model.named_modules() if name.endswith((".layers", ".blocks")))
        layers = [_count(layer) for stack in stacks for layer in stack]
        experts = [x for name, x in model.named_parameters() if name.endswith(EXPERT_WEIGHTS)]
        adapters = sum(x.in_features + x.out_features for x in adapted_layers(model).values())
        expert_adapters = sum(len(x) * sum(x.shape[1:]) for x in experts)
        kept = kept_by(config, model)
        linear = (x.weight for name, x in model.named_modules() if type(x) is torch.nn.Linear and not kept(name))
        total, quantized = _count(model), sum(x.numel() for x in (*linear, *experts))
        matrices = sum(model.get_parameter(name).numel() for name in hidden_matrices(model))
        return cls(total, total - sum(layers), max(layers), matrices, quantized, adapters, expert_adapters)

    def trained(self, lora: Lora) -> int:
        """The number of trained parameters."""
        return lora.rank * (self.adapters + lora.experts * self.expert_adapters) if lora.rank else self.total

    def bytes(self, width: float, lora: Lora) -> float:
        """The size of all parameters but adapters, in weights of `width` bytes."""
        return width * self.total + (lora.stored.bytes - width if lora.stored else 0) * self.quantized


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
            The full weights and gradients outside of layers, the weights of two layers, and the gradients of one
            layer. With LoRA the gradients of adapters only.
        saved (`float`):
            Activations saved for backward.
        working (`float`):
            The larger of the loss computation and the backward of one layer. Gradient checkpointing first recomputes
            the forward of this layer.
        most (`float`):
            The most bytes of gradients and activations at the same time, which is less than their sum.
        host (`float`, *optional*, defaults to 0.0):
            Pinned host memory for checkpoints. It is not part of the total.
    """

    weights: float
    gradients: float
    moments: float
    gathered: float
    saved: float
    working: float
    most: float
    host: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.moments + self.gathered + self.most


def is_sharded(lora: Lora, optimizer: Optimizer) -> bool:
    """Whether FSDP2 can shard the weights. Otherwise each GPU has all parameters."""
    return optimizer.shards and not lora.stored


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
) -> StepMemory:
    """The memory of one GPU when `size` of `gpus` share a row. `width` is the size of a parameter in bytes.

    `checkpointed` says which layers are. With `offload`, the GPU holds few checkpoints at a time. `rows` are those of a step.
    Experts are spread over `expert_parallel` GPUs, each of which has as many tokens.
    """
    whole = not is_sharded(lora, optimizer)
    # DDP keeps the gradients in its buckets.
    throughout = optimizer.releases or rows > 1 or (whole and gpus > 1)
    gpus, tokens = 1 if whole else gpus, -(-max_length // size)
    # FSDP2 casts weights to bfloat16, and autocast only the inputs and weights of products.
    stream = HALF if gpus > 1 else width
    layers = [layer_memory(sizes, layer, max_length, size, attention, lora, stream) for layer in sizes.layers]
    if expert_parallel > 1:
        # The tokens that arrive for each choice, and the outputs of experts that come back.
        chosen = [layer.mlp.chosen if isinstance(layer.mlp, Experts) else 0 for layer in sizes.layers]
        travel = HALF * 2 * tokens * sizes.hidden
        layers = [(kept + travel * n, made) for (kept, made), n in zip(layers, chosen, strict=True)]
    # Checkpointing always keeps the input of a layer.
    given = stream * tokens * sizes.hidden
    ways, checkpoints = list(zip(layers, checkpointed, strict=True)), given * sum(checkpointed)
    others = sum(kept for (kept, _), again in ways if not again)
    layer = max(kept - given + made if again else made for (kept, made), again in ways)
    on_device = on_gpu(lora) if offload else len(layers)
    saved, loss = others + min(checkpoints, on_device * given), loss_memory(sizes, tokens, lora.rank > 0, stream)
    weights, gradients, states = _of_parameters(sizes, parameters, width, lora, optimizer)
    root = gradients if throughout else 0.0 if lora.rank else width * parameters.root
    backward = _most_in_backward(ways, given, on_device, root / gpus, gradients / gpus)
    at_loss = saved + loss + (gradients / gpus if throughout else 0)
    return StepMemory(
        weights=weights / gpus,
        gradients=gradients / gpus,
        moments=states / gpus,
        gathered=_gathered(sizes, parameters, lora, gpus, expert_parallel) if gpus > 1 else 0,
        saved=saved,
        working=max(loss, layer),
        most=max(at_loss, backward),
        host=checkpoints if offload else 0.0,
    )


def _of_parameters(
    sizes: Sizes, parameters: Parameters, width: int, lora: Lora, optimizer: Optimizer
) -> tuple[float, float, float]:
    """Bytes of all parameters, of the gradients of the trained ones, and of the states of the optimizer."""
    weights, adapters = parameters.bytes(width, lora), FULL * parameters.trained(lora) if lora.rank else 0.0
    gradients, head = adapters or weights, sizes.vocabulary * sizes.hidden
    if optimizer.releases:
        # Tied embeddings add to the gradient of the head at the end of the backward.
        gradients = min(gradients, width * (parameters.layer + head))
    special = (0, 0) if lora.rank else (head, parameters.matrices)
    states = optimizer.states(FULL if lora.rank else width, parameters.trained(lora), *special)
    return weights + adapters, gradients, states


def _gathered(sizes: Sizes, parameters: Parameters, lora: Lora, gpus: int, expert_parallel: int) -> float:
    """Bytes of weights and gradients that FSDP2 gathers for running layers."""
    experts = max(sizes.expert_parameters, default=0)
    # A process's own experts are not gathered if no other one has them.
    layer = parameters.layer - experts + (experts / expert_parallel if gpus > expert_parallel else 0)
    gradients = 3 * parameters.trained(lora) / len(sizes.layers) if lora.rank else parameters.root + layer
    return HALF * (parameters.root + 2 * layer + gradients)


def _most_in_backward(ways: list, checkpoint: float, on_device: int, root: float, gradients: float) -> float:
    """The most bytes of activations and gradients in the backward of a layer.

    Args:
        ways (`list`):
            For each layer the bytes that it saves and makes in its backward, and whether it is checkpointed.
        checkpoint (`float`), on_device (`int`):
            Bytes of a checkpoint, and how many of them the GPU holds at most.
        root (`float`), gradients (`float`):
            Bytes of the gradients that exist before the backward of the layers, and after it.
    """
    most, below, checkpoints, each = 0.0, 0.0, 0, (gradients - root) / len(ways)
    for number, ((kept, made), again) in enumerate(ways):
        # A layer that is computed again has its own input, too.
        held = min(checkpoints, on_device - again) * checkpoint
        most = max(most, root + each * (len(ways) - 1 - number) + below + held + kept + made)
        if again:
            checkpoints += 1
        else:
            below += kept
    return most


def checkpointed_layers(config: PreTrainedConfig, every_n_layers: int) -> list[bool]:
    """Return which layers Transformers checkpoints with `every_n_layers`, or none for 0."""
    # It counts the layers of the whole model, and those of a vision tower come first.
    first = getattr(getattr(config, "vision_config", None), "depth", 0)
    numbers = range(first, first + len(sizes_of(config).layers))
    return [every_n_layers > 0 and number % every_n_layers == 0 for number in numbers]


def on_gpu(lora: Lora) -> int:
    """Checkpoints that `offload` leaves on the GPU: one in use, one on its way, and with adapters the embeddings.

    Transformers then lets embeddings require a gradient, for which autograd keeps them.
    """
    return 3 if lora.rank else 2


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
