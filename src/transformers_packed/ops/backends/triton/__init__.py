"""This package's own Triton kernels, a file for each op, and what all of them can serve.

Only the files import triton, so the ops import them when they run them. No kernel is autotuned: block sizes follow from
the widths of a model, never from the number of its tokens, so that no new row compiles anything. Offsets of rows are
64-bit. Nothing is added up by atomics, so that a run can be repeated bit for bit.
"""

import importlib.util
from collections.abc import Callable
from functools import lru_cache, wraps

import torch


def on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


@lru_cache
def problem() -> str:
    """Why these kernels cannot run here, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed (pip install triton)"
    return "has not been tried on AMD GPUs" if torch.version.hip else ""


def verify(tensor: torch.Tensor, *others) -> tuple[bool, str]:
    """Whether these kernels serve a tensor."""
    if not on_gpu(tensor):
        return False, "needs CUDA tensors"
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False, f"serves float32, float16 and bfloat16, not {tensor.dtype}"
    return not problem(), problem()


def verify_gated(
    hidden_states: torch.Tensor, gate: torch.Tensor, linear_weight: torch.Tensor | None = None
) -> tuple[bool, str]:
    """Whether a kernel serves a tensor and its gate, and as one with it the linear layer behind."""
    # Adapters on one of the two layers before may give another dtype.
    if gate.dtype != hidden_states.dtype:
        return False, f"wants one dtype, not {hidden_states.dtype} beside {gate.dtype}"
    if linear_weight is not None and not runs_uncast(hidden_states, linear_weight):
        return False, f"wants {hidden_states.dtype} for the weight too, and no autocast to another"
    return verify(hidden_states)


def runs_uncast(hidden_states: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether linear layers with these weights would take `hidden_states` as they are: no cast, as under autocast."""
    dtype, device = hidden_states.dtype, hidden_states.device.type
    if any(weight.dtype != dtype for weight in weights):
        return False
    return not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == dtype


def ceil_div(a: int, b: int) -> int:
    """`a / b` rounded up. Triton's own is made for kernels, and takes several microseconds on the host."""
    return -(-a // b)


def on_its_device(function: Callable) -> Callable:
    """Decorator: launch where the first tensor is, which need not be the current device. Backward runs there anyway."""

    @wraps(function)
    def launch(*args, **kwargs):
        device = next(x for x in args if isinstance(x, torch.Tensor)).device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(*args, **kwargs)
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return launch
