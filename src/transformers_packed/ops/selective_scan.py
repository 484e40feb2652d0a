"""The selective scan of Mamba, Gu and Dao, "Mamba: Linear-Time Sequence Modeling" (arXiv 2312.00752).

Each channel decays the numbers of its state `S` (`N`) at rates of their own, adds the token and reads it:

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t          y_t = C_t . S_t + D x_t

`dt` is a softplus of the projection. Channels in a group share `B` and `C`. [`torch_selective_scan`] walks through all
chunks of a row at once, and then from chunk to chunk. It ignores document boundaries; [`selective_scan`] isolates the
documents. Steps, decays and states are float32, or float64 for float64 inputs.

`selective_scan_fn` of mamba-ssm is no implementation, because it takes no boundaries.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ..boundaries import CHUNK_SIZE, SequenceBoundaries
from ..errors import input_error, shapes
from .backends import triton
from .dispatch import Call, Setting, run, with_triton
from .norm import widened
from .per_document import per_document
from .ssd import chunks_of_rows


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    *,
    dt_bias: torch.Tensor | None = None,
    boundaries: SequenceBoundaries | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Compute the scan of Mamba on a batch of sequences, or on each document of a packed row.

    Args:
        x (`torch.Tensor` of shape `[batch, T, channels]`):
            Inputs of any floating dtype.
        dt (`torch.Tensor` of shape `[batch, T, channels]`):
            Projection for the step, in any floating dtype. The step is `softplus(dt + dt_bias)`.
        A (`torch.Tensor` of shape `[channels, N]`):
            Rates of the decay, negative.
        B (`torch.Tensor` of shape `[batch, T, N]` or `[batch, T, G, N]`):
            Where a token is written. `channels / G` consecutive channels share one group.
        C (`torch.Tensor` of the shape of `B`):
            Where a token reads.
        D (`torch.Tensor` of shape `[channels]`):
            Factor of the input in the output.
        dt_bias (`torch.Tensor` of shape `[channels]`, *optional*):
            Added to `dt`.
        boundaries ([`SequenceBoundaries`], *optional*):
            Documents of a packed row (`batch` = 1). The state of each document starts at zero.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` or `"reference"`.

    Returns:
        `torch.Tensor` of shape `[batch, T, channels]` in the dtype of `x`.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed import SequenceBoundaries
    >>> from transformers_packed.ops import selective_scan
    >>> x, dt, B, C = torch.randn(1, 5, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 4), torch.randn(1, 5, 4)
    >>> channels = {"A": -torch.ones(8, 4), "D": torch.ones(8)}
    >>> packed = selective_scan(x, dt, B=B, C=C, **channels, boundaries=SequenceBoundaries.from_lengths([2, 3]))
    >>> alone = selective_scan(x[:, 2:], dt[:, 2:], B=B[:, 2:], C=C[:, 2:], **channels)
    >>> torch.allclose(packed[:, 2:], alone, atol=1e-6)
    True

    ```
    """
    if B.ndim == C.ndim == 3:
        B, C = B[:, :, None], C[:, :, None]
    if dt_bias is None:
        dt_bias = torch.zeros_like(D)
    _check(x, dt, A, B, C, D, dt_bias)
    return run("selective_scan", impl, IMPLEMENTATIONS, x, dt, A, B, C, D, dt_bias, boundaries=boundaries)


def _check(x, dt, A, B, C, D, dt_bias) -> None:
    rows = x.ndim == 3 and B.ndim == 4 and dt.shape == x.shape and B.shape == C.shape and B.shape[:2] == x.shape[:2]
    channels = x.shape[2:]
    of_channels = D.shape == dt_bias.shape == channels and A.shape == (*channels, *B.shape[3:])
    if not rows or not of_channels or x.shape[2] % B.shape[2]:
        expected = "x and dt [batch, T, channels], B and C [batch, T, G, N] with G that divides channels"
        raise input_error(f"{expected}, A [channels, N], D and dt_bias [channels]", shapes(x, dt, B, C, A, D, dt_bias))


def torch_selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    chunk_size: int = CHUNK_SIZE,
    **kwargs,
) -> torch.Tensor:
    """Compute the scan in chunks, in plain PyTorch. This is the reference implementation.

    The arguments are those of [`selective_scan`], with groups. Each row is one sequence, and the packing keywords are
    ignored.
    """
    length, groups = x.shape[1], B.shape[2]
    chunk_size = min(chunk_size, length)
    wide = widened(x)
    dt, A, B, C, D, dt_bias = (z.to(wide.dtype) for z in (dt, A, B, C, D, dt_bias))
    step = F.softplus(dt + dt_bias)
    # Tokens after the last one have a step of 0, so they change no state. By the place of a token in its chunk:
    # [batch, chunks, G, channels of a group, 1] and [batch, chunks, G, N, 1].
    padding = -length % chunk_size
    steps, written, b, c = (
        F.pad(z, (0, 0) * (z.ndim - 2) + (0, padding)).unflatten(1, (-1, chunk_size))[..., None].unbind(2)
        for z in (step.unflatten(2, (groups, -1)), (step * wide).unflatten(2, (groups, -1)), B, C)
    )
    rates = A.unflatten(0, (groups, -1))
    decays = [(z * rates).exp() for z in steps]

    def states(state: torch.Tensor) -> Iterator[torch.Tensor]:
        for decay, w, key in zip(decays, written, b, strict=True):
            state = decay * state + w * key.mT
            yield state

    before = torch.zeros_like(decays[0])
    if before.shape[1] > 1:
        *_, added = states(before)
        kept = (torch.stack(steps).sum(0) * rates).exp()
        state, found = before[:, 0], []
        for chunk in range(added.shape[1]):
            found.append(state)
            state = kept[:, chunk] * state + added[:, chunk]
        before = torch.stack(found, 1)
    outputs = torch.stack([state @ query for state, query in zip(states(before), c, strict=True)], 2)
    return (outputs.squeeze(-1).flatten(3).flatten(1, 2)[:, :length] + D * wide).to(x.dtype)


def _reference(x, dt, A, B, C, D, dt_bias, *, boundaries):
    def scan(x, dt, B, C):
        return torch_selective_scan(x, dt, A, B, C, D, dt_bias)

    return scan(x, dt, B, C) if boundaries is None else per_document(scan, x, dt, B, C, boundaries=boundaries)


def _triton(x, dt, A, B, C, D, dt_bias, *, boundaries):
    from .backends.triton.selective_scan import SelectiveScan

    batch, length, _ = x.shape
    chunks, offsets, _ = chunks_of_rows(x, boundaries, "channels")
    rows = (z.reshape(batch * length, -1) for z in (x, dt, B, C))
    x, dt, b, c = rows
    y = SelectiveScan.apply(x, dt, A, b, c, D, dt_bias, chunks, offsets, B.shape[2])
    return y.view(batch, length, -1)


def _verify_triton(x, dt, A, B, C, D, dt_bias, **_):
    if B.shape[3] > 256:
        return f"supports states of up to 256 numbers, not {B.shape[3]}"
    return triton.verify_all(dt, A, B, C, D, dt_bias, x)


IMPLEMENTATIONS = with_triton(_triton, _verify_triton, _reference)


def example(setting: Setting) -> dict[str, Call]:
    """The calls of a layer, for [`availability`]."""
    x, rows, channels = setting.zeros(1, 3, 64), setting.zeros(1, 3, 1, 16), setting.zeros(64)
    call = x, x, setting.zeros(64, 16), rows, rows, channels, channels
    return {"selective_scan": Call(IMPLEMENTATIONS, call, setting.row())}
