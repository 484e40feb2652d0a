"""Divergence of a student's language modeling head from a teacher's, without full logits.

With `p` and `q` the distributions of teacher and student, softmax of their logits over `temperature`, the generalized
Jensen-Shannon divergence is `beta * KL(p || m) + (1 - beta) * KL(q || m)` of the mixture `m = beta * p + (1 - beta) * q`
([Agarwal et al., 2023](https://arxiv.org/abs/2306.13649)). It vanishes at both ends, so `beta=0` stands for the forward
`KL(p || q)` and `beta=1` for the reverse `KL(q || p)`, the limits of the divergence over `beta` and over `1 - beta`.

The gradient with respect to a student's logit over `temperature` is `(1 - beta) * q * (log(q / m) - KL(q || m))`, and at the
ends `q - p` and `q * (log(q / p) - KL(q || p))`. As in [`linear_cross_entropy`], the forward computes the gradients of
hidden states and weight chunk by chunk, and the backward scales them.

Logits are in float32, because a divergence is made of differences between nearly equal logits. Rounded to bfloat16, a logit
of 20 is off by up to 0.06, as much as a student and its teacher often differ. The logits of a quarter of a chunk exist at
a time, and the gradient of a chunk in the dtype of the head, so that the gradient of the weight is read and written once
per chunk. For a vocabulary of 248,320 words, that takes 0.95 GiB in bfloat16.

The cost is that of the cross entropy, and another product of `tokens x hidden x vocabulary` for the teacher, which gets no
gradient. Dropping tokens requires the number of targets on the host, which costs one host sync unless it is passed.

A server returns the log-probabilities of the teacher's likeliest words alone. [`linear_topk_divergence`] takes all others
as one class, the tail, and gets the student's log-probabilities of these words from [`linear_logps`].
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..errors import input_error, shapes
from .autograd import compute_dtype, first_order, retains_graph
from .cross_entropy import HeadGradients, add_product, by_chunks, places
from .dispatch import run
from .logps import linear_logps
from .norm import widened


# Tokens per chunk. The logits of a quarter of them exist at a time.
CHUNK_SIZE = 1024


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
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    num_items_in_batch: int | float | torch.Tensor | None = None,
    num_targets: int | None = None,
    return_entropies: bool = False,
    chunk_size: int = CHUNK_SIZE,
    impl: str = "auto",
) -> Any:
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
        logit_scale (`float`, *optional*, defaults to 1.0), teacher_logit_scale (`float`, *optional*, defaults to 1.0):
            Factors of the logits, before anything else.
        softcap (`float`, *optional*), teacher_softcap (`float`, *optional*):
            Bounds of the logits, which become `softcap * tanh(logits / softcap)` before the temperature.
        num_items_in_batch (`int`, `float` or 0-dimensional `torch.Tensor`, *optional*):
            Divisor of the sum over the targets. Defaults to their number.
        num_targets (`int`, *optional*):
            Number of targets, which saves the host sync. Another number than that of `is_target` is an error, which a
            GPU reports as a failed assertion.
        return_entropies (`bool`, *optional*, defaults to `False`):
            Also return the entropy of the student's distribution at each token, without a gradient.
        chunk_size (`int`, *optional*, defaults to 1024):
            Number of tokens per chunk of gradients, and four times that of logits.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (chunks, with a kernel for the distributions), `"torch"` (chunks), or `"reference"` (all
            logits at once).

    Returns:
        `torch.Tensor`: the loss in nats, a float32 scalar, or float64 for float64. Without any target, it is 0 if
            `num_items_in_batch` is passed, and otherwise NaN. With `return_entropies`, a tuple of it and of the
            entropies in nats, of the same dtype `[...]`, 0 where a token does not count.

    Raises:
        `ValueError`: the shapes do not match, a number is out of its range, or `impl` does not support the call. The
            backward with `create_graph=True` raises it for any `impl` except `"reference"`.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import linear_divergence
    >>> student, teacher, targets = torch.randn(5, 8), torch.randn(5, 16), torch.ones(5, dtype=torch.bool)
    >>> weights = torch.randn(11, 8), torch.randn(11, 16)
    >>> loss = linear_divergence(student, weights[0], teacher, weights[1], targets, beta=0)
    >>> logps = (student @ weights[0].T).log_softmax(-1), (teacher @ weights[1].T).log_softmax(-1)
    >>> torch.allclose(loss, torch.nn.functional.kl_div(*logps, reduction="batchmean", log_target=True))
    True

    ```
    """
    shape, vocab = is_target.shape, weight.shape[0]
    for states, matrix, added in (
        (hidden_states, weight, bias),
        (teacher_hidden_states, teacher_weight, teacher_bias),
    ):
        fits = matrix.ndim == 2 and states.shape == (*shape, matrix.shape[-1]) and len(matrix) == vocab
        if not fits or (added is not None and added.shape != (vocab,)):
            expected = (
                f"hidden states {[*shape]} + [hidden], and weights [{vocab}, hidden] and biases of one vocabulary"
            )
            raise input_error(expected, shapes(states, matrix, added))
    positive = {"temperature": temperature, "softcap": softcap, "teacher_softcap": teacher_softcap}
    _check_numbers(beta, positive, chunk_size)
    kept = places(is_target.flatten(), num_targets).to(hidden_states.device)
    # The teacher gets no gradient.
    taught = (
        teacher_hidden_states.detach(),
        teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
    )
    everywhere = len(kept) == is_target.numel()
    student, teacher = (
        _Head(_rows(x, None if everywhere else kept), w, b, *_shape_of_logits(scale, cap, temperature))
        for x, w, b, scale, cap in (
            (hidden_states, weight, bias, logit_scale, softcap),
            (*taught, teacher_logit_scale, teacher_softcap),
        )
    )
    call = student, teacher, float(beta), chunk_size
    total, entropies = run("linear_divergence", impl, IMPLEMENTATIONS, student.hidden_states, *call)
    loss = total / _divisor(num_items_in_batch, len(kept), total)
    if not return_entropies:
        return loss
    return loss, entropies.new_zeros(is_target.numel()).index_copy_(0, kept, entropies).view(shape)


def linear_topk_divergence(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    teacher_ids: torch.Tensor,
    teacher_logps: torch.Tensor,
    is_target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    num_items_in_batch: int | float | torch.Tensor | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Compute the divergence of a student from the likeliest words of a teacher, with all other words as one class.

    Args:
        hidden_states (`torch.Tensor` of shape `[..., hidden]`):
            Input of the student's head, in any floating dtype.
        weight (`torch.Tensor` of shape `[vocab, hidden]`):
            Weight of the student's head, in the same dtype.
        teacher_ids (`torch.LongTensor` of shape `[..., K]`):
            Words of which the teacher's log-probabilities are known, different ones for each token.
        teacher_logps (`torch.Tensor` of shape `[..., K]`):
            Their log-probabilities at `temperature`, in nats. A word with `-inf` is part of the tail, whatever its id is.
        is_target (`torch.BoolTensor` of shape `[...]`):
            Which tokens count.
        bias (`torch.Tensor` of shape `[vocab]`, *optional*):
            Bias of the head.
        beta (`float`, *optional*, defaults to 0.5), temperature (`float`, *optional*, defaults to 1.0):
            As in [`linear_divergence`]. The temperature divides the student's logits alone.
        num_items_in_batch (`int`, `float` or 0-dimensional `torch.Tensor`, *optional*):
            Divisor of the sum over the targets. Defaults to their number.
        impl (`str`, *optional*, defaults to `"auto"`):
            That of [`linear_logps`].

    Returns:
        `torch.Tensor`: the loss in nats, a scalar as that of [`linear_divergence`], of which it is a lower bound.

    Raises:
        `ValueError`: the shapes do not match, or a number is out of its range.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops.divergence import linear_divergence, linear_topk_divergence
    >>> hidden, weight, targets = torch.randn(5, 8), torch.randn(11, 8), torch.ones(5, dtype=torch.bool)
    >>> teacher, teacher_weight = torch.randn(5, 8), torch.randn(11, 8)
    >>> logps, ids = (teacher @ teacher_weight.T).log_softmax(-1).topk(10)
    >>> found = linear_topk_divergence(hidden, weight, ids, logps, targets)
    >>> torch.allclose(found, linear_divergence(hidden, weight, teacher, teacher_weight, targets), rtol=1e-4)
    True

    ```
    """
    shape = is_target.shape
    if teacher_ids.shape != teacher_logps.shape or teacher_ids.shape[:-1] != shape or not teacher_ids.numel():
        expected = f"teacher_ids and teacher_logps {[*shape]} + [K], with K of 1 or more"
        raise input_error(expected, shapes(teacher_ids, teacher_logps))
    _check_numbers(beta, {"temperature": temperature})
    kept = is_target.flatten().nonzero()[:, 0].to(hidden_states.device)
    rows, ids, p = (x.flatten(0, -2).index_select(0, kept) for x in (hidden_states, teacher_ids, teacher_logps))
    known = p > -math.inf
    of = torch.arange(len(kept), device=kept.device)[:, None].expand_as(ids)
    options: dict[str, Any] = {"temperature": temperature, "rows": of, "ignore_index": None, "impl": impl}
    q: Any = linear_logps(rows, weight, ids.where(known, 0), bias, **options)
    losses, _ = _losses(_with_tail(q.masked_fill(~known, -math.inf)), _with_tail(p.to(q.dtype)), beta)
    return losses.sum() / _divisor(num_items_in_batch, len(kept), q)


def _with_tail(logps: torch.Tensor) -> torch.Tensor:
    """Log-probabilities `[T, K]` of some words, and of all others together, `[T, K + 1]`."""
    # Rounding may leave nothing, or less.
    most = -torch.finfo(logps.dtype).eps
    rest = torch.log(-torch.expm1(logps.logsumexp(-1, keepdim=True).clamp(max=most)))
    return torch.cat([logps, rest], dim=-1)


def _check_numbers(beta: float, positive: dict[str, float | None], chunk_size: int = 1) -> None:
    wrong = [f"{name}={x}" for name, x in positive.items() if x is not None and not 0 < x < math.inf]
    if not 0 <= beta <= 1 or chunk_size < 1 or wrong:
        got = ", ".join([f"beta={beta}", f"chunk_size={chunk_size}", *wrong])
        raise input_error("beta from 0 to 1, chunk_size of 1 or more, and temperature and caps above 0", got)


def _divisor(items: int | float | torch.Tensor | None, targets: int, total: torch.Tensor) -> torch.Tensor:
    if items is None:
        items = targets or math.nan
    elif not targets:
        items = math.inf
    return torch.as_tensor(items, device=total.device)


class _Head(NamedTuple):
    """A head with its input `[T, hidden]`. Its logits are `cap * tanh(product * scale)`, or without a cap (0) the product
    times `scale`.
    """

    hidden_states: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float
    cap: float

    def product(self, rows: slice) -> torch.Tensor:
        """The logits of some rows before their scale `[C, V]`, in at least float32."""
        found = add_product(None, self.hidden_states[rows], self.weight.t())
        return found if self.bias is None else found.add_(self.bias)

    def logits(self, products: torch.Tensor) -> torch.Tensor:
        scaled = products * self.scale
        return self.cap * scaled.tanh() if self.cap else scaled

    def derivative(self, products: torch.Tensor) -> torch.Tensor | float:
        """The derivative of each logit with respect to its product."""
        return self.cap * self.scale * (1 - (products * self.scale).tanh().square()) if self.cap else self.scale

    def in_dtype(self, dtype: torch.dtype) -> "_Head":
        return self._replace(hidden_states=self.hidden_states.to(dtype), weight=self.weight.to(dtype))


def _rows(x: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    return x.flatten(0, -2) if kept is None else x.flatten(0, -2).index_select(0, kept)


def _shape_of_logits(scale: float, softcap: float | None, temperature: float) -> tuple[float, float]:
    """The scale and the cap of a [`_Head`]."""
    return (scale / temperature, 0.0) if softcap is None else (scale / softcap, softcap / temperature)


def _reference(_, student: _Head, teacher: _Head, beta: float, chunk_size: int):
    q, p = (
        head.logits(widened(F.linear(head.hidden_states, head.weight, head.bias))).log_softmax(-1)
        for head in (student, teacher)
    )
    losses, _ = _losses(q, p, beta)
    return losses.sum(), torch.special.entr(q.detach().exp()).sum(-1)


def _chunked(steps, _, student: _Head, teacher: _Head, beta: float, chunk_size: int):
    # Gradients are always disabled inside a forward, which has to know whether they are needed.
    options = steps, beta, chunk_size, torch.is_grad_enabled()
    return _LinearDivergence.apply(student.hidden_states, student.weight, student.bias, student, teacher, options)


class _LinearDivergence(torch.autograd.Function):
    """The sum over all rows, and the entropies `[T]`. The forward also computes the gradients of the sum."""

    @staticmethod
    def forward(ctx, hidden_states, weight, bias, student, teacher, options):
        (step, ctx.scaled), beta, chunk_size, wanted = options
        needed = [wanted and needed for needed in ctx.needs_input_grad[:3]]
        # Autocast would run the matrix products in low precision too.
        dtype = compute_dtype(hidden_states)
        gradients = HeadGradients(needed, (hidden_states, weight, bias), dtype)
        student, teacher = student.in_dtype(dtype), teacher.in_dtype(compute_dtype(teacher.hidden_states))
        length, part = len(hidden_states), -(-chunk_size // 4)
        losses = hidden_states.new_empty(length, dtype=torch.promote_types(dtype, torch.float32))
        entropies = torch.empty_like(losses)
        buffer = hidden_states.new_empty(min(chunk_size, length), len(weight), dtype=dtype) if any(needed) else None
        for start in range(0, length, chunk_size):
            chunk = slice(start, min(start + chunk_size, length))
            for at in range(chunk.start, chunk.stop, part):
                rows = slice(at, min(at + part, chunk.stop))
                gradient = None if buffer is None else buffer[at - start : rows.stop - start]
                step(student, teacher, rows, beta, losses, entropies, gradient)
            if buffer is not None:
                gradients.add(chunk, buffer[: chunk.stop - start], student.hidden_states[chunk], student.weight)
        ctx.gradients = gradients
        ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        return losses.sum(), entropies

    @staticmethod
    @first_order('Pass impl="reference" to the op. It supports gradients of any order.')
    def backward(ctx, d_total, _):
        return *ctx.gradients.scaled(d_total, ctx.scaled, retains_graph()), None, None, None


def _torch_step(student: _Head, teacher: _Head, rows: slice, beta: float, losses, entropies, gradient) -> None:
    """Write the losses and entropies of some rows `[C]`, and the gradient `[C, V]` of their summed loss if it is wanted."""
    products = student.product(rows)
    q, p = student.logits(products).log_softmax(-1), teacher.logits(teacher.product(rows)).log_softmax(-1)
    losses[rows], m = _losses(q, p, beta)
    entropies[rows] = torch.special.entr(q.exp()).sum(-1)
    if gradient is None:
        return
    if beta == 0:
        by_logit = q.exp() - p.exp()
    else:
        terms = _terms(q, m)
        by_logit = (1 if beta == 1 else 1 - beta) * (terms - q.exp() * terms.sum(-1, keepdim=True))
    gradient.copy_(by_logit * student.derivative(products))


def _losses(q: torch.Tensor, p: torch.Tensor, beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The divergence of each row, of log-probabilities `[C, V]`, and the logarithm of what both are compared with."""
    if beta == 0:
        return _terms(p, q).sum(-1), q
    if beta == 1:
        return _terms(q, p).sum(-1), p
    # The mixture of words that cannot be has no gradient.
    impossible = torch.maximum(p, q) == -math.inf
    one, other = (x.masked_fill(impossible, 0) for x in (p, q))
    m = torch.logaddexp(one + math.log(beta), other + math.log1p(-beta))
    return (beta * _terms(p, m) + (1 - beta) * _terms(q, m)).sum(-1), m


def _terms(logps: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The terms of a Kullback-Leibler divergence, 0 for words that cannot be."""
    return logps.exp() * (logps - others).masked_fill(logps == -math.inf, 0)


IMPLEMENTATIONS = by_chunks(_chunked, {"divergence": "divergence"}, (_torch_step,), _reference)
