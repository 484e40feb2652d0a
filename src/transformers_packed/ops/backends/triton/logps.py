"""Log-probabilities and entropies of rows of logits, and the gradient of the logits in their place."""

import triton
import triton.language as tl

from . import next_power_of_2, on_its_device


_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
# A power of two that is 0 in float32. Exponents stop there, so that a logit of -inf adds 0 to the entropy, not NaN.
_LOWEST = tl.constexpr(-200.0)


@triton.jit
def _scaled_logits(logits_ptr, columns, vocab, temperature):
    """Load logits, divide them by the temperature, and change the base of their exponential to 2."""
    logits = tl.load(logits_ptr + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)
    return logits / temperature * _LOG2_E


@triton.jit(do_not_specialize=["first"])
def _statistics(
    logits_ptr, ids_ptr, starts_ptr, totals_ptr, logps_ptr, entropies_ptr, tops_ptr, first, vocab, stride, temperature,
    ENTROPY: tl.constexpr, TOPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    logits_ptr += tl.program_id(0).to(tl.int64) * stride
    row = first + tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    # Each lane keeps its largest exponent so far, and sums relative to it.
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    place = columns
    for start in range(0, vocab, 2 * BLOCK):
        x0 = _scaled_logits(logits_ptr, start + columns, vocab, temperature)
        x1 = _scaled_logits(logits_ptr, start + BLOCK + columns, vocab, temperature)
        new = tl.maximum(largest, tl.maximum(x0, x1))
        # Avoid inf - inf in a lane whose logits are all -inf.
        reference = tl.where(new == float("-inf"), 0.0, new)
        scale = tl.exp2(largest - reference)
        e0 = tl.exp2(x0 - reference)
        e1 = tl.exp2(x1 - reference)
        if ENTROPY:
            weighted = scale * (weighted + tl.maximum(largest - reference, _LOWEST) * total)
            weighted += e0 * tl.maximum(x0 - reference, _LOWEST) + e1 * tl.maximum(x1 - reference, _LOWEST)
        total = total * scale + e0 + e1
        if TOPS:
            # The first column of each lane's largest exponent.
            place = tl.where(x1 > tl.maximum(largest, x0), start + BLOCK + columns, place)
            place = tl.where((x0 > largest) & (x0 >= x1), start + columns, place)
        largest = new
    top = tl.max(largest, 0)
    scale = tl.exp2(largest - top)
    if ENTROPY:
        weighted = tl.sum(scale * (weighted + tl.maximum(largest - top, _LOWEST) * total), 0)
    sum_of_all = tl.sum(total * scale, 0)
    log_sum = tl.log2(sum_of_all)
    log_total = (top + log_sum) * _LN_2
    tl.store(totals_ptr + row, log_total)
    if ENTROPY:
        tl.store(entropies_ptr + row, (log_sum - weighted / sum_of_all) * _LN_2)
    if TOPS:
        place = tl.min(tl.where(largest == top, place, vocab), 0)
    for pair in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        target = tl.load(ids_ptr + pair)
        # A target outside of the vocabulary makes the log-probability NaN.
        known = (target >= 0) & (target < vocab)
        logit = tl.load(logits_ptr + target, mask=known, other=float("nan")).to(tl.float32)
        tl.store(logps_ptr + pair, logit / temperature - log_total)
        if TOPS:
            tl.store(tops_ptr + pair, target == place)


@on_its_device
def statistics(chunk, pairs, temperature, totals, logps, entropies, tops) -> None:
    """Write the log-sum-exp and the entropy of each row, and the log-probability of each pair and whether it is top.

    `chunk` and `pairs` are those of `ops.logps`. The targets of row `i` are `pairs.ids[pairs.starts[i]:pairs.starts[i+1]]`.
    """
    logits, first = chunk.logits, chunk.rows.start
    rows, vocab = logits.shape
    block = min(2048, next_power_of_2(vocab))
    outputs = totals, logps, totals if entropies is None else entropies, logps if tops is None else tops
    options = first, vocab, logits.stride(0), temperature, entropies is not None, tops is not None, block
    _statistics[(rows,)](logits, pairs.ids, pairs.starts, *outputs, *options, num_warps=8)


@triton.jit
def _share(exponent, by_row, by_entropy, entropy, ENTROPY: tl.constexpr):
    """Return the gradient of a logit that is not a target's. `exponent` is its log-probability in base 2."""
    factor = by_row
    if ENTROPY:
        factor += by_entropy * (tl.maximum(exponent, _LOWEST) * _LN_2 + entropy)
    return -tl.exp2(exponent) * factor


@triton.jit(do_not_specialize=["first"])
def _overwrite(
    logits_ptr, ids_ptr, starts_ptr, totals_ptr, logps_ptr, entropies_ptr, by_pair_ptr, by_row_ptr, by_entropy_ptr,
    first, vocab, stride, temperature, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    logits_ptr += tl.program_id(0).to(tl.int64) * stride
    row = first + tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    reference = tl.load(totals_ptr + row) * _LOG2_E
    by_row = tl.load(by_row_ptr + row)
    by_entropy = 0.0
    entropy = 0.0
    if ENTROPY:
        by_entropy = tl.load(by_entropy_ptr + row)
        entropy = tl.load(entropies_ptr + row)
    for start in range(0, vocab, BLOCK):
        at = start + columns
        exponent = _scaled_logits(logits_ptr, at, vocab, temperature) - reference
        gradient = _share(exponent, by_row, by_entropy, entropy, ENTROPY) / temperature
        tl.store(logits_ptr + at, gradient.to(logits_ptr.dtype.element_ty), mask=at < vocab)
    # The gradients of the targets are written after all threads have written theirs. No two targets are equal.
    tl.debug_barrier()
    for pair in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        target = tl.load(ids_ptr + pair)
        known = (target >= 0) & (target < vocab)
        exponent = tl.load(logps_ptr + pair) * _LOG2_E
        share = _share(exponent, by_row, by_entropy, entropy, ENTROPY)
        gradient = (tl.load(by_pair_ptr + pair) + share) / temperature
        tl.store(logits_ptr + target, gradient.to(logits_ptr.dtype.element_ty), mask=known)


@on_its_device
def overwrite_with_gradient(chunk, pairs, temperature, totals, logps, entropies, upstream) -> None:
    """Overwrite the logits `[C, V]` of a chunk with their gradient.

    `upstream` are the gradients of the log-probabilities, summed per pair and per row, and of the entropies per row.
    """
    logits, first = chunk.logits, chunk.rows.start
    rows, vocab = logits.shape
    block = min(2048, next_power_of_2(vocab))
    by_pair, by_row, by_entropy = upstream
    with_entropy = by_entropy is not None
    inputs = pairs.ids, pairs.starts, totals, logps, entropies if with_entropy else totals
    gradients = by_pair, by_row, by_entropy if with_entropy else by_row
    options = first, vocab, logits.stride(0), temperature, with_entropy, block
    _overwrite[(rows,)](logits, *inputs, *gradients, *options, num_warps=8)
