"""The kinds of weights that the ops for linear layers and experts read: as they are, or dequantized when a product needs them.

A kind is a function for linear layers in `_LINEAR`, and one for experts in `_EXPERTS`. The first that knows the weight returns it,
the others return `None`.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..ops.autograd import autocast_dtype
from ..ops.backends.triton import ceil_div
from ..ops.dequantization import dequantize_4bit, dequantize_blocks, dequantize_rows
from ..ops.float8 import float8_rows_of
from ..ops.float8_blocks import BLOCK, problem_of_gpu
from ..ops.terms import BlocksWeight, Dequantized, DequantizedExperts, Float8Experts, Float8Weight
from .checkpoint_formats import Blocks, PackedWeight
from .host_parameters import WEIGHT, WEIGHTS, HostWeight, copies_of, needs_copies
from .quantized_weights import StoredWeight, with_tensors
from .untouched import is_bare_linear, is_untouched


def _plain(layer, in_float8, hidden_states):
    if not is_bare_linear(layer):
        return None
    return Float8Weight(layer.weight) if in_float8 else layer.weight


def _torchao_float8(layer, in_float8, hidden_states):
    """A frozen weight that torchao has quantized by `Float8WeightOnlyConfig`, in e4m3 with a scale per row."""
    if type(layer) is not torch.nn.Linear:
        return None
    # Pruning and old weight norms compute the weight from other parameters.
    weight = layer._parameters.get("weight")
    stored = float8_rows_of(weight)
    if stored is None or not is_untouched(layer, torch.nn.Linear, parameters=(type(weight), torch.nn.Parameter)):
        return None
    if in_float8:
        return Float8Weight(stored[0], stored[1].flatten(), weight.dtype)
    # Attributes of torchao's tensor are slow to read.
    dtype = weight.dtype
    return Dequantized(stored[0].shape, dtype, lambda: dequantize_rows(*stored, dtype))


def _bitsandbytes(layer, in_float8, hidden_states):
    """A weight that bitsandbytes has quantized to 4 bit."""
    if type(layer).__module__ != "bitsandbytes.nn.modules":
        return None
    from bitsandbytes.nn import Linear4bit, Params4bit

    if not is_untouched(layer, Linear4bit, parameters=(Params4bit, torch.nn.Parameter)):
        return None
    weight, state = layer.weight, layer.weight.quant_state
    if state is None or layer.compute_dtype is None:
        return None

    def compute() -> torch.Tensor:
        packed = weight.data
        if packed.dtype != torch.uint8:
            # The bytes may be stored as numbers of another dtype, which FSDP can shard.
            packed = packed.view(torch.uint8).view(-1, 1)
        return dequantize_4bit(packed, state).view(*state.shape)

    return Dequantized(state.shape, layer.compute_dtype, compute)


def _released(layer, in_float8, hidden_states):
    """A weight of a quantized checkpoint as our models load it. Products in float8 read a scale for each row or block."""
    if type(layer) is not torch.nn.Linear or not isinstance(layer._parameters.get("weight"), PackedWeight):
        return None
    if not is_untouched(layer, torch.nn.Linear, parameters=(PackedWeight, torch.nn.Parameter)):
        return None
    weight: Any = layer._parameters["weight"]
    stored = weight.stored
    if in_float8 and isinstance(stored, Blocks) and stored.block == (1, stored.shape[1]):
        return Float8Weight(stored.values, stored.scale.flatten(), weight.product_dtype)
    if in_float8 and why_not_in_float8(layer) == "":
        return BlocksWeight(stored.values, stored.scale, weight.product_dtype)
    return weight.dequantized()


def _class_in_blocks(name: str) -> type | None:
    """Return a class of Transformers for checkpoints in FP8, or `None` if no model has one."""
    return getattr(sys.modules.get("transformers.integrations.finegrained_fp8"), name, None)


def is_in_blocks(layer: torch.nn.Module) -> bool:
    """Whether the layer is one of Transformers for a checkpoint in FP8, which runs on GPUs alone by itself."""
    return type(layer) is _class_in_blocks("FP8Linear")


def _in_blocks(layer, in_float8, hidden_states):
    """A weight in e4m3 with a scale for each block, or for all. It is frozen. Products in float8 cast the input too."""
    if not is_in_blocks(layer) or not is_untouched(layer, type(layer)):
        return None
    if in_float8 and why_not_in_float8(layer) == "":
        scale = layer.weight_scale_inv.detach().float()
        return BlocksWeight(layer.weight.detach(), scale, autocast_dtype(hidden_states) or hidden_states.dtype)
    found = _blocks_of(layer, "weight", hidden_states)
    return None if found is None else Dequantized(found.weight.shape, found.weight.dtype, found.weight.compute)


def why_not_in_float8(module: Any) -> str | None:
    """Return why products with weights that are stored in float8 with scales of blocks cannot run in it, or an empty string.

    For any other module, return `None`.
    """
    stored = _stored_in_blocks(module)
    if not stored:
        return None
    if getattr(module, "activation_scheme", None) == "static":
        return "has scales for its inputs, which would be ignored"
    for block, values in stored:
        if block is None or tuple(block) != (BLOCK, BLOCK) or any(size % BLOCK for size in values.shape[-2:]):
            got = f"{tuple(values.shape[-2:])} and {block and tuple(block)}"
            return f"needs sizes in multiples of {BLOCK} and blocks of {BLOCK} x {BLOCK}, not {got}"
        if values.dtype != torch.float8_e4m3fn:
            return f"needs weights in e4m3, not {values.dtype}"
    return problem_of_gpu() if torch.cuda.is_available() else ""


def _stored_in_blocks(module: Any) -> list[tuple[Any, torch.Tensor]]:
    """Return the block and the values of each weight of a layer or of experts, if these are in float8 with scales of blocks."""
    names = (WEIGHT,) if isinstance(module, torch.nn.Linear) else WEIGHTS
    if is_in_blocks(module) or has_experts_in_blocks(module):
        return [(module.block_size, getattr(module, name)) for name in names]
    weights = [module._parameters.get(name) for name in names]
    stored = [x.stored for x in weights if isinstance(x, PackedWeight) and isinstance(x.stored, Blocks)]
    # Products of linear layers in float8 take a scale for each row in another way.
    by_row = names == (WEIGHT,) and bool(stored) and stored[0].block == (1, stored[0].shape[1])
    return [] if by_row or len(stored) < len(names) else [(x.block, x.values) for x in stored]


def _blocks_of(module: Any, name: str, hidden_states: torch.Tensor) -> "ExpertsWeight | None":
    given = getattr(module, name).detach(), getattr(module, f"{name}_scale_inv").detach()
    shape, number = given[0].shape, given[1].shape[-2] if given[1].ndim else 1
    if given[0].dtype != torch.float8_e4m3fn:
        return None
    # Without blocks, one scale is for the whole weight of a layer or an expert.
    high, wide = module.block_size or shape[-2:]
    # Gates and the other half of `gate_up_proj` have one each, however few rows they have.
    high = shape[-2] // number if number > ceil_div(shape[-2], high) else high
    dtype = autocast_dtype(hidden_states) or hidden_states.dtype

    def compute(tensors: Sequence[torch.Tensor], *experts: int, impl: str = "auto") -> torch.Tensor:
        weight, scale = tensors
        scale = scale.view(1, 1) if scale.ndim == 0 else scale
        part = slice(*experts) if experts else slice(None)
        return dequantize_blocks(weight[part], scale[part], (high, wide), dtype, impl=impl)

    return ExpertsWeight.stored(shape, dtype, given, compute)


def has_experts_in_blocks(module: torch.nn.Module) -> bool:
    """Whether the module is Transformers' own for the experts of a checkpoint in FP8."""
    return type(module) is _class_in_blocks("FP8Experts")


class ExpertsWeight(NamedTuple):
    """A weight of experts.

    Args:
        weight (`torch.Tensor`, [`DequantizedExperts`] or [`Float8Experts`]):
            The weight where it is stored.
        compute (`Callable[[Sequence[torch.Tensor], int, int], torch.Tensor]`):
            Returns the weights of some experts, as [`DequantizedExperts`] does, from copies of the tensors that hold them.
            Of [`Float8Experts`], it returns the values and the scales.
    """

    weight: torch.Tensor | DequantizedExperts | Float8Experts
    compute: Callable[..., Any]

    @classmethod
    def stored(cls, shape: torch.Size, dtype: torch.dtype, tensors: Sequence[torch.Tensor], compute: Callable) -> Any:
        """Return a weight that `compute` computes from these tensors."""
        return cls(DequantizedExperts(shape, dtype, partial(compute, tensors)), compute)


def _plain_experts(module, name, in_float8, hidden_states):
    weight = getattr(module, name)
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter, HostWeight) and not has_experts_in_blocks(module)
    return ExpertsWeight(weight, _some) if plain else None


def _some(tensors: Sequence[torch.Tensor], first: int, last: int) -> torch.Tensor:
    return tensors[0][first:last]


def _stored_experts(module, name, in_float8, hidden_states):
    """Experts in bitsandbytes' 4 bit, or of a quantized checkpoint."""
    weight = getattr(module, name)
    if not isinstance(weight, StoredWeight) or weight.requires_grad:
        return None
    if in_float8:
        blocks: Any = weight
        return _in_float8((blocks.stored.values, blocks.stored.scale), weight.product_dtype)

    def compute(tensors: Sequence[torch.Tensor], first: int, last: int, impl: str = "auto") -> torch.Tensor:
        return with_tensors(weight, tensors).compute(first, last, impl)

    return ExpertsWeight(DequantizedExperts(weight.shape, weight.product_dtype, weight.compute), compute)


def _torchao_experts(module, name, in_float8, hidden_states):
    weight = getattr(module, name)
    stored = None if weight.requires_grad else float8_rows_of(weight)
    if stored is None:
        return None
    dtype = weight.dtype

    def compute(tensors: Sequence[torch.Tensor], first: int, last: int, impl: str = "auto") -> torch.Tensor:
        values, scale = tensors
        return dequantize_rows(values[first:last], scale[first:last], dtype, impl=impl)

    return ExpertsWeight.stored(stored[0].shape, dtype, stored, compute)


def _experts_in_blocks(module, name, in_float8, hidden_states):
    """Experts as [`_in_blocks`] has linear layers."""
    if not has_experts_in_blocks(module):
        return None
    if not in_float8:
        return _blocks_of(module, name, hidden_states)
    given = getattr(module, name).detach(), getattr(module, f"{name}_scale_inv").detach()
    return _in_float8(given, autocast_dtype(hidden_states) or hidden_states.dtype)


def _in_float8(given: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> ExpertsWeight:
    def compute(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        values, scale = tensors
        return values, scale.float()

    return ExpertsWeight(Float8Experts(given[0].shape, dtype, partial(compute, given)), compute)


# Each gets a layer, whether its products run in float8, and its input. It also has to see that the layer is untouched. For
# LoRA on another class of PEFT, `adapters_of` lists the class too.
_LINEAR: tuple[Callable[[torch.nn.Module, bool, torch.Tensor], Any], ...] = (
    _plain,
    _torchao_float8,
    _bitsandbytes,
    _released,
    _in_blocks,
)
# Each gets a module of experts, the name of the weight, whether its products run in float8, and the input.
_EXPERTS: tuple[Callable[[torch.nn.Module, str, bool, torch.Tensor], ExpertsWeight | None], ...] = (
    _plain_experts,
    _stored_experts,
    _torchao_experts,
    _experts_in_blocks,
)


def weight_of_layer(layer: torch.nn.Module, in_float8: bool, hidden_states: torch.Tensor) -> Any:
    """Return the weight of a linear layer for [`Projection`], or `None` if the layer has to be called."""
    return next((x for x in (kind(layer, in_float8, hidden_states) for kind in _LINEAR) if x is not None), None)


def weight_of_experts(
    module: torch.nn.Module, name: str, in_float8: bool, hidden_states: torch.Tensor
) -> torch.Tensor | DequantizedExperts | Float8Experts | None:
    """Return a weight of experts for the op, or `None` if it is of an unknown kind."""
    kinds = (kind(module, name, in_float8, hidden_states) for kind in _EXPERTS)
    found = next((x for x in kinds if x is not None), None)
    if found is None or not needs_copies(module, hidden_states.device):
        return None if found is None else found.weight
    weight, tensors = found.weight, copies_of(module, name, hidden_states.device)
    if isinstance(weight, Float8Experts):
        return weight._replace(stored=lambda: found.compute(tensors()))

    def compute(first: int, last: int, **options: Any) -> torch.Tensor:
        return found.compute(tensors(), first, last, **options)

    return DequantizedExperts(weight.shape, weight.dtype, compute)


def in_fewer_bits(model: torch.nn.Module) -> list[str]:
    """Return the names of parameters in fewer than 16 bits of a floating dtype, with scales that are apart or inside."""
    return [
        name
        for name, x in model.named_parameters()
        if isinstance(x, StoredWeight) or (x.is_floating_point() and x.element_size() == 1)
    ]
