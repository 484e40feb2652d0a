"""Log-probabilities of given tokens from hidden states and a language modeling head, without full logits.

[`linear_logps`] drops ignored targets and computes the logits of a few thousand tokens at a time. The forward keeps the
log-sum-exp of each row of logits. The backward accepts any gradient per token: it recomputes the logits of a chunk,
overwrites them with their gradient, and computes the gradients of the hidden states and the head before the next chunk.
The cost is four matrix products of `tokens x hidden x vocabulary`, or three with a frozen head.
[`linear_cross_entropy`] needs three, or two with a frozen head, because the gradient of a mean is known in the forward.
With a frozen head or `same_gradient`, this forward also computes the gradients, and the backward only scales them.
Dropping ignored targets requires their number on the host, which costs one host sync.

Several targets can share a hidden row, such as the first tokens of several completions of one prompt. The logits of a
shared row are computed once. Equal targets of a row count as one pair, so each pair writes its own logit's gradient.
Upstream gradients are added per pair and per row before the chunks: in order on a CPU, and on a GPU by
`index_put_(accumulate=True)`, which sorts the indices instead of using atomics. Results are bitwise reproducible.
Finding the distinct rows and pairs costs three more host syncs.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..errors import input_error, shapes
from .autograd import compute_dtype, first_order, retains_graph
from .cross_entropy import HeadGradients, by_chunks, rows_of_chunk
from .dispatch import run
from .norm import widened


# The exponential of this log-probability is 0 in every dtype. With it, a logit of -inf adds 0 to the entropy, not NaN.
_LOWEST = -1000.0


def linear_logps(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    temperature: float = 1.0,
    ignore_index: int | None = -100,
    rows: torch.Tensor | None = None,
    entropy: bool = False,
    is_top1: bool = False,
    same_gradient: bool = False,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Compute `log_softmax((hidden_states @ weight.T + bias) / temperature)` at the targets, in chunks of tokens.

    Args:
        hidden_states (`torch.Tensor` of shape `[..., hidden]`):
            Input of the head, in any floating dtype. With `rows`, `[N, hidden]`.
        weight (`torch.Tensor` of shape `[vocab, hidden]`):
            Weight of the head, in the same dtype.
        targets (`torch.LongTensor` of shape `[...]`):
            Token whose log-probability is computed. Targets must already be shifted.
        bias (`torch.Tensor` of shape `[vocab]`, *optional*):
            Bias of the head.
        temperature (`float`, *optional*, defaults to 1.0):
            Divisor of the logits, applied in float32.
        ignore_index (`int`, *optional*, defaults to -100):
            Target of tokens without one. With `None`, each token has a target, and none are searched for.
        rows (`torch.LongTensor` of the shape of `targets`, *optional*):
            Index of the hidden row of each target. Several targets can share a row. Defaults to one row per target.
        entropy (`bool`, *optional*, defaults to `False`):
            Whether to also return the entropy of each target's distribution. It is differentiable.
        is_top1 (`bool`, *optional*, defaults to `False`):
            Whether to also return whether each target is the `argmax` of its logits: the first largest one.
        same_gradient (`bool`, *optional*, defaults to `False`):
            Whether to expect the same gradient for all log-probabilities, as from their sum. The forward then computes
            the gradient of a trained head, which takes one matrix product less. The backward compares the gradients,
            which costs one host sync, and starts again if they differ. No effect with `rows`.
        chunk_size (`int`, *optional*):
            Number of hidden rows per chunk of logits. Defaults to that of [`linear_cross_entropy`] for so many rows.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (chunks, with kernels for the softmax), `"torch"` (chunks), or `"reference"` (all
            logits at once).

    Returns:
        `torch.Tensor`: log-probabilities of the shape of `targets`, float32, or float64 for float64 inputs. 0 for
            ignored targets, and NaN for targets outside the vocabulary. With `entropy` or `is_top1`, a tuple of the
            log-probabilities, the entropies (of the same shape and dtype, 0 for ignored targets) if asked for, and
            booleans of the same shape (`False` for ignored targets) if asked for.

    Raises:
        `ValueError`: the shapes do not match, `temperature` or `chunk_size` is not positive, or `impl` does not
            support the call. The backward with `create_graph=True` raises it for any `impl` except `"reference"`.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import linear_logps
    >>> hidden_states, weight = torch.randn(5, 8), torch.randn(11, 8)
    >>> logps = linear_logps(hidden_states, weight, torch.tensor([3, -100, 0, 10, 7]))
    >>> expected = (hidden_states @ weight.T).log_softmax(-1)
    >>> torch.allclose(logps[[0, 2, 3, 4]], expected[[0, 2, 3, 4], [3, 0, 10, 7]], atol=1e-5), logps[1].item()
    (True, 0.0)
    >>> shared = linear_logps(hidden_states, weight, torch.tensor([3, 9, 3]), rows=torch.tensor([0, 0, 4]))
    >>> torch.allclose(shared, expected[[0, 0, 4], [3, 9, 3]], atol=1e-5)
    True

    ```
    """
    _check(hidden_states, weight, targets, bias, rows)
    if chunk_size is None:
        hidden = weight.shape[1]
        chunk_size = rows_of_chunk(hidden_states.numel() // hidden, hidden, not weight.requires_grad)
    if chunk_size < 1 or not temperature > 0:
        raise input_error("chunk_size of 1 or more and temperature above 0", f"{chunk_size} and {temperature}")
    options = {"temperature": float(temperature), "ignore_index": ignore_index, "same_gradient": same_gradient}
    options |= {"entropy": entropy, "is_top1": is_top1}
    flat = targets.reshape(-1), bias, None if rows is None else rows.reshape(-1)
    call = hidden_states.reshape(-1, weight.shape[1]), weight, *flat
    found = run("linear_logps", impl, IMPLEMENTATIONS, *call, chunk_size=chunk_size, **options)
    found = tuple(x.view(targets.shape) for x in found if x is not None)
    return found if entropy or is_top1 else found[0]


def _check(hidden_states, weight, targets, bias, rows):
    shape = targets.shape if rows is None else hidden_states.shape[:1]
    fits = weight.ndim == 2 and hidden_states.shape == (*shape, weight.shape[1])
    fits = fits and (rows is None or rows.shape == targets.shape)
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        of_rows = "..." if rows is None else "N"
        expected = (
            f"hidden_states [{of_rows}, hidden], weight [vocab, hidden], targets [...], bias [vocab] and rows [...]"
        )
        raise input_error(expected, shapes(hidden_states, weight, targets, bias, rows))
    for name, x in (("targets", targets), ("rows", rows)):
        if x is not None and (x.is_floating_point() or x.dtype == torch.bool):
            raise input_error(f"integer {name}", x.dtype)


def _reference(hidden_states, weight, targets, bias, rows, *, temperature, ignore_index, entropy, is_top1, **_):
    targets = targets.to(hidden_states.device).long()
    ignored = torch.zeros_like(targets, dtype=torch.bool) if ignore_index is None else targets == ignore_index
    if rows is not None:
        hidden_states = hidden_states[rows.to(hidden_states.device).masked_fill(ignored, 0).long()]
    # Zeros, so that NaN in a row without target reaches neither the result nor the gradient of the weight.
    hidden_states = hidden_states.masked_fill(ignored[:, None], 0)
    logits = widened(F.linear(hidden_states, weight, bias)) / temperature
    logps = logits.log_softmax(-1)
    known = (targets >= 0) & (targets < weight.shape[0])
    found = logps.gather(1, targets.where(known, 0)[:, None])[:, 0]
    # NaN for a target outside of the vocabulary, but the finite gradient of its normalization, as in the chunks.
    found = found.where(known, float("nan") - logits.logsumexp(-1))
    entropies = None
    if entropy:
        entropies = -(logps.exp() * logps.clamp_min(_LOWEST)).sum(-1).masked_fill(ignored, 0)
    tops = (logits.argmax(-1) == targets) & ~ignored if is_top1 else None
    return found.masked_fill(ignored, 0), entropies, tops


class _Pairs(NamedTuple):
    """The distinct pairs of a row of logits and a target.

    `ids` `[P]` are the targets and `slots` `[P]` the rows of logits, in ascending order. The pairs of row `i` start at
    `starts[i]`, `[D + 1]`. Target `i` is pair `of[i]`, or pair `i` if `of` is `None`. `bounds` are the starts of the
    chunks in the pairs.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    of: torch.Tensor | None
    bounds: list[int]

    def of_targets(self, values: torch.Tensor) -> torch.Tensor:
        """Copy `values` `[P]` of pairs to the targets."""
        return values.clone() if self.of is None else values[self.of]


def _chunked(steps, hidden_states, weight, targets, bias, rows, *, ignore_index, **options):
    chunk_size = options["chunk_size"]
    device, count, vocab = hidden_states.device, len(targets), weight.shape[0]
    kept = None if ignore_index is None else (targets != ignore_index).nonzero().flatten().to(device)
    if kept is not None and len(kept) == count:
        kept = None
    targets, chosen = targets.to(device).long(), None
    if kept is not None:
        targets, chosen = targets.index_select(0, kept), kept
    if rows is None:
        starts = torch.arange(len(targets) + 1, device=device)
        pairs = _Pairs(targets, starts[:-1], starts, None, [*range(0, len(targets), chunk_size), len(targets)])
    else:
        rows = rows.to(device).long()
        chosen, slots = (rows if kept is None else rows.index_select(0, kept)).unique(return_inverse=True)
        pairs = _distinct(slots, targets, len(chosen), vocab, chunk_size)
    if chosen is not None:
        hidden_states = hidden_states.index_select(0, chosen)
    # Gradients are always disabled inside a forward, which has to know whether they are needed.
    options = SimpleNamespace(steps=steps, wanted=torch.is_grad_enabled(), **options)
    found = _LinearLogps.apply(hidden_states, weight, bias, pairs, options)
    if kept is not None:
        found = [None if x is None else x.new_zeros(count).index_copy(0, kept, x) for x in found]
    return found


def _distinct(slots, targets, count, vocab, chunk_size) -> _Pairs:
    # All targets outside of the vocabulary count as the same one.
    known = (targets >= 0) & (targets < vocab)
    keys, of = (slots * (vocab + 1) + targets.where(known, vocab)).unique(return_inverse=True)
    slots, ids = keys // (vocab + 1), keys % (vocab + 1)
    starts = torch.searchsorted(slots, torch.arange(count + 1, device=slots.device))
    return _Pairs(ids, slots, starts, of, [*starts[:count:chunk_size].tolist(), len(ids)])


class _Chunk(NamedTuple):
    """A chunk of rows of logits with their pairs."""

    rows: slice
    pairs: slice
    logits: torch.Tensor


def _chunks(hidden_states, weight, bias, pairs: _Pairs, chunk_size: int) -> Iterator[_Chunk]:
    """Compute the logits of each chunk, in the same buffer."""
    buffer = hidden_states.new_empty(min(chunk_size, len(hidden_states)), weight.shape[0])
    for i, start in enumerate(range(0, len(hidden_states), chunk_size)):
        rows = slice(start, min(start + chunk_size, len(hidden_states)))
        logits = torch.mm(hidden_states[rows], weight.t(), out=buffer[: rows.stop - start])
        if bias is not None:
            logits += bias
        yield _Chunk(rows, slice(*pairs.bounds[i : i + 2]), logits)


class _LinearLogps(torch.autograd.Function):
    """The log-probability of each target, the entropy of its row or `None`, and whether it is the top one or `None`.

    With a frozen head or `same_gradient`, the forward also computes the gradients of the sum of the log-probabilities. A
    backward without gradients of entropies only scales them.
    """

    @staticmethod
    def forward(ctx, hidden_states, weight, bias, pairs, options):
        ctx.pairs, ctx.options = pairs, options
        ctx.set_materialize_grads(False)
        # Autocast would run the matrix product of the head in low precision too.
        ctx.dtype = compute_dtype(hidden_states)
        statistics, overwrite_with_gradient, _ = options.steps
        totals = hidden_states.new_empty(len(hidden_states), dtype=torch.promote_types(ctx.dtype, torch.float32))
        entropies = torch.empty_like(totals) if options.entropy else None
        logps = totals.new_empty(len(pairs.ids))
        tops = torch.empty_like(logps, dtype=torch.bool) if options.is_top1 else None
        frozen = not any(ctx.needs_input_grad[1:3])
        ahead = options.wanted and any(ctx.needs_input_grad) and pairs.of is None and (frozen or options.same_gradient)
        inputs = hidden_states, weight, bias
        ctx.ahead = HeadGradients(ctx.needs_input_grad[:3], inputs, ctx.dtype) if ahead else None
        ones = torch.ones_like(totals) if ahead else None
        head = hidden_states.to(ctx.dtype), weight.to(ctx.dtype), bias
        for chunk in _chunks(*head, pairs, options.chunk_size):
            statistics(chunk, pairs, options.temperature, totals, logps, entropies, tops)
            if ahead:
                overwrite_with_gradient(chunk, pairs, options.temperature, totals, logps, None, (ones, ones, None))
                ctx.ahead.add(chunk.rows, chunk.logits, head[0][chunk.rows], head[1])
        ctx.save_for_backward(hidden_states, weight, bias, totals, logps, entropies)
        if options.is_top1:
            tops = pairs.of_targets(tops)
            ctx.mark_non_differentiable(tops)
        # Copies, so that the caller may change the result in place.
        return pairs.of_targets(logps), entropies[pairs.of_targets(pairs.slots)] if options.entropy else None, tops

    @staticmethod
    @first_order('Pass impl="reference" to the op. It supports gradients of any order.')
    def backward(ctx, d_logps, d_entropies, _):
        hidden_states, weight, bias, totals, logps, entropies = ctx.saved_tensors
        pairs, (_, overwrite_with_gradient, scaled) = ctx.pairs, ctx.options.steps
        if d_logps is None and d_entropies is None:
            return (None,) * 5
        kept, ahead = retains_graph(), ctx.ahead
        if not kept:
            # The graph outlives this backward, and the gradient of the weight is large.
            ctx.ahead = None
        if ahead is not None and d_entropies is None:
            if not any(ctx.needs_input_grad[1:3]):
                return (ahead.hidden_states * d_logps[:, None]).to(hidden_states.dtype), None, None, None, None
            # The sums over tokens need the same gradient for all of them.
            if not len(d_logps) or bool((d_logps == d_logps[0]).all()):
                return *ahead.scaled(d_logps[:1].sum(), scaled, kept), None, None
        del ahead
        if d_logps is None:
            d_logps = torch.zeros_like(d_entropies)
        slots = None if pairs.of is None else pairs.slots[pairs.of]
        upstream = (
            _sum_by(pairs.of, d_logps, len(logps)),
            _sum_by(slots, d_logps, len(totals)),
            None if d_entropies is None else _sum_by(slots, d_entropies, len(totals)),
        )
        gradients = HeadGradients(ctx.needs_input_grad[:3], (hidden_states, weight, bias), ctx.dtype)
        head = hidden_states.to(ctx.dtype), weight.to(ctx.dtype), bias
        for chunk in _chunks(*head, pairs, ctx.options.chunk_size):
            overwrite_with_gradient(chunk, pairs, ctx.options.temperature, totals, logps, entropies, upstream)
            gradients.add(chunk.rows, chunk.logits, head[0][chunk.rows], head[1])
        found = zip((gradients.hidden_states, gradients.weight, gradients.bias), gradients.dtypes, strict=True)
        return *(None if x is None else x.to(dtype) for x, dtype in found), None, None


def _sum_by(index: torch.Tensor | None, values: torch.Tensor, count: int) -> torch.Tensor:
    """Sum `values` with the same index, in a fixed order. Without an index, each value has its own."""
    if index is None:
        return values.contiguous()
    sums = values.new_zeros(count)
    # On a GPU, index_add_ uses atomics, and index_put_ sorts the indices.
    return sums.index_put_((index,), values, accumulate=True) if sums.is_cuda else sums.index_add_(0, index, values)


def _at_targets(chunk: _Chunk, pairs: _Pairs):
    """Return the row in the chunk and the column of each pair, and whether it is in the vocabulary."""
    ids = pairs.ids[chunk.pairs]
    known = (ids >= 0) & (ids < chunk.logits.shape[1])
    return pairs.slots[chunk.pairs] - chunk.rows.start, ids.where(known, 0), known


def _torch_statistics(chunk, pairs, temperature, totals, logps, entropies, tops):
    """Write the log-sum-exp and the entropy of each row, and the log-probability of each pair and whether it is top."""
    values = chunk.logits.to(totals.dtype, copy=True).div_(temperature)
    totals[chunk.rows] = total = values.logsumexp(-1)
    slots, ids, known = _at_targets(chunk, pairs)
    logps[chunk.pairs] = (values[slots, ids] - total[slots]).where(known, float("nan"))
    if tops is not None:
        tops[chunk.pairs] = values.argmax(-1)[slots] == pairs.ids[chunk.pairs]
    if entropies is not None:
        values -= total[:, None]
        entropies[chunk.rows] = torch.special.entr(values.exp_()).sum(-1)


def _torch_gradient(chunk, pairs, temperature, totals, logps, entropies, upstream):
    """Overwrite the logits of a chunk with their gradient."""
    by_pair, by_row, by_entropy = upstream
    values = widened(chunk.logits).div_(temperature).sub_(totals[chunk.rows, None])
    factor = by_row[chunk.rows, None]
    if by_entropy is not None:
        surprise = values.clamp_min(_LOWEST).add_(entropies[chunk.rows, None])
        factor = surprise.mul_(by_entropy[chunk.rows, None]).add_(factor)
    gradient = values.exp_().mul_(factor).neg_()
    slots, ids, known = _at_targets(chunk, pairs)
    # Pairs are distinct. Only zeros may share an element with another pair.
    gradient.index_put_((slots, ids), by_pair[chunk.pairs].where(known, 0), accumulate=True)
    chunk.logits.copy_(gradient.div_(temperature))


_KERNELS = {"statistics": "logps", "overwrite_with_gradient": "logps"}
IMPLEMENTATIONS = by_chunks(_chunked, _KERNELS, (_torch_statistics, _torch_gradient), _reference)
