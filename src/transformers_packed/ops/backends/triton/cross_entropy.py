"""Cross entropy of rows of logits, with the gradient in place of the logits, and the scaling of gradients."""

import torch
import triton
import triton.language as tl

from . import ceil_div, next_power_of_2, on_its_device


_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _logits(logits_ptr, columns, vocab):
    return tl.load(logits_ptr + columns, mask=columns < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def _softmax_minus_target(
    logits_ptr, labels_ptr, losses_ptr, vocab, stride, smoothing, SMOOTHS: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    # A label outside of the vocabulary makes the loss NaN.
    known = (label >= 0) & (label < vocab)
    target = tl.load(logits_ptr + label, mask=known, other=float("nan")).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    # Each lane keeps its largest logit so far, and a sum relative to it. It processes four logits at a time, which
    # takes five exponentials instead of eight.
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, 4 * BLOCK):
        at = start + columns
        x0 = _logits(logits_ptr, at, vocab)
        x1 = _logits(logits_ptr, at + BLOCK, vocab)
        x2 = _logits(logits_ptr, at + 2 * BLOCK, vocab)
        x3 = _logits(logits_ptr, at + 3 * BLOCK, vocab)
        new = tl.maximum(tl.maximum(largest, tl.maximum(x0, x1)), tl.maximum(x2, x3))
        # Avoid inf - inf in a lane whose logits are all -inf.
        reference = tl.where(new == float("-inf"), 0.0, new) * _LOG2_E
        total = total * tl.exp2(largest * _LOG2_E - reference)
        total += tl.exp2(x0 * _LOG2_E - reference) + tl.exp2(x1 * _LOG2_E - reference)
        total += tl.exp2(x2 * _LOG2_E - reference) + tl.exp2(x3 * _LOG2_E - reference)
        largest = new
        if SMOOTHS:
            plain += tl.where(at < vocab, x0, 0.0) + tl.where(at + BLOCK < vocab, x1, 0.0)
            plain += tl.where(at + 2 * BLOCK < vocab, x2, 0.0) + tl.where(at + 3 * BLOCK < vocab, x3, 0.0)
    top = tl.max(largest, 0)
    log_total = top + tl.log(tl.sum(total * tl.exp2((largest - top) * _LOG2_E), 0))
    loss = log_total - (1.0 - smoothing) * target
    if SMOOTHS:
        loss -= smoothing * tl.sum(plain, 0) / vocab
    tl.store(losses_ptr + row, loss)
    if GRADIENT:
        share = smoothing / vocab
        reference = log_total * _LOG2_E
        for start in range(0, vocab, BLOCK):
            at = start + columns
            gradient = tl.exp2(_logits(logits_ptr, at, vocab) * _LOG2_E - reference)
            if SMOOTHS:
                gradient -= share
            tl.store(logits_ptr + at, gradient.to(logits_ptr.dtype.element_ty), mask=at < vocab)
        # The target's gradient is written after all threads have written theirs.
        tl.debug_barrier()
        gradient = tl.exp2(target * _LOG2_E - reference) - share - (1.0 - smoothing)
        tl.store(logits_ptr + label, gradient.to(logits_ptr.dtype.element_ty), mask=known)


@on_its_device
def softmax_minus_target(
    logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float, gradient_too: bool
) -> torch.Tensor:
    """Return the loss of each row, float32 `[C]`. Overwrite `logits` `[C, V]` with the gradient of the summed loss."""
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(2048, next_power_of_2(vocab))
    options = float(label_smoothing), label_smoothing > 0, gradient_too, block
    _softmax_minus_target[(rows,)](logits, labels.contiguous(), losses, vocab, logits.stride(0), *options, num_warps=8)
    return losses


@triton.jit
def _scaled(x_ptr, factor_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, (x * tl.load(factor_ptr)).to(y_ptr.dtype.element_ty), mask=at < count)


@on_its_device
def scaled(x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute `x * factor` in `dtype`, in place if `x` has that dtype. `factor` is a float32 scalar on the device."""
    y = x if x.dtype == dtype else torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        _scaled[(ceil_div(x.numel(), 4096),)](x, factor, y, x.numel(), 4096)
    return y
