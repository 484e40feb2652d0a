"""Cross entropy of a language modeling head without full logits: `mean over targets of -log softmax(h W^T + b)[y]`.

With a vocabulary of 248,320 words, the logits of 16,384 tokens take 8 GiB in bfloat16 and 16 GiB in float32. Their
gradient takes as much again. [`linear_cross_entropy`] drops tokens without a target and computes the logits of one to
three thousand tokens at a time. It overwrites each chunk with its gradient and computes the gradients of `h` and `W` before
the next chunk. The backward only scales them. Memory holds one chunk of logits and the float32 gradient of `W`, which
accumulates over the chunks.

The cost is three matrix products of `tokens x hidden x vocabulary`, as with the full logits, and two reads and one
write of the logits. Dropping tokens requires the number of targets on the host, which costs one host sync. A model that
starts a [`TargetCount`] before its layers does not wait for them.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from ..errors import input_error, shapes
from .autograd import autocast_dtype, first_order, retains_graph
from .backends import triton
from .dispatch import Call, Implementation, Setting, run
from .norm import widened


# Most rows of a chunk of logits. In bfloat16, they take 1.4 GiB for a vocabulary of 248,320 words.
CHUNK_SIZE = 3072
# With a frozen head, no chunk reads and writes a gradient of its weight. Smaller chunks then take no longer.
FROZEN_CHUNK_SIZE = 1536
# Products of fewer rows would wait for the memory: each of them reads the weight, and perhaps reads and writes its gradient.
LEAST_CHUNK_SIZE = 1024
# The chunks of a row, unless it is so short or so long that the sizes above decide.
_CHUNKS = 4


def rows_of_chunk(rows: int, hidden: int, frozen: bool) -> int:
    """Return how many of `rows` hidden states `[rows, hidden]` have logits at the same time, unless a caller says it.

    Layers keep little for a short row, beside which a chunk of logits counts. The gradient of a trained head is in float32
    during the chunks. The backward then makes one in the head's dtype beside it, which is as large as `hidden` rows of
    logits. Chunks with fewer rows would not lower the peak. Rows of all lengths share few sizes, whose memory the allocator
    can use again.
    """
    least = LEAST_CHUNK_SIZE if frozen else max(LEAST_CHUNK_SIZE, hidden)
    step = LEAST_CHUNK_SIZE // 2
    return min(FROZEN_CHUNK_SIZE if frozen else CHUNK_SIZE, max(least, -(-rows // (_CHUNKS * step)) * step))


def linear_cross_entropy(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    num_items_in_batch: int | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    num_targets: int | None = None,
    token_weights: torch.Tensor | None = None,
    return_losses: bool = False,
    chunk_size: int | None = None,
    impl: str = "auto",
) -> Any:
    """Compute the cross entropy of `hidden_states @ weight.T + bias` and `labels` in chunks of tokens.

    Args:
        hidden_states (`torch.Tensor` of shape `[..., hidden]`):
            Input of the head, in any floating dtype.
        weight (`torch.Tensor` of shape `[vocab, hidden]`):
            Weight of the head, in the same dtype.
        labels (`torch.LongTensor` of shape `[...]`):
            Target of each token. Labels must already be shifted.
        bias (`torch.Tensor` of shape `[vocab]`, *optional*):
            Bias of the head.
        num_items_in_batch (`int` or 0-dimensional `torch.Tensor`, *optional*):
            Divisor of the sum over the targets. Defaults to the number of targets.
        label_smoothing (`float`, *optional*, defaults to 0.0):
            Share of the target probability that is spread over the whole vocabulary.
        ignore_index (`int`, *optional*, defaults to -100):
            Label of tokens without a target.
        num_targets (`int`, *optional*):
            Number of tokens with a target, which saves the host sync. Another number than that of `labels` is an
            error, which a GPU reports as a failed assertion.
        token_weights (`torch.FloatTensor` of shape `[...]`, *optional*):
            Factor of each token's loss in the sum. Losses of different divisors then share one gradient of the weight.
        return_losses (`bool`, *optional*, defaults to `False`):
            Also return the loss of each token, without its factor and without a gradient.
        chunk_size (`int`, *optional*):
            Number of tokens per chunk of logits. Defaults to a quarter of the tokens, but to at least 1024 or `hidden`, and
            to at most 3072. If the weight is frozen, to at least 1024 and at most 1536.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (chunks, with a kernel for the softmax), `"torch"` (chunks), or `"reference"` (all
            logits at once, in float32 or float64).

    Returns:
        `torch.Tensor`: the loss, a float32 scalar. Without any target, it is 0 if `num_items_in_batch` is passed, and
            otherwise NaN, as in PyTorch. With `return_losses`, a tuple of it and of the losses of the tokens, float32
            `[...]`, 0 without a target.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call. The backward with
            `create_graph=True` raises it for any `impl` except `"reference"`.

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
    if token_weights is not None and token_weights.shape != labels.shape:
        raise input_error(f"token_weights of shape {tuple(labels.shape)}", tuple(token_weights.shape))
    if weight.ndim != 2 or hidden_states.shape[-1] != weight.shape[1] or hidden_states.shape[:-1] != labels.shape:
        expected = "hidden_states [..., hidden], weight [vocab, hidden] and labels [...]"
        raise input_error(expected, shapes(hidden_states, weight, labels))
    if chunk_size is None:
        chunk_size = rows_of_chunk(labels.numel(), weight.shape[1], not weight.requires_grad)
    if chunk_size < 1 or not 0 <= label_smoothing <= 1:
        got = f"{chunk_size} and {label_smoothing}"
        raise input_error("chunk_size of 1 or more and label_smoothing from 0 to 1", got)
    options = {"num_items_in_batch": num_items_in_batch, "label_smoothing": label_smoothing}
    options |= {"ignore_index": ignore_index, "num_targets": num_targets, "chunk_size": chunk_size}
    options |= {"token_weights": None if token_weights is None else token_weights.flatten()}
    options["return_losses"] = return_losses
    call = hidden_states.flatten(0, -2), weight, labels.flatten(), bias
    loss, losses = run("linear_cross_entropy", impl, IMPLEMENTATIONS, *call, **options)
    return (loss, losses.view(labels.shape)) if return_losses else loss


def shift_labels(labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Return the targets of each token, which are the labels `[..., T]` one token ahead. The last token has none."""
    return F.pad(labels[..., 1:], (0, 1), value=ignore_index)


class TargetCount:
    """The number of targets, counted while the GPU computes something else.

    `int(count)` waits for what was launched before the count, not for the kernels that were launched since.

    Args:
        labels (`torch.LongTensor` of any shape):
            Target of each token. They must not change before the number is read.
        ignore_index (`int`):
            Label of tokens without a target.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops.cross_entropy import TargetCount
    >>> int(TargetCount(torch.tensor([3, -100, 0]), -100))
    2

    ```
    """

    def __init__(self, labels: torch.Tensor, ignore_index: int):
        self._event = None
        if not labels.is_cuda:
            self._number = (labels != ignore_index).sum()
            return
        stream = _counting_stream(labels.device)
        stream.wait_stream(torch.cuda.current_stream(labels.device))
        with torch.cuda.stream(stream):
            self._number = torch.empty((), dtype=torch.int64, device="cpu", pin_memory=True)
            self._number.copy_((labels != ignore_index).sum(), non_blocking=True)
            self._event = stream.record_event()
        # Freed before it is read, its memory would get other values.
        labels.record_stream(stream)

    def __int__(self) -> int:
        if self._event is not None:
            self._event.synchronize()
        return int(self._number)


@cache
def _counting_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _reference(
    hidden_states, weight, labels, bias, *, num_items_in_batch, label_smoothing, ignore_index, num_targets,
    token_weights, return_losses, chunk_size,
):  # fmt: skip
    logits = widened(F.linear(hidden_states, weight, bias))
    labels = labels.to(logits.device)
    if num_targets is not None:
        # The check is in the choice of places.
        labels.index_select(0, places(labels != ignore_index, num_targets))
    options = {"ignore_index": ignore_index, "reduction": "none", "label_smoothing": label_smoothing}
    losses = F.cross_entropy(logits, labels, **options)
    total = (losses if token_weights is None else losses * token_weights.to(losses)).sum()
    items = (labels != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    return total / _like(items, total), losses.detach().float()


def _chunked(
    steps, hidden_states, weight, labels, bias, *, num_items_in_batch, label_smoothing, ignore_index, num_targets,
    token_weights, return_losses, chunk_size,
):  # fmt: skip
    length = len(labels)
    kept = places(labels != ignore_index, num_targets).to(hidden_states.device)
    labels = labels.to(hidden_states.device)
    if num_targets is not None or len(kept) < len(labels):
        hidden_states, labels = hidden_states.index_select(0, kept), labels.index_select(0, kept)
        token_weights = None if token_weights is None else token_weights.to(kept.device).index_select(0, kept)
    if num_items_in_batch is None:
        num_items_in_batch = len(labels) or math.nan
    elif not len(labels):
        num_items_in_batch = math.inf
    scale = _like(num_items_in_batch, hidden_states).float().reciprocal()
    options = scale, token_weights, (*steps, torch.is_grad_enabled()), chunk_size, label_smoothing
    loss, losses = _LinearCrossEntropy.apply(hidden_states, weight, bias, labels, *options)
    return loss, losses.new_zeros(length).index_copy_(0, kept, losses) if return_losses else None


def places(mask: torch.Tensor, number: int | None) -> torch.Tensor:
    """Return where a mask `[T]` is `True`. No host sync if the number of these places is known."""
    if number is None:
        return mask.nonzero().flatten()
    if not mask.is_cuda and int(mask.sum()) != number:
        raise input_error("num_targets as in labels", f"{number} instead of {int(mask.sum())}")
    length = len(mask)
    # The first element takes what is not in the mask. Too few or too many places leave an index out of range.
    found = torch.full((number + 1,), length, dtype=torch.int64, device=mask.device)
    return found.scatter_(0, mask.cumsum(0).where(mask, 0), torch.arange(length, device=mask.device))[1:]


def _like(number: int | float | torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `number` as a scalar on the device of `tensor`. No host sync for a Python number or a tensor there."""
    if isinstance(number, torch.Tensor):
        return number.to(tensor.device)
    return torch.full((), number, dtype=torch.float32, device=tensor.device)


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss, and those of the tokens. The forward also computes the gradients of the sum over the targets."""

    @staticmethod
    def forward(ctx, hidden_states, weight, bias, labels, scale, token_weights, steps, chunk_size, label_smoothing):
        # Gradients are always disabled inside a forward, so the caller passes whether they are needed.
        softmax_step, scaled, wanted = steps
        needed = [wanted and needed for needed in ctx.needs_input_grad[:3]]
        # Autocast would run the matrix product of the head in low precision too.
        dtype = autocast_dtype(hidden_states)
        gradients = HeadGradients(needed, (hidden_states, weight, bias), dtype or hidden_states.dtype)
        if dtype is not None:
            hidden_states, weight = hidden_states.to(dtype), weight.to(dtype)
        losses = hidden_states.new_zeros(len(labels), dtype=torch.float32)
        buffer = hidden_states.new_empty(min(chunk_size, len(labels)), weight.shape[0])
        for start in range(0, len(labels), chunk_size):
            rows = slice(start, start + chunk_size)
            chunk = hidden_states[rows]
            logits = torch.mm(chunk, weight.t(), out=buffer[: len(chunk)])
            if bias is not None:
                logits += bias
            losses[rows] = softmax_step(logits, labels[rows], label_smoothing, any(needed))
            # From here on, `logits` holds its own gradient.
            gradients.add(rows, logits, chunk, weight, None if token_weights is None else token_weights[rows])
        ctx.gradients, ctx.scale, ctx.scaled = gradients, scale, scaled
        ctx.mark_non_differentiable(losses)
        ctx.set_materialize_grads(False)
        return (losses if token_weights is None else losses * token_weights).sum() * scale, losses

    @staticmethod
    @first_order(
        'Pass skip_logits=False to the model, or impl="reference" to the op. They support gradients of any order.'
    )
    def backward(ctx, d_loss, _):
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_cross_entropy: the first backward through this loss has freed its gradients. "
                "Run the forward again, or pass retain_graph=True to the first backward."
            )
        # Nothing else refers to the gradients.
        kept = retains_graph()
        # The forward does not scale, because the gradient of a mean over many targets would underflow in float16.
        gradients = ctx.gradients.scaled(d_loss * ctx.scale, ctx.scaled, kept)
        if not kept:
            ctx.gradients = None
        return (*gradients, None, None, None, None, None, None)


class HeadGradients:
    """The gradients of hidden states, weight and bias, added up over chunks of logits. `None` where not needed.

    Args:
        needed (`Sequence[bool]`):
            Which of the three inputs need a gradient.
        inputs (`tuple`):
            Hidden states `[T, H]`, weight `[V, H]` and bias `[V]` or `None`.
        dtype (`torch.dtype`):
            Dtype of the matrix products. The sums over tokens are at least in float32.
    """

    def __init__(self, needed: Sequence[bool], inputs: tuple, dtype: torch.dtype):
        hidden_states, weight, bias = inputs
        for_hidden, self.for_weight, for_bias = needed
        self.dtypes = [None if x is None else x.dtype for x in inputs]
        self.hidden_states = torch.empty_like(hidden_states, dtype=dtype) if for_hidden else None
        # The first product creates the sum, unless there is no chunk.
        self.weight = torch.zeros_like(weight) if self.for_weight and not len(hidden_states) else None
        self.bias = torch.zeros_like(bias, dtype=torch.promote_types(dtype, torch.float32)) if for_bias else None

    def add(
        self,
        rows: slice,
        logits: torch.Tensor,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        factors: torch.Tensor | None = None,
    ) -> None:
        """Add those of a chunk of rows, whose logits hold their own gradient, times a factor `[C]` of each row."""
        if factors is not None:
            # Of a row's products, and not of its logits, which are many more numbers.
            hidden_states = hidden_states * factors[:, None].to(hidden_states.dtype)
        if self.hidden_states is not None:
            products = torch.mm(logits, weight, out=self.hidden_states[rows])
            if factors is not None:
                products *= factors[:, None]
        if self.for_weight:
            self.weight = add_product(self.weight, logits.t(), hidden_states)
        if self.bias is not None:
            logits = logits if factors is None else logits * factors[:, None].to(self.bias.dtype)
            self.bias += logits.sum(0, dtype=self.bias.dtype)

    def scaled(self, factor: torch.Tensor, scaled: Callable, kept: bool) -> list[torch.Tensor | None]:
        """All of them times a scalar, in the dtypes of the inputs. In place, unless they are kept for another backward."""
        found = zip((self.hidden_states, self.weight, self.bias), self.dtypes, strict=True)
        return [None if x is None else scaled(x.clone() if kept else x, factor, dtype) for x, dtype in found]


def add_product(total: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute `total + left @ right`, in place if `total` is not `None`. Sums are float32, or float64 for float64."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    if left.is_cuda and left.dtype in (torch.float16, torch.bfloat16):
        if total is None:
            return torch.mm(left, right, out_dtype=dtype)
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    if total is None:
        total = torch.zeros(left.shape[0], right.shape[1], dtype=dtype, device=left.device)
    return total.addmm_(left.to(dtype), right.to(dtype))


def _torch_softmax_step(logits, labels, label_smoothing, gradient_too):
    """Return the loss of each row, float32 `[C]`. Overwrite `logits` `[C, V]` with the gradient of the summed loss."""
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


def torch_scaled(x, factor, dtype):
    return torch.mul(x, factor, out=x if x.dtype == dtype else x.new_empty(x.shape, dtype=dtype))


def by_chunks(run: Callable, kernels: dict[str, str], steps: tuple, reference: Callable) -> dict[str, Implementation]:
    """Return the table of an op of a head that runs on chunks of logits: `run` with kernels, or with PyTorch's steps.

    The last step is that of [`HeadGradients.scaled`]. `kernels` are the others by name, with the files that have them.
    """
    launched = (*(triton.late(file, name) for name, file in kernels.items()), triton.late("cross_entropy", "scaled"))
    return {
        "triton": Implementation(partial(run, launched), lambda hidden_states, *_, **__: triton.verify(hidden_states)),
        "torch": Implementation(partial(run, (*steps, torch_scaled))),
        "reference": Implementation(reference),
    }


_KERNELS = {"softmax_minus_target": "cross_entropy"}
IMPLEMENTATIONS = by_chunks(_chunked, _KERNELS, (_torch_softmax_step,), _reference)


def example(setting: Setting) -> dict[str, Call]:
    """The call of a model's loss, for [`availability`]."""
    call = setting.zeros(3, 256), setting.zeros(8, 256), torch.zeros(3), None
    return {"linear_cross_entropy": Call(IMPLEMENTATIONS, call)}
