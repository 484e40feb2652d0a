"""Checkpoints of layers in pinned host memory, copied behind the computation.

Gradient checkpointing keeps the input of each layer, and `offload=True` of Transformers keeps it in host memory. There,
each save allocates pinned memory, and both copies run on the compute stream. Here they run on a stream of their own, into
buffers that are used again:

* The copy of a layer's input starts before the layer and ends behind it. The input leaves the GPU at the next save.
* In backward, the computation of a layer starts the copy of the input of the layer before it.
* What a layer keeps beside its input, such as the output of attention, comes back when its own computation starts.
* Outputs of linear layers come back with the input of their layer ([`Layer`]), if the copies have time for them.

So the GPU has at most two inputs, and the last one never leaves it. PyTorch's allocator of pinned memory rounds sizes up
to powers of two. These buffers are registered with CUDA instead, and are at most a sixteenth larger than an input.

Nobody has to ask for copies that cost nothing, so they may be automatic. Then inputs stay on the GPU if they are small, if
copies take longer than layers, and if the buffers would take too much of the host's memory.
"""

import math
import os
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers.utils import logging

from ..foreign import swapped
from . import host_memory
from .host_tensors import Kept, Output, Saved, nothing
from .kept_outputs import Layer, Outputs


logger = logging.get_logger(__name__)

# Bytes below which a copy takes longer than it is worth, and below which copies of all layers gain too little to be made
# unasked: 0.4 GiB with 24 layers.
_SMALLEST, SMALLEST_UNASKED = 1 << 20, 1 << 24
# Tokens of a document from which on attention takes longer than a copy of its output: half of 4 n operations for each value
# of 2 bytes, at 550 TFLOP/s and 55 GB/s. Shorter documents may leave the GPU waiting for the copy.
LONG_DOCUMENT = 1 << 14
# Whether outputs that nobody asked for wait for the buffers of a whole row's inputs, which need the memory more.
_inputs_first = True
# Whether layers keep outputs that nobody asked for.
_keeps_outputs = True
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
        needed (`Callable[[], float]`, *optional*):
            Makes the copies automatic: tensors stay on the GPU where copies would cost something. Returns the bytes of the
            GPU that somebody else will need, such as an optimizer for its moments, or infinity where a step is to take as
            little of the GPU's memory as it can.
        computes_all (`bool`, *optional*, defaults to `False`):
            Whether a second computation leaves out no product, because a `context_fn` of somebody else counts the operators.
    """

    def __init__(self, needed: Callable[[], float] | None = None, computes_all: bool = False) -> None:
        self.needed, self.computes_all, self._copies = needed, computes_all, dict[torch.device, Copies]()

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
        if self.automatic and not self.computes_all and not torch.compiler.is_compiling():
            function = Layer(function, self)
        with saved_tensors_hooks(self.first_input_of_layer(), self.load):
            return checkpoint(function, *args, **kwargs)

    def first_input_of_layer(self) -> Callable[[torch.Tensor], Any]:
        """Return [`save`] for the inputs of one function. The first large one leaves the GPU: others are those of all layers."""
        found: list[Saved] = []

        def save(tensor: torch.Tensor) -> Any:
            if found:
                return Kept(tensor, inside=False, unasked=False)
            saved = self.save(tensor)
            found.extend([saved] if self.has(saved) else [])
            return saved

        return save

    def __reduce__(self):
        # A copy of the model has its own buffers.
        return HostCheckpoints, (_none if self.automatic else None, self.computes_all)

    def save(self, tensor: torch.Tensor, inside: bool = False, beside: bool = False, unasked: bool = False) -> Any:
        """Return what [`load`] takes: a tensor that leaves the GPU, or one that stays.

        `inside` says that the function that runs has made it, and needs it in backward after its own inputs. `beside` says
        that it comes from one kernel with the tensor that was saved last. Both leave the GPU at the next save then.
        `unasked` says that it can be computed again, so it takes no memory that inputs need, and may be changed.
        """
        if not leaves(tensor, SMALLEST_UNASKED if self.automatic else _SMALLEST):
            return Kept(tensor, inside, unasked)
        copies = self._copies.get(tensor.device)
        if copies is None:
            copies = self._copies[tensor.device] = Copies(tensor.device, self.needed)
        last = copies.last if beside else copies.let_leave(tensor.nbytes)
        host = copies.take(tensor.nbytes, unasked)
        if host is None:
            return Kept(tensor, inside, unasked)
        return Saved(tensor, copies, host, last, inside, beside, unasked)

    def save_outputs(self, tensors: list[torch.Tensor]) -> list[Any]:
        """Return what [`load`] takes for each output of a call of linear layers, or `None` if copies have no time for it."""
        copies = self._copies.get(tensors[0].device) if tensors else None
        if copies is None:
            return []
        copies.outputs.begin_call()
        found: list[Any] = []
        for tensor in tensors:
            host = copies.take_output(tensor.nbytes) if leaves(tensor, SMALLEST_UNASKED) else None
            found.append(None if host is None else Output(tensor, copies, host))
        return found

    @staticmethod
    def load(saved: Any) -> Any:
        """Return a tensor on the GPU, or what is no tensor.

        Raises:
            `ValueError`: somebody has written into the tensor.
        """
        return saved.load() if isinstance(saved, Kept) else saved

    @staticmethod
    def has(saved: Any) -> bool:
        """Whether it is in host memory."""
        return isinstance(saved, Saved)

    @staticmethod
    def is_changed(saved: Any) -> bool:
        """Whether somebody has written into a tensor that can be computed again."""
        return isinstance(saved, Kept) and saved.unasked and saved.is_changed()


def leaves(tensor: torch.Tensor, smallest: int) -> bool:
    """Whether a saved tensor goes to the host."""
    return tensor.is_cuda and type(tensor) is torch.Tensor and tensor.nbytes >= smallest


def all_checkpoints() -> AbstractContextManager:
    """Let small tensors, and attention of short documents, go to the host too meanwhile, as large ones do later."""
    return swapped(globals(), _SMALLEST=0, SMALLEST_UNASKED=0, LONG_DOCUMENT=0, _inputs_first=False)


def without_outputs() -> AbstractContextManager:
    """Let layers keep no outputs meanwhile. As long as there are more in each row, rows take long to pin their memory."""
    return swapped(globals(), _keeps_outputs=False)


class Copies:
    """Copies between a device and buffers of pinned memory, in order, and the tensor that was saved last.

    With `needed`, they are automatic: they take a part of the host's memory, and end if layers wait for them and the device
    has room beside what it returns.
    """

    def __init__(self, device: torch.device, needed: Callable[[], float] | None = None):
        self.device, self.stream, self.free = device, torch.cuda.Stream(device), list[torch.Tensor]()
        # Buffers of outputs that nobody asked for, their bytes, the most that they may have, and whether they may be made,
        # which is so once inputs of a row have come back.
        self.free_unasked, self.bytes_unasked = list[torch.Tensor](), 0
        self.most_unasked: float | None = None
        self.inputs_have_buffers = False
        # What was saved last, and the last input of a function.
        self.last: Callable[[], Saved | None] = nothing
        self.input: Callable[[], Saved | None] = nothing
        # Bytes of all buffers, and the most that they may have.
        self.bytes, self.most, self.needed = 0, math.inf, needed
        if needed is not None:
            self.most = self.share_of_host()
        # Of layers: when it began, when the copy of its input ended, and when the next one began.
        self.layers: list[tuple[Any, Any, Any]] | None = None if needed is None else []
        self.begun: Any = None
        # Of linear layers, and the most bytes that have been allocated so far.
        self.outputs, self.peak = Outputs(), 0

    def share_of_host(self) -> float:
        """Bytes of the free memory of the host that this process may take unasked."""
        return _SHARE * host_memory.free_host_memory() / int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def let_leave(self, size: int) -> Callable[[], Saved | None]:
        """Let the tensor that was saved last leave the device, before one of `size` bytes is saved. Return the former."""
        last, self.last = self.last, nothing
        begun, self.begun = self.begun, None if self.layers is None else self.now()
        earlier = last()
        if earlier is not None:
            earlier.leave_unchanged()
            # Not of layers that waited for memory or copied outputs, nor of the small tensors of `all_checkpoints`.
            usual = size >= SMALLEST_UNASKED > 0 and any(buffer.nbytes >= size for buffer in self.free)
            if self.layers is not None and usual and not self.outputs.quota.value:
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

    def take_output(self, size: int) -> torch.Tensor | None:
        """Return a buffer for an output of the layer that runs, or `None` if it is computed again."""
        if not _keeps_outputs or (_inputs_first and not self.outputs.may_keep(size)):
            return None
        host = self.take(size, unasked=True)
        self.outputs.left -= size if host is not None else 0
        return host

    def begin_layer(self, size: int) -> list[Callable[[], Saved | None]]:
        """Note that a layer begins, with an input of `size` bytes. Return the list of the outputs that it will keep."""
        known = self.needed is not None and self.inputs_have_buffers
        return self.outputs.begin_layer(size, self.never_used if known else None)

    def never_used(self) -> float:
        """Return the bytes of the device that no step has used, and nobody will need."""
        assert self.needed is not None
        self.note_peak()
        return _ROOM * self.room(self.peak) - self.needed()

    def note_peak(self) -> None:
        """Remember what was allocated at the peak of a row, because trainers reset the statistics of PyTorch between rows."""
        if self.needed is not None:
            self.peak = max(self.peak, self.allocated_at_peak())

    def allocated_at_peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    def room(self, allocated: int | None = None) -> float:
        """Bytes of the device that are free, or reserved and not used, of `allocated` or of what is allocated now."""
        return host_memory.free_device_memory(self.device, allocated)

    def now(self) -> Any:
        """Return an event of the compute stream."""
        return self.compute_stream().record_event(self.timer())

    def timer(self) -> Any:
        """Return an event that knows its time, or `None` if no time is needed."""
        return None if self.needed is None else torch.cuda.Event(enable_timing=True)

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
        # A free one is too small, and makes room.
        more = size - (self.free_unasked[-1].nbytes if self.free_unasked else 0)
        if self.bytes_unasked + more > self.most_unasked or self.bytes + more > self.most:
            return None
        if self.free_unasked:
            self.drop_unasked()
        try:
            buffer = self.allocate(size)
        except MemoryError:
            self.most_unasked = 0
            return None
        # Which takes long.
        self.outputs.quota.forget()
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

    def give_back(self, buffer: torch.Tensor, unasked: bool) -> None:
        """Let another tensor use a buffer."""
        if unasked:
            self.free_unasked.append(buffer)
        else:
            self.free.append(buffer)
            # Those of the check before the first step are small.
            self.inputs_have_buffers |= _inputs_first

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


def _none() -> int:
    return 0
