"""The short depthwise causal convolution before the gated delta rule, with a window of `W` tokens.

    y_t = activation(bias + sum_w weight_w * x_{t - W + 1 + w})          tokens before the first one are zero

In a packed row, the windows of a document's first `W - 1` tokens must not include tokens of the previous document.
[`torch_causal_conv1d`] ignores documents and the packing keywords. [`causal_conv1d`] isolates documents. Tensors are
token-major, `[B, T, D]`, as in flash-linear-attention.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from ..boundaries import SequenceBoundaries
from ..errors import input_error, shapes
from .backends import causal_conv1d as compiled
from .backends import fla, triton
from .dispatch import Call, Implementation, Setting, run, with_triton
from .norm import widened


def causal_conv1d(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    boundaries: SequenceBoundaries | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Apply a depthwise causal convolution to a batch of sequences, or to each document of a packed row.

    Args:
        hidden_states (`torch.Tensor` of shape `[B, T, D]`):
            Input of any floating dtype.
        weight (`torch.Tensor` of shape `[D, W]`):
            One filter of width `W` per channel.
        bias (`torch.Tensor` of shape `[D]`, *optional*):
            Added before the activation.
        activation (`str`, *optional*):
            A key of Transformers' `ACT2FN`, such as `"silu"`.
        boundaries ([`SequenceBoundaries`], *optional*):
            Documents of a packed row (`B` = 1).
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"fla"`, `"causal_conv1d"` or `"reference"`.

    Returns:
        `torch.Tensor` of shape `[B, T, D]` in the dtype of `hidden_states`.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

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
        fix = "Squeeze the middle dimension of a Conv1d weight, and put channels last."
        raise input_error("hidden_states [B, T, D] and weight [D, W]", shapes(hidden_states, weight), fix)
    call = (hidden_states, weight, bias, activation)
    return run("causal_conv1d", impl, IMPLEMENTATIONS, *call, boundaries=boundaries)


def causal_conv1d_qkv(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
    *,
    key_heads: int,
    key_dim: int,
    value_dim: int,
    boundaries: SequenceBoundaries | None = None,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Apply [`causal_conv1d`], split the result into queries, keys and values, and normalize queries and keys.

    Each head of the queries and keys is scaled to unit length.

    Args:
        hidden_states (`torch.Tensor` of shape `[B, T, D]`):
            Concatenated projections of queries, keys and values, in any floating dtype.
        weight (`torch.Tensor` of shape `[D, W]`):
            One filter of width `W` per channel.
        bias (`torch.Tensor` of shape `[D]`, *optional*):
            Added before the activation.
        activation (`str`, *optional*, defaults to `"silu"`):
            A key of Transformers' `ACT2FN`.
        key_heads (`int`):
            Number of query heads, which equals the number of key heads.
        key_dim (`int`):
            Channels per query or key head.
        value_dim (`int`):
            Channels per value head. The channels after the queries and keys are the values.
        boundaries ([`SequenceBoundaries`], *optional*):
            Documents of a packed row (`B` = 1).
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` or `"reference"`. The reference runs [`causal_conv1d`] with `impl="auto"`, and the
            other steps in PyTorch.

    Returns:
        `tuple`: queries and keys `[B, T, key_heads, key_dim]` and values `[B, T, value_heads, value_dim]`, in the
            dtype of `hidden_states`.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import causal_conv1d_qkv
    >>> x, weight = torch.randn(1, 5, 12), torch.randn(12, 4)
    >>> q, k, v = causal_conv1d_qkv(x, weight, key_heads=1, key_dim=2, value_dim=4)
    >>> q.shape, k.shape, v.shape, round(float(k[0, 3].norm()), 3)
    (torch.Size([1, 5, 1, 2]), torch.Size([1, 5, 1, 2]), torch.Size([1, 5, 2, 4]), 1.0)

    ```
    """
    _check_heads(hidden_states, weight, key_heads, key_dim, value_dim)
    options = {"key_heads": key_heads, "key_dim": key_dim, "value_dim": value_dim, "boundaries": boundaries}
    return run("causal_conv1d_qkv", impl, QUERY_KEY_VALUE, hidden_states, weight, bias, activation, **options)


def _check_heads(hidden_states: torch.Tensor, weight: torch.Tensor, key_heads: int, key_dim: int, value_dim: int):
    """Raise an error if the channels are not whole heads of queries, keys and values."""
    channels = hidden_states.shape[-1]
    values = channels - 2 * key_heads * key_dim
    if weight.ndim != 2 or weight.shape[0] != channels or hidden_states.ndim != 3 or values <= 0 or values % value_dim:
        expected = "hidden_states [B, T, D] and weight [D, W] for whole heads of queries, keys and values"
        heads = f"{key_heads} heads of {key_dim} channels and values of {value_dim}"
        got = f"{shapes(hidden_states, weight)} for {heads}"
        raise input_error(expected, got, "Put channels last, and check the number of heads.")


def torch_causal_conv1d(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs,
) -> torch.Tensor:
    """Apply the convolution in plain PyTorch. Each row is one sequence, and the packing keywords are ignored."""
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
    boundaries.check_row(hidden_states, "hidden_states", "D")
    # Zeros between the documents, `W - 1` of them, keep every window inside its document. The result is that of
    # `per_document`, in one pass over the row.
    gap = weight.shape[-1] - 1
    length = boundaries.total_length
    slots = torch.arange(length, device=hidden_states.device) + gap * boundaries.seq_idx[0]
    spaced = hidden_states.new_zeros(1, length + gap * (boundaries.num_documents - 1), hidden_states.shape[-1])
    return function(spaced.index_copy(1, slots, hidden_states)).index_select(1, slots)


IMPLEMENTATIONS = {
    "fla": Implementation(fla.causal_conv1d, fla.verify_causal_conv1d),
    "causal_conv1d": Implementation(compiled.causal_conv1d, compiled.verify_causal_conv1d),
    "reference": Implementation(_reference),
}


def _reference_qkv(hidden_states, weight, bias, activation, *, key_heads, key_dim, value_dim, boundaries):
    convolved = causal_conv1d(hidden_states, weight, bias, activation, boundaries=boundaries)
    size = key_heads * key_dim
    query, key, value = convolved.split([size, size, convolved.shape[-1] - 2 * size], dim=-1)
    query, key = (_unit_length(x.unflatten(-1, (key_heads, key_dim))) for x in (query, key))
    return query, key, value.unflatten(-1, (-1, value_dim))


def _unit_length(x: torch.Tensor) -> torch.Tensor:
    y = widened(x)
    return (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def triton_qkv(hidden_states, weight, bias, activation, *, key_heads, key_dim, value_dim, boundaries, halo=None):
    """Run the kernel. `halo` is a pair: the tokens `[halos * (W - 1), D]` before some documents, and [`slots_of`] these."""
    from .backends.triton.convolution import CausalConv1dQKV

    rows, length, channels = hidden_states.shape
    if boundaries is None:
        position = torch.arange(length, dtype=torch.int32, device=hidden_states.device).repeat(rows)
    else:
        boundaries.check_row(hidden_states, "hidden_states", "D")
        position = boundaries.derived("positions", lambda: boundaries.position_ids[0].to(torch.int32))
    # The kernel has values of as many heads as their channels fill.
    value_heads = channels // key_dim - 2 * key_heads
    *keys, value = CausalConv1dQKV.apply(
        hidden_states.flatten(0, 1), weight, position, key_heads, value_heads, key_dim, 1e-6, *(halo or ())
    )
    query, key = (x.unflatten(0, (rows, length)) for x in keys)
    return query, key, value.view(rows, length, value_heads * key_dim // value_dim, value_dim)


def slots_of(boundaries: SequenceBoundaries, documents: Sequence[int], width: int) -> torch.Tensor:
    """Return the slot of each token, int32 `[T]`, if each of these documents has a halo of `width` tokens."""

    def make() -> torch.Tensor:
        slots = torch.full((boundaries.total_length,), -1, dtype=torch.int32)
        starts = boundaries.cu_seqlens_cpu.tolist()
        for halo, document in enumerate(documents):
            tokens = slots[starts[document] : starts[document + 1]][:width]
            tokens[:] = torch.arange(halo * width, halo * width + len(tokens))
        return slots.to(boundaries.cu_seqlens.device, non_blocking=True)

    return boundaries.derived(f"slots of {documents} and {width}", make)


def verify_triton_qkv(hidden_states, weight, bias, activation, *, key_dim, value_dim, **_):
    if bias is not None or activation not in ("silu", "swish"):
        return "supports only SiLU without a bias"
    if weight.shape[1] > 4:
        return f"supports windows of up to 4 tokens, not {weight.shape[1]}"
    if not takes_heads(key_dim, value_dim):
        return f"needs keys of 16 to 256 channels and values of a multiple of them, not {key_dim} and {value_dim}"
    return triton.verify(hidden_states)


def takes_heads(key_dim: int, value_dim: int) -> bool:
    """Whether the kernel takes heads of these sizes."""
    return 16 <= key_dim <= 256 and value_dim % key_dim == 0


QUERY_KEY_VALUE = with_triton(triton_qkv, verify_triton_qkv, _reference_qkv)


def example(setting: Setting) -> dict[str, Call]:
    """The calls of a layer, for [`availability`]."""
    row, channels = setting.row(), 2 * setting.key_dim + setting.value_dim
    heads = {"key_heads": 1, "key_dim": setting.key_dim, "value_dim": setting.value_dim}
    call = setting.zeros(1, 3, channels), setting.zeros(channels, 4), None, "silu"
    return {
        "causal_conv1d": Call(IMPLEMENTATIONS, (setting.zeros(1, 3, 16), setting.zeros(16, 4), None, "silu"), row),
        "causal_conv1d_qkv": Call(QUERY_KEY_VALUE, call, row | heads),
    }
