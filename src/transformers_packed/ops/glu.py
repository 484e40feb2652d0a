"""Gated linear units: an activation of one projection times another, as in an MLP or at the end of attention."""

import torch
import torch.nn.functional as F

from ..errors import input_error
from .backends import triton
from .dispatch import Implementation, always, run
from .linear import check_layer


_ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}
# The op's name where it is recorded, as in `implementations_used`.
_NAMES = {"silu": "swiglu", "sigmoid": "sigmoid_gate"}


def glu(
    gate: torch.Tensor,
    hidden_states: torch.Tensor,
    linear_weight: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    impl: str = "auto",
) -> torch.Tensor:
    """`activation(gate) * hidden_states`, and the linear layer behind it if its weight is given.

    Args:
        gate, hidden_states (`torch.Tensor` of shape `[..., width]`):
            The two projections, any floating dtype.
        linear_weight (`torch.Tensor` of shape `[out, width]`, *optional*):
            The weight of the layer that takes the product. Backward then makes the product again.
        activation (`str`, *optional*, defaults to `"silu"`):
            `"silu"` (SwiGLU) or `"sigmoid"` (the output gate of attention).
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (computed in float32, rounded once, not kept before a layer) or `"reference"`.

    Returns:
        `torch.Tensor` of shape `[..., width]`, or `[..., out]` with a layer, in torch's common dtype of the two.

    Raises:
        `ValueError`: shapes that do not fit, an unknown activation, or an `impl` that cannot serve.

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
        raise input_error(
            "gate and hidden_states of one shape", f"{tuple(gate.shape)} and {tuple(hidden_states.shape)}"
        )
    name = _NAMES[activation]
    if linear_weight is not None:
        check_layer(gate.shape[-1], linear_weight)
        name += "_linear"
    return run(name, impl, IMPLEMENTATIONS, gate, hidden_states, linear_weight, activation)


def _reference(gate, hidden_states, linear_weight, activation):
    if linear_weight is None:
        return hidden_states * _ACTIVATIONS[activation](gate)
    return F.linear(glu(gate, hidden_states, activation=activation), linear_weight)


def _triton(gate, hidden_states, linear_weight, activation):
    from .backends.triton.glu import GLU

    return GLU.apply(gate, hidden_states, linear_weight, activation == "silu")


def _verify_triton(gate, hidden_states, linear_weight, activation):
    return triton.verify_gated(hidden_states, gate, linear_weight)


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, _verify_triton),
    "reference": Implementation(_reference, always),
}
