"""Cross entropy of rows of logits, and the gradient of the logits in their place."""

import torch
import triton
import triton.language as tl

from . import on_its_device


@triton.jit
def _softmax_minus_target(
    logits_ptr, labels_ptr, losses_ptr, vocab, stride, smoothing, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    # Before the reductions, which all threads wait for: below, another one may have overwritten it. A label that is no
    # word makes the loss NaN.
    known = (label >= 0) & (label < vocab)
    target = tl.load(logits_ptr + label, mask=known, other=float("nan")).to(tl.float32)
    columns = tl.arange(0, BLOCK)
    # Each lane keeps the largest logit that it saw, and a sum relative to that.
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        x = tl.load(logits_ptr + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        new = tl.maximum(largest, x)
        # A lane that saw nothing but -inf has no difference to take.
        reference = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - reference) + tl.exp(x - reference)
        largest = new
        plain += tl.where(inside, x, 0.0)
    top = tl.max(largest, 0)
    log_total = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    loss = log_total - (1.0 - smoothing) * target
    if smoothing > 0.0:
        loss -= smoothing * tl.sum(plain, 0) / vocab
    tl.store(losses_ptr + row, loss)
    if GRADIENT:
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            x = tl.load(logits_ptr + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(x - log_total) - smoothing / vocab
            gradient -= tl.where(start + columns == label, 1.0 - smoothing, 0.0)
            tl.store(logits_ptr + start + columns, gradient.to(logits_ptr.dtype.element_ty), mask=inside)


@on_its_device
def softmax_minus_target(
    logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float, gradient_too: bool
) -> torch.Tensor:
    """The loss of each row `[C]`, float32; `logits` `[C, V]` become the gradient of its sum."""
    rows, vocab = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(8192, triton.next_power_of_2(vocab))
    _softmax_minus_target[(rows,)](
        logits,
        labels.contiguous(),
        losses,
        vocab,
        logits.stride(0),
        float(label_smoothing),
        gradient_too,
        block,
        num_warps=16,
    )
    return losses
