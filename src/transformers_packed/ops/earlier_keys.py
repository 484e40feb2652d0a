"""Attention of the last tokens of a document to all of its tokens, by cuDNN, with one call for each piece of keys.

cuDNN has no causal mask for queries that begin after the keys. So the queries attend to all keys of an earlier piece in one
call, and to those of their own piece, up to themselves, in the last one. Each call also returns the logarithm of its sums of
exponentials, by which the outputs are averaged. In the backward, each call gets the average and the logarithm of the total
sums, and computes its share of the gradients.

Queries are padded to lengths for which cuDNN has a plan. The padding has neither a gradient nor a reader. If the last piece
has more keys than queries, the padding stands before the queries, and the mask is causal again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from . import dense_attention
from .autograd import compute_dtype, first_order
from .dense_attention import padded_length


Pair = tuple[torch.Tensor, torch.Tensor]


def attention_after_pieces(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, earlier: Sequence[Pair], scaling: float
) -> torch.Tensor:
    """Compute causal attention `[1, T, H, D]` of the last tokens of a document.

    Args:
        query (`torch.Tensor` of shape `[1, H, T, D]`):
            Queries of these tokens.
        key (`torch.Tensor` of shape `[1, HKV, S, D]`), value (`torch.Tensor` of the same shape):
            Keys and values of the last `S >= T` tokens.
        earlier (`Sequence` of pairs of `torch.Tensor`):
            Keys and values `[1, HKV, N, D]` of all tokens before those, in pieces of one length.
        scaling (`float`):
            Scaling factor of the dot products.
    """
    dtype = compute_dtype(query)
    flat = [x.to(dtype) for pair in (*earlier, (key, value)) for x in pair]
    return _Averaged.apply(scaling, query.to(dtype), *flat).transpose(1, 2)


def why_not(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, earlier: Sequence[Pair], dropout: float
) -> str:
    """Return why [`attention_after_pieces`] does not support a call or is slower than `varlen_attn`, or an empty string."""
    if reason := dense_attention.why_not(query, key, value, dropout):
        return reason
    before = sum(k.shape[2] for k, _ in earlier)
    faster = is_faster(query.shape[2], key.shape[2], before, len(earlier), query.shape[1] * query.shape[3])
    return "" if faster else "is not faster for pieces of this length"


def is_faster(queries: int, keys: int, before: int, pieces: int, width: int) -> bool:
    """Whether [`attention_after_pieces`] takes less time than `varlen_attn`, by a model of measured times.

    Args:
        queries (`int`), keys (`int`):
            Tokens of `query`, and of `key`.
        before (`int`), pieces (`int`):
            Tokens of `earlier`, and the number of its pairs.
        width (`int`):
            Heads of queries times their size.
    """
    # A causal mask leaves half of the pairs.
    varlen = dense_attention.VARLEN * width * (queries**2 + 2 * queries * (before + keys - queries))
    dense = dense_attention.DENSE * width * (padded_length(keys) ** 2 + 2 * padded_length(queries) * before)
    # Outputs and gradients of queries are averaged and added up.
    dense += (pieces + 1) * (dense_attention.CALL + 4 * width * queries * dense_attention.COPY)
    return dense < varlen


@dataclass(frozen=True)
class _Call:
    """A call of the kernel, for a number of queries with padding before and after them."""

    key: torch.Tensor
    value: torch.Tensor
    before: int
    queries: int
    length: int
    is_causal: bool

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        return _padded(x, self.before, self.length)

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, self.before : self.before + self.queries]


def _padded(x: torch.Tensor, before: int, length: int) -> torch.Tensor:
    """Pad `[1, H, T, D]` with zeros."""
    after = length - before - x.shape[2]
    return F.pad(x, (0, 0, before, after)) if before or after else x


def _calls(query: torch.Tensor, flat: Sequence[torch.Tensor]) -> Iterator[_Call]:
    *earlier, (key, value) = zip(flat[::2], flat[1::2], strict=True)
    queries, keys = query.shape[2], key.shape[2]
    for pair in earlier:
        yield _Call(*pair, 0, queries, padded_length(queries), is_causal=False)
    length = padded_length(keys)
    yield _Call(_padded(key, 0, length), _padded(value, 0, length), keys - queries, queries, length, is_causal=True)


class _Averaged(torch.autograd.Function):
    """Attention of queries `[1, H, T, D]` to pairs of keys and values, of which the last ends with those of the queries."""

    @staticmethod
    def forward(ctx, scale, query, *flat):
        ctx.scale = scale
        output, total = _attention_after_pieces(query, list(flat), scale)
        ctx.save_for_backward(query, output, total, *flat)
        return output

    @staticmethod
    @first_order("Compute second-order gradients with attn_implementation='eager'.")
    def backward(ctx, gradient):
        query, output, total, *flat = ctx.saved_tensors
        of_query, of_pairs = torch.zeros_like(query, dtype=total.dtype), []
        for call in _calls(query, flat):
            rows = call.pad(gradient), call.pad(query), call.key, call.value, call.pad(output)
            found, *pair = _differentiate(*rows, call.pad(total), call.is_causal, ctx.scale)
            of_query += call.unpad(found)
            of_pairs += pair
        # Without the padding of the last pair.
        of_pairs[-2:] = (x[:, :, : flat[-1].shape[2]] for x in of_pairs[-2:])
        return None, of_query.to(query.dtype), *of_pairs


# One operator, of which checkpointing keeps one output, not those of the calls.
@torch.library.custom_op("transformers_packed::attention_after_pieces", mutates_args=())
def _attention_after_pieces(
    query: torch.Tensor, flat: list[torch.Tensor], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the average `[1, H, T, D]` of the calls, and the logarithm of their sums of exponentials `[1, H, T, 1]`."""
    output: Any = None
    total: Any = None
    for call in _calls(query, flat):
        found, sums = _attend(call.pad(query), call.key, call.value, call.is_causal, scale)
        found, sums = call.unpad(found), call.unpad(sums.view(*found.shape[:3], 1))
        if output is None:
            output, total = found.to(torch.promote_types(found.dtype, torch.float32)), sums
        else:
            before, total = total, torch.logaddexp(total, sums)
            output.mul_((before - total).exp()).addcmul_(found, (sums - total).exp())
    return output.to(query.dtype, copy=True), total.clone()


def _attend(query, key, value, is_causal: bool, scale: float) -> Sequence[torch.Tensor]:
    """Return outputs, and logarithms of sums of exponentials."""
    function = torch.ops.aten._scaled_dot_product_cudnn_attention
    return function(query, key, value, None, True, 0.0, is_causal, scale=scale)[:2]


def _differentiate(gradient, query, key, value, output, sums, is_causal: bool, scale: float) -> Sequence[torch.Tensor]:
    """Return the gradients of query, key and value."""
    function = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    # Without dropout, nothing reads the state of a random generator.
    no_random = torch.zeros((), dtype=torch.int64, device=query.device)
    lengths = None, None, query.shape[2], key.shape[2]
    inputs = gradient, query, key, value, output, sums, no_random, no_random, None
    return function(*inputs, *lengths, 0.0, is_causal, scale=scale)
