"""What a checkpointed layer saves in host memory if its two halves are computed again one after the other.

    made = first(x)        y = second(x, made)

The backward computes `second` again, and then `first`. So the activations of both never exist together, and the last
product of each is computed once. `x` has one copy for both. The price is a copy of `made`.
"""

from typing import Any

import torch

from .autograd import detached
from .offload import Copies, HostCheckpoints


class Halves:
    """Saves the arguments of both halves of a layer, in place of [`HostCheckpoints.save`].

    Args:
        host ([`HostCheckpoints`]):
            The copies of the model.
        copies ([`Copies`]):
            Those of the device.
        given (`torch.Tensor`):
            The input of the layer, which the second half takes too.
        room (`torch.Tensor`):
            A buffer of host memory for what the first half makes.
    """

    def __init__(self, host: HostCheckpoints, copies: Copies, given: torch.Tensor, room: torch.Tensor):
        self.host, self.copies, self.given = host, copies, given
        self.room: torch.Tensor | None = room
        self.saved: Any = None

    @classmethod
    def of(cls, host: HostCheckpoints, given: torch.Tensor) -> "Halves | None":
        """Return the halves of a layer with this input, or `None` if the host has no room for a second tensor like it."""
        copies = host.copies_of(given)
        room = None if copies is None else copies.take_for_half(given.nbytes, host.layers)
        return None if copies is None or room is None else cls(host, copies, given, room)

    def save(self, tensor: torch.Tensor) -> Any:
        """Save an argument of a half. What the first half made comes after the input."""
        if is_alias(tensor, self.given):
            if self.saved is None:
                self.saved = self.host.save(tensor)
            else:
                # The output of the first half has its node, which keeps what that half has saved.
                self.saved.share(detached(tensor))
            return self.saved
        if self.saved is None or self.host.copies_of(tensor) is not self.copies:
            return self.host.save(tensor)
        room = self.room
        if room is not None and tensor.nbytes <= room.nbytes:
            self.room = None
        else:
            room = None
        return self.host.save(tensor, beside=self.host.has(self.saved), unasked=True, host=room)

    def end(self) -> None:
        """Give back what the layer has not used."""
        if self.room is not None:
            self.copies.free_unasked.append(self.room)
            self.room = None


def is_alias(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same part of one memory, in the same state."""

    def place(x: torch.Tensor) -> tuple:
        return x.data_ptr(), x.device, x.dtype, x.shape, x.stride(), x._version

    return place(tensor) == place(other)
