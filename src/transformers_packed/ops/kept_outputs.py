"""Outputs of linear layers that a checkpointed layer keeps in host memory, so that its second computation leaves out the products.

With `K` inputs, an element of an output takes `2 K` operations and 2 bytes of a copy. At 668 TFLOP/s and 50 GB/s, the copy
takes as long as 13,000 inputs. But it runs beside the layers, and nobody waits for it as long as its layer has time for it.
How many outputs that are, the copies tell ([`Quota`]).
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .autograd import detached


# How many bytes of outputs more a layer keeps in the next row for each byte of its input, as long as few copies are late, how
# many fewer if more are late, and what share that is.
_MORE, _FEWER, _LATE = 1.0, 0.5, 1 / 8
# After how many rows without late copies it may be more again.
_AGAIN = 64


class Quota:
    """The bytes of outputs that a layer may keep for each byte of its input.

    They grow from row to row until the device has to wait for copies, and then shrink until it does not. Much later, they may
    grow again.
    """

    def __init__(self) -> None:
        self.value, self.grows, self.rows = 0.0, True, 0
        # Whether an output has been left out since the value has changed.
        self.is_too_small = False
        # When the device began to wait for a copy, and when the copy ended, in one row, and whether that row is over.
        self.waits: list[tuple[Any, Any]] = []
        self.is_over = False
        self.is_usual = True

    def forget(self) -> None:
        """Leave out the waits since the value has changed: something else has taken time."""
        self.is_usual = False

    def note(self, now: Callable[[], Any], copied: Any) -> None:
        """Note that the device waits from now on for the end of a copy."""
        if self.value and not self.is_over:
            self.waits.append((now(), copied))

    def begin_row(self, most: Callable[[], float]) -> None:
        """Change the value if the device has come to all waits that are noted. `most` returns the largest one it may have."""
        if self.waits and not all(event.query() for event in self.waits[-1]):
            # The host is always ahead, so later waits would never be those of the past.
            self.is_over = True
            return
        waits, is_usual, is_too_small = self.waits, self.is_usual, self.is_too_small
        self.waits, self.is_over, self.is_usual, self.is_too_small = [], False, True, False
        if not is_usual:
            return
        late = sum(begun.elapsed_time(copied) > 0 for begun, copied in waits)
        self.rows += 1
        if late > _LATE * len(waits):
            self.value, self.grows, self.rows = max(self.value - _FEWER, 0.0), False, 0
        elif (self.grows or self.rows >= _AGAIN) and is_too_small and self.value + _MORE <= most():
            self.value, self.grows = self.value + _MORE, True


class Outputs:
    """What the layers of a row keep, and how much they may. The backward of the last one comes at once, so it keeps none."""

    def __init__(self) -> None:
        self.quota = Quota()
        # The layers of a row, and those that have begun.
        self.number = self.begun = 0
        # Bytes that the device had for the outputs of a layer when the row began, and bytes that this layer may still keep.
        self.room = self.left = 0.0
        # Bytes of the largest input of earlier rows, and with this row. What a step of a larger one needs is not known.
        self.largest = self.largest_now = 0
        # Of this layer, and the number of its call of linear layers that runs.
        self.kept: list[Callable[[], Any]] = []
        self.call = 0
        # Of earlier layers, with the number of the call.
        self.leaving: list[tuple[int, Callable[[], Any]]] = []

    def begin_layer(self, size: int, unused: Callable[[], float] | None) -> list[Callable[[], Any]]:
        """Note that a layer begins, and return the list of what it will keep.

        Args:
            size (`int`):
                Bytes of its input.
            unused (`Callable[[], float]`, *optional*):
                Returns the bytes of the device that nobody needs. Without it, the quota stays.
        """
        if not self.begun:
            self.largest = self.largest_now
            if unused is not None:
                self.quota.begin_row(lambda: unused() / size)
                # A row may be longer than those that the value comes from.
                self.room = unused() if self.quota.value else 0.0
        self.begun += 1
        self.left = min(self.quota.value * size, self.room) if size <= self.largest else 0.0
        self.largest_now = max(self.largest_now, size)
        # All that is left is of the layer before the last one.
        self.leave(math.inf)
        self.leaving = [(saved.call, this) for this in self.kept if (saved := this()) is not None]
        self.kept, self.call = [], 0
        return self.kept

    def begin_backward(self) -> None:
        """Note that a layer of a backward begins."""
        if self.begun:
            self.number, self.begun = self.begun, 0

    def begin_call(self) -> None:
        """Note a call of linear layers. Outputs of the same call in the layer before have had a layer's time for their copies."""
        self.call += 1
        self.leave(self.call)

    def leave(self, last: float) -> None:
        """Let outputs of earlier layers leave the device, up to those of a call."""
        left, self.leaving = self.leaving, []
        for call, this in left:
            output = this()
            if call > last:
                self.leaving.append((call, this))
            elif output is not None:
                output.leave_unchanged()

    def may_keep(self, size: int) -> bool:
        """Whether this layer may keep an output of so many bytes."""
        if self.begun >= self.number:
            return False
        if size > self.left:
            self.quota.is_too_small = True
        return size <= self.left


class _Running(threading.local):
    """The checkpointed layer that runs in this thread."""

    layer: "Layer | None" = None


_RUNNING = _Running()


class Layer:
    """A function under gradient checkpointing. Its first run saves outputs of linear layers, and others load them.

    Args:
        function (`Callable`):
            Function that is computed again in backward.
        host (`HostCheckpoints`):
            Copies outputs to host memory, as long as this makes nobody wait.
    """

    def __init__(self, function: Callable, host: Any):
        self.function, self.host = function, host
        # For each call of linear layers with one input, the saved outputs by their number.
        self.kept: list[dict[int, Any]] = []
        self.left: Iterator[dict[int, Any]] = iter(())
        self.has_run = self.keeps = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # With reentrant autograd, the first run has no gradients, and its input is saved only after it.
        self.keeps = torch.is_grad_enabled() and not self.has_run
        self.left, self.has_run = iter(self.kept), True
        with _running(self):
            return self.function(*args, **kwargs)

    def known(self) -> dict[int, torch.Tensor]:
        """Return the outputs of the next call of linear layers that need not be computed, by their number."""
        saved = next(self.left, {}).items()
        return {i: self.host.load(x) for i, x in saved if not self.host.is_changed(x)}

    def keep(self, outputs: list[torch.Tensor]) -> None:
        """Save outputs of a call of linear layers in the first run."""
        if self.keeps:
            saved = self.host.save_outputs([detached(y) for y in outputs])
            self.kept.append({i: x for i, x in enumerate(saved) if x is not None})


@contextmanager
def _running(layer: Layer) -> Iterator[None]:
    before, _RUNNING.layer = _RUNNING.layer, layer
    try:
        yield
    finally:
        _RUNNING.layer = before


def running_layer() -> Layer | None:
    """Return the layer that runs in this thread and may keep outputs, if any."""
    return None if torch.compiler.is_compiling() else _RUNNING.layer
