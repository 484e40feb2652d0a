"""Gradient checkpointing of our models: its options, copies in host memory, and attention that is not computed again."""

import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..errors import input_error
from ..ops import offload
from ..ops.kept_attention import keeping_attention
from .host_experts import bytes_in_host_memory
from .releases import arguments_of_layer, wrap_checkpoints
from .segments import check_size, in_segments
from .versions import check_checkpointing


# The attribute with what copies checkpoints to the host.
_COPIES = "host_checkpoints"
_AUTO = "auto"


class Options(NamedTuple):
    """The options of `activation_checkpointing_enable`. `others` are those of `torch.utils.checkpoint.checkpoint`."""

    every_n_layers: int
    offload: bool | str
    keep_attention: bool | str
    segment_tokens: int | None
    others: dict[str, Any]


def read_options(given: dict[str, Any] | None, every_n_layers: int, offload: bool | str) -> Options:
    """Return checked options. Those in `given` count, because trainers of TRL pass all of them on there.

    Raises:
        `ValueError`: an option has another value, or does not go with another one.
    """
    others = dict(given or {})
    every_n_layers = others.pop("every_n_layers", every_n_layers)
    offload, keep = others.pop("offload", offload), others.pop("keep_attention", False)
    segment_tokens = others.pop("segment_tokens", None)
    for name, value in (("offload", offload), ("keep_attention", keep)):
        if not isinstance(value, bool) and value != _AUTO:
            raise input_error(f'{name} of True, False or "auto"', repr(value))
    if keep == _AUTO and (others.get("use_reentrant") or "context_fn" in others):
        keep = False
    if keep and "context_fn" in others:
        raise input_error("no context_fn with keep_attention", "one", "Leave it out.")
    if segment_tokens is not None:
        check_size(segment_tokens)
        check_checkpointing("segment_tokens")
    for name, asked in (("keep_attention", keep), ("segment_tokens", segment_tokens is not None)):
        if not asked:
            continue
        if others.get("use_reentrant"):
            raise input_error(f"use_reentrant=False with {name}", "use_reentrant=True", "Leave it out.")
        others["use_reentrant"] = False
    return Options(every_n_layers, offload, keep, segment_tokens, others)


def enable(model: torch.nn.Module, usual: Callable, options: Options) -> None:
    """Turn checkpointing on. `usual` is Transformers' `activation_checkpointing_enable` of the model."""
    accelerator = torch.accelerator.current_accelerator()
    # Copies beside the layers; other devices have those of Transformers.
    beside = bool(options.offload) and (accelerator is None or accelerator.type == "cuda")
    least = options.segment_tokens is not None
    host = _host_of(model, options.offload == _AUTO, least) if beside else vars(model).pop(_COPIES, None)
    others = options.others
    if host is not None:
        host.computes_all = "context_fn" in others
    if options.keep_attention is True:
        others = others | {"context_fn": partial(keeping_attention, host) if beside else keeping_attention}
    usual(others or None, options.every_n_layers, options.offload is True and not beside)
    if beside:
        wrap_checkpoints(model, host)
        if options.keep_attention == _AUTO:
            wrap_checkpoints(model, partial(keep_long_attention, host))
    if options.segment_tokens is not None:
        wrap_checkpoints(model, partial(in_segments, options.segment_tokens))


def _host_of(model: torch.nn.Module, automatic: bool, least: bool) -> Any:
    """Return the copies of a model's checkpoints, with the buffers that it has already.

    With `least`, a step takes as little of the GPU's memory as it can. So it does with weights in host memory.
    """
    # They must not keep the model.
    needed = partial(_needed, weakref.ref(model), least) if automatic else None
    host = vars(model).get(_COPIES)
    if host is None or getattr(host.needed, "args", None) != getattr(needed, "args", None):
        host = offload.HostCheckpoints(needed)
    vars(model)[_COPIES] = host
    return host


def _needed(this: Callable[[], torch.nn.Module | None], least: bool) -> float:
    """Return the bytes of the GPU that a step needs beside what it has allocated."""
    model = this()
    return math.inf if least or (model is not None and bytes_in_host_memory(model)) else bytes_of_moments(model)


def keep_long_attention(
    host: offload.HostCheckpoints, checkpoint: Callable, function: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Run a layer by `checkpoint`. Attention of a row with a long document is not computed again if it fits host memory.

    Args:
        host ([`HostCheckpoints`]):
            The copies of the model.
        checkpoint (`Callable`):
            `torch.utils.checkpoint.checkpoint` without reentrant autograd, or a function like it.
        function (`Callable`):
            The layer with its keyword arguments, as Transformers passes it to a checkpointing function.
    """
    row = (arguments_of_layer(function) | kwargs).get("boundaries")
    if row is None or torch.compiler.is_compiling():
        return checkpoint(function, *args, **kwargs)
    if row.most_keys >= offload.LONG_DOCUMENT:
        kwargs["context_fn"] = partial(keeping_attention, host, True)
    return checkpoint(function, *args, **kwargs)


def bytes_on_host(model: torch.nn.Module, unasked: bool = True) -> int:
    """Return the bytes of host memory for checkpoints of a model, and of those inside of it, with or without unasked outputs."""
    return sum(host.bytes if unasked else host.bytes - host.bytes_unasked for host in _hosts(model))


def _hosts(model: torch.nn.Module) -> set[offload.HostCheckpoints]:
    """Return the copies of a model, and of those inside of it."""
    return {vars(module)[_COPIES] for module in model.modules() if _COPIES in vars(module)}


def bytes_of_gradients(model: torch.nn.Module | None) -> int:
    """Return the bytes of a gradient of each trained parameter."""
    parameters = () if model is None else model.parameters()
    return sum(x.numel() * x.element_size() for x in parameters if x.requires_grad)


def bytes_of_moments(model: torch.nn.Module | None) -> int:
    """Return the bytes of two moments of each trained parameter, which AdamW has from the first step on."""
    return 2 * bytes_of_gradients(model)
