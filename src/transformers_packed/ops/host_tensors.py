"""Tensors that a forward saves in host memory, and the order in which its backward needs them."""

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import input_error


if TYPE_CHECKING:
    from .offload import Copies


def nothing() -> None:
    """A weak reference to no tensor."""


class Kept:
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


class Saved(Kept):
    """A saved tensor: on the device until it has been copied to the host, and again from shortly before its use."""

    def __init__(
        self,
        tensor: torch.Tensor,
        copies: "Copies",
        host: torch.Tensor,
        last: "Callable[[], Saved | None]",
        inside: bool,
        beside: bool,
        unasked: bool,
    ):
        super().__init__(tensor, inside, unasked)
        self.copies, self.loaded = copies, False
        # What leaves the device with it.
        self.beside = last if beside else nothing
        # Attention returns tensors with the heads before the tokens, but not in memory.
        self.shape, self.stride = tensor.shape, torch.empty_like(tensor, device="meta").stride()
        self.dtype, self.host, self.nbytes = tensor.dtype, host, tensor.nbytes
        self.hold(tensor)
        self.copied = copies.start(self.on_host(), tensor)
        self.before: Callable[[], Saved | None] = nothing
        self.earlier: Callable[[], Saved | None] = nothing
        # What linear layers of this layer made.
        self.outputs: list[Callable[[], Saved | None]] = []
        self.link(last)

    def link(self, last: "Callable[[], Saved | None]") -> None:
        """Find what the backward needs before and after it: inputs from the last one to the first, and what they keep."""
        copies, this = self.copies, weakref.ref(self)
        copies.last = this
        if not self.inside:
            self.before, self.earlier, copies.input = copies.input, copies.input, this
            self.outputs = copies.begin_layer(self.nbytes)
        elif (first := last()) is not None:
            self.before, first.before = first.before, this

    def load(self) -> torch.Tensor:
        """Return the tensor on the device, and start the copies of those that are needed next."""
        self.check()
        tensor, self.loaded = self.fetch(), True
        self.leave()
        earlier = self.before()
        while earlier is not None and earlier.loaded:
            earlier = earlier.before()
        if earlier is not None:
            earlier.fetch()
        if not self.inside:
            self.copies.outputs.begin_backward()
            layer = self.earlier()
            if layer is None:
                # This is the first layer.
                self.copies.note_peak()
            else:
                layer.fetch_outputs()
        return tensor

    def fetch_outputs(self) -> None:
        """Start the copies of what linear layers of this layer made, after those of what the layer behind it needs."""
        for output in self.outputs:
            saved = output()
            if saved is not None:
                saved.fetch()

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
            self.copies.outputs.quota.note(self.copies.now, self.copied)
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
        flat = self.host[: self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)

    def __del__(self, is_finalizing: Callable = sys.is_finalizing):
        # All copies use one stream, so the next use of the buffer waits for this one.
        if not is_finalizing() and hasattr(self, "copied"):
            self.leave()
            self.copies.give_back(self.host, self.unasked)


class Output(Saved):
    """An output of a linear layer, which comes back with the input of its layer, and can be computed again."""

    def __init__(self, tensor: torch.Tensor, copies: "Copies", host: torch.Tensor):
        super().__init__(tensor, copies, host, nothing, inside=True, beside=False, unasked=True)

    def link(self, last: "Callable[[], Saved | None]") -> None:
        self.call = self.copies.outputs.call
        self.copies.outputs.kept.append(weakref.ref(self))

    def load(self) -> torch.Tensor:
        """Return a tensor on the device into which others may write."""
        tensor = self.fetch()
        if not self.loaded:
            # It has never left, and the next computation of its layer needs it as it is.
            return tensor.clone()
        self.leave()
        return tensor

    def fetch(self) -> torch.Tensor:
        self.loaded = self.loaded or self.tensor is None
        return super().fetch()
