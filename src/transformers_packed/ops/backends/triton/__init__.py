"""This package's Triton kernels, one file for each op, and their common requirements.

Only these files import triton, so the ops import them when they run a kernel. No kernel is autotuned: block sizes
depend on the widths of a model, not on the number of tokens, so a new row compiles nothing. Row offsets are 64-bit. No
sum uses atomics, so results are bitwise reproducible.
"""

import importlib.util
from collections.abc import Callable
from functools import lru_cache, wraps
from importlib import import_module

import torch
from torch.utils._pytree import tree_leaves

from ...autograd import first_order


def on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


@lru_cache
def problem() -> str:
    """Return why these kernels cannot run on this machine, or an empty string."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed (pip install triton)"
    return "is untested on AMD GPUs" if torch.version.hip else ""


def verify(tensor: torch.Tensor, *others) -> str:
    """Whether these kernels support a tensor."""
    if not on_gpu(tensor):
        return "needs CUDA tensors"
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"supports float32, float16 and bfloat16, not {tensor.dtype}"
    return problem()


def verify_all(*tensors: torch.Tensor) -> str:
    """Whether these kernels support all of the tensors."""
    return next(filter(None, map(verify, tensors)), "")


def verify_gated(hidden_states: torch.Tensor, gate: torch.Tensor) -> str:
    """Whether a kernel supports a tensor and its gate."""
    # An adapter on one of the two projections may return another dtype.
    if gate.dtype != hidden_states.dtype:
        return f"needs one dtype, not {hidden_states.dtype} and {gate.dtype}"
    return verify(hidden_states)


def late(module: str, name: str) -> Callable:
    """Return a call of what a file of this folder has under a name. The call imports it, because that needs triton."""

    def call(*args):
        found = getattr(import_module(f"{__name__}.{module}"), name)
        return getattr(found, "apply", found)(*args)

    return call


@lru_cache
def _single_gpu() -> bool:
    return torch.cuda.device_count() == 1


def ceil_div(a: int, b: int) -> int:
    """Return `a / b` rounded up. `triton.cdiv` is for kernels and takes several microseconds on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`. Triton's own function takes microseconds as well."""
    return 1 << (n - 1).bit_length()


def on_its_device(function: Callable) -> Callable:
    """Decorator: launch on the device of the first tensor, even if it is not current. A backward runs there anyway."""

    @wraps(function)
    def launch(*args, **kwargs):
        if _single_gpu():
            return function(*args, **kwargs)
        device = next(x for x in tree_leaves(args) if isinstance(x, torch.Tensor)).device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(*args, **kwargs)
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return launch


class KernelFunction(torch.autograd.Function):
    """Base of the autograd functions that launch kernels: on the device of the first tensor, and of first order.

    A subclass defines `forward(ctx, ...)` and `backward(ctx, ...)`, which become static methods.
    """

    def __init_subclass__(cls) -> None:
        cls.forward = staticmethod(on_its_device(cls.forward))  # type: ignore[method-assign]
        cls.backward = staticmethod(first_order()(cls.backward))  # type: ignore[method-assign]
