"""The cross entropy of a language model's head, without its logits: `mean over targets of -log softmax(h W^T + b)[y]`.

With a vocabulary of 248,320 words the logits of 16,384 tokens take 8 GiB in bfloat16 and 16 GiB in float32, and their
gradient as much again. [`linear_cross_entropy`] leaves out the tokens without a target, makes the logits of a few
thousand tokens at a time, turns them into their own gradient in place, and computes the gradients of `h` and `W` before
the next chunk. Backward only scales. Memory: one chunk of logits, and the float32 gradient of `W`, to which every chunk
adds.

Cost: three matrix products of `tokens x hidden x vocabulary`, as with the logits, and two readings and one writing of
the logits. The number of targets has to be known on the host to leave the other tokens out: one wait for the GPU.
"""

import math

import torch
import torch.nn.functional as F

from ..errors import input_error
from .autograd import first_order
from .backends import triton
from .dispatch import Implementation, always, run
from .norm import widened


# Tokens whose logits exist at a time: 1.4 GiB of a vocabulary of 248,320 words in bfloat16.
CHUNK_SIZE = 3072


def linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_items_in_batch: int | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    chunk_size: int = CHUNK_SIZE,
    impl: str = "auto",
) -> torch.Tensor:
    """Cross entropy of `hidden_states @ weight.T + bias` against `labels`, in chunks of tokens.

    Args:
        hidden_states (`torch.Tensor` of shape `[..., hidden]`):
            What the head would get, in any floating dtype.
        weight (`torch.Tensor` of shape `[vocab, hidden]`):
            The head's weight, in the same dtype.
        labels (`torch.LongTensor` of shape `[...]`):
            The target of each token itself: already shifted.
        bias (`torch.Tensor` of shape `[vocab]`, *optional*):
            The head's bias.
        num_items_in_batch (`int` or 0-dimensional `torch.Tensor`, *optional*):
            What the sum over the targets is divided by; by default their number.
        label_smoothing (`float`, *optional*, defaults to 0.0):
            The share of the target that is spread over the whole vocabulary.
        ignore_index (`int`, *optional*, defaults to -100):
            The label of tokens without a target.
        chunk_size (`int`, *optional*, defaults to 3072):
            How many tokens' logits exist at a time.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (chunks, with a kernel for the softmax), `"torch"` (chunks), or `"reference"` (all logits
            at once, in float32 or float64).

    Returns:
        `torch.Tensor`: the loss, a float32 scalar; 0 without any target if `num_items_in_batch` is given, else NaN, as
        in torch.

    Raises:
        `ValueError`: shapes that do not fit, or an `impl` that cannot serve; in a backward with `create_graph=True`, any
            `impl` but `"reference"`.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import linear_cross_entropy
    >>> hidden_states, weight = torch.randn(5, 8), torch.randn(11, 8)
    >>> labels = torch.tensor([3, -100, 0, 10, 7])
    >>> loss = linear_cross_entropy(hidden_states, weight, labels)
    >>> torch.allclose(loss, torch.nn.functional.cross_entropy(hidden_states @ weight.T, labels))
    True

    ```
    """
    if weight.ndim != 2 or hidden_states.shape[-1] != weight.shape[1] or hidden_states.shape[:-1] != labels.shape:
        got = f"{tuple(hidden_states.shape)}, {tuple(weight.shape)} and {tuple(labels.shape)}"
        raise input_error("hidden_states [..., hidden], weight [vocab, hidden] and labels [...]", got)
    if chunk_size < 1 or not 0 <= label_smoothing <= 1:
        got = f"{chunk_size} and {label_smoothing}"
        raise input_error("chunk_size of 1 or more and label_smoothing from 0 to 1", got)
    options = {"num_items_in_batch": num_items_in_batch, "label_smoothing": label_smoothing}
    options |= {"ignore_index": ignore_index, "chunk_size": chunk_size}
    call = hidden_states.flatten(0, -2), weight, labels.flatten(), bias
    return run("linear_cross_entropy", impl, IMPLEMENTATIONS, *call, **options)


def _reference(hidden_states, weight, labels, bias, *, num_items_in_batch, label_smoothing, ignore_index, chunk_size):
    logits = widened(F.linear(hidden_states, weight, bias))
    reduction = "mean" if num_items_in_batch is None else "sum"
    labels = labels.to(logits.device)
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(logits, labels, **options)
    return loss if num_items_in_batch is None else loss / _like(num_items_in_batch, loss)


def _torch(*args, **kwargs):
    return _chunked((_torch_softmax_step, _torch_scaled), *args, **kwargs)


def _triton(*args, **kwargs):
    from .backends.triton.cross_entropy import scaled, softmax_minus_target

    return _chunked((softmax_minus_target, scaled), *args, **kwargs)


def _chunked(
    steps, hidden_states, weight, labels, bias, *, num_items_in_batch, label_smoothing, ignore_index, chunk_size
):
    kept = (labels != ignore_index).nonzero().flatten().to(hidden_states.device)
    labels = labels.to(hidden_states.device)
    if len(kept) < len(labels):
        hidden_states, labels = hidden_states.index_select(0, kept), labels.index_select(0, kept)
    if num_items_in_batch is None:
        num_items_in_batch = len(labels) or math.nan
    elif not len(labels):
        num_items_in_batch = math.inf
    scale = _like(num_items_in_batch, hidden_states).float().reciprocal()
    options = scale, (*steps, torch.is_grad_enabled()), chunk_size, label_smoothing
    return _LinearCrossEntropy.apply(hidden_states, weight, bias, labels, *options)


def _like(number: int | float | torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`number` as a scalar where `tensor` is; without waiting for the GPU if it is a tensor there, or a number."""
    if isinstance(number, torch.Tensor):
        return number.to(tensor.device)
    return torch.full((), number, dtype=torch.float32, device=tensor.device)


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss; forward also computes the gradients of the sum over the targets."""

    @staticmethod
    def forward(ctx, hidden_states, weight, bias, labels, scale, steps, chunk_size, label_smoothing):
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden_states, weight, bias)]
        # Under autocast the head's product would be in the low precision too.
        device = hidden_states.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
        # Gradients are always off in a forward; whether they are wanted was read outside.
        softmax_step, scaled, wanted = steps
        for_hidden, for_weight, for_bias = (wanted and needed for needed in ctx.needs_input_grad[:3])
        losses = hidden_states.new_zeros(len(labels), dtype=torch.float32)
        d_hidden = torch.empty_like(hidden_states) if for_hidden else None
        d_weight = None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if for_bias else None
        buffer = hidden_states.new_empty(min(chunk_size, len(labels)), weight.shape[0])
        for start in range(0, len(labels), chunk_size):
            rows = slice(start, start + chunk_size)
            chunk = hidden_states[rows]
            logits = torch.mm(chunk, weight.t(), out=buffer[: len(chunk)])
            if bias is not None:
                logits += bias
            losses[rows] = softmax_step(logits, labels[rows], label_smoothing, for_hidden or for_weight or for_bias)
            # From here on `logits` hold their own gradient.
            if for_hidden:
                torch.mm(logits, weight, out=d_hidden[rows])
            if for_weight:
                d_weight = _add_product(d_weight, logits.t(), chunk)
            if for_bias:
                d_bias += logits.sum(0, dtype=torch.float32)
        if for_weight and d_weight is None:
            d_weight = torch.zeros_like(weight, dtype=torch.float32)
        ctx.gradients, ctx.scale, ctx.scaled = (d_hidden, d_weight, d_bias), scale, scaled
        return losses.sum() * scale

    @staticmethod
    @first_order(
        'Pass skip_logits=False to the model, or impl="reference" to the op: the loss from logits has those of any order.'
    )
    def backward(ctx, d_loss):
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_cross_entropy: backward through this loss ran before, and its gradients are freed since. "
                "Run the forward again, or pass retain_graph=True to the first backward."
            )
        # Scaled in place, as nothing else holds them, unless the graph is kept for another backward.
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        # Not scaled before: in float16 the gradient of a mean over many targets would vanish.
        factor = d_loss * ctx.scale
        gradients = [
            None if x is None else ctx.scaled(x.clone() if kept else x, factor, dtype)
            for x, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        if not kept:
            ctx.gradients = None
        return (*gradients, None, None, None, None, None)


def _add_product(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`total + left @ right`, in `total` if there is one, with sums in float32 whatever the factors are."""
    dtype = torch.float32
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        if total is None:
            return torch.mm(left, right, out_dtype=dtype)
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    if total is None:
        total = torch.zeros(left.shape[0], right.shape[1], dtype=dtype, device=left.device)
    return total.addmm_(left.to(dtype), right.to(dtype))


def _torch_softmax_step(logits, labels, label_smoothing, gradient_too):
    """The loss of each row `[C]`, float32; `logits` `[C, V]` become the gradient of its sum."""
    values = logits.float()
    total = values.logsumexp(-1, keepdim=True)
    losses = total - (1 - label_smoothing) * values.gather(1, labels[:, None])
    if label_smoothing:
        losses = losses - label_smoothing * values.mean(-1, keepdim=True)
    if gradient_too:
        gradient = (values - total).exp_()
        if label_smoothing:
            gradient -= label_smoothing / logits.shape[1]
        logits.copy_(
            gradient.scatter_add_(1, labels[:, None], gradient.new_full((len(labels), 1), label_smoothing - 1))
        )
    return losses[:, 0]


def _torch_scaled(x, factor, dtype):
    return torch.mul(x, factor, out=x if x.dtype == dtype else x.new_empty(x.shape, dtype=dtype))


IMPLEMENTATIONS = {
    "triton": Implementation(_triton, lambda hidden_states, *_, **__: triton.verify(hidden_states)),
    "torch": Implementation(_torch, always),
    "reference": Implementation(_reference, always),
}
