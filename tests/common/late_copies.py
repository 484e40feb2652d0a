"""Copies of checkpoints to the host, on a CPU and as late as they may be."""

from types import SimpleNamespace
from unittest import mock

import torch

from transformers_packed.ops import offload


class Doubled(torch.autograd.Function):
    """A kernel that writes into its input, as Liger's rotary embeddings do. PyTorch does not count it."""

    @staticmethod
    def forward(ctx, x):
        x.data.mul_(2)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Event:
    """The end of a copy, which runs only when a stream waits for it or for a later copy, or a time in a layer."""

    def __init__(self, copies: "LateCopies", at: float, run=None):
        self.copies, self.queue, self.at, self.run = copies, copies.queue, at, run
        if run is not None:
            self.queue.append(self)

    def wait(self) -> None:
        while self in self.queue:
            self.queue.pop(0).run()

    def query(self) -> bool:
        # The host is a step of five layers ahead.
        return self.at + 5 < self.copies.time

    def elapsed_time(self, later: "Event") -> float:
        return later.at - self.at


class LateCopies(offload.Copies):
    """Copies on a CPU that take as long as they may. Until then, the target is NaN.

    For automatic copies, a layer takes 1 ms, a copy `copy_ms`, and the device has room for `has_room` bytes,
    of which a step has allocated `allocated_in_step`.
    """

    copy_ms, has_room, allocated_in_step = 0.5, 1 << 40, 0

    def __init__(self, device: torch.device, needed=None):
        with mock.patch("torch.cuda.Stream"):
            super().__init__(device, needed)
        self.queue, self.copies, self.allocated, self.pinned, self.time = [], 0, 0, 0, 0.0

    def compute_stream(self):
        return SimpleNamespace(wait_event=Event.wait)

    def now(self):
        self.time += 1
        return Event(self, self.time)

    def room(self, allocated=None):
        return self.has_room - (allocated or 0)

    def allocated_at_peak(self):
        return self.allocated_in_step

    def start(self, target, source):
        # These share the memory, and later changes do not count as changes of the tensor.
        self.copies, (to, of) = self.copies + 1, (x.data for x in (target, source))
        # A copy does.
        torch.autograd.graph.increment_version(target)
        # Bytes of this value are NaN in any floating dtype.
        to.fill_(float("nan") if target.is_floating_point() else 255)
        return Event(self, self.time + self.copy_ms, lambda: to.copy_(of))

    def pin(self, pages, what, fix):
        self.pinned += 1

    def allocate(self, size):
        self.allocated += 1
        return torch.empty(size, dtype=torch.uint8)


def on_a_cpu(smallest: int):
    """Let tensors of at least `smallest` elements go to the host on a CPU."""
    options = {"Copies": LateCopies, "leaves": lambda tensor, _: tensor.numel() >= smallest}
    return mock.patch.multiple(offload, **options)
