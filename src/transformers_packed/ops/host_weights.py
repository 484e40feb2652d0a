"""Frozen tensors in host memory, of which a device has copies while they are used and shortly before.

A product asks for the tensors of its layer in forward, when a checkpointed layer is computed again, and in backward. Nothing
that is saved for backward holds a copy. A device has the tensors of two layers at most:

* Those in use. The products of this layer wait for the end of their copy, on a stream of its own.
* Those that came next after the same two layers the last time. Their copy runs beside the products of the layer in use. So
  it follows forward and backward, skipped layers and any other order. An order that is new costs a wait for a copy.

Each copy is new memory of the allocator, which gives it the memory of the copy that was given up just before. The allocator
does not while something still refers to that one, such as a view of weights. The copy waits for all products that were
launched before, which read what was in this memory.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from . import offload


# Tensors in pages begin at multiples of it, as PyTorch's own on a GPU do.
_ALIGNMENT = 512
# Layers whose tensors a device has at a time.
_MOST = 2
_FIX = "Free host memory, raise the limit of locked memory (ulimit -l), or leave the experts on the GPU."


class HostTensors:
    """Lists of tensors of a layer in host memory, and their copies on the device that asks for them.

    A copy of this object is empty, as of a layer whose tensors have not moved yet.
    """

    def __init__(self) -> None:
        self.pages: list[torch.Tensor] = []
        self.lists: list[list[torch.Tensor]] = []
        # How often the values may have changed.
        self.changes = 0
        self._pinned: list[torch.Tensor] = []
        # What came after these tensors the last time, by what came before them.
        self.next: dict[Any, Callable[[], HostTensors | None]] = {}
        self._copies: DeviceCopies | None = None

    def __reduce__(self):
        return HostTensors, ()

    def keep(self, at: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors into pages of their own as list number `at`, in place of another list, and return them there."""
        # A tensor of inference mode could not be read in training.
        with torch.inference_mode(False), torch.no_grad():
            pages = offload.new_pages(max(_places(tensors)[-1], 1))
            moved = _cut(pages, tensors)
            for target, source in zip(moved, tensors, strict=True):
                target.copy_(source)
        self.pages[at:], self.lists[at:] = [pages, *self.pages[at + 1 :]], [moved, *self.lists[at + 1 :]]
        self.changes += 1
        return moved

    def holds(self, at: int, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are list number `at`, and no others that somebody has put in their place."""
        return at < len(self.lists) and _addresses(self.lists[at]) == _addresses(tensors)

    def on(self, device: torch.device, at: int) -> list[torch.Tensor]:
        """Return list number `at` on a device. Its tensors are valid for as long as somebody refers to one of them."""
        if self._copies is None or self._copies.device != device:
            self._copies = _COPIES.get(device) or DeviceCopies(device)
            _COPIES[device] = self._copies
        return self._copies.get(self, at)

    def pin(self, copies: offload.Copies) -> None:
        """Pin the pages, which the first device that needs a copy does."""
        pinned = [pages for pages in self.pages if any(pages is other for other in self._pinned)]
        self._pinned = pinned
        for pages in self.pages:
            if not any(pages is other for other in pinned):
                copies.pin(pages, "experts in host memory", _FIX)
                pinned.append(pages)

    def state(self) -> tuple[int, ...]:
        """What differs after a change of values."""
        return self.changes, *(x._version for tensors in self.lists for x in tensors)


def is_apart(device: torch.device) -> bool:
    """Whether a device needs copies of tensors in host memory."""
    return device.type != "cpu"


class DeviceCopies:
    """The copies of layers on a device, and the order in which layers use them."""

    def __init__(self, device: torch.device):
        self.device, self.copies = device, offload.Copies(device)
        # The last one is in use, and the first one is given up first.
        self.layers: list[_Copy] = []
        self.before: Callable[[], HostTensors | None] = _nothing
        self.current: Callable[[], HostTensors | None] = _nothing
        self.misses = 0

    def get(self, tensors: HostTensors, at: int) -> list[torch.Tensor]:
        """Return a list of a layer, and start the copy of the layer that is expected after it."""
        self._follow(tensors)
        copy = self._find(tensors)
        if copy is None:
            self.misses += 1
            copy = self._start(tensors)
        else:
            self.layers.remove(copy)
        self.layers.append(copy)
        found = copy.arrived(at)
        following = tensors.next.get(self.before, _nothing)()
        if following is not None and self._find(following) is None:
            self.layers.insert(0, self._start(following))
        return found

    def _follow(self, tensors: HostTensors) -> None:
        current = self.current()
        if current is tensors:
            return
        if current is not None:
            current.next[self.before] = weakref.ref(tensors)
        self.before, self.current = self.current, weakref.ref(tensors)

    def _find(self, tensors: HostTensors) -> "_Copy | None":
        found = next((copy for copy in self.layers if copy.of() is tensors), None)
        if found is not None and found.state != tensors.state():
            self.layers.remove(found)
            return None
        return found

    def _start(self, tensors: HostTensors) -> "_Copy":
        # Its memory is free for the new one.
        if len(self.layers) == _MOST:
            del self.layers[0]
        return _Copy(tensors, self.copies)


# They live for as long as tensors that have used them.
_COPIES: weakref.WeakValueDictionary[torch.device, DeviceCopies] = weakref.WeakValueDictionary()


class _Copy:
    """The tensors of a layer on a device, from the start of their copy on."""

    def __init__(self, tensors: HostTensors, copies: offload.Copies):
        self.of, self.state, self.copies = weakref.ref(tensors), tensors.state(), copies
        self.stream = copies.compute_stream()
        self.lists: list[list[torch.Tensor]] = []
        self.buffers: list[torch.Tensor] = []
        self.ends: list[Any] = []
        tensors.pin(copies)
        with torch.inference_mode(False), torch.no_grad():
            for pages, like in zip(tensors.pages, tensors.lists, strict=True):
                buffer = torch.empty(pages.nbytes, dtype=torch.uint8, device=copies.device)
                self.ends.append(copies.start(buffer, pages))
                self.lists.append(_cut(buffer, like))
                self.buffers.append(buffer)

    def arrived(self, at: int) -> list[torch.Tensor]:
        """Return a list, for which what comes later on the current stream waits."""
        stream = self.copies.compute_stream()
        stream.wait_event(self.ends[at])
        if stream != self.stream:
            # The allocator knows of one stream.
            self.buffers[at].record_stream(stream)
        return self.lists[at]

    def __del__(self, is_finalizing: Callable = sys.is_finalizing):
        # The memory is that of the stream on which it was allocated, and may be overwritten there from here on.
        if not is_finalizing():
            for end in getattr(self, "ends", ()):
                self.stream.wait_event(end)


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return where tensors begin in pages, and the bytes of all."""
    *sizes, last = [0, *(x.numel() * x.dtype.itemsize for x in tensors)]
    starts = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    return [*starts, starts[-1] + last]


def _cut(pages: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of pages in the shapes and dtypes of tensors."""
    places = zip(_places(like), like, strict=False)
    return [pages[start : start + x.numel() * x.dtype.itemsize].view(x.dtype).view(x.shape) for start, x in places]


def _addresses(tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.dtype, torch.Size]]:
    return [(x.data_ptr(), x.dtype, x.shape) for x in tensors]


def _nothing() -> None:
    return None
