"""Attention of long documents by cuDNN: documents of similar length as dense batches, and the short rest by `varlen_attn`.

A causal document that is padded on the right needs no mask, because its tokens never see the padding. So a long document
runs alone, and documents of similar length run as a batch. On Hopper, cuDNN's kernels then take 0.6 of the time of
FlashAttention 2, from which `varlen_attn` is made. Each batch is a call, and cuDNN builds a plan for each new shape, which
takes some 0.1 s. Lengths are therefore padded to one of 16 in each octave, and short documents stay in `varlen_attn`.

[`group`] chooses by a model of measured times, once per row on the host. Times that grow with the number of tokens are the
same for both, so only those of the pairs of tokens count, of a call, of the copies of a batch, and of the copies of the
whole row if its documents change their order.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..boundaries import SequenceBoundaries
from ..device_boundaries import DeviceBoundaries
from .autograd import compute_dtype
from .per_document import BucketLayout, cheapest_groups, in_batches, layout_of, spans


# Microseconds of forward and backward on an H100, by benchmarks/attention.py: of a pair of tokens in a head, for each
# element of the head dimension, and of a call. A copy reads and writes an element twice.
VARLEN, DENSE, CALL, COPY = 2.5e-8, 1.5e-8, 250.0, 3.2e-6
# Shorter documents are not looked at.
_SHORTEST = 1024


class Plan(NamedTuple):
    """The dense batches of a row, and the boundaries of all other documents, which follow them in the layout."""

    layout: BucketLayout
    rest: SequenceBoundaries | None


def padded_length(length: int) -> int:
    """Return the length to which a document is padded, a multiple of a sixteenth of the power of two below it."""
    step = 1 << max(6, length.bit_length() - 5)
    return -(-length // step) * step


def group(lengths: Sequence[int], heads: int, kv_heads: int, dim: int) -> list[tuple[list[int], int]]:
    """Choose the documents that run as dense batches, by a model of measured times.

    Args:
        lengths (`Sequence[int]`):
            Tokens of each document of a row.
        heads (`int`), kv_heads (`int`), dim (`int`):
            Heads of queries and keys, and their size.

    Returns:
        `list`: the documents of each batch and the length to which they are padded. All others run in `varlen_attn`.
    """
    sizes: dict[int, list[int]] = {}
    for document, length in enumerate(lengths):
        if length >= _SHORTEST:
            sizes.setdefault(padded_length(length), []).append(document)
    order = sorted(sizes, reverse=True)
    work, copies = heads * dim, 2 * (heads + kv_heads) * dim * COPY

    def time(begin: int, documents: int) -> float:
        longest = order[begin]
        return CALL + documents * longest * (DENSE * work * longest + copies)

    best = cheapest_groups([len(sizes[size]) for size in order], time)

    def groups_of(end: int) -> list[tuple[list[int], int]]:
        return [
            ([document for size in order[begin:stop] for document in sizes[size]], order[begin])
            for begin, stop in spans(best, end)
        ]

    # Time saved against `varlen_attn`, if the i longest sizes are dense.
    saved, varlen = [0.0], 0.0
    for end, size in enumerate(order, start=1):
        varlen += sum(VARLEN * work * lengths[document] ** 2 for document in sizes[size])
        first = [document for documents, _ in groups_of(end) for document in sorted(documents)]
        reordering = 0.0 if first == list(range(len(first))) else sum(lengths) * copies
        saved.append(varlen - best[end][0] - reordering)
    return groups_of(max(range(len(saved)), key=saved.__getitem__))


def plan_of(boundaries: SequenceBoundaries, heads: int, kv_heads: int, dim: int) -> Plan | None:
    """Return the batches of a row, or `None` if `varlen_attn` is faster for all of its documents."""

    def make() -> tuple[Plan | None]:
        lengths = boundaries.lengths
        groups = group(lengths, heads, kv_heads, dim)
        if not groups:
            return (None,)
        dense = {document for documents, _ in groups for document in documents}
        rest = [length for document, length in enumerate(lengths) if document not in dense]
        device = boundaries.cu_seqlens.device
        others = SequenceBoundaries.from_lengths(rest, device=device) if rest else None
        return (Plan(layout_of(lengths, device, groups), others),)

    return boundaries.derived(f"dense attention {heads} {kv_heads} {dim}", make)[0]


def dense_attention(module, query, key, value, *, boundaries, scaling, varlen: Callable, **options):
    """Attention of a packed row as [`attention`] returns it. `varlen` computes the documents that are not dense."""
    plan = plan_of(boundaries, query.shape[1], key.shape[1], query.shape[3])
    assert plan is not None
    dtype = compute_dtype(query)
    rows = [x.transpose(1, 2)[0].to(dtype) for x in (query, key, value)]

    def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return _causal(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scaling).transpose(1, 2)

    def others(*rows: torch.Tensor) -> torch.Tensor:
        heads_first = (row.transpose(0, 1)[None] for row in rows)
        return varlen(module, *heads_first, boundaries=plan.rest, scaling=scaling, **options)[0][0]

    return in_batches(dense, rows, plan.layout, others if plan.rest is not None else None), None


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)


def verify(module, query, key, value, *, boundaries, dropout=0.0, **options) -> str:
    """Verifier of [`dense_attention`]."""
    if reason := why_not(query, key, value, dropout):
        return reason
    if isinstance(boundaries, DeviceBoundaries):
        return "needs the lengths of documents on the host"
    is_faster = plan_of(boundaries, query.shape[1], key.shape[1], query.shape[3]) is not None
    return "" if is_faster else "is not faster for documents of this length"


def why_not(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> str:
    """Return why cuDNN does not compute such attention here, or an empty string."""
    if not query.is_cuda or not is_supported(query.device):
        return "needs tensors on a GPU of compute capability 9.0"
    dtype = compute_dtype(query)
    if dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, not {query.dtype}"
    if dropout:
        return "does not support dropout"
    if torch.are_deterministic_algorithms_enabled():
        return "has no deterministic backward"
    if not _supports(query, key, value, dtype):
        heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
        return f"has no kernel for {heads} and {kv_heads} heads of {dim} in this release of torch and cuDNN"
    return ""


def is_supported(device: torch.device | None = None) -> bool:
    """Whether a GPU, by default the current one, is of the kind for which the times were measured."""
    return not torch.version.hip and torch.cuda.get_device_capability(device) == (9, 0)


_SUPPORTED: dict[tuple, bool] = {}


def _supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether torch can use cuDNN for such heads."""
    call = query.device, dtype, query.shape[1], key.shape[1], query.shape[3], value.shape[3]
    if call not in _SUPPORTED:
        params: Any = torch.backends.cuda.SDPAParams
        batch = (x[:, :, :64].to(dtype) for x in (query, key, value))
        _SUPPORTED[call] = torch.backends.cuda.can_use_cudnn_attention(params(*batch, None, 0.0, True, True))
    return _SUPPORTED[call]
