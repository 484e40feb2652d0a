"""This package's own Triton kernels. Each module imports triton, so the ops import them when they run them.

No kernel is autotuned: block sizes follow from the widths of a model, never from the number of its tokens, so that no
new row compiles anything. Offsets of rows are 64-bit. Nothing is added up by atomics, so that a run can be repeated bit
for bit.
"""

from collections.abc import Callable
from functools import wraps

import torch


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
