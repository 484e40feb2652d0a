"""Checkpoints of layers in pinned host memory, copied behind the computation.

Gradient checkpointing keeps the input of each layer, and `offload=True` of Transformers keeps it in host memory. There,
each save allocates pinned memory, and both copies run on the compute stream. Here they run on a stream of their own, into
buffers that are used again:

* The copy of a layer's input starts before the layer and ends behind it. The input leaves the GPU at the next save.
* In backward, the computation of a layer starts the copy of the input of the layer before it.

So the GPU has at most two inputs, and the last one never leaves it. PyTorch's allocator of pinned memory rounds sizes up
to powers of two. These buffers are registered with CUDA instead, and are at most a sixteenth larger than an input.
"""

import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..errors import input_error


# Bytes below which a copy takes longer than it is worth.
_SMALLEST = 1 << 20


def checkpoint_on_host(checkpoint: Callable, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Return `checkpoint(function, *args, **kwargs)`, which saves large CUDA tensors among `args` in host memory.

    Args:
        checkpoint (`Callable`):
            `torch.utils.checkpoint.checkpoint`, or a function like it.
        function (`Callable`):
            Function that is computed again in backward.

    Raises:
        `ValueError`: `function` writes into one of its arguments, whose copy would then be of neither state.
        `RuntimeError`: the host has no memory for the copies.
    """
    with saved_tensors_hooks(_save, _load):
        return checkpoint(function, *args, **kwargs)


def _save(tensor: torch.Tensor) -> Any:
    if not tensor.is_cuda or type(tensor) is not torch.Tensor or tensor.nbytes < _SMALLEST:
        return tensor
    return _Saved(tensor, _copies(tensor.device))


def _load(saved: Any) -> torch.Tensor:
    return saved.load() if isinstance(saved, _Saved) else saved


class Pool:
    """Buffers that are used again.

    Args:
        allocate (`Callable`):
            Function of a number of bytes that returns a buffer.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]):
        self.allocate, self.free = allocate, list[torch.Tensor]()

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of at least `size` bytes. One that is too small for it makes room for a new one."""
        fitting = [at for at, buffer in enumerate(self.free) if buffer.nbytes >= size]
        if fitting:
            return self.free.pop(min(fitting, key=lambda at: self.free[at].nbytes))
        # The allocation waits for copies that still read it.
        too_small = (
            self.free.pop(max(range(len(self.free)), key=lambda at: self.free[at].nbytes)) if self.free else None
        )
        step = max(1 << 16, 1 << (size.bit_length() - 5))
        buffer = self.allocate(-(-size // step) * step)
        del too_small
        return buffer


class _Copies:
    """The stream and the buffers of a device, and the tensor that was saved last."""

    def __init__(self, device: torch.device):
        self.stream, self.pool = torch.cuda.Stream(device), Pool(self.allocate)
        self.last: Callable[[], _Saved | None] = lambda: None

    def allocate(self, size: int) -> torch.Tensor:
        # A buffer that makes room for this one may still be read.
        self.stream.synchronize()
        buffer = torch.empty(size, dtype=torch.uint8)
        cudart: Any = torch.cuda.cudart()
        failed = int(cudart.cudaHostRegister(buffer.data_ptr(), size, 0))
        if failed:
            raise RuntimeError(
                f"offload: expected {size / 2**20:,.0f} MiB more of host memory that CUDA can pin, got error {failed}. "
                "Use shorter rows, checkpoint fewer layers with every_n_layers, or leave offload out."
            )
        # The memory is that of the storage.
        weakref.finalize(buffer, cudart.cudaHostUnregister, buffer.data_ptr()).atexit = False
        return buffer


@cache
def _copies(device: torch.device) -> _Copies:
    return _Copies(device)


class _Saved:
    """A saved tensor: on the device until it has been copied to the host, and again from shortly before its use."""

    def __init__(self, tensor: torch.Tensor, copies: _Copies):
        self.copies, self.before, self.host = copies, copies.last, copies.pool.take(tensor.nbytes)
        self.shape, self.dtype, self.device, self.version = tensor.shape, tensor.dtype, tensor.device, tensor._version
        self.tensor: torch.Tensor | None = tensor
        earlier = copies.last()
        if earlier is not None:
            earlier.check()
            earlier.leave()
        self.copy(self.on_host(), tensor)
        copies.last = weakref.ref(self)

    def load(self) -> torch.Tensor:
        """Return the tensor on the device, and start the copy of the one that was saved before."""
        self.check()
        tensor = self.fetch()
        self.leave()
        earlier = self.before()
        if earlier is not None:
            earlier.fetch()
        return tensor

    def fetch(self) -> torch.Tensor:
        if self.tensor is None:
            self.tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            self.copy(self.tensor, self.on_host())
            self.version = self.tensor._version
        return self.tensor

    def leave(self) -> None:
        """Give up the tensor on the device. What comes later on the compute stream waits for its copy."""
        if self.tensor is not None:
            torch.cuda.current_stream(self.device).wait_event(self.copied)
            self.tensor = None

    def check(self) -> None:
        if self.tensor is not None and self.tensor._version != self.version:
            got = "a layer that writes into its input"
            raise input_error("layers that leave their input as it is, with offload", got, "Leave offload out.")

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # The memory of the target, and the values of the source, are those of the compute stream from here on.
        self.copies.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies.stream):
            target.copy_(source, non_blocking=True)
            self.copied = self.copies.stream.record_event()

    def on_host(self) -> torch.Tensor:
        return self.host[: self.shape.numel() * self.dtype.itemsize].view(self.dtype).view(self.shape)

    def __del__(self):
        # All copies use one stream, so the next use of the buffer waits for this one.
        if not sys.is_finalizing() and hasattr(self, "copied"):
            self.leave()
            self.copies.pool.free.append(self.host)
