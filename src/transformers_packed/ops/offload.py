"""Checkpoints of layers in pinned host memory, copied behind the computation.

Gradient checkpointing keeps the input of each layer, and `offload=True` of Transformers keeps it in host memory. There,
each save allocates pinned memory, and both copies run on the compute stream. Here they run on a stream of their own, into
buffers that are used again:

* The copy of a layer's input starts before the layer and ends behind it. The input leaves the GPU at the next save.
* In backward, the computation of a layer starts the copy of the input of the layer before it.
* What a layer keeps beside its input, such as the output of attention, comes back when its own computation starts.

So the GPU has at most two inputs, and the last one never leaves it. PyTorch's allocator of pinned memory rounds sizes up
to powers of two. These buffers are registered with CUDA instead, and are at most a sixteenth larger than an input.

Nobody has to ask for copies that cost nothing, so they may be automatic. Then inputs stay on the GPU if they are small, if
copies take longer than layers, and if the buffers would take too much of the host's memory.
"""

import math
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers.utils import logging

from ..errors import input_error
from ..foreign import swapped
from . import host_memory


logger = logging.get_logger(__name__)

# Bytes below which a copy takes longer than it is worth, and below which copies of all layers gain too little to be made
# unasked: 0.4 GiB with 24 layers.
_SMALLEST, SMALLEST_UNASKED = 1 << 20, 1 << 24
# Tokens of a document from which on attention takes longer than a copy of its output: half of 4 n operations for each value
# of 2 bytes, at 550 TFLOP/s and 55 GB/s. Shorter documents may leave the GPU waiting for the copy.
LONG_DOCUMENT = 1 << 14
# Whether outputs that nobody asked for wait for the buffers of a whole row's inputs, which need the memory more.
_inputs_first = True
# The most of the free memory of the host that automatic copies take, because pinned pages cannot be swapped out.
_SHARE = 0.5
# How many layers tell whether copies take longer than layers, and the share of its time that such a layer waits.
_LAYERS, _WAITS = 64, 0.05
# The part of the free memory of the GPU that may be filled again.
_ROOM = 0.8


class HostCheckpoints:
    """Runs functions under checkpointing, with large CUDA tensors among their arguments saved in host memory.

    The buffers are those of this object, and are freed with it and the graphs that it made.

    Args:
        needed (`Callable[[], int]`, *optional*):
            Makes the copies automatic: tensors stay on the GPU where copies would cost something. Returns the bytes of the
            GPU that somebody else will need, such as an optimizer for its moments.
    """

    def __init__(self, needed: Callable[[], int] | None = None) -> None:
        self.needed, self._copies = needed, dict[torch.device, Copies]()

    @property
    def automatic(self) -> bool:
        return self.needed is not None

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(copies.bytes for copies in self._copies.values())

    @property
    def bytes_unasked(self) -> int:
        """Bytes of the buffers for outputs that nobody asked for."""
        return sum(copies.bytes_unasked for copies in self._copies.values())

    def __call__(self, checkpoint: Callable, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Return `checkpoint(function, *args, **kwargs)`.

        Args:
            checkpoint (`Callable`):
                `torch.utils.checkpoint.checkpoint`, or a function like it.
            function (`Callable`):
                Function that is computed again in backward.

        Raises:
            `ValueError`: `function` writes into one of its arguments, which would then be of another state in backward.
            `MemoryError`: the host has no memory for the copies, which are not automatic.
        """
        with saved_tensors_hooks(self.save, self.load):
            return checkpoint(function, *args, **kwargs)

    def __reduce__(self):
        # A copy of the model has its own buffers.
        return HostCheckpoints, (_none,) if self.automatic else ()

    def save(self, tensor: torch.Tensor, inside: bool = False, beside: bool = False, unasked: bool = False) -> Any:
        """Return what [`load`] takes: a tensor that leaves the GPU, or one that stays.

        `inside` says that the function that runs has made it, and needs it in backward after its own inputs. `beside` says
        that it comes from one kernel with the tensor that was saved last. Both leave the GPU at the next save then.
        `unasked` says that it can be computed again, so it takes no memory that inputs need, and may be changed.
        """
        if not leaves(tensor, SMALLEST_UNASKED if self.automatic else _SMALLEST):
            return _Kept(tensor, inside, unasked)
        copies = self._copies.get(tensor.device)
        if copies is None:
            copies = self._copies[tensor.device] = Copies(tensor.device, self.needed)
        last = copies.last if beside else copies.let_leave(tensor.nbytes)
        host = copies.take(tensor.nbytes, unasked)
        if host is None:
            return _Kept(tensor, inside, unasked)
        return _Saved(tensor, copies, host, last, inside, beside, unasked)

    @staticmethod
    def load(saved: Any) -> Any:
        """Return a tensor on the GPU, or what is no tensor.

        Raises:
            `ValueError`: somebody has written into the tensor.
        """
        return saved.load() if isinstance(saved, _Kept) else saved

    @staticmethod
    def has(saved: Any) -> bool:
        """Whether it is in host memory."""
        return isinstance(saved, _Saved)

    @staticmethod
    def is_changed(saved: Any) -> bool:
        """Whether somebody has written into a tensor that can be computed again."""
        return isinstance(saved, _Kept) and saved.unasked and saved.is_changed()


def leaves(tensor: torch.Tensor, smallest: int) -> bool:
    """Whether a saved tensor goes to the host."""
    return tensor.is_cuda and type(tensor) is torch.Tensor and tensor.nbytes >= smallest


def all_checkpoints() -> AbstractContextManager:
    """Let small tensors, and attention of short documents, go to the host too meanwhile, as large ones do later."""
    return swapped(globals(), _SMALLEST=0, SMALLEST_UNASKED=0, LONG_DOCUMENT=0, _inputs_first=False)


class Copies:
    """Copies between a device and buffers of pinned memory, in order, and the tensor that was saved last.

    With `needed`, they are automatic: they take a part of the host's memory, and end if layers wait for them and the device
    has room beside what it returns.
    """

    def __init__(self, device: torch.device, needed: Callable[[], int] | None = None):
        self.device, self.stream, self.free = device, torch.cuda.Stream(device), list[torch.Tensor]()
        # Buffers of outputs that nobody asked for, their bytes, the most that they may have, and whether they may be made,
        # which is so once inputs of a row have come back.
        self.free_unasked, self.bytes_unasked = list[torch.Tensor](), 0
        self.most_unasked: float | None = None
        self.inputs_have_buffers = False
        # What was saved last, and the last input of a function.
        self.last: Callable[[], _Saved | None] = _nothing
        self.input: Callable[[], _Saved | None] = _nothing
        # Bytes of all buffers, and the most that they may have.
        self.bytes, self.most, self.needed = 0, math.inf, needed
        if needed is not None:
            self.most = self.share_of_host()
        # Of layers: when it began, when the copy of its input ended, and when the next one began.
        self.layers: list[tuple[Any, Any, Any]] | None = None if needed is None else []
        self.begun: Any = None

    def share_of_host(self) -> float:
        """Bytes of the free memory of the host that this process may take unasked."""
        return _SHARE * host_memory.free_host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def let_leave(self, size: int) -> "Callable[[], _Saved | None]":
        """Let the tensor that was saved last leave the device, before one of `size` bytes is saved. Return the former."""
        last, self.last = self.last, _nothing
        begun, self.begun = self.begun, None if self.layers is None else self.now()
        earlier = last()
        if earlier is not None:
            earlier.leave_unchanged()
            # Not of layers that waited for memory, nor of the small tensors of `all_checkpoints`.
            usual = size >= SMALLEST_UNASKED > 0 and any(buffer.nbytes >= size for buffer in self.free)
            if self.layers is not None and usual:
                self.layers.append((begun, earlier.copied, self.begun))
                self.decide()
        return last

    def decide(self) -> None:
        """End the copies if most layers have waited for them, and the device has room for what it gets back."""
        layers = (self.layers or [])[:_LAYERS]
        # The host is ahead of the device.
        if len(layers) < _LAYERS or not all(event.query() for event in layers[-1]):
            return
        self.layers = None
        waited = sum(begun.elapsed_time(end) * _WAITS < end.elapsed_time(copied) for begun, copied, end in layers)
        assert self.needed is not None
        if 2 * waited > len(layers) and self.bytes < _ROOM * self.room() - self.needed():
            self.most = 0
            logger.warning_once(
                "Checkpoints stay on the GPU, because their copies to the host take longer than layers."
            )

    def room(self) -> int:
        """Bytes of the device that are free, or reserved and not used."""
        return host_memory.free_device_memory(self.device)

    def now(self) -> Any:
        """Return an event of the compute stream."""
        return self.compute_stream().record_event(self.timer())

    def timer(self) -> Any:
        """Return an event that knows its time, or `None` if no time is needed."""
        return None if self.layers is None else torch.cuda.Event(enable_timing=True)

    def compute_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Start a copy, and return the event of its end."""
        # The memory of the target, and the values of the source, are those of the compute stream from here on.
        self.stream.wait_stream(self.compute_stream())
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event(self.timer())

    def take(self, size: int, unasked: bool = False) -> torch.Tensor | None:
        """Return a buffer of at least `size` bytes. A free one that is too small makes room for a new one.

        Automatic copies, and outputs that nobody asked for, get `None` if the tensor stays on the device.
        """
        if not self.most:
            self.free.clear()
            self.free_unasked.clear()
            self.bytes = self.bytes_unasked = 0
            return None
        free = self.free_unasked if unasked else self.free
        fitting = [at for at, buffer in enumerate(free) if buffer.nbytes >= size]
        if fitting:
            return free.pop(min(fitting, key=lambda at: free[at].nbytes))
        size = host_memory.whole_pages(size)
        return self.new_unasked(size) if unasked else self.new(size)

    def new_unasked(self, size: int) -> torch.Tensor | None:
        """Return a new buffer for an output, or `None` where inputs may need the memory."""
        if _inputs_first and not self.inputs_have_buffers:
            return None
        if self.most_unasked is None:
            self.most_unasked = self.share_of_host()
        if self.free_unasked:
            # It is too small.
            self.drop_unasked()
        if self.bytes_unasked + size > self.most_unasked or self.bytes + size > self.most:
            return None
        try:
            buffer = self.allocate(size)
        except MemoryError:
            self.most_unasked = 0
            return None
        self.bytes += size
        self.bytes_unasked += size
        return buffer

    def drop_unasked(self) -> None:
        """Free the buffer of an output that is not in use."""
        size = self.free_unasked.pop().nbytes
        self.bytes -= size
        self.bytes_unasked -= size

    def new(self, size: int) -> torch.Tensor | None:
        """Return a new buffer, or `None` if automatic copies may take no more memory."""
        largest = max(range(len(self.free)), key=lambda at: self.free[at].nbytes, default=None)
        freed = 0 if largest is None else self.free[largest].nbytes
        while self.free_unasked and self.bytes + size - freed > self.most:
            self.drop_unasked()
        after = self.bytes + size - freed
        why = "that is half of the free memory of the host for each process"
        if after <= self.most:
            if largest is not None:
                self.bytes -= self.free.pop(largest).nbytes
            try:
                buffer = self.allocate(size)
                self.bytes += size
                return buffer
            except MemoryError:
                if self.needed is None:
                    raise
                # Others would not be pinned either.
                self.most, why = self.bytes, "CUDA cannot pin more"
        used = f"{self.bytes / 2**30:,.1f} GiB"
        logger.warning_once(f"{used} of checkpoints are in host memory, and the others on the GPU, because {why}.")
        return None

    def allocate(self, size: int) -> torch.Tensor:
        """Return a new buffer of pinned memory."""
        buffer = host_memory.new_pages(size)
        fix = "Use shorter rows, checkpoint fewer layers with every_n_layers, or leave offload out."
        self.pin(buffer, "offload", fix)
        return buffer

    def pin(self, pages: torch.Tensor, what: str, fix: str) -> None:
        """Pin pages of [`new_pages`] until they are freed. `what` and `fix` are for the error."""
        host_memory.pin(pages, self.stream, self.device, what, fix)

    def hold(self, pages: torch.Tensor) -> None:
        """Let pages that the copies of another device have pinned be freed only after those of this one."""
        # What was registered last is called first.
        weakref.finalize(pages, self.stream.synchronize).atexit = False


def _nothing() -> None:
    return None


def _none() -> int:
    return 0


class _Kept:
    """A saved tensor on the device. PyTorch checks no versions of what hooks have packed."""

    tensor: torch.Tensor | None

    def __init__(self, tensor: torch.Tensor, inside: bool, unasked: bool):
        self.tensor, self.version, self.inside, self.unasked = tensor, tensor._version, inside, unasked
        # Whether it had been changed when it left the device.
        self.changed = False

    def load(self) -> torch.Tensor:
        """Return the tensor on the device."""
        self.check()
        assert self.tensor is not None
        return self.tensor

    def is_changed(self) -> bool:
        """Whether somebody has written into the tensor."""
        return self.changed or (self.tensor is not None and self.tensor._version != self.version)

    def check(self) -> None:
        if not self.is_changed():
            return
        what, fix = "their input as it is, with gradient checkpointing", "Let it write into a copy."
        if self.inside:
            what = "the output of attention as it is, with keep_attention"
            fix = "Let it write into a copy, or set keep_attention=False."
        raise input_error(f"layers that leave {what}", "a layer that writes into it", fix)


class _Saved(_Kept):
    """A saved tensor: on the device until it has been copied to the host, and again from shortly before its use."""

    def __init__(
        self,
        tensor: torch.Tensor,
        copies: Copies,
        host: torch.Tensor,
        last: "Callable[[], _Saved | None]",
        inside: bool,
        beside: bool,
        unasked: bool,
    ):
        super().__init__(tensor, inside, unasked)
        self.copies, self.loaded = copies, False
        # What leaves the device with it.
        self.beside = last if beside else _nothing
        # Attention returns tensors with the heads before the tokens, but not in memory.
        self.shape, self.stride = tensor.shape, torch.empty_like(tensor, device="meta").stride()
        self.dtype, self.host = tensor.dtype, host
        self.hold(tensor)
        self.copied = copies.start(self.on_host(), tensor)
        copies.last = weakref.ref(self)
        # The backward needs inputs from the last one to the first, and after each what its function made.
        if not inside:
            self.before, copies.input = copies.input, copies.last
        elif (first := last()) is not None:
            self.before, first.before = first.before, copies.last
        else:
            self.before = _nothing

    def load(self) -> torch.Tensor:
        """Return the tensor on the device, and start the copy of the one that is needed next."""
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
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.copies.device)
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

    def leave_unchanged(self) -> None:
        """Let it leave the device, and what was saved beside it. Raise a `ValueError` if somebody has changed one."""
        other = self.beside()
        if other is not None:
            other.leave_unchanged()
        if self.unasked:
            self.changed = self.is_changed()
        else:
            self.check()
        self.leave()

    def on_host(self) -> torch.Tensor:
        flat = self.host[: self.shape.numel() * self.dtype.itemsize].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)

    def __del__(self, is_finalizing: Callable = sys.is_finalizing):
        # All copies use one stream, so the next use of the buffer waits for this one.
        if not is_finalizing() and hasattr(self, "copied"):
            self.leave()
            if self.unasked:
                self.copies.free_unasked.append(self.host)
            else:
                self.copies.free.append(self.host)
                # Those of the check before the first step are small.
                self.copies.inputs_have_buffers |= _inputs_first
