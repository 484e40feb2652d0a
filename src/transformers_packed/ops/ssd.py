"""The scan of Mamba-2 by state-space duality, Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060).

Each head decays its state `S` (`N` x `P`), adds the token's outer product and reads it:

    S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_t^T          y_t = C_t^T S_t + D x_t

`dt` is a softplus of the projection, between two limits. Heads in a group share `B` and `C`. [`torch_ssd`] computes
chunks of tokens at once, and only the update of the state from chunk to chunk is sequential. It ignores document
boundaries; [`ssd`] isolates the documents. Steps, decays, states and sums are float32, or float64 for float64 inputs.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

from ..boundaries import CHUNK_SIZE, SequenceBoundaries
from ..errors import input_error, shapes
from .backends import mamba_ssm, triton
from .dispatch import Call, Implementation, Setting, run
from .norm import widened
from .per_document import per_document


def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    *,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    boundaries: SequenceBoundaries | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Compute the scan of Mamba-2 on a batch of sequences, or on each document of a packed row.

    Args:
        x (`torch.Tensor` of shape `[batch, T, H, P]`):
            Inputs of any floating dtype.
        dt (`torch.Tensor` of shape `[batch, T, H]`):
            Projection for the step, in any floating dtype. The step is `softplus(dt + dt_bias)` between the limits.
        A (`torch.Tensor` of shape `[H]`):
            Rate of the decay, negative.
        B (`torch.Tensor` of shape `[batch, T, G, N]`):
            Where a token is written. `H / G` consecutive heads share one group.
        C (`torch.Tensor` of shape `[batch, T, G, N]`):
            Where a token reads.
        D (`torch.Tensor` of shape `[H]`):
            Factor of the input in the output.
        dt_bias (`torch.Tensor` of shape `[H]`):
            Added to `dt`.
        dt_limit (`tuple[float, float]`, *optional*, defaults to `(0.0, inf)`):
            Lower and upper limit of the step.
        boundaries ([`SequenceBoundaries`], *optional*):
            Documents of a packed row (`batch` = 1). The state of each document starts at zero.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"`, `"mamba_ssm"` or `"reference"`.

    Returns:
        `torch.Tensor` of shape `[batch, T, H, P]` in the dtype of `x`.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed import SequenceBoundaries
    >>> from transformers_packed.ops import ssd
    >>> x, dt, B, C = torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2), torch.randn(1, 5, 1, 4), torch.randn(1, 5, 1, 4)
    >>> heads = {"A": -torch.ones(2), "D": torch.ones(2), "dt_bias": torch.zeros(2)}
    >>> packed = ssd(x, dt, B=B, C=C, **heads, boundaries=SequenceBoundaries.from_lengths([2, 3]))
    >>> alone = ssd(x[:, 2:], dt[:, 2:], B=B[:, 2:], C=C[:, 2:], **heads)
    >>> torch.allclose(packed[:, 2:], alone, atol=1e-6)
    True

    ```
    """
    _check(x, dt, A, B, C, D, dt_bias)
    options = {"dt_bias": dt_bias, "dt_limit": dt_limit, "boundaries": boundaries}
    return run("ssd", impl, IMPLEMENTATIONS, x, dt, A, B, C, D, **options)


def _check(x, dt, A, B, C, D, dt_bias) -> None:
    heads = x.shape[2:3]
    per_token = x.ndim == B.ndim == 4 and dt.shape == x.shape[:3] and B.shape == C.shape and B.shape[:2] == x.shape[:2]
    if not per_token or any(z.shape != heads for z in (A, D, dt_bias)) or x.shape[2] % B.shape[2]:
        expected = "x [batch, T, H, P], dt [batch, T, H], B and C [batch, T, G, N] with G that divides H"
        raise input_error(f"{expected}, A, D and dt_bias [H]", shapes(x, dt, B, C, A, D, dt_bias))


def torch_ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    chunk_size: int = CHUNK_SIZE,
    **kwargs,
) -> torch.Tensor:
    """Compute the scan in chunks, in plain PyTorch. This is the reference implementation.

    The arguments are those of [`ssd`]. Each row is one sequence, and the packing keywords are ignored.
    """
    length, groups = x.shape[1], B.shape[2]
    wide = widened(x)
    step = F.softplus(widened(dt) + dt_bias).clamp(*dt_limit)
    # Tokens after the last one have a step of 0, so they change no state. [B, chunks, tokens, G, heads of a group, P].
    inputs = wide * step[..., None], step * A, widened(B), widened(C)
    padding = -length % chunk_size
    written, decay, b, c = (
        F.pad(z, (0, 0) * (z.ndim - 2) + (0, padding)).unflatten(1, (-1, chunk_size)) for z in inputs
    )
    written, decay = (z.unflatten(3, (groups, -1)) for z in (written, decay))

    sums = decay.cumsum(2)
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).triu(1)[:, :, None, None]
    pairs = (sums[:, :, :, None] - sums[:, :, None]).masked_fill(later, float("-inf")).exp()
    scores = torch.einsum("zqtgn,zqsgn->zqtsg", c, b)
    outputs = torch.einsum("zqtsgh,zqsghp->zqtghp", scores[..., None] * pairs, written)

    end = sums[:, :, -1:]
    added = torch.einsum("zqsgn,zqsghp->zqghnp", b, written * (end - sums).exp()[..., None])
    kept = end[:, :, 0, ..., None, None].exp()
    state, before = torch.zeros_like(added[:, 0]), []
    for chunk in range(added.shape[1]):
        before.append(state)
        state = state * kept[:, chunk] + added[:, chunk]
    read = torch.einsum("zqtgn,zqghnp->zqtghp", c, torch.stack(before, 1))
    outputs = outputs + read * sums.exp()[..., None]
    return (outputs.flatten(3, 4).flatten(1, 2)[:, :length] + D[:, None] * wide).to(x.dtype)


def _reference(x, dt, A, B, C, D, *, dt_bias, dt_limit, boundaries):
    def scan(x, dt, B, C):
        return torch_ssd(x, dt, A, B, C, D, dt_bias, dt_limit)

    return scan(x, dt, B, C) if boundaries is None else per_document(scan, x, dt, B, C, boundaries=boundaries)


def chunks_of_rows(x: torch.Tensor, boundaries: SequenceBoundaries | None, sizes: str) -> tuple:
    """Return the chunks of all sequences `[batch, T, *sizes]`, or of the documents of a row, for the kernels of a scan."""
    from .backends.triton.ssd import chunks_of

    if boundaries is None:
        boundaries = SequenceBoundaries.from_lengths([x.shape[1]] * len(x), device=x.device)
    else:
        boundaries.check_row(x, "x", sizes)
    return boundaries.derived("ssd", partial(chunks_of, boundaries))


def _triton(x, dt, A, B, C, D, *, dt_bias, dt_limit, boundaries):
    from .backends.triton.ssd import SSD, size_of_heads

    batch, length, heads, dim = x.shape
    chunks = chunks_of_rows(x, boundaries, "H, P")
    size = size_of_heads(heads, dim, B.shape[2])
    x = F.pad(x, (0, size - dim)) if size > dim else x
    sizes = heads, size, *B.shape[2:]
    x, dt, B, C = (z.reshape(batch * length, -1) for z in (x, dt, B, C))
    low, high = dt_limit
    y = SSD.apply(x, dt, A, B, C, D, dt_bias, (float(low), float(high)), *chunks, sizes)
    return y.view(batch, length, heads, size)[..., :dim]


def _verify_triton(x, dt, A, B, C, D, **_):
    if len({x.dtype, B.dtype, C.dtype}) > 1:
        return f"needs one dtype of x, B and C, not {x.dtype}, {B.dtype} and {C.dtype}"
    if x.dtype == torch.float16:
        return "supports float32 and bfloat16, because states overflow in float16"
    return triton.verify(x)


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, _verify_triton),
    "mamba_ssm": Implementation(mamba_ssm.ssd, mamba_ssm.verify_ssd, "its chunks do not begin with documents"),
    "reference": Implementation(_reference),
}


def example(setting: Setting) -> dict[str, Call]:
    """The calls of a layer, for [`availability`]."""
    x, rows, heads = setting.zeros(1, 3, 2, 64), setting.zeros(1, 3, 1, 16), setting.zeros(2)
    call = x, setting.zeros(1, 3, 2), heads, rows, rows, heads
    return {"ssd": Call(IMPLEMENTATIONS, call, setting.row() | {"dt_bias": heads, "dt_limit": (0.0, math.inf)})}
