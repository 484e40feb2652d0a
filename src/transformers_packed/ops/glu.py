"""Gated linear units: the activation of one projection times another, as in an MLP or at the end of attention."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

from ..errors import input_error, shapes
from .backends import triton
from .dispatch import Call, Setting, run, with_triton
from .linear import apply_reference, as_projection, check_layer, verify_layer
from .terms import Projection, planned


Activation = Literal["silu", "sigmoid"]
_ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}
# Name of the op in records such as `implementations_used`.
_NAMES = {"silu": "swiglu", "sigmoid": "sigmoid_gate"}


def glu(
    gate: torch.Tensor,
    hidden_states: torch.Tensor,
    linear_weight: torch.Tensor | Projection | Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    activation: Activation = "silu",
    impl: str = "auto",
) -> torch.Tensor:
    """Compute `activation(gate) * hidden_states`, and optionally a linear layer on the product.

    Args:
        gate (`torch.Tensor` of shape `[..., width]`):
            Projection for the gate, in any floating dtype.
        hidden_states (`torch.Tensor` of shape `[..., width]`):
            Projection that the gate multiplies, in any floating dtype.
        linear_weight (`torch.Tensor` of shape `[out, width]`, [`Projection`] or `Callable`, *optional*):
            Weight of a linear layer on the product, or the layer with its adapters. The backward then recomputes the
            product. A function is called with the product.
        activation (`str`, *optional*, defaults to `"silu"`):
            `"silu"` (SwiGLU) or `"sigmoid"` (the output gate of attention).
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` or `"reference"`. `"triton"` computes the product in float32 and rounds once. With a
            linear layer, it does not save the product for the backward.

    Returns:
        `torch.Tensor` of shape `[..., width]`, or `[..., out]` with a linear layer, in the inputs' promoted dtype.

    Raises:
        `ValueError`: the shapes do not match, the activation is unknown, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import glu
    >>> glu(torch.tensor([0.0, 20.0]), torch.tensor([5.0, 2.0])).tolist()
    [0.0, 40.0]
    >>> glu(torch.zeros(1, 2), torch.tensor([[5.0, 2.0]]), torch.ones(1, 2), activation="sigmoid").tolist()
    [[3.5]]

    ```
    """
    if activation not in _ACTIVATIONS:
        raise input_error(f"an activation of {sorted(_ACTIVATIONS)}", f'"{activation}"')
    if gate.shape != hidden_states.shape:
        raise input_error("gate and hidden_states of the same shape", shapes(gate, hidden_states))
    if callable(linear_weight):
        return linear_weight(glu(gate, hidden_states, activation=activation, impl=impl))
    name = _NAMES[activation]
    if linear_weight is not None:
        check_layer(gate.shape[-1], linear_weight)
        name += "_linear"
    return run(name, impl, IMPLEMENTATIONS, gate, hidden_states, linear_weight, activation)


def _reference(gate, hidden_states, linear_weight, activation):
    if linear_weight is None:
        return hidden_states * _ACTIVATIONS[activation](gate)
    return apply_reference(glu(gate, hidden_states, activation=activation), linear_weight)


def _triton(gate, hidden_states, linear_weight, activation):
    from .backends.triton.glu import GLU

    plan, tensors = planned([] if linear_weight is None else [as_projection(linear_weight)])
    return GLU.apply(gate, hidden_states, activation == "silu", plan, *tensors)


def _verify_triton(gate, hidden_states, linear_weight, activation):
    return verify_layer(hidden_states, linear_weight) or triton.verify_gated(hidden_states, gate)


IMPLEMENTATIONS = with_triton(_triton, _verify_triton, _reference)


def example(setting: Setting) -> dict[str, Call]:
    """The calls of an MLP and of the gate after attention, for [`availability`]."""
    row, found = setting.zeros(1, 3, 256), {}
    for activation, name in _NAMES.items():
        for suffix, layer in (("", None), ("_linear", setting.zeros(8, 256))):
            found[name + suffix] = Call(IMPLEMENTATIONS, (row, row, layer, activation))
    return found
