"""The short depthwise causal convolution before the gated delta rule: each channel sees its last `W` tokens.

    y_t = activation(bias + sum_w weight_w * x_{t - W + 1 + w})          tokens before the first one are zero

In a packed row the window of a document's first `W - 1` tokens must not reach back into the document before it.
[`torch_causal_conv1d`] knows nothing of documents and ignores the packing keywords; [`causal_conv1d`] keeps them apart.
Tensors are token-major, `[B, T, D]`, as in flash-linear-attention.
"""

from functools import partial

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from .dispatch import Implementation, always, run
from .kernels import (
    compiled_causal_conv1d,
    fla_causal_conv1d,
    verify_compiled_causal_conv1d,
    verify_fla_causal_conv1d,
)


def causal_conv1d(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    boundaries: SequenceBoundaries | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Depthwise causal convolution of a batch of sequences, or of each document of a packed row.

    Args:
        hidden_states (`torch.Tensor` of shape `[B, T, D]`):
            The input, any floating dtype.
        weight (`torch.Tensor` of shape `[D, W]`):
            One filter of width `W` per channel.
        bias (`torch.Tensor` of shape `[D]`, *optional*):
            Added before the activation.
        activation (`str`, *optional*):
            A key of Transformers' `ACT2FN`, such as `"silu"`.
        boundaries ([`SequenceBoundaries`], *optional*):
            The documents of a packed row (`B` = 1).
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"fla"`, `"causal_conv1d"` or `"reference"`.

    Returns:
        `torch.Tensor` of shape `[B, T, D]` in the dtype of `hidden_states`.

    Raises:
        `ValueError`: shapes that do not fit, or an `impl` that cannot serve.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed import SequenceBoundaries
    >>> from transformers_packed.ops import causal_conv1d
    >>> x, weight = torch.ones(1, 4, 1), torch.ones(1, 2)
    >>> causal_conv1d(x, weight, boundaries=SequenceBoundaries.from_lengths([2, 2])).flatten().tolist()
    [1.0, 2.0, 1.0, 2.0]

    ```
    """
    if weight.ndim != 2 or hidden_states.ndim != 3 or hidden_states.shape[-1] != weight.shape[0]:
        raise input_error(
            "causal_conv1d",
            expected="hidden_states [B, T, D] and weight [D, W]",
            got=f"{tuple(hidden_states.shape)} and {tuple(weight.shape)}",
            fix="Squeeze the middle dimension of a Conv1d weight, and put channels last.",
        )
    call = (hidden_states, weight, bias, activation)
    return run("causal_conv1d", impl, IMPLEMENTATIONS, *call, boundaries=boundaries)


def torch_causal_conv1d(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs,
) -> torch.Tensor:
    """The convolution in plain torch, the reference; each row is one sequence and the packing keywords are ignored."""
    width = weight.shape[-1]
    left_padded = F.pad(hidden_states.to(weight.dtype).transpose(1, 2), (width - 1, 0))
    output = F.conv1d(left_padded, weight[:, None], bias, groups=weight.shape[0]).transpose(1, 2)
    if activation is not None:
        output = ACT2FN[activation](output)
    return output.to(hidden_states.dtype)


def _reference(hidden_states, weight, bias, activation, *, boundaries):
    function = partial(torch_causal_conv1d, weight=weight, bias=bias, activation=activation)
    if boundaries is None:
        return function(hidden_states)
    # With a window's width of zeros between the documents no window reaches from one into another. That is what
    # `per_document` would compute, in one pass over the row.
    gap = weight.shape[-1] - 1
    length = boundaries.total_length
    slots = torch.arange(length, device=hidden_states.device) + gap * boundaries.seq_idx[0]
    spaced = hidden_states.new_zeros(1, length + gap * (boundaries.num_documents - 1), hidden_states.shape[-1])
    return function(spaced.index_copy(1, slots, hidden_states)).index_select(1, slots)


IMPLEMENTATIONS = {
    "fla": Implementation(fla_causal_conv1d, verify_fla_causal_conv1d),
    "causal_conv1d": Implementation(compiled_causal_conv1d, verify_compiled_causal_conv1d),
    "reference": Implementation(_reference, always),
}
