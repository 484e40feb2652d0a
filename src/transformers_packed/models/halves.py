"""Checkpointed decoder layers whose backward computes the MLP again, and then the mixer.

The forward of a layer runs each half with [`half`]. A layer runs as a whole unless the host has room for what the first
half makes, because that would be one more tensor on the GPU. Nothing asks for it yet: see [`use_halves`].
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from inspect import unwrap
from typing import Any

import torch

from ..foreign import swapped
from ..ops.halves import Halves
from ..ops.offload import HostCheckpoints
from .host_parameters import host_of
from .releases import forward_of_layer


# The forwards of [`has_halves`].
_FORWARDS: set[Callable] = set()
# Not before the copies have run on a GPU.
_in_use = False
# What runs each half of the layer that runs now, unless the layer runs as a whole.
_run_half: ContextVar[Callable | None] = ContextVar("halves of a layer", default=None)


def use_halves() -> AbstractContextManager:
    """Let checkpointed layers run in halves meanwhile, where their inputs go to host memory."""
    return swapped(globals(), _in_use=True)


def has_halves(forward: Callable) -> Callable:
    """Method decorator: the forward of a decoder layer runs its mixer, and then its MLP, with [`half`]."""
    _FORWARDS.add(forward)
    return forward


def half(step: Callable, *tensors: torch.Tensor, **options: Any) -> Any:
    """Return `step(*tensors, **options)`, a half of a layer, which is computed again by itself if the layer runs in halves.

    The first half takes the layer's input, and the second one the same tensor and then what the first half made.
    """
    run = None if torch.compiler.is_compiling() else _run_half.get()
    return step(*tensors, **options) if run is None else run(partial(step, **options), *tensors)


def in_halves(
    host: HostCheckpoints,
    checkpoint: Callable,
    function: Callable,
    hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the halves of a layer by `checkpoint`, or all of it where it has no halves or the host no room.

    Args:
        host ([`HostCheckpoints`]):
            The copies of the model, with which `checkpoint` saves.
        checkpoint (`Callable`):
            `torch.utils.checkpoint.checkpoint` without reentrant autograd, or a function like it.
        function (`Callable`):
            The layer with its keyword arguments, as Transformers passes it to a checkpointing function.
        hidden_states (`torch.Tensor` of shape `[1, T, hidden]`):
            The input of the layer.

    Returns:
        `torch.Tensor` of shape `[1, T, hidden]`.
    """
    halves = Halves.of(host, hidden_states) if not kwargs and _can_run_in_halves(function) else None
    if halves is None:
        return checkpoint(function, hidden_states, *args, **kwargs)
    token = _run_half.set(partial(checkpoint, save=halves.save))
    try:
        return function(hidden_states, *args)
    finally:
        _run_half.reset(token)
        halves.end()


def _can_run_in_halves(function: Callable) -> bool:
    """Whether a function is the forward of one of our layers, which computes a half as it would within the layer."""
    forward, layer = forward_of_layer(function)
    if not _in_use or forward is None or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    # Someone else's forward may do more than the halves. A segment of a row, and whatever else calls a layer, hands on
    # states within one run of it. Weights in host memory are there while the whole layer runs.
    return unwrap(forward, stop=_FORWARDS.__contains__) in _FORWARDS and host_of(layer) is None
