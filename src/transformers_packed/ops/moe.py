"""Mixture of experts: each token chooses experts, and the result is the weighted sum of their outputs.

The result of a token does not depend on the other tokens to the last bit, in the forward and in the backward. Matrix
products run in blocks whose shape does not depend on the routing, and the outputs of a token's experts are added in the
order in which it chose them.
"""

from functools import partial

import torch
import torch.nn.functional as F

from ..errors import input_error, shapes
from .autograd import autocast_dtype, compute_dtype, first_order
from .backends import triton
from .dispatch import Call, Implementation, Setting, run, with_triton
from .float8_blocks import BLOCK, cast_in_blocks, product_in_blocks
from .norm import widened
from .terms import Adapter, DequantizedExperts, Float8Experts


# Rows of one expert that the reference multiplies at a time. The last block of an expert is filled with zeros.
_BLOCK = 16
# Highest rank of an adapter whose second matrix fits into the shared memory beside the tiles.
MAX_RANK = 64


def choose_experts(
    router_logits: torch.Tensor, top_k: int, *, normalize: bool = True, impl: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts with the highest logits for each token.

    Among equal logits, the lowest index comes first. The weights are the softmax of all logits in float32.

    Args:
        router_logits (`torch.Tensor` of shape `[T, experts]`):
            Scores of all experts for each token.
        top_k (`int`):
            Number of experts per token.
        normalize (`bool`, *optional*, defaults to `True`):
            Whether to divide the weights of the chosen experts by their sum.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (with `normalize=True`) or `"reference"`.

    Returns:
        `tuple`: the weights `[T, top_k]` in the dtype of the logits, and the experts `[T, top_k]` in int64.

    Raises:
        `ValueError`: `top_k` is not between 1 and the number of experts, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import choose_experts
    >>> weights, experts = choose_experts(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), 2)
    >>> weights.tolist(), experts.tolist()
    ([[0.5, 0.5]], [[1, 2]])

    ```
    """
    if router_logits.ndim != 2 or not 0 < top_k <= router_logits.shape[-1]:
        got = f"{shapes(router_logits)}, {top_k}"
        raise input_error("router_logits [T, experts] and top_k of 1 to experts", got)
    return run("choose_experts", impl, ROUTERS, router_logits, top_k, normalize)


def _reference_router(router_logits, top_k, normalize):
    # `topk` takes any of several equal logits.
    index = router_logits.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = torch.softmax(widened(router_logits), -1).gather(-1, index)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(router_logits.dtype), index


def _triton_router(router_logits, top_k, normalize):
    from .backends.triton.moe import Router

    return Router.apply(router_logits, top_k)


def _verify_router(router_logits, top_k, normalize):
    return triton.verify(router_logits) if normalize else "supports normalized weights only"


def experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor | DequantizedExperts | Float8Experts,
    down_proj: torch.Tensor | DequantizedExperts | Float8Experts,
    *,
    gate_up_adapter: Adapter | None = None,
    down_adapter: Adapter | None = None,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
    impl: str = "auto",
) -> torch.Tensor:
    """Compute `sum over k of weight_k * down_k(silu(gate_k(x)) * up_k(x))` with the experts of each token.

    Args:
        hidden_states (`torch.Tensor` of shape `[T, hidden]`):
            Input of the experts, in any floating dtype.
        top_k_index (`torch.LongTensor` of shape `[T, top_k]`):
            Experts of each token. An index of `E` or more stands for an expert on another device and adds nothing.
        top_k_weights (`torch.Tensor` of shape `[T, top_k]`):
            Weights of these experts.
        gate_up_proj (`torch.Tensor` of shape `[E, 2 * width, hidden]`, [`DequantizedExperts`] or [`Float8Experts`]):
            First weights of all experts, those of the gate before the others. Quantized weights are frozen, and
            computed for some experts at a time, once in the forward and once in the backward. The products with
            [`Float8Experts`] run in float8, and cast their rows.
        down_proj (`torch.Tensor` of shape `[E, hidden, width]`, or as `gate_up_proj`):
            Second weights of all experts.
        gate_up_adapter ([`Adapter`], *optional*), down_adapter ([`Adapter`], *optional*):
            Additions of low rank to the weights, `down` `[E, rank, in]` and `up` `[E, out, rank]`, without dropout and
            bias.
        shared (`tuple[torch.Tensor, torch.Tensor]`, *optional*):
            Output `[T, hidden]` of the shared expert, and its gate `[T, 1]`. `sigmoid(gate) * output` is added.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"triton"` (on GPUs of compute capability 9.0 to 11.0) or `"reference"`. `"triton"` saves the
            input and the outputs of `gate_up_proj` for the backward.

    Returns:
        `torch.Tensor` of shape `[T, hidden]`, in the dtype of `hidden_states`.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops import experts
    >>> gate_up = torch.tensor([[[20.0], [1.0]], [[20.0], [3.0]]])
    >>> index, weights = torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])
    >>> experts(torch.ones(1, 1), index, weights, gate_up, torch.ones(2, 1, 1)).tolist()
    [[40.0]]

    ```
    """
    shape, (tokens, hidden) = gate_up_proj.shape, hidden_states.shape
    if shape[2] != hidden or down_proj.shape != (shape[0], hidden, shape[1] / 2):
        expected = "hidden_states [T, hidden], weights [E, 2 * width, hidden] and [E, hidden, width]"
        raise input_error(expected, shapes(hidden_states, gate_up_proj, down_proj))
    if top_k_index.shape != top_k_weights.shape or top_k_index.shape[:1] != (tokens,) or top_k_index.ndim != 2:
        expected = f"top_k_index and top_k_weights [{tokens}, top_k]"
        raise input_error(expected, shapes(top_k_index, top_k_weights))
    for weight, adapter in ((gate_up_proj, gate_up_adapter), (down_proj, down_adapter)):
        if adapter is not None:
            _check_adapter(weight, adapter)
    if shared is not None and tuple(x.shape for x in shared) != ((tokens, hidden), (tokens, 1)):
        expected = f"an output [{tokens}, {hidden}] and a gate [{tokens}, 1] of the shared expert"
        raise input_error(expected, shapes(*shared))
    call = hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_adapter, down_adapter, shared
    name = "experts_float8" if _in_float8(gate_up_proj, down_proj) else "experts"
    return run(name if call[5:7] == (None, None) else f"{name}_lora", impl, EXPERTS, *call)


def _in_float8(gate_up_proj, down_proj) -> bool:
    """Whether the products run in float8. Raise a `ValueError` if one weight alone, or another size, would have them."""
    found = [isinstance(x, Float8Experts) for x in (gate_up_proj, down_proj)]
    if found[0] != found[1] or (found[0] and any(size % BLOCK for size in down_proj.shape[1:])):
        expected = f"products in float8 for both weights, in multiples of {BLOCK}, or for none"
        raise input_error(expected, f"{shapes(gate_up_proj, down_proj)}, in float8: {found}")
    return found[0]


def _check_adapter(weight, adapter):
    number, out, size = weight.shape
    rank = adapter.up.shape[-1]
    if adapter.down.shape != (number, rank, size) or not rank or adapter.up.shape != (number, out, rank):
        expected = f"an adapter [{number}, rank, {size}] and [{number}, {out}, rank]"
        raise input_error(expected, shapes(adapter.down, adapter.up))
    if adapter.dropout or adapter.bias is not None:
        raise input_error("an adapter of experts without dropout and bias", f"dropout={adapter.dropout}")


def _reference(
    hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_adapter, down_adapter, shared
):
    tokens, top_k = top_k_index.shape
    number, dtype = gate_up_proj.shape[0], gate_up_proj.dtype
    slots = top_k_index.flatten()
    order = slots.argsort(stable=True)
    counts = torch.bincount(slots.clamp(max=number), minlength=number + 1)[:number].tolist()
    # One row per choice. The gradients of a token's rows are then added in the order of its choices.
    rows = hidden_states.to(dtype)[:, None].expand(-1, top_k, -1).flatten(0, 1)
    rows = rows[order[: sum(counts)]].split(counts)
    found = [hidden_states.new_zeros(0, hidden_states.shape[1], dtype=dtype)]
    first, second = (_by_expert(*pair) for pair in ((gate_up_proj, gate_up_adapter), (down_proj, down_adapter)))
    for mine, gate_up, down in zip(rows, first, second, strict=True):
        for block in mine.split(_BLOCK) if len(mine) or not sum(counts) else ():
            gate, up = gate_up(F.pad(block, (0, 0, 0, _BLOCK - len(block)))).chunk(2, -1)
            found.append(down(F.silu(gate) * up)[: len(block)])
    found = torch.cat([*found, hidden_states.new_zeros(len(slots) - sum(counts), hidden_states.shape[1], dtype=dtype)])
    by_choice = widened(found[order.argsort()]).view(tokens, top_k, hidden_states.shape[1])
    weights = widened(top_k_weights)[..., None]
    total = by_choice[:, 0] * weights[:, 0]
    for k in range(1, top_k):
        total = total + by_choice[:, k] * weights[:, k]
    if shared is not None:
        output, gate = map(widened, shared)
        total = total + torch.sigmoid(gate) * output
    return total.to(hidden_states.dtype)


def _by_expert(weight, adapter):
    """Yield what multiplies rows by the weight of each expert, plus its adapter."""
    number, factors = weight.shape[0], [(None, None)] * weight.shape[0]
    if isinstance(weight, DequantizedExperts):
        products = (partial(_times_frozen, _weight_of(weight, i), weight, i) for i in range(number))
    elif isinstance(weight, Float8Experts):
        products = (partial(_times_float8, weight, i) for i in range(number))
    else:
        products = (partial(F.linear, weight=x) for x in weight.unbind())
    if adapter is not None:
        both = adapter.down, adapter.up * adapter.scale
        factors = zip(*(x.to(weight.dtype).unbind() for x in both), strict=True)
    for product, (down, up) in zip(products, factors, strict=True):
        yield partial(_apply, product, down, up, weight.dtype)


def _apply(product, down, up, dtype, rows):
    rows = rows.to(dtype)
    y = product(rows)
    return y if down is None else y + F.linear(F.linear(rows, down), up)


def _times_frozen(matrix, weights, expert, rows):
    dtype = compute_dtype(rows)
    return _FrozenLinear.apply(rows.to(dtype), matrix.to(dtype), weights, expert)


def _times_float8(weights, expert, rows):
    return _Float8Linear.apply(rows.to(compute_dtype(rows)), weights, expert)


class _Float8Linear(torch.autograd.Function):
    """A linear layer of an expert whose weight is in float8 with a scale for each block."""

    @staticmethod
    def forward(rows, weights, expert):
        values, scale = (x[expert] for x in weights.stored())
        return product_in_blocks(*cast_in_blocks(rows), values, scale).to(rows.dtype)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.weights, ctx.expert = inputs

    @staticmethod
    @first_order("Compute second-order gradients without products in float8.")
    def backward(ctx, dy):
        values, scale = (x[ctx.expert] for x in ctx.weights.stored())
        return product_in_blocks(*cast_in_blocks(dy), values.t(), scale.t()).to(dy.dtype), None, None


class _FrozenLinear(torch.autograd.Function):
    """A linear layer of an expert whose weight is computed again in backward, so that nothing holds it until then."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows, matrix, weights, expert):
        return F.linear(rows, matrix)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *_, ctx.weights, ctx.expert = inputs

    @staticmethod
    def backward(ctx, dy):
        return dy @ _weight_of(ctx.weights, ctx.expert).to(dy.dtype), None, None, None


def _weight_of(weights, expert):
    return weights.compute(expert, expert + 1)[0].to(weights.dtype)


def _triton(hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_adapter, down_adapter, shared):
    from .backends.triton.moe import Experts

    dtype = autocast_dtype(hidden_states) or gate_up_proj.dtype
    # Autograd needs the matrices as arguments of their own.
    factors = [(None, None, None) if a is None else a[:3] for a in (gate_up_adapter, down_adapter)]
    weights = gate_up_proj, down_proj
    quantized = [None if isinstance(x, torch.Tensor) else x for x in weights]
    options = dtype, [scale for *_, scale in factors], torch.is_grad_enabled(), quantized
    weights = [x if isinstance(x, torch.Tensor) else None for x in weights]
    call = hidden_states, top_k_index, top_k_weights, *weights
    return Experts.apply(*call, *(shared or (None, None)), options, *factors[0][:2], *factors[1][:2])


def verify_triton(
    hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, gate_up_adapter, down_adapter, shared
) -> str:
    """Whether `impl="triton"` supports this call of [`experts`], whose index and weights may be `None`."""
    if reason := triton.verify(hidden_states):
        return reason
    # GPUs of compute capability 12 have less than half of the shared memory that the kernels use.
    if hidden_states.is_cuda and not (9, 0) <= torch.cuda.get_device_capability(hidden_states.device) < (12, 0):
        return "needs a GPU of compute capability 9.0 to 11.0"
    width = down_proj.shape[2]
    if hidden_states.shape[1] % 64 or width % 64:
        return f"needs multiples of 64, not hidden states of {hidden_states.shape[1]} and experts of {width}"
    dtype = autocast_dtype(hidden_states) or gate_up_proj.dtype
    if dtype != torch.bfloat16:
        return f"needs products in bfloat16, not {dtype}"
    if down_proj.dtype != gate_up_proj.dtype:
        return f"needs weights of one dtype, not {gate_up_proj.dtype} and {down_proj.dtype}"
    adapters = [adapter for adapter in (gate_up_adapter, down_adapter) if adapter is not None]
    rank = max((adapter.down.shape[1] for adapter in adapters), default=0)
    return f"supports adapters up to rank {MAX_RANK}, not {rank}" if rank > MAX_RANK else ""


ROUTERS = with_triton(_triton_router, _verify_router, _reference_router)
EXPERTS = with_triton(_triton, verify_triton, _reference)


def example(setting: Setting) -> dict[str, Call]:
    """The call of a mixture, for [`availability`]. On a GPU without the kernel, a model calls `grouped_mm`."""
    hidden, width = setting.hidden_size, setting.expert_width
    matrices = setting.zeros(1, 2 * width, hidden), setting.zeros(1, hidden, width)
    grouped_mm = Implementation(
        _reference, lambda hidden_states, *_: "" if hidden_states.is_cuda else "needs CUDA tensors"
    )
    table = {"triton": EXPERTS["triton"], "grouped_mm": grouped_mm, "reference": EXPERTS["reference"]}
    return {"experts": Call(table, (setting.zeros(3, hidden), None, None, *matrices, None, None, None))}
