"""Checkpoints of layers in pinned host memory, copied behind the computation.

Gradient checkpointing keeps the input of each layer, and `offload=True` of Transformers keeps it in host memory. There,
each save allocates pinned memory, and both copies run on the compute stream. Here they run on a stream of their own, into
buffers that are used again:

* The copy of a layer's input starts before the layer and ends behind it. The input leaves the GPU at the next save.
* In backward, the computation of a layer starts the copy of the input of the layer before it.

So the GPU has at most two inputs, and the last one never leaves it. PyTorch's allocator of pinned memory rounds sizes up
to powers of two. These buffers are registered with CUDA instead, and are at most a sixteenth larger than an input.
"""

import mmap
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ..errors import input_error


# Bytes below which a copy takes longer than it is worth.
_SMALLEST = 1 << 20


class HostCheckpoints:
    """Runs functions under checkpointing, with large CUDA tensors among their arguments saved in host memory.

    The buffers are those of this object, and are freed with it and the graphs that it made.
    """

    def __init__(self) -> None:
        self._copies: dict[torch.device, Copies] = {}

    def __call__(self, checkpoint: Callable, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Return `checkpoint(function, *args, **kwargs)`.

        Args:
            checkpoint (`Callable`):
                `torch.utils.checkpoint.checkpoint`, or a function like it.
            function (`Callable`):
                Function that is computed again in backward.

        Raises:
            `ValueError`: `function` writes into one of its arguments, whose copy would then be of neither state.
            `MemoryError`: the host has no memory for the copies.
        """
        with saved_tensors_hooks(self._save, _load):
            return checkpoint(function, *args, **kwargs)

    def __reduce__(self):
        # A copy of the model has its own buffers.
        return HostCheckpoints, ()

    def _save(self, tensor: torch.Tensor) -> Any:
        if not leaves(tensor):
            return tensor
        if tensor.device not in self._copies:
            self._copies[tensor.device] = Copies(tensor.device)
        return _Saved(tensor, self._copies[tensor.device])


def leaves(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor goes to the host."""
    return tensor.is_cuda and type(tensor) is torch.Tensor and tensor.nbytes >= _SMALLEST


def _load(saved: Any) -> torch.Tensor:
    return saved.load() if isinstance(saved, _Saved) else saved


class Copies:
    """Copies between a device and buffers of pinned memory, in order, and the tensor that was saved last."""

    def __init__(self, device: torch.device):
        self.device, self.stream, self.free = device, torch.cuda.Stream(device), list[torch.Tensor]()
        self.last: Callable[[], _Saved | None] = _nothing

    def compute_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Start a copy, and return the event of its end."""
        # The memory of the target, and the values of the source, are those of the compute stream from here on.
        self.stream.wait_stream(self.compute_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def take(self, size: int) -> torch.Tensor:
        """Return a buffer of at least `size` bytes. A free one that is too small makes room for a new one."""
        fitting = [at for at, buffer in enumerate(self.free) if buffer.nbytes >= size]
        if fitting:
            return self.free.pop(min(fitting, key=lambda at: self.free[at].nbytes))
        if self.free:
            self.free.pop(max(range(len(self.free)), key=lambda at: self.free[at].nbytes))
        step = max(1 << 16, 1 << (size.bit_length() - 5))
        return self.allocate(-(-size // step) * step)

    def allocate(self, size: int) -> torch.Tensor:
        """Return a new buffer of pinned memory."""
        # Pages that no other buffer shares, large ones where the system has them: CUDA pins them faster.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
        # Kernels without large pages refuse the advice.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        failed = int(_cudart().cudaHostRegister(buffer.data_ptr(), size, 0))
        if failed:
            fix = "Use shorter rows, checkpoint fewer layers with every_n_layers, or leave offload out."
            expected = f"{size / 2**20:,.0f} MiB more of host memory that CUDA can pin"
            raise MemoryError(f"offload: expected {expected}, got error {failed}. {fix}")
        weakref.finalize(buffer, _unpin, buffer.data_ptr(), self.stream).atexit = False
        return buffer


def _cudart() -> Any:
    return torch.cuda.cudart()


def _unpin(address: int, stream: Any) -> None:
    # A copy may still read it.
    stream.synchronize()
    _cudart().cudaHostUnregister(address)


def _nothing() -> None:
    return None


class _Saved:
    """A saved tensor: on the device until it has been copied to the host, and again from shortly before its use."""

    tensor: torch.Tensor | None

    def __init__(self, tensor: torch.Tensor, copies: Copies):
        self.copies, self.before, self.loaded = copies, copies.last, False
        self.shape, self.dtype = tensor.shape, tensor.dtype
        earlier, copies.last = copies.last(), _nothing
        if earlier is not None:
            earlier.check()
            earlier.leave()
        self.host = copies.take(tensor.nbytes)
        self.hold(tensor)
        self.copied = copies.start(self.on_host(), tensor)
        copies.last = weakref.ref(self)

    def load(self) -> torch.Tensor:
        """Return the tensor on the device, and start the copy of the one that was saved before and is not used yet."""
        self.check()
        tensor, self.loaded = self.fetch(), True
        self.leave()
        earlier = self.before()
        while earlier is not None and earlier.loaded:
            earlier = earlier.before()
        if earlier is not None:
            earlier.fetch()
        return tensor

    def fetch(self) -> torch.Tensor:
        """Return the tensor on the device, where it may not have arrived."""
        if self.tensor is not None:
            return self.tensor
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.copies.device)
        self.copied = self.copies.start(tensor, self.on_host())
        self.hold(tensor)
        return tensor

    def hold(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version, self.stream = tensor, tensor._version, self.copies.compute_stream()

    def leave(self) -> None:
        """Give up the tensor on the device. What comes later on its stream, and on this one, waits for its copy."""
        if self.tensor is not None:
            for stream in (self.stream, self.copies.compute_stream()):
                stream.wait_event(self.copied)
            self.tensor = None

    def check(self) -> None:
        if self.tensor is not None and self.tensor._version != self.version:
            got = "a layer that writes into its input"
            raise input_error("layers that leave their input as it is, with offload", got, "Leave offload out.")

    def on_host(self) -> torch.Tensor:
        return self.host[: self.shape.numel() * self.dtype.itemsize].view(self.dtype).view(self.shape)

    def __del__(self, is_finalizing: Callable = sys.is_finalizing):
        # All copies use one stream, so the next use of the buffer waits for this one.
        if not is_finalizing() and hasattr(self, "copied"):
            self.leave()
            self.copies.free.append(self.host)
