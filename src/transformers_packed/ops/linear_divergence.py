"""Divergence of a student's language modeling head from a teacher's, without full logits.

With `p` and `q` the distributions of teacher and student, softmax of their logits over `temperature`, the generalized
Jensen-Shannon divergence is `beta * KL(p || m) + (1 - beta) * KL(q || m)` of the mixture `m = beta * p + (1 - beta) * q`
([Agarwal et al., 2023](https://arxiv.org/abs/2306.13649)). It vanishes at both ends, so `beta=0` stands for the forward
`KL(p || q)` and `beta=1` for the reverse `KL(q || p)`, the limits of the divergence over `beta` and over `1 - beta`.

The gradient with respect to a student's logit over `temperature` is `(1 - beta) * q * (log(q / m) - KL(q || m))`, and at the
ends `q - p` and `q * (log(q / p) - KL(q || p))`. As in [`linear_cross_entropy`], the forward computes the gradients of
hidden states and weight chunk by chunk, and the backward scales them. Memory holds one chunk of both logits.

The cost is that of the cross entropy, and another product of `tokens x hidden x vocabulary` for the teacher, which gets no
gradient. Finding the targets costs one host sync.
"""

import math

import torch
import torch.nn.functional as F

from ..errors import input_error, shapes
from .autograd import autocast_dtype, first_order, retains_graph
from .cross_entropy import FROZEN_CHUNK_SIZE, HeadGradients, torch_scaled
from .norm import widened


def linear_divergence(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    teacher_hidden_states: torch.Tensor,
    teacher_weight: torch.Tensor,
    is_target: torch.Tensor,
    bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    num_items_in_batch: int | torch.Tensor | None = None,
    chunk_size: int = FROZEN_CHUNK_SIZE,
) -> torch.Tensor:
    """Compute the generalized Jensen-Shannon divergence of a student from a teacher in chunks of tokens.

    Args:
        hidden_states (`torch.Tensor` of shape `[..., hidden]`):
            Input of the student's head, in any floating dtype.
        weight (`torch.Tensor` of shape `[vocab, hidden]`):
            Weight of the student's head, in the same dtype.
        teacher_hidden_states (`torch.Tensor` of shape `[..., teacher_hidden]`):
            Input of the teacher's head for the same tokens, in any floating dtype. It gets no gradient.
        teacher_weight (`torch.Tensor` of shape `[vocab, teacher_hidden]`):
            Weight of the teacher's head, in the dtype of its input. It gets no gradient.
        is_target (`torch.BoolTensor` of shape `[...]`):
            Which tokens count, those that predict a token of an answer.
        bias (`torch.Tensor` of shape `[vocab]`, *optional*), teacher_bias (`torch.Tensor` of shape `[vocab]`, *optional*):
            Biases of the heads.
        beta (`float`, *optional*, defaults to 0.5):
            Share of the teacher in the mixture. 0 is the forward divergence, 1 the reverse one.
        temperature (`float`, *optional*, defaults to 1.0):
            Divisor of all logits. The loss is not multiplied by its square.
        num_items_in_batch (`int` or 0-dimensional `torch.Tensor`, *optional*):
            Divisor of the sum over the targets. Defaults to their number.
        chunk_size (`int`, *optional*, defaults to 1536):
            Number of tokens per chunk of logits.

    Returns:
        `torch.Tensor`: the loss in nats, a float32 scalar, or float64 for float64. Without any target, it is 0 if
            `num_items_in_batch` is passed, and otherwise NaN.

    Raises:
        `ValueError`: the shapes do not match, or `beta`, `temperature` or `chunk_size` is out of its range. The backward
            with `create_graph=True`.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops.linear_divergence import linear_divergence
    >>> student, teacher, targets = torch.randn(5, 8), torch.randn(5, 16), torch.ones(5, dtype=torch.bool)
    >>> weights = torch.randn(11, 8), torch.randn(11, 16)
    >>> loss = linear_divergence(student, weights[0], teacher, weights[1], targets, beta=0)
    >>> logps = (student @ weights[0].T).log_softmax(-1), (teacher @ weights[1].T).log_softmax(-1)
    >>> torch.allclose(loss, torch.nn.functional.kl_div(*logps, reduction="batchmean", log_target=True))
    True

    ```
    """
    shape, vocab = is_target.shape, weight.shape[0]
    for states, matrix in ((hidden_states, weight), (teacher_hidden_states, teacher_weight)):
        if states.shape != (*shape, matrix.shape[-1]) or matrix.ndim != 2 or len(matrix) != vocab:
            expected = f"hidden states {[*shape]} + [hidden], and weights [{vocab}, hidden] of one vocabulary"
            raise input_error(expected, shapes(states, matrix))
    if not 0 <= beta <= 1 or temperature <= 0 or chunk_size < 1:
        got = f"{beta}, {temperature} and {chunk_size}"
        raise input_error("beta from 0 to 1, temperature above 0 and chunk_size of 1 or more", got)
    kept = is_target.flatten().nonzero()[:, 0].to(hidden_states.device)
    rows, teacher_rows = (x.flatten(0, -2).index_select(0, kept) for x in (hidden_states, teacher_hidden_states))
    items = (len(kept) or math.nan) if num_items_in_batch is None else num_items_in_batch
    teacher = teacher_rows.detach(), teacher_weight.detach(), None if teacher_bias is None else teacher_bias.detach()
    options = beta, temperature, chunk_size, torch.is_grad_enabled()
    total = _LinearDivergence.apply(rows, weight, bias, teacher, options)
    return total / torch.as_tensor(items, device=total.device).clamp(min=1)


class _LinearDivergence(torch.autograd.Function):
    """The sum over all rows. The forward also computes its gradients."""

    @staticmethod
    def forward(ctx, hidden_states, weight, bias, teacher, options):
        beta, temperature, chunk_size, wanted = options
        needed = [wanted and needed for needed in ctx.needs_input_grad[:3]]
        dtype = autocast_dtype(hidden_states) or hidden_states.dtype
        gradients = HeadGradients(needed, (hidden_states, weight, bias), dtype)
        hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
        total = widened(hidden_states.new_zeros(()))
        for start in range(0, len(hidden_states), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = F.linear(hidden_states[rows], weight, None if bias is None else bias.to(dtype))
            losses, gradient = _divergence(logits, F.linear(teacher[0][rows], *teacher[1:]), beta, temperature)
            total += losses.sum()
            if any(needed):
                gradients.add(rows, gradient.to(dtype), hidden_states[rows], weight)
        ctx.gradients = gradients
        return total

    @staticmethod
    @first_order("Compute the divergence from logits.")
    def backward(ctx, d_total):
        return *ctx.gradients.scaled(d_total, torch_scaled, retains_graph()), None, None


def _divergence(
    logits: torch.Tensor, teacher_logits: torch.Tensor, beta: float, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence of each row `[C]`, and its gradient with respect to `logits` `[C, V]`, in at least float32."""
    q, p = (F.log_softmax(widened(x) / temperature, dim=-1) for x in (logits, teacher_logits))
    if beta == 0:
        losses, gradient = (p.exp() * (p - q)).sum(-1), q.exp() - p.exp()
    else:
        m = p if beta == 1 else torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
        share, own = 1 if beta == 1 else 1 - beta, (q.exp() * (q - m)).sum(-1)
        losses, gradient = share * own, share * q.exp() * (q - m - own[:, None])
        if beta < 1:
            losses = losses + beta * (p.exp() * (p - m)).sum(-1)
    return losses, gradient / temperature
