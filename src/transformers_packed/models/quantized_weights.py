"""Frozen weights in fewer bits than other code sees, among them experts in bitsandbytes' 4 bit.

A parameter of experts that bitsandbytes itself has replaced (`replace_parameter_4bit`) has another shape and another name,
which PEFT does not adapt. [`adopt`] turns such parameters into ours.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import parametrize

from ..errors import input_error


_THEIRS = "bitsandbytes.nn.parametrize"
aten = torch.ops.aten
_DETACHED = (aten.detach.default, aten.alias.default)
_COPIES = (aten.copy_.default, aten.set_.source_Tensor)
_SHARDS = (aten.split.Tensor, aten.split_with_sizes.default)


class StoredWeight(torch.Tensor):
    """Frozen weights `[..., out, in]` in fewer bits than the floating dtype that other code sees.

    The ops for linear layers and experts compute them in `product_dtype`, some experts at a time. Any other operation gets
    the whole tensor in the dtype of this one, which `to` changes, as `prepare_model_for_kbit_training` does. Copies, and
    moves to another device, stay in fewer bits. The weights cannot be changed or sharded, and a view is a copy.
    """

    # The values as they are stored, and the dtype of products.
    packed: torch.Tensor
    product_dtype: torch.dtype
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        """Take the tensors of other weights too, which a move of a module to a device sets."""
        if type(other) is not type(self):
            raise _in_place()
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        vars(self).update(vars(other))

    def compute(self, first: int = 0, last: int | None = None, impl: str = "auto") -> torch.Tensor:
        """Return the weights from `first` to before `last` of the first dimension, in the dtype of products.

        `impl` is that of the op for the dequantization.
        """
        raise NotImplementedError

    def copied(self, copied: Any, dtype: torch.dtype | None = None) -> "StoredWeight":
        """Return these weights with `copied` of each tensor, as a tensor of another `dtype` if it is given."""
        raise NotImplementedError

    def _whole(self) -> torch.Tensor:
        return self.compute().to(self.dtype)

    def __setitem__(self, *_: Any) -> None:
        # It would change a copy.
        raise _in_place()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        mine, kwargs = args[0] if args and isinstance(args[0], cls) else None, kwargs or {}
        if mine is not None:
            if func in _DETACHED:
                return mine.copied(lambda x: x)
            if func is aten.clone.default:
                return mine.copied(torch.clone)
            if func is aten._to_copy.default:
                device = kwargs.get("device") or mine.device
                return mine.copied(lambda x: x.to(device, copy=True), kwargs.get("dtype"))
            if func in _COPIES:
                return mine._same_as(args[1])
            if func in _SHARDS:
                raise input_error("weights in a floating dtype to shard or split", "weights in fewer bits")
        if any(isinstance(x, cls) for x in _written(func, args, kwargs)):
            raise _in_place()
        args, kwargs = torch.utils._pytree.tree_map_only(StoredWeight, StoredWeight._whole, (args, kwargs))
        return func(*args, **kwargs)

    def _same_as(self, other: torch.Tensor) -> "StoredWeight":
        """Return these weights for a copy of the same ones. Raise a `ValueError` for others.

        DDP copies the weights of the first process. PEFT sets the weights, which it adapts for a forward, to themselves.
        """
        if getattr(other, "packed", None) is self.packed:
            return self
        if torch.equal(self._whole(), other._whole() if isinstance(other, StoredWeight) else other):
            return self
        raise input_error("the same weights in a copy to weights in fewer bits", "others")


class ExpertsIn4bit(StoredWeight):
    """Frozen weights `[E, out, in]` in NF4 or FP4, with bitsandbytes' values, blocks and scales.

    Args:
        packed (`torch.Tensor` of shape `[N / 2, 1]`):
            The values of all `N` elements, two in a byte.
        state (`bitsandbytes.functional.QuantState`):
            Scales, sizes, and the dtype of products.
        dtype (`torch.dtype`, *optional*):
            The dtype that other code sees, by default that of products.
    """

    state: Any

    @staticmethod
    def __new__(cls, packed: torch.Tensor, state: Any, dtype: torch.dtype | None = None) -> "ExpertsIn4bit":
        options: Any = {"dtype": dtype or state.dtype, "device": packed.device, "requires_grad": False}
        return torch.Tensor._make_wrapper_subclass(cls, state.shape, **options)

    def __init__(self, packed: torch.Tensor, state: Any, dtype: torch.dtype | None = None):
        self.packed, self.state, self.product_dtype = packed, state, state.dtype

    @classmethod
    def of(cls, weights: torch.Tensor, quant_type: str = "nf4", double: bool = False) -> "ExpertsIn4bit":
        """Quantize weights `[E, out, in]` on their device. `double` quantizes the scales too."""
        from bitsandbytes.functional import quantize_4bit

        from ..ops.dequantization import MOST

        if weights.numel() >= MOST:
            raise input_error(f"fewer than {MOST:,} elements to quantize to 4 bit", f"{tuple(weights.shape)}")
        return cls(*quantize_4bit(weights.contiguous(), quant_type=quant_type, compress_statistics=double))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ExpertsIn4bit({tuple(self.shape)}, {self.state.quant_type}, {self.dtype}, {self.device})"

    def compute(self, first: int = 0, last: int | None = None, impl: str = "auto") -> torch.Tensor:
        from ..ops.dequantization import dequantize_4bit

        number, each = (self.shape[0] if last is None else last) - first, self.shape[1:].numel()
        values = dequantize_4bit(self.packed, self.state, first * each, number * each, impl=impl)
        return values.view(number, *self.shape[1:])

    def copied(self, copied: Any, dtype: torch.dtype | None = None) -> "ExpertsIn4bit":
        state = _copied_state(self.state, copied)
        return ExpertsIn4bit(copied(self.packed), state, dtype or self.dtype)


def _copied_state(state: Any, copied: Any) -> Any:
    """Return bitsandbytes' state of a weight with `copied` of each tensor, in the order of [`_tensors_of_state`]."""
    state = copy.copy(state)
    state.absmax, state.code = copied(state.absmax), copied(state.code)
    if state.nested:
        state.offset, state.state2 = copied(state.offset), copy.copy(state.state2)
        state.state2.absmax, state.state2.code = copied(state.state2.absmax), copied(state.state2.code)
    return state


def _tensors_of_state(state: Any) -> list[torch.Tensor]:
    nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *nested]


def is_in_4bit(weights: Any) -> bool:
    """Whether this is a weight of a linear layer that bitsandbytes has quantized to 4 bit."""
    cls = type(weights)
    return (cls.__module__, cls.__name__) == ("bitsandbytes.nn.modules", "Params4bit") and weights.bnb_quantized


def has_parts(weights: Any) -> bool:
    """Whether the numbers of a parameter are in other tensors: in a [`StoredWeight`], or in bitsandbytes' 4 bit."""
    return isinstance(weights, StoredWeight) or is_in_4bit(weights)


def copied_weights(weights: Any, copied: Any) -> Any:
    """Return weights that have parts with `copied` of each tensor."""
    if isinstance(weights, StoredWeight):
        return weights.copied(copied)
    values = copied(weights.data)
    options = {
        name: vars(weights)[name] for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage")
    }
    state = _copied_state(weights.quant_state, copied)
    return type(weights)(values, requires_grad=False, quant_state=state, bnb_quantized=True, **options)


def tensors_of(weights: Any) -> list[torch.Tensor]:
    """List the tensors that hold the numbers of a parameter: itself, or its parts."""
    if is_in_4bit(weights):
        # Graphs ask in each step, and it takes several times as long to make a new parameter.
        return [weights.detach().as_subclass(torch.Tensor), *_tensors_of_state(weights.quant_state)]
    if not isinstance(weights, StoredWeight):
        return [weights]
    found: list[torch.Tensor] = []

    def listed(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    weights.copied(listed)
    return found


def with_tensors(weights: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """Return weights that have parts in other tensors, in the order of [`tensors_of`]."""
    others = iter(tensors)
    return copied_weights(weights, lambda _: next(others))


def _written(func: Any, args: tuple, kwargs: dict) -> list:
    """List what the operation changes in place."""
    if not func._schema.is_mutable:
        return []
    values = dict(zip((x.name for x in func._schema.arguments), args, strict=False)) | kwargs
    written = [x.name for x in func._schema.arguments if x.is_write]
    return torch.utils._pytree.tree_leaves([values.get(name) for name in written])


def _in_place() -> ValueError:
    hint = "To merge an adapter, load the model without quantization, or call its dequantize(), and load the adapter onto it"
    return input_error("weights in a floating dtype for a change in place", f"weights in fewer bits. {hint}")


def dequantize(model: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    """Make the weights of the model that are in fewer bits plain ones, in `dtype` or in the one that other code sees."""
    for name, weights in list(model.named_parameters()):
        if isinstance(weights, StoredWeight):
            path, _, name = name.rpartition(".")
            values = weights.compute().to(dtype or weights.dtype)
            setattr(model.get_submodule(path), name, torch.nn.Parameter(values))


def set_weights(module: torch.nn.Module, name: str, weights: ExpertsIn4bit) -> None:
    """Make `weights` a parameter of the module, whose state dict has bitsandbytes' entries."""
    setattr(module, name, torch.nn.Parameter(weights, requires_grad=False))
    write_entries(module)


def write_entries(module: torch.nn.Module) -> None:
    """Make the module's state dict have bitsandbytes' entries of weights in 4 bit."""
    if _with_entries not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_with_entries)


def _with_entries(module: Any, state_dict: dict, prefix: str, local_metadata: Any) -> None:
    for name, weights in module._parameters.items():
        if isinstance(weights, ExpertsIn4bit) and prefix + name in state_dict:
            state_dict[prefix + name] = weights.packed
            entries = weights.state.as_dict(packed=True)
            state_dict.update({f"{prefix}{name}.{entry}": value for entry, value in entries.items()})


def is_replaced(module: torch.nn.Module) -> bool:
    """Whether bitsandbytes' `replace_parameter_4bit` has replaced a parameter of the module."""
    if not parametrize.is_parametrized(module):
        return False
    parts: Any = module.parametrizations
    return any(type(part).__module__ == _THEIRS for part in parts.modules())


def adopt(module: torch.nn.Module) -> None:
    """Turn parameters `[E, out, in]` of the module that bitsandbytes has replaced into [`ExpertsIn4bit`]."""
    for name, (first, *others) in list(module.parametrizations.items()):  # type: ignore[operator, union-attr]
        if type(first).__module__ == _THEIRS and not others:
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
            set_weights(module, name, ExpertsIn4bit(getattr(module, name).data, first.quant_state))
    if is_replaced(module):
        return
    for hooks in (module._forward_pre_hooks, module._forward_hooks, module._state_dict_hooks):
        for key, hook in list(hooks.items()):
            if getattr(getattr(hook, "func", hook), "__module__", "") == _THEIRS:
                hooks.pop(key)
