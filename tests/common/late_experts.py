"""Copies of weights from host memory, on a CPU and as late as they may be."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from common.late_copies import LateCopies

from transformers_packed.ops import host_weights, offload


@contextmanager
def copied_on_a_cpu():
    """Let products on a CPU read copies of weights in host memory. The context is the [`DeviceCopies`] of the CPU."""
    with ExitStack() as stack:
        copies: dict = {}
        stack.enter_context(mock.patch.object(offload, "Copies", LateCopies))
        stack.enter_context(mock.patch.object(host_weights, "_COPIES", copies))
        for module in ("ops.host_weights", "models.host_parameters"):
            stack.enter_context(mock.patch(f"transformers_packed.{module}.is_apart", lambda device: True))
        device = torch.device("cpu")
        copies[device] = host_weights.DeviceCopies(device)
        yield copies[device]


def without_memory(copies):
    """Forget all copies. Their memory is free then, if nobody else refers to it."""
    for copy in copies.layers:
        if (tensors := copy.of()) is not None:
            tensors.copies.clear()
    copies.layers.clear()
