"""Frozen tensors in host memory, of which a device has copies while they are used and shortly before.

A layer or a product asks for its tensors in forward, when a checkpointed layer is computed again, and in backward. A device
has the tensors of two layers at most:

* Those in use. The products of this layer wait for the end of their copy, on a stream of its own.
* Those that came next after the same two layers the last time. Their copy runs beside the products of the layer in use. So
  it follows forward and backward, skipped layers and any other order. An order that is new costs a wait for a copy.

A copy always has the same storage, which is empty while the tensors are in host memory alone. What autograd saves of a copy
holds no memory, and finds the values again once somebody has asked for them. The allocator gives a copy the memory of the one
that was given up just before. The copy waits for all products that were launched before, which read what was in this memory.
"""

import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate, count
from typing import Any

import torch

from . import host_memory, offload


# Copies tensors into pages of host memory. The first are those that are copied to devices, the second those of the tensors.
# They are the same unless other processes have mapped the first.
Place = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]

# Tensors in pages begin at multiples of it, as PyTorch's own on a GPU do.
_ALIGNMENT = 512
_NUMBERS = count()
# Layers whose tensors a device has at a time.
_MOST = 2
_FIX = "Free host memory, raise the limit of locked memory (ulimit -l), or leave the weights on the GPU."


class HostTensors:
    """Lists of tensors of a layer in host memory, each by a key, and their copies on the device that asks for them.

    A copy of this object is empty, as of a layer whose tensors have not moved yet.
    """

    def __init__(self) -> None:
        self.pages: dict[Hashable, torch.Tensor] = {}
        self.lists: dict[Hashable, list[torch.Tensor]] = {}
        # How often the values may have changed, and how often lists have moved.
        self.changes = self.moves = 0
        # Of lists in pages that other processes have mapped too: the pages of the tensors, and the state in which both had
        # the same values.
        self.private: dict[Hashable, torch.Tensor] = {}
        self._same: dict[Hashable, tuple[int, ...]] = {}
        # Pinned pages, and who copies them.
        self._pinned: list[tuple[torch.Tensor, offload.Copies]] = []
        self.number = next(_NUMBERS)
        # What came after these tensors the last time, by the number of what came before them.
        self.next: dict[int | None, Callable[[], HostTensors | None]] = {}
        # The keys of lists that are not copied, until somebody asks for them.
        self.unread: set[Hashable] = set()
        # The last copy on each device. Graphs refer to its storages.
        self.copies: dict[DeviceCopies, _Copy] = {}

    def __reduce__(self):
        return HostTensors, ()

    def keep(self, key: Hashable, tensors: Sequence[torch.Tensor], place: Place | None = None) -> list[torch.Tensor]:
        """Copy tensors into pages, by default of their own, in place of another list of this key. Return them there.

        Others may take their place afterwards, of which [`follow`] is told.
        """
        # A tensor of inference mode could not be read in training.
        with torch.inference_mode(False), torch.no_grad():
            self.pages[key], values = (place or own_pages)(tensors)
            moved = _cut(values, tensors)
        self.private.pop(key, None)
        if values is not self.pages[key]:
            self.private[key] = values
        self.moves += 1
        self.follow(key, moved)
        return moved

    def follow(self, key: Hashable, tensors: list[torch.Tensor]) -> None:
        """Let these be the list of a key, with the values that are in its pages. They count changes in place."""
        self.lists[key] = tensors
        self._same[key] = self._state_of(key)

    def holds(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the list of a key with its values, and no others that somebody has put in their place."""
        return key in self.lists and _addresses(self.lists[key]) == _addresses(tensors) and self._is_copied(key)

    def _is_copied(self, key: Hashable) -> bool:
        """Whether devices get the values of a list. A change of pages that are shared stays in the tensors."""
        state = self._state_of(key)
        if key not in self.private or state == self._same[key]:
            return True
        same = are_equal(self.pages[key], self.private[key])
        if same:
            self._same[key] = state
        return same

    def on(self, device: torch.device, key: Hashable) -> list[torch.Tensor]:
        """Return the list of a key on a device, valid until two other layers have been asked for theirs."""
        copies = _COPIES.get(device)
        if copies is None:
            copies = _COPIES[device] = DeviceCopies(device)
        return copies.get(self, key)

    def pin(self, copies: offload.Copies) -> None:
        """Pin the pages, which the first device that needs a copy does. They outlive copies to any other one."""
        every = self.pages.values()
        self._pinned = [(other, by) for other, by in self._pinned if any(other is pages for pages in every)]
        for pages in every:
            users = [by for other, by in self._pinned if other is pages]
            if copies not in users:
                copies.hold(pages) if users else copies.pin(pages, "weights in host memory", _FIX)
                self._pinned.append((pages, copies))

    def give_up(self) -> None:
        """Free the copies on devices."""
        for device, copy in self.copies.items():
            if copy in device.layers:
                device.layers.remove(copy)
                copy.give_up()

    def state(self) -> tuple[int, ...]:
        """What differs after a change of values, or of the lists to copy."""
        return (
            self.moves,
            self.changes,
            len(self.unread),
            *(x._version for tensors in self.lists.values() for x in tensors),
        )

    def _state_of(self, key: Hashable) -> tuple[int, ...]:
        return self.changes, *(x._version for x in self.lists[key])

    @property
    def shared_bytes(self) -> int:
        """Bytes of pages that other processes may have mapped too."""
        return sum(self.pages[key].nbytes for key in self.private)


def is_apart(device: torch.device) -> bool:
    """Whether a device needs copies of tensors in host memory."""
    return device.type != "cpu"


class DeviceCopies:
    """The copies of layers on a device, and the order in which layers use them."""

    def __init__(self, device: torch.device):
        self.device, self.copies = device, offload.Copies(device)
        # The last one is in use, and the first one is given up first.
        self.layers: list[_Copy] = []
        self.before: int | None = None
        self.current: Callable[[], HostTensors | None] = _nothing
        self.misses = 0

    def get(self, tensors: HostTensors, key: Hashable) -> list[torch.Tensor]:
        """Return the list of a key of a layer, and start the copy of the layer that is expected after it."""
        self._follow(tensors)
        tensors.unread.discard(key)
        copy = self._find(tensors)
        if copy is None:
            self.misses += 1
            copy = self._start(tensors)
        else:
            self.layers.remove(copy)
        self.layers.append(copy)
        found = copy.arrived(key)
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
        self.before, self.current = None if current is None else current.number, weakref.ref(tensors)

    def _find(self, tensors: HostTensors) -> "_Copy | None":
        found = next((copy for copy in self.layers if copy.of() is tensors), None)
        if found is not None and found.state != tensors.state():
            self.layers.remove(found)
            found.give_up()
            return None
        return found

    def _start(self, tensors: HostTensors) -> "_Copy":
        # Its memory is free for the new one.
        if len(self.layers) == _MOST:
            self.layers.pop(0).give_up()
        copy = tensors.copies.get(self)
        if copy is None:
            copy = tensors.copies[self] = _Copy(tensors, self.copies)
        copy.start(tensors)
        return copy


# They live for as long as tensors that have used them.
_COPIES: weakref.WeakValueDictionary[torch.device, DeviceCopies] = weakref.WeakValueDictionary()


class _Copy:
    """The tensors of a layer on a device, in storages that are empty but from the start of a copy until it is given up."""

    def __init__(self, tensors: HostTensors, copies: offload.Copies):
        self.of, self.copies = weakref.ref(tensors), copies
        self.lists: dict[Hashable, list[torch.Tensor]] = {}
        self.buffers: dict[Hashable, torch.Tensor] = {}
        self.ends: dict[Hashable, Any] = {}
        self.state: tuple[int, ...] = ()
        self.stream = copies.compute_stream()

    def start(self, tensors: HostTensors) -> None:
        """Start to copy the tensors."""
        tensors.pin(self.copies)
        self.state, self.stream = tensors.state(), self.copies.compute_stream()
        with torch.inference_mode(False), torch.no_grad():
            for key, pages in tensors.pages.items():
                if key in tensors.unread:
                    continue
                if key not in self.lists or sizes_of(self.lists[key]) != sizes_of(tensors.lists[key]):
                    self.buffers[key] = torch.empty(pages.nbytes, dtype=torch.uint8, device=self.copies.device)
                    self.lists[key] = _cut(self.buffers[key], tensors.lists[key])
                storage = self.buffers[key].untyped_storage()
                # A new one has its memory, for which `resize_` would allocate it again.
                if storage.nbytes() != pages.nbytes:
                    storage.resize_(pages.nbytes)
                # Autograd would take a copy for a change of what it has saved, but `data` has a version of its own.
                self.ends[key] = self.copies.start(self.buffers[key].data, pages)

    def arrived(self, key: Hashable) -> list[torch.Tensor]:
        """Return the list of a key, for which what comes later on the current stream waits."""
        stream = self.copies.compute_stream()
        stream.wait_event(self.ends[key])
        if stream != self.stream:
            # The allocator knows of one stream.
            self.buffers[key].record_stream(stream)
        return self.lists[key]

    def give_up(self) -> None:
        """Empty the storages."""
        self._end()
        for buffer in self.buffers.values():
            buffer.untyped_storage().resize_(0)

    def _end(self) -> None:
        # The memory is that of the stream on which it was allocated, and may be overwritten there from here on.
        for end in self.ends.values():
            self.stream.wait_event(end)
        self.ends = {}

    def __del__(self, is_finalizing: Callable = sys.is_finalizing):
        if not is_finalizing() and hasattr(self, "ends"):
            self._end()


def own_pages(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy tensors into pages of their own."""
    pages = filled(host_memory.new_pages(max(bytes_of(tensors), 1)), tensors)
    return pages, pages


def filled(pages: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return pages after a copy of tensors to their places there."""
    for target, source in zip(_cut(pages, tensors), tensors, strict=True):
        target.copy_(source)
    return pages


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of pages for tensors."""
    return _places(tensors)[-1]


def are_equal(pages: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether pages of one size have the same bits."""
    # Words of eight bytes take a fifth of the time.
    whole = pages.nbytes // 8 * 8
    words = (x[:whole].view(torch.int64) for x in (pages, others))
    return torch.equal(*words) and torch.equal(pages[whole:], others[whole:])


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return where tensors begin in pages, and the bytes of all."""
    if not tensors:
        return [0]
    *sizes, last = [0, *(x.numel() * x.dtype.itemsize for x in tensors)]
    starts = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    return [*starts, starts[-1] + last]


def _cut(pages: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of pages in the shapes and dtypes of tensors."""
    places = zip(_places(like), like, strict=False)
    return [pages[start : start + x.numel() * x.dtype.itemsize].view(x.dtype).view(x.shape) for start, x in places]


def sizes_of(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.dtype, torch.Size]]:
    """Return the dtype and the shape of each tensor."""
    return [(x.dtype, x.shape) for x in tensors]


def _addresses(tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.dtype, torch.Size]]:
    return [(x.data_ptr(), x.dtype, x.shape) for x in tensors]


def _nothing() -> None:
    return None
