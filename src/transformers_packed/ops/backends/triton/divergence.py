"""Divergences of rows of logits from those of a teacher, and the gradient of the student's logits."""

import math

import torch
import triton
import triton.language as tl

from . import next_power_of_2, on_its_device


@triton.jit
def _logits(ptr, columns, vocab, scale, cap, CAPPED: tl.constexpr):
    """Load products, and make logits of them. Columns outside of the vocabulary are -inf."""
    x = tl.load(ptr + columns, mask=columns < vocab, other=0.0).to(tl.float32) * scale
    if CAPPED:
        x = cap * (2.0 * tl.sigmoid(2.0 * x) - 1.0)
    return tl.where(columns < vocab, x, float("-inf"))


@triton.jit
def _log_mixture(log_p, log_q, log_beta, log_rest):
    """The logarithm of `beta * p + (1 - beta) * q`."""
    one = log_p + log_beta
    other = log_q + log_rest
    top = tl.maximum(one, other)
    # Avoid inf - inf where both are -inf.
    reference = tl.where(top == float("-inf"), 0.0, top)
    return reference + tl.log(tl.exp(one - reference) + tl.exp(other - reference))


@triton.jit
def _times(probability, difference):
    """Their product, which is 0 where the probability is, even if the difference is not finite."""
    return tl.where(probability > 0.0, probability * difference, 0.0)


@triton.jit
def _divergence(
    q_ptr, p_ptr, gradient_ptr, losses_ptr, entropies_ptr, vocab, q_scale, q_cap, p_scale, p_cap, beta, log_beta, log_rest,
    MODE: tl.constexpr, Q_CAPPED: tl.constexpr, P_CAPPED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    q_ptr += row * vocab
    p_ptr += row * vocab
    columns = tl.arange(0, BLOCK)
    # Each lane keeps its largest logits so far, and sums relative to them.
    q_top = tl.full((BLOCK,), float("-inf"), tl.float32)
    p_top = tl.full((BLOCK,), float("-inf"), tl.float32)
    q_total = tl.zeros((BLOCK,), tl.float32)
    p_total = tl.zeros((BLOCK,), tl.float32)
    # The student's logits with its own weights, and with the weights of one model, its logits minus the other's.
    own = tl.zeros((BLOCK,), tl.float32)
    gap = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        q = _logits(q_ptr, start + columns, vocab, q_scale, q_cap, Q_CAPPED)
        p = _logits(p_ptr, start + columns, vocab, p_scale, p_cap, P_CAPPED)
        q_new = tl.maximum(q_top, q)
        p_new = tl.maximum(p_top, p)
        # Avoid inf - inf in a lane whose logits are all -inf.
        q_reference = tl.where(q_new == float("-inf"), 0.0, q_new)
        p_reference = tl.where(p_new == float("-inf"), 0.0, p_new)
        q_rest = tl.exp(q_top - q_reference)
        p_rest = tl.exp(p_top - p_reference)
        q_share = tl.exp(q - q_reference)
        p_share = tl.exp(p - p_reference)
        q_total = q_total * q_rest + q_share
        p_total = p_total * p_rest + p_share
        own = own * q_rest + _times(q_share, q)
        if MODE == 0:
            gap = gap * p_rest + _times(p_share, p - q)
        elif MODE == 1:
            gap = gap * q_rest + _times(q_share, q - p)
        q_top = q_new
        p_top = p_new
    top = tl.max(q_top, 0)
    rest = tl.exp(q_top - top)
    q_sum = tl.sum(q_total * rest, 0)
    q_norm = top + tl.log(q_sum)
    tl.store(entropies_ptr + row, q_norm - tl.sum(own * rest, 0) / q_sum)
    if MODE == 1:
        gap *= rest
    top = tl.max(p_top, 0)
    rest = tl.exp(p_top - top)
    p_sum = tl.sum(p_total * rest, 0)
    p_norm = top + tl.log(p_sum)
    if MODE == 0:
        loss = tl.sum(gap * rest, 0) / p_sum - p_norm + q_norm
        mean = 0.0
    elif MODE == 1:
        loss = tl.sum(gap, 0) / q_sum - q_norm + p_norm
        mean = loss
    else:
        both = tl.zeros((BLOCK,), tl.float32)
        of_q = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab, BLOCK):
            log_q = _logits(q_ptr, start + columns, vocab, q_scale, q_cap, Q_CAPPED) - q_norm
            log_p = _logits(p_ptr, start + columns, vocab, p_scale, p_cap, P_CAPPED) - p_norm
            log_m = _log_mixture(log_p, log_q, log_beta, log_rest)
            both += _times(tl.exp(log_p), log_p - log_m)
            of_q += _times(tl.exp(log_q), log_q - log_m)
        mean = tl.sum(of_q, 0)
        loss = beta * tl.sum(both, 0) + (1.0 - beta) * mean
    tl.store(losses_ptr + row, loss)
    if GRADIENT:
        gradient_ptr += row * vocab
        for start in range(0, vocab, BLOCK):
            at = start + columns
            z = _logits(q_ptr, at, vocab, q_scale, q_cap, Q_CAPPED)
            log_q = z - q_norm
            log_p = _logits(p_ptr, at, vocab, p_scale, p_cap, P_CAPPED) - p_norm
            if MODE == 0:
                gradient = tl.exp(log_q) - tl.exp(log_p)
            elif MODE == 1:
                gradient = _times(tl.exp(log_q), log_q - log_p - mean)
            else:
                log_m = _log_mixture(log_p, log_q, log_beta, log_rest)
                gradient = (1.0 - beta) * _times(tl.exp(log_q), log_q - log_m - mean)
            if Q_CAPPED:
                # The derivative of the hyperbolic tangent, from its value.
                gradient *= q_cap * (1.0 - (z / q_cap) * (z / q_cap))
            gradient *= q_scale
            tl.store(gradient_ptr + at, gradient.to(gradient_ptr.dtype.element_ty), mask=at < vocab)


def divergence(student, teacher, rows: slice, beta: float, losses, entropies, gradient) -> None:
    """Write the losses and entropies of some rows `[C]`, and the gradient `[C, V]` of their summed loss if it is wanted.

    `student` and `teacher` are heads of `ops.divergence`.
    """
    _launch(
        student.product(rows), teacher.product(rows), student, teacher, beta, losses[rows], entropies[rows], gradient
    )


@on_its_device
def _launch(products: torch.Tensor, taught: torch.Tensor, student, teacher, beta, losses, entropies, gradient) -> None:
    count, vocab = products.shape
    mode = 2 if 0 < beta < 1 else int(beta)
    logs = (math.log(beta), math.log1p(-beta)) if mode == 2 else (0.0, 0.0)
    numbers = float(student.scale), float(student.cap), float(teacher.scale), float(teacher.cap), beta, *logs
    # A mixture computes more for each logit. A larger block then hides more of the reads.
    block = min(4096 if mode == 2 else 2048, next_power_of_2(vocab))
    options = mode, student.cap > 0, teacher.cap > 0, gradient is not None, block
    outputs = products if gradient is None else gradient, losses, entropies
    _divergence[(count,)](products, taught, *outputs, vocab, *numbers, *options, num_warps=16)
