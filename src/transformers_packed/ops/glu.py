"""Elementwise gates: of an MLP (SwiGLU), of attention's output, and of the gated delta rule."""

import torch
import torch.nn.functional as F

from ..errors import input_error
from .dispatch import Implementation, always, run
from .kernels import verify_triton
from .linear import check_layer, verify_triton_linear
from .norm import widened


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """`silu(gate) * up`.

    Args:
        gate, up (`torch.Tensor` of one shape):
            What the two projections of an MLP give, any floating dtype.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (computed in float32, rounded once) or `"reference"`.

    Returns:
        `torch.Tensor` of the same shape, in torch's common dtype of the two.

    Raises:
        `ValueError`: shapes that differ, or an `impl` that cannot serve.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import swiglu
    >>> swiglu(torch.tensor([0.0, 20.0]), torch.tensor([5.0, 2.0])).tolist()
    [0.0, 40.0]

    ```
    """
    _check("swiglu", "gate and up", gate, up)
    return run("swiglu", impl, SWIGLU, gate, up)


def sigmoid_gate(gate: torch.Tensor, hidden_states: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """`hidden_states * sigmoid(gate)`.

    Args:
        gate, hidden_states (`torch.Tensor` of one shape):
            Any floating dtype.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (computed in float32, rounded once) or `"reference"`.

    Returns:
        `torch.Tensor` of the same shape, in torch's common dtype of the two.

    Raises:
        `ValueError`: shapes that differ, or an `impl` that cannot serve.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import sigmoid_gate
    >>> sigmoid_gate(torch.zeros(2), torch.tensor([5.0, 2.0])).tolist()
    [2.5, 1.0]

    ```
    """
    _check("sigmoid_gate", "gate and hidden_states", gate, hidden_states)
    return run("sigmoid_gate", impl, SIGMOID_GATE, gate, hidden_states)


def swiglu_linear(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor, *, impl: str = "auto") -> torch.Tensor:
    """[`swiglu`] and the linear layer behind it: `(silu(gate) * up) @ weight.T`. Backward makes the product again.

    Args:
        gate, up (`torch.Tensor` of shape `[..., width]`):
            What the two projections of an MLP give, any floating dtype.
        weight (`torch.Tensor` of shape `[out, width]`):
            The layer's weight.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (the product is not kept for backward) or `"reference"`.

    Returns:
        `torch.Tensor` of shape `[..., out]`.

    Raises:
        `ValueError`: shapes that differ, or an `impl` that cannot serve.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import swiglu_linear
    >>> swiglu_linear(torch.tensor([[0.0, 20.0]]), torch.tensor([[5.0, 2.0]]), torch.ones(1, 2)).tolist()
    [[40.0]]

    ```
    """
    _check("swiglu_linear", "gate and up", gate, up)
    check_layer("swiglu_linear", gate.shape[-1], weight)
    return run("swiglu_linear", impl, SWIGLU_LINEAR, gate, up, weight)


def sigmoid_gate_linear(
    gate: torch.Tensor, hidden_states: torch.Tensor, weight: torch.Tensor, *, impl: str = "auto"
) -> torch.Tensor:
    """[`sigmoid_gate`] and the linear layer behind it. Backward makes the product again.

    Args:
        gate, hidden_states (`torch.Tensor` of shape `[..., width]`):
            Any floating dtype.
        weight (`torch.Tensor` of shape `[out, width]`):
            The layer's weight.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (the product is not kept for backward) or `"reference"`.

    Returns:
        `torch.Tensor` of shape `[..., out]`.

    Raises:
        `ValueError`: shapes that differ, or an `impl` that cannot serve.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import sigmoid_gate_linear
    >>> sigmoid_gate_linear(torch.zeros(1, 2), torch.tensor([[5.0, 2.0]]), torch.ones(1, 2)).tolist()
    [[3.5]]

    ```
    """
    _check("sigmoid_gate_linear", "gate and hidden_states", gate, hidden_states)
    check_layer("sigmoid_gate_linear", gate.shape[-1], weight)
    return run("sigmoid_gate_linear", impl, SIGMOID_GATE_LINEAR, gate, hidden_states, weight)


def decay_and_rate(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, *, impl: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """The decay `g = -exp(a_log) * softplus(a + dt_bias)` and the rate `beta = sigmoid(b)` of the gated delta rule.

    Args:
        a, b (`torch.Tensor` of shape `[..., HV]`):
            The projections, any floating dtype.
        a_log, dt_bias (`torch.Tensor` of shape `[HV]`):
            The layer's parameters.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` or `"reference"`.

    Returns:
        `tuple`: `g` in float32 (float64 for `a` in float64) and `beta` in the dtype of `b`, both `[..., HV]`.

    Raises:
        `ValueError`: shapes that do not fit, or an `impl` that cannot serve.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import decay_and_rate
    >>> g, beta = decay_and_rate(*(torch.zeros(1, 2),) * 2, *(torch.zeros(2),) * 2)
    >>> g.exp().tolist(), beta.tolist()  # softplus(0) is log 2
    ([[0.5, 0.5]], [[0.5, 0.5]])

    ```
    """
    if a.shape != b.shape or a_log.shape != a.shape[-1:] or dt_bias.shape != a.shape[-1:]:
        raise input_error(
            "a and b [..., HV], a_log and dt_bias [HV]",
            ", ".join(str(tuple(x.shape)) for x in (a, b, a_log, dt_bias)),
            "Check the number of value heads.",
        )
    return run("decay_and_rate", impl, DECAY_AND_RATE, a, b, a_log, dt_bias)


def _check(call: str, names: str, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.shape != right.shape:
        raise input_error(
            f"{names} of one shape", f"{tuple(left.shape)} and {tuple(right.shape)}", "Reshape one of them."
        )


def _verify(verify):
    """`verify`, and whether what is multiplied has one dtype: adapters on one of the two layers may give another."""

    def verify_both(gate, x, *weight):
        if gate.dtype != x.dtype:
            return False, f"wants one dtype, not {gate.dtype} and {x.dtype}"
        return verify(gate, *weight)

    return verify_both


def _triton(silu: bool):
    def gated_product(gate, x):
        from .backends.triton.gates import GatedProduct

        return GatedProduct.apply(gate, x, silu)

    return Implementation(gated_product, _verify(verify_triton))


SWIGLU = {
    "triton": _triton(silu=True),
    "reference": Implementation(lambda gate, up: F.silu(gate) * up, always),
}
SIGMOID_GATE = {
    "triton": _triton(silu=False),
    "reference": Implementation(lambda gate, x: x * gate.sigmoid(), always),
}


def _triton_linear(silu: bool):
    def gated_product_linear(gate, x, weight):
        from .backends.triton.gates import GatedProductLinear

        return GatedProductLinear.apply(gate, x, weight, silu)

    return Implementation(gated_product_linear, _verify(verify_triton_linear))


SWIGLU_LINEAR = {
    "triton": _triton_linear(silu=True),
    "reference": Implementation(lambda gate, up, weight: F.linear(swiglu(gate, up), weight), always),
}
SIGMOID_GATE_LINEAR = {
    "triton": _triton_linear(silu=False),
    "reference": Implementation(lambda gate, x, weight: F.linear(sigmoid_gate(gate, x), weight), always),
}


def _decay_reference(a, b, a_log, dt_bias):
    # exp(a_log) in float32: in float16 it overflows.
    return -widened(a_log).exp() * F.softplus(widened(a) + dt_bias), b.sigmoid()


def _decay_triton(a, b, a_log, dt_bias):
    from .backends.triton.decay import DecayAndRate

    g, beta = DecayAndRate.apply(*(x.reshape(-1, len(a_log)) for x in (a, b)), a_log, dt_bias)
    return g.view(a.shape), beta.view(b.shape)


DECAY_AND_RATE = {
    "triton": Implementation(_decay_triton, lambda a, *others: verify_triton(a)),
    "reference": Implementation(_decay_reference, always),
}
