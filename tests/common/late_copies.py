"""Copies of checkpoints to the host, on a CPU and as late as they may be."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch

from transformers_packed.ops import offload


class Event:
    """The end of a copy, which runs only when a stream waits for it or for a later copy."""

    def __init__(self, queue: list, run):
        self.queue, self.run = queue, run
        queue.append(self)

    def wait(self) -> None:
        while self in self.queue:
            self.queue.pop(0).run()


class LateCopies(offload.Copies):
    """Copies on a CPU that take as long as they may. Until then, the target is NaN."""

    def __init__(self, device: torch.device):
        with mock.patch("torch.cuda.Stream"):
            super().__init__(device)
        self.queue, self.copies, self.allocated = [], 0, 0

    def compute_stream(self):
        return SimpleNamespace(wait_event=Event.wait)

    def start(self, target, source):
        # Arrays share the memory, and later changes do not count as changes of the tensor.
        self.copies, (to, of) = self.copies + 1, (x.detach().numpy() for x in (target, source))
        to[:] = np.nan
        return Event(self.queue, lambda: np.copyto(to, of))

    def allocate(self, size):
        self.allocated += 1
        return torch.empty(size, dtype=torch.uint8)


def on_a_cpu(smallest: int):
    """Let tensors of at least `smallest` elements go to the host on a CPU."""
    options = {"Copies": LateCopies, "leaves": lambda tensor: tensor.numel() >= smallest}
    return mock.patch.multiple(offload, **options)
