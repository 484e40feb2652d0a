"""Weights of quantized checkpoints as they were released: compressed-tensors, ModelOpt, AWQ, GPTQ and AutoRound.

[`stored_weight`] tells the format of a weight by the names and dtypes of its tensors, and returns it as a [`PackedWeight`] with
the bits of these tensors. Whole numbers are laid out as compressed-tensors has them: a row for each output, unsigned, the
first column in the low bits.

The formats, of a linear layer of `in` inputs and `out` outputs:

    weight_packed int32 [out, in / 8], weight_scale [out, G], weight_shape, (weight_zero_point int32 [out / 8, G])
    weight_packed uint8 [out, in / 2], weight_scale e4m3 [out, in / 16], weight_global_scale
    weight uint8 [out, in / 2], weight_scale e4m3 [out, in / 16], weight_scale_2
    weight e4m3 or int8 [out, in], weight_scale [out, 1], [1] or [out / 128, in / 128], (weight_zero_point)
    qweight int32 [in / 8, out], qzeros int32 [G, out / 8], scales [G, out], g_idx int32 [in]
    qweight int32 [in, out / 8], qzeros int32 [G, out / 8], scales [G, out], of which the columns are in another order

The first two and the fourth are compressed-tensors', the third is ModelOpt's, the last ones are those of GPTQ and AWQ, which
AutoRound writes too. With 8 bit, an int32 has 4 numbers instead of 8.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..errors import input_error
from ..ops.backends.triton import ceil_div
from ..ops.dequantization import dequantize_blocks
from ..ops.grouped_dequantization import Groups, dequantize_groups
from ..ops.linear import fused_linears, product_dtype
from ..ops.terms import Dequantized, Projection
from .checkpoint_kinds import format_of_gptq
from .quantized_weights import StoredWeight, aten


# The names of a weight's tensors. The inputs' scales are for servers that quantize them too.
TENSORS = "weight weight_packed weight_scale weight_scale_2 weight_global_scale weight_shape weight_zero_point weight_g_idx".split()
TENSORS += "qweight qzeros scales g_idx input_scale input_global_scale input_zero_point".split()
_OF_INPUTS = "input_"
# The places of 8 numbers of AWQ in an int32.
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


class Blocks(NamedTuple):
    """A weight `[..., R, C]` in float8 with a scale for each block, as [`dequantize_blocks`] takes them."""

    values: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]
    rounded: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape


class PackedWeight(StoredWeight):
    """A frozen weight `[..., out, in]` of a quantized checkpoint.

    Layers compute it again in the backward, whether an op of this package or their own forward runs them. Weights of one
    format can be stacked, and concatenated along their rows.

    Args:
        stored ([`Groups`] or [`Blocks`]):
            The values and their scales.
        product_dtype (`torch.dtype`):
            Dtype of products.
        dtype (`torch.dtype`, *optional*):
            The dtype that other code sees, by default that of products.
    """

    stored: Any

    @staticmethod
    def __new__(cls, stored: Any, product_dtype: torch.dtype, dtype: torch.dtype | None = None) -> "PackedWeight":
        options: Any = {"dtype": dtype or product_dtype, "device": stored.values.device, "requires_grad": False}
        return torch.Tensor._make_wrapper_subclass(cls, stored.shape, **options)

    def __init__(self, stored: Any, product_dtype: torch.dtype, dtype: torch.dtype | None = None):
        self.stored, self.packed, self.product_dtype = stored, stored.values, product_dtype

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kind = getattr(self.stored, "code", "float8")
        return f"PackedWeight({tuple(self.shape)}, {kind}, {self.dtype}, {self.device})"

    def compute(self, first: int = 0, last: int | None = None, impl: str = "auto") -> torch.Tensor:
        stored = self.stored if (first, last) == (0, None) else _map(self.stored, lambda x: x[first:last])
        if isinstance(stored, Groups):
            return dequantize_groups(stored, self.product_dtype, impl=impl)
        values, scale, block, rounded = stored
        # A product in float32 is rounded once.
        dtype = self.product_dtype if rounded == torch.float32 else rounded
        return dequantize_blocks(values, scale, block, dtype, impl=impl).to(self.product_dtype)

    def dequantized(self) -> Dequantized:
        """Return the weight of a linear layer for its op."""
        return Dequantized(self.stored.shape, self.product_dtype, self.compute)

    def copied(self, copied: Any, dtype: torch.dtype | None = None) -> "PackedWeight":
        return PackedWeight(_map(self.stored, copied), self.product_dtype, dtype or self.dtype)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                inputs, weight, bias = _arguments_of_linear(*args, **(kwargs or {}))
                projection = Projection(weight.dequantized() if isinstance(weight, cls) else weight, bias)
                dtype = product_dtype(inputs, projection)
                if dtype is not None and not isinstance(inputs, cls):
                    # Any function may get the output, such as one that rotates it in place.
                    return fused_linears(inputs, [projection], dtype, keep=False)[0]
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.stack.default, aten.cat.default) and all(isinstance(x, cls) for x in args[0]):
            weights, stacks = args[0], func is aten.stack.default
            dim = (args[1] if len(args) > 1 else 0) % (weights[0].ndim + stacks)
            # Experts are stacked, and rows are concatenated.
            if dim == (0 if stacks else weights[0].ndim - 2) and _can_be_joined(weights):
                return _joined(weights, lambda tensors: func(tensors, dim))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _arguments_of_linear(input, weight, bias=None):
    return input, weight, bias


def _map(stored: Any, function: Callable) -> Any:
    """Return a stored weight with the function's result for each tensor."""
    return type(stored)(*(function(x) if isinstance(x, torch.Tensor) else x for x in stored))


def _can_be_joined(weights: list[PackedWeight]) -> bool:
    """Whether these weights differ in the values of tensors only, and consist of whole blocks."""
    stored = weights[0].stored
    if isinstance(stored, Blocks) and stored.shape[-2] % stored.block[0]:
        return False
    formats = {
        (type(x.stored), x.product_dtype, x.dtype)
        + tuple((y.shape, y.dtype) if isinstance(y, torch.Tensor) else y for y in x.stored)
        for x in weights
    }
    return len(formats) == 1


def _joined(weights: list[PackedWeight], join: Callable) -> PackedWeight:
    first, parts = weights[0], zip(*(x.stored for x in weights), strict=True)
    stored = type(first.stored)(*(join(x) if isinstance(x[0], torch.Tensor) else x[0] for x in parts))
    return PackedWeight(stored, first.product_dtype, first.dtype)


def stored_weight(tensors: dict[str, torch.Tensor], config: dict, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight of a linear layer of a quantized checkpoint.

    Args:
        tensors (`dict[str, torch.Tensor]`):
            The tensors of the weight by name, without that of the layer.
        config (`dict`):
            The `quantization_config` of the checkpoint.
        dtype (`torch.dtype`):
            Dtype of products, and of a weight that is not quantized.

    Returns:
        [`PackedWeight`] of shape `[out, in]`, or a `torch.Tensor` if the weight is not quantized.

    Raises:
        `ValueError`: the tensors are none of the formats of this module.
    """
    tensors = {name: x for name, x in tensors.items() if not name.startswith(_OF_INPUTS)}
    if tensors.keys() == {"weight"} and tensors["weight"].is_floating_point() and tensors["weight"].dtype.itemsize > 1:
        return tensors["weight"].to(dtype)
    stored = next((x for x in (read(tensors, config) for read in _FORMATS) if x is not None), None)
    if stored is None:
        got = ", ".join(f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tensors.items())
        formats = "FP8, INT8, NVFP4, or 4 or 8 bit by compressed-tensors, ModelOpt, AWQ (gemm) or GPTQ"
        raise input_error(f"a weight in {formats}", got)
    return PackedWeight(stored, dtype)


def _packed_integers(tensors: dict[str, torch.Tensor], config: dict) -> Groups | None:
    packed = tensors.get("weight_packed")
    if packed is None or packed.dtype != torch.int32 or not {"weight_shape", "weight_scale"} <= tensors.keys():
        return None
    rows, columns = tensors["weight_shape"].tolist()
    bits = next((bits for bits in (4, 8) if packed.shape[1] == ceil_div(columns * bits, 32)), None)
    if bits is None or columns * bits % 8:
        return None
    scale, zero = tensors["weight_scale"], tensors.get("weight_zero_point")
    if zero is not None:
        # The rows of a group are packed.
        zero = _numbers(zero.t(), bits)[:, :rows].t()
    values = _bytes(packed)[:, : columns * bits // 8]
    return _groups(values, scale, bits, zero, tensors.get("weight_g_idx"))


def _nvfp4(tensors: dict[str, torch.Tensor], config: dict) -> Groups | None:
    divided = "weight_global_scale" in tensors
    values, whole = tensors.get("weight_packed"), tensors.get("weight_global_scale")
    if not divided:
        values, whole = tensors.get("weight"), tensors.get("weight_scale_2")
    if values is None or values.dtype != torch.uint8 or whole is None or "weight_scale" not in tensors:
        return None
    whole = whole.float().reshape(1)
    return Groups(values, tensors["weight_scale"], "nvfp4", torch.bfloat16, whole=whole, divided=divided)


def _bytes_of_rows(tensors: dict[str, torch.Tensor], config: dict) -> Blocks | Groups | None:
    values, scale = tensors.get("weight"), tensors.get("weight_scale")
    if values is None or scale is None or values.dtype not in (torch.float8_e4m3fn, torch.int8):
        return None
    rows, columns = values.shape
    if values.dtype == torch.int8:
        scale = scale.reshape(rows if scale.numel() > 1 else 1, -1)
        zero = tensors.get("weight_zero_point")
        zero = None if zero is None else _unsigned(zero.reshape(len(scale), -1).expand(rows, -1))
        return _groups(_unsigned(values), scale, 8, zero)
    if scale.numel() == 1:
        block = rows, columns
    elif scale.shape in ((rows,), (rows, 1)):
        block = 1, columns
    else:
        block = _block_of(config)
    number = ceil_div(rows, block[0]), ceil_div(columns, block[1])
    if "weight_zero_point" in tensors or scale.numel() != number[0] * number[1]:
        return None
    return Blocks(values, scale.float().reshape(number), block, scale.dtype)


def _of_gptq_or_awq(tensors: dict[str, torch.Tensor], config: dict) -> Groups | None:
    if not {"qweight", "qzeros", "scales"} <= tensors.keys():
        return None
    packed, zeros, scale = (tensors[name] for name in ("qweight", "qzeros", "scales"))
    outputs = scale.shape[1]
    bits = zeros.shape[1] * 32 // outputs
    if packed.dtype != torch.int32 or bits not in (4, 8):
        return None
    if packed.shape[1] != outputs:
        if bits != 4 or packed.shape[1] * 8 != outputs:
            return None
        places = torch.tensor(_AWQ, device=packed.device)
        values, zero = (_numbers(x, 4).view(len(x), -1, 8)[..., places].flatten(1).t() for x in (packed, zeros))
        return _groups(values[:, ::2] | values[:, 1::2] << 4, scale.t(), 4, zero)
    if format_of_gptq(config) != "gptq_v2":
        # Such files have one less.
        zeros = zeros + (0x11111111 if bits == 4 else 0x01010101)
    zero = _numbers(zeros, bits)[:, :outputs].t()
    return _groups(_bytes(packed.t()), scale.t(), bits, zero, tensors.get("g_idx"))


def _groups(
    values: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    zero: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> Groups | None:
    """Return groups of whole numbers, or `None` if columns are left over. `order` is the group of each column `[in]`."""
    rows, columns = len(values), values.shape[1] * 8 // bits
    scale = scale if scale.numel() > 1 else scale.reshape(1, 1).expand(rows, 1)
    if order is not None:
        groups = scale.shape[1]
        usual = torch.arange(columns, device=order.device) // ceil_div(columns, groups)
        least, most = order.aminmax()
        # Before it is known, compressed-tensors' order is -1 for each column.
        if most < 0 or (columns % groups == 0 and torch.equal(order, usual.to(order.dtype))):
            order = None
        elif least < 0 or most >= groups or len(order) != columns:
            return None
        else:
            order = order[None].int()
    if order is None and columns % scale.shape[1]:
        return None
    zero = None if zero is None else zero.contiguous()
    return Groups(values.contiguous(), scale.contiguous(), f"int{bits}", scale.dtype, zero, order)


def _bytes(packed: torch.Tensor) -> torch.Tensor:
    """Return the bytes of int32 numbers `[R, N]`, `[R, 4 N]`."""
    return packed.contiguous().view(torch.uint8)


def _numbers(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned numbers in int32 numbers `[R, N]`, a byte for each."""
    values = _bytes(packed)
    return values if bits == 8 else torch.stack((values & 15, values >> 4), -1).flatten(1)


def _unsigned(values: torch.Tensor) -> torch.Tensor:
    """Return numbers in int8 plus 128, in uint8."""
    return (values.to(torch.int16) + 128).to(torch.uint8)


def _block_of(config: dict) -> tuple[int, int]:
    """Return the rows and columns of a block in float8."""
    for group in config.get("config_groups", {}).values():
        block = (group.get("weights") or {}).get("block_structure")
        if block:
            high, wide = block.split("x") if isinstance(block, str) else block
            return int(high), int(wide)
    return 128, 128


_FORMATS = (_packed_integers, _nvfp4, _bytes_of_rows, _of_gptq_or_awq)
