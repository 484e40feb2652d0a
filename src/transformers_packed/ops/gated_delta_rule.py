"""The gated delta rule, Yang et al., "Gated Delta Networks" (arXiv 2412.06464).

Each head decays its state `S` (`K` x `V`), corrects it along the key and reads it with the query:

    S_t = exp(g_t) * (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T          o_t = S_t^T q_t / sqrt(K)

[`torch_recurrent_gated_delta_rule`] computes this token by token, [`torch_chunk_gated_delta_rule`] in chunks. Let `c`
be the cumulative sum of `g` inside a chunk and `S` the state before the chunk. The corrections `u` that the chunk
writes solve a unit lower triangular system

    (I + A) u = beta * v - beta * exp(c) * k S          A_ti = beta_t exp(c_t - c_i) (k_t . k_i)   for i < t

The system has two right-hand sides, one for `v` and one for `k`, and is solved for all chunks at once. Only the update
of `S` from chunk to chunk is sequential. The cost per token and head is O(chunk * (K + V) + K * V). The state and all
sums are float32, or float64 for float64 inputs.

Both torch functions ignore document boundaries: like their namesakes in Transformers, they accept the packing keywords
without using them. [`gated_delta_rule`] isolates the documents.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F

from ..boundaries import CHUNK_SIZE, SequenceBoundaries
from ..errors import input_error, shapes
from .backends import fla, flash_qla, triton
from .dispatch import Call, Implementation, Setting, run, with_triton
from .norm import widened
from .per_document import per_document


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    boundaries: SequenceBoundaries | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    impl: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gated delta rule on a batch of sequences, or on each document of a packed row.

    Args:
        query (`torch.Tensor` of shape `[B, T, H, K]`):
            Queries of any floating dtype.
        key (`torch.Tensor` of shape `[B, T, H, K]`):
            Keys.
        value (`torch.Tensor` of shape `[B, T, HV, V]`):
            Values. `HV` is a multiple of `H`: `HV / H` consecutive value heads share one key head.
        g (`torch.Tensor` of shape `[B, T, HV]`):
            Natural logarithm of the decay, at most 0.
        beta (`torch.Tensor` of shape `[B, T, HV]`):
            Learning rate of the state, usually in (0, 1).
        boundaries ([`SequenceBoundaries`], *optional*):
            Documents of a packed row (`B` = 1). Without `initial_state`, the state of each document starts at zero.
        initial_state (`torch.Tensor` of shape `[B, HV, K, V]`, *optional*):
            State before the first token. For a packed row `[N, HV, K, V]`, one for each document.
        output_final_state (`bool`, *optional*, defaults to `False`):
            Whether to return the state after the last token. For a packed row, one for each document.
        use_qk_l2norm_in_kernel (`bool`, *optional*, defaults to `False`):
            Whether to normalize queries and keys to unit length first.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"flash_qla"`, `"fla"` or `"reference"`.

    Returns:
        `tuple`: the output `[B, T, HV, V]` in the dtype of `query`, and the final state `[B, HV, K, V]`, or
            `[N, HV, K, V]` for a packed row, or `None`.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed import SequenceBoundaries
    >>> from transformers_packed.ops import gated_delta_rule
    >>> q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    >>> g, beta = -torch.rand(1, 5, 2), torch.rand(1, 5, 2)
    >>> packed, _ = gated_delta_rule(q, k, v, g, beta, boundaries=SequenceBoundaries.from_lengths([2, 3]))
    >>> alone, _ = gated_delta_rule(q[:, 2:], k[:, 2:], v[:, 2:], g[:, 2:], beta[:, 2:])
    >>> torch.allclose(packed[:, 2:], alone, atol=1e-6)
    True

    ```
    """
    check_groups(key, value)
    check_state(key, value, initial_state, output_final_state, boundaries)
    options = {"initial_state": initial_state, "output_final_state": output_final_state, "boundaries": boundaries}
    options["use_qk_l2norm_in_kernel"] = use_qk_l2norm_in_kernel
    return run("gated_delta_rule", impl, IMPLEMENTATIONS, query, key, value, g, beta, **options)


def check_groups(key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise an error if the numbers of heads do not match."""
    if value.shape[2] % key.shape[2]:
        got = f"{value.shape[2]} and {key.shape[2]}"
        raise input_error("value heads [B, T, heads, dim] in a multiple of the number of key heads", got)


def check_state(key, value, initial_state, output_final_state: bool, boundaries: SequenceBoundaries | None) -> None:
    """Raise an error if there is not one initial state for each sequence, or if a row has no states."""
    if boundaries is not None and (initial_state is not None or output_final_state):
        boundaries.check_kind("a delta rule with initial or final states")
    if initial_state is None:
        return
    sequences = len(key) if boundaries is None else boundaries.num_documents
    expected = (sequences, value.shape[2], key.shape[-1], value.shape[-1])
    if initial_state.shape != expected:
        raise input_error(f"an initial_state {expected}, one for each sequence", tuple(initial_state.shape))


def gated_delta_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, *, impl: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the decay `g = -exp(a_log) * softplus(a + dt_bias)` and the rate `beta = sigmoid(b)` of the delta rule.

    Args:
        a (`torch.Tensor` of shape `[..., HV]`):
            Projection for the decay, in any floating dtype.
        b (`torch.Tensor` of shape `[..., HV]`):
            Projection for the rate, in any floating dtype.
        a_log (`torch.Tensor` of shape `[HV]`):
            Parameter `A_log` of the layer.
        dt_bias (`torch.Tensor` of shape `[HV]`):
            Parameter `dt_bias` of the layer.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` or `"reference"`.

    Returns:
        `tuple`: `g` in float32 (float64 if `a` is float64) and `beta` in the dtype of `b`, both `[..., HV]`.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import gated_delta_gates
    >>> g, beta = gated_delta_gates(*(torch.zeros(1, 2),) * 2, *(torch.zeros(2),) * 2)
    >>> g.exp().tolist(), beta.tolist()  # softplus(0) is log 2
    ([[0.5, 0.5]], [[0.5, 0.5]])

    ```
    """
    if a.shape != b.shape or a_log.shape != a.shape[-1:] or dt_bias.shape != a.shape[-1:]:
        expected = "a and b [..., HV], a_log and dt_bias [HV] for HV value heads"
        raise input_error(expected, shapes(a, b, a_log, dt_bias))
    return run("gated_delta_gates", impl, GATES, a, b, a_log, dt_bias)


def torch_chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = CHUNK_SIZE,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gated delta rule in chunks, in plain PyTorch. This is the reference implementation.

    The arguments are those of [`gated_delta_rule`], or `g` `[B, T, HV, K]` with a decay for each channel of the keys,
    and then a `chunk_size` that is a power of two. Each row is one sequence: the packing keywords `seq_idx`,
    `cu_seqlens`, `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and `max_length_k`, and all others, are ignored.
    """
    length = query.shape[1]
    inputs = _prepare(query, key, value, g, beta, use_qk_l2norm_in_kernel)
    # [B, H, G, T, ...] -> [B, H, G, chunks, C, ...], `g` with 1 or K columns; zeros after the last token do not change the state.
    padding = -length % chunk_size
    q, k, v, g, beta = (F.pad(x, (0, 0, 0, padding)).unflatten(3, (-1, chunk_size)) for x in inputs)

    log_decay = g.cumsum(dim=4)
    decay_since_start = _decay(log_decay)
    k_beta = k * beta
    pairs = _pairs if g.shape[-1] == 1 else _pairs_by_channel
    system, attended = pairs((k_beta, q), k, log_decay)
    within = attended.unbind(3)
    corrections = _solve(system, v * beta).unbind(3)

    # The state is only read if tokens or an initial state precede the chunk.
    state = None if initial_state is None else initial_state.to(v.dtype).unflatten(1, v.shape[1:3])
    from_state: tuple[torch.Tensor, ...] = ()
    if state is not None or len(corrections) > 1:
        from_state = _solve(system, k_beta * decay_since_start).unbind(3)
    queries = (q * decay_since_start).unbind(3)
    last = log_decay[:, :, :, :, -1:]
    keys = (k * _decay(last - log_decay)).transpose(4, 5).unbind(3)
    chunk_decay = _decay(last).transpose(4, 5).unbind(3)

    outputs = []
    for n, written in enumerate(corrections):
        if state is None:
            outputs.append(within[n] @ written)
            state = keys[n] @ written
        else:
            written = written - from_state[n] @ state
            outputs.append(queries[n] @ state + within[n] @ written)
            state = state * chunk_decay[n] + keys[n] @ written
    return _finish(torch.cat(outputs, dim=3)[:, :, :, :length], state, query.dtype, output_final_state)


def torch_recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gated delta rule token by token, in plain PyTorch.

    Decoding runs this form, and tests compare the chunked form with it. The arguments are those of
    [`gated_delta_rule`]. The packing keywords are ignored.
    """
    q, k, v, g, beta = _prepare(query, key, value, g, beta, use_qk_l2norm_in_kernel)
    if initial_state is None:
        state = v.new_zeros(*v.shape[:3], k.shape[-1], v.shape[-1])
    else:
        state = initial_state.to(v.dtype).unflatten(1, v.shape[1:3])
    decay = g.exp()[..., None]
    outputs = []
    for t in range(q.shape[3]):
        state = state * decay[:, :, :, t]
        # Read k^T S, a row of V, with k_t as a column, then write beta * (v - k^T S) along k.
        k_t = k[:, :, :, t, :, None]
        recalled = k_t.transpose(3, 4) @ state
        state = state + k_t @ ((v[:, :, :, t, None] - recalled) * beta[:, :, :, t, None])
        outputs.append(q[:, :, :, t, None] @ state)
    return _finish(torch.cat(outputs, dim=3), state, query.dtype, output_final_state)


def _prepare(query, key, value, g, beta, normalise: bool) -> list[torch.Tensor]:
    """Move heads before tokens, cast to float32 (or float64) and scale `q`.

    The shape is `[B, H, G, T, ...]` with `G` value heads per key head. Queries and keys have `G` = 1 and are broadcast
    to their value heads. `beta` is a column, and so is `g`, unless it has one for each channel.
    """
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k = (x.transpose(1, 2).to(dtype)[:, :, None] for x in (query, key))
    if normalise:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    groups = (k.shape[1], -1)
    columns = (x[..., None] if x.ndim == 3 else x for x in (g, beta))
    columns = (x.transpose(1, 2).to(dtype).unflatten(1, groups) for x in columns)
    return [q, k, value.transpose(1, 2).to(dtype).unflatten(1, groups), *columns]


def _finish(output, state, dtype: torch.dtype, output_final_state: bool):
    """Return `[B, T, HV, V]` in the caller's dtype, and the state `[B, HV, K, V]` if `output_final_state` is set."""
    output = output.flatten(1, 2).transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)
    return output, state.flatten(1, 2) if output_final_state else None


def _decay(log_decay: torch.Tensor) -> torch.Tensor:
    """Compute `exp(log_decay)`, with zero below the square root of the smallest normal number (1e-19 in float32).

    Rounding removes such small factors from the sums that contain them, but the product of two of them is a denormal
    number. Denormal numbers are slow on a CPU: with the strong decays of a new model they took two fifths of the time.
    """
    smallest = 0.5 * math.log(torch.finfo(log_decay.dtype).tiny)
    return log_decay.masked_fill(log_decay < smallest, float("-inf")).exp()


def _pairs(rows, k: torch.Tensor, log_decay: torch.Tensor) -> list[torch.Tensor]:
    """Return `[..., C, C]` for each of `rows` `[..., C, K]`: the products with earlier `k`, with the decay in between.

    The entries above the diagonal are zero.
    """
    chunk_size = k.shape[4]
    later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=k.device).triu(1)
    pair_decay = _decay((log_decay - log_decay.transpose(4, 5)).masked_fill(later, float("-inf")))
    return [(x @ k.transpose(4, 5)) * pair_decay for x in rows]


def _pairs_by_channel(rows, k: torch.Tensor, log_decay: torch.Tensor) -> list[torch.Tensor]:
    """Like [`_pairs`], for a decay of each channel.

    Between a token of the first half of a chunk and one of the second, the decay is that up to the middle times that
    from there on. Both factors are at most 1, so nothing overflows, and all such pairs are one product of matrices.
    The pairs inside a half are those of a chunk of half the size.
    """
    # One value head or a group of them, which queries and keys are broadcast to.
    shape, half = log_decay.shape[:-1], 1
    found = [(x * k).sum(-1).expand(shape)[..., None, None] for x in rows]
    while half < k.shape[4]:
        first, second = (log_decay.unflatten(4, (-1, 2, half))[..., i, :, :] for i in (0, 1))
        middle = first[..., -1:, :]
        earlier = k.unflatten(4, (-1, 2, half))[..., 0, :, :] * _decay(middle - first)
        later_decay = _decay(second - middle)
        for i, x in enumerate(rows):
            later = x.unflatten(4, (-1, 2, half))[..., 1, :, :] * later_decay
            above, below = found[i].unflatten(4, (-1, 2)).unbind(5)
            corner = torch.cat([later @ earlier.transpose(-2, -1), below], dim=-1)
            found[i] = torch.cat([F.pad(above, (0, half)), corner], dim=-2)
        half *= 2
    return [x.squeeze(4) for x in found]


def _solve(system: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Solve `(I + strictly_lower(system)) x = right` for `x`."""
    return torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)


def reference(query, key, value, g, beta, *, boundaries, **options):
    """The reference implementation of [`gated_delta_rule`], also for `g` `[B, T, HV, K]`."""
    if boundaries is not None and (options["initial_state"] is not None or options["output_final_state"]):
        return _documents_with_states(query, key, value, g, beta, boundaries=boundaries, **options)
    if boundaries is not None:
        rule = partial(torch_chunk_gated_delta_rule, **options)
        return per_document(lambda *x: rule(*x)[0], query, key, value, g, beta, boundaries=boundaries), None
    decoding = query.shape[1] == 1 and options["initial_state"] is not None
    function = torch_recurrent_gated_delta_rule if decoding else torch_chunk_gated_delta_rule
    return function(query, key, value, g, beta, **options)


def _documents_with_states(*tensors, boundaries, initial_state, **options):
    documents = zip(*(x.split(boundaries.lengths, dim=1) for x in tensors), strict=True)
    states = [None] * boundaries.num_documents if initial_state is None else initial_state.split(1)
    results = [
        torch_chunk_gated_delta_rule(*document, initial_state=state, **options)
        for document, state in zip(documents, states, strict=True)
    ]
    outputs, states = zip(*results, strict=True)
    return torch.cat(outputs, dim=1), torch.cat(states) if options["output_final_state"] else None


IMPLEMENTATIONS = {
    "flash_qla": Implementation(flash_qla.gated_delta_rule, flash_qla.verify_gated_delta_rule),
    "fla": Implementation(fla.gated_delta_rule, fla.verify_gated_delta_rule),
    "reference": Implementation(reference),
}


def _gates_reference(a, b, a_log, dt_bias):
    # Compute exp(a_log) in float32, because float16 overflows.
    return -widened(a_log).exp() * F.softplus(widened(a) + dt_bias), b.sigmoid()


def _gates_triton(a, b, a_log, dt_bias):
    from .backends.triton.gated_delta_rule import GatedDeltaGates

    g, beta = GatedDeltaGates.apply(*(x.reshape(-1, len(a_log)) for x in (a, b)), a_log, dt_bias)
    return g.view(a.shape), beta.view(b.shape)


GATES = with_triton(_gates_triton, triton.verify, _gates_reference)


def example(setting: Setting) -> dict[str, Call]:
    """The calls of a layer, for [`availability`]."""
    query, value = setting.zeros(1, 3, 2, setting.key_dim), setting.zeros(1, 3, 4, setting.value_dim)
    g, gate, vector = setting.zeros(1, 3, 4, dtype=torch.float32), setting.zeros(1, 3, 4), setting.zeros(4)
    return {
        "gated_delta_rule": Call(IMPLEMENTATIONS, (query, query, value, g, gate), setting.row()),
        "gated_delta_gates": Call(GATES, (gate, gate, vector, vector)),
    }
