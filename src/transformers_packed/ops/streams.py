"""Residuals of several streams (hyper-connections): mix the streams to the input of a layer, and add its output to each."""

import torch
import torch.nn.functional as F

from ..errors import input_error, shapes
from .backends import triton
from .dispatch import run, with_triton


def stream_gates(
    low: torch.Tensor, factors: torch.Tensor | None, streams: int, *, impl: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `silu(low / streams)` and `2 * sigmoid(factors / streams)`.

    A layer projects the former to the gate of [`mix_streams`]. The latter are the factors of [`add_to_streams`].

    Args:
        low (`torch.Tensor` of shape `[..., rank]`):
            Projection of the streams, in any floating dtype.
        factors (`torch.Tensor` of shape `[..., S]`, *optional*):
            Projection of the streams to a value for each.
        streams (`int`):
            The number of streams.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (computes both in one kernel, in float32, and rounds once) or `"reference"`.

    Returns:
        `tuple`: both, in the shapes and dtypes of the inputs, and `None` without `factors`.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops.streams import stream_gates
    >>> stream_gates(torch.zeros(1), torch.zeros(2), 2)
    (tensor([0.]), tensor([1., 1.]))

    ```
    """
    if streams < 1 or factors is not None and factors.shape != (*low.shape[:-1], streams):
        got = f"{shapes(low, factors)} for {streams}"
        raise input_error("low [..., rank] and factors [..., S] for S streams", got)
    return run("stream_gates", impl, GATES, low, factors, streams)


def mix_streams(gate: torch.Tensor, streams: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """Compute the mean over the streams of `sigmoid(gate) * streams`.

    Args:
        gate (`torch.Tensor` of shape `[..., S, width]`):
            Gate of each element, in any floating dtype.
        streams (`torch.Tensor` of shape `[..., S, width]`):
            `S` streams.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (computes in float32 and rounds once) or `"reference"`.

    Returns:
        `torch.Tensor` of shape `[..., width]`, in the inputs' promoted dtype.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops.streams import mix_streams
    >>> mix_streams(torch.zeros(2, 3), torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])).tolist()
    [1.0, 1.0, 1.0]

    ```
    """
    if gate.shape != streams.shape or gate.ndim < 2:
        raise input_error("gate and streams of the same shape [..., S, width]", shapes(gate, streams))
    return run("mix_streams", impl, MIX, gate, streams)


def add_to_streams(
    streams: torch.Tensor, hidden_states: torch.Tensor, factors: torch.Tensor, *, impl: str = "auto"
) -> torch.Tensor:
    """Compute `streams + factors * hidden_states`, with one factor for each stream.

    Args:
        streams (`torch.Tensor` of shape `[..., S, width]`):
            `S` streams, in any floating dtype.
        hidden_states (`torch.Tensor` of shape `[..., width]`):
            What to add to all of them.
        factors (`torch.Tensor` of shape `[..., S]`):
            Factor for each stream.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (computes in float32 and rounds once) or `"reference"`.

    Returns:
        `torch.Tensor` of shape `[..., S, width]`, in the inputs' promoted dtype.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops.streams import add_to_streams
    >>> add_to_streams(torch.zeros(2, 2), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])).tolist()
    [[1.0, 2.0], [3.0, 6.0]]

    ```
    """
    if hidden_states.shape != (*streams.shape[:-2], streams.shape[-1]) or factors.shape != streams.shape[:-1]:
        expected = "streams [..., S, width], hidden_states [..., width] and factors [..., S]"
        raise input_error(expected, shapes(streams, hidden_states, factors))
    return run("add_to_streams", impl, ADD, streams, hidden_states, factors)


def _gates_reference(low, factors, streams):
    return F.silu(low / streams), None if factors is None else 2 * torch.sigmoid(factors / streams)


def _verify_gates(low, factors, streams):
    return triton.verify_all(*(x for x in (low, factors) if x is not None))


def _mix_reference(gate, streams):
    return (torch.sigmoid(gate) * streams).mean(dim=-2)


def _add_reference(streams, hidden_states, factors):
    return streams + hidden_states.unsqueeze(-2) * factors.unsqueeze(-1)


def _verify(*tensors):
    if tensors[0].shape[-1] > 16384:
        return f"supports widths up to 16384, not {tensors[0].shape[-1]}"
    return triton.verify_all(*tensors)


GATES = with_triton(triton.late("streams", "StreamGates"), _verify_gates, _gates_reference)
MIX = with_triton(triton.late("streams", "MixStreams"), _verify, _mix_reference)
ADD = with_triton(triton.late("streams", "AddToStreams"), _verify, _add_reference)
