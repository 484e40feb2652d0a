"""Mixture of experts: the router, and the experts of all tokens."""

import torch
import triton
import triton.language as tl

from ...autograd import save, saved
from ...terms import Float8Experts
from . import KernelFunction, next_power_of_2
from .float8_blocks import Float8Plan
from .grouped_products import Factors, Plan


@triton.jit
def _route(logits_ptr, weights_ptr, index_ptr, E, TOP: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column, slot = tl.arange(0, WIDTH), tl.arange(0, SLOTS)
    logits = tl.load(logits_ptr + token * E + column, mask=column < E, other=0.0).to(tl.float32)
    # NaN is chosen first, as when sorting, and makes the weights NaN.
    logits = tl.where(logits != logits, float("inf"), logits)
    free = column < E
    chosen = tl.full((SLOTS,), float("-inf"), tl.float32)
    for k in tl.static_range(TOP):
        best = tl.max(tl.where(free, logits, float("-inf")), 0)
        expert = tl.min(tl.where(free & (logits == best), column, WIDTH), 0)
        free = free & (column != expert)
        chosen = tl.where(slot == k, best, chosen)
        tl.store(index_ptr + token * TOP + k, expert.to(tl.int64))
    weights = tl.exp(chosen - tl.max(chosen, 0))
    weights = weights / tl.sum(weights, 0)
    tl.store(weights_ptr + token * TOP + slot, weights.to(weights_ptr.dtype.element_ty), mask=slot < TOP)


@triton.jit
def _shared_backward(dy_ptr, shared_ptr, gate_ptr, d_shared_ptr, d_gate_ptr, N, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    at, inside = token * N + column, column < N
    dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.sigmoid(tl.load(gate_ptr + token).to(tl.float32))
    tl.store(d_shared_ptr + at, (dy * gate).to(d_shared_ptr.dtype.element_ty), mask=inside)
    d_gate = tl.sum(dy * shared, 0) * gate * (1.0 - gate)
    tl.store(d_gate_ptr + token, d_gate.to(d_gate_ptr.dtype.element_ty))


class Router(KernelFunction):
    """The weights `[T, top_k]` and the experts `[T, top_k]` with the highest logits `[T, E]`."""

    def forward(ctx, logits, top_k):
        logits = logits.contiguous()
        tokens, number = logits.shape
        weights = logits.new_empty(tokens, top_k)
        index = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
        if tokens:
            sizes = (next_power_of_2(n) for n in (number, top_k))
            _route[(tokens,)](logits, weights, index, number, top_k, *sizes, num_warps=1)
        ctx.save_for_backward(logits, index)
        ctx.mark_non_differentiable(index)
        return weights, index

    def backward(ctx, d_weights, _):
        logits, index = ctx.saved_tensors
        # The probabilities over their sum are the softmax of the chosen logits.
        weights = torch.softmax(logits.gather(1, index).float(), -1)
        d_chosen = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
        return torch.zeros_like(logits).scatter_(1, index, d_chosen.to(logits.dtype)), None


def _either(quantized, *weights):
    """Return the quantized weights, and the others where there are none."""
    return [x if q is None else q for q, x in zip(quantized, weights, strict=True)]


def _plan_for(weight) -> type[Plan]:
    return Float8Plan if isinstance(weight, Float8Experts) else Plan


def _shared_gradients(dy, shared, gate):
    """Return the gradients of the shared expert's output and of its gate."""
    d_shared, d_gate, n = torch.empty_like(shared), torch.empty_like(gate), shared.shape[1]
    _shared_backward[(len(shared),)](dy.contiguous(), shared, gate, d_shared, d_gate, n, next_power_of_2(n))
    return d_shared, d_gate


class Experts(KernelFunction):
    """The weighted sum of the experts' outputs for tokens `[T, hidden]`, plus that of the shared expert if it is given.

    `options` are the dtype of all products, the scales of the adapters of both weights, whether gradients are enabled,
    and both weights if they are quantized. The last tensors are the matrices of these adapters, or `None`.
    """

    def forward(ctx, x, index, weights, gate_up, down, shared, gate, options, *matrices):
        dtype, scales, keep, ctx.quantized = options
        ctx.dtype, ctx.like, ctx.scales = dtype, x.dtype, scales
        first_weight, second_weight = _either(ctx.quantized, gate_up, down)
        index, weights, number = index.contiguous(), weights.contiguous(), first_weight.shape[0]
        shared, gate = (None if t is None else t.contiguous() for t in (shared, gate))
        rows, low, both, placed = x.to(dtype).contiguous(), None, None, [None] * 5
        if len(rows):
            plan = _plan_for(first_weight).of(index, number)
            first, second = Factors.of(matrices, scales, dtype)
            keep = keep and any(ctx.needs_input_grad)
            h, both, low = plan.gate_up(rows, first_weight, first, keep, second is not None)
            placed = plan.tensors()
        save(ctx, rows, index, weights, gate_up, down, shared, gate, *matrices, low, both, *placed)
        if not len(rows):
            return torch.empty_like(x)
        y, _ = plan.rows_times_experts(h, second_weight, second, transposed=True)
        return plan.sum_of_choices(y, index, weights, x.dtype, shared, gate)

    def backward(ctx, dy):
        x, index, weights, gate_up, down, shared, gate, *matrices, low, both = (all_saved := saved(ctx))[:-5]
        for_x, _, for_weights, for_gate_up, for_down, *for_shared, _ = ctx.needs_input_grad[:8]
        for_matrices = ctx.needs_input_grad[8:]
        if not len(x):
            inputs = x.to(ctx.like), None, weights, gate_up, down, shared, gate, None, *matrices
            wanted = zip(inputs, ctx.needs_input_grad, strict=True)
            return tuple(torch.zeros_like(x) if for_x else None for x, for_x in wanted)
        dx = d_gate_up = d_down = None
        found = [None] * 4
        d_shared, d_gate = _shared_gradients(dy, shared, gate) if any(for_shared) else (None, None)
        first_weight, second_weight = _either(ctx.quantized, gate_up, down)
        first, second = Factors.of(matrices, ctx.scales, ctx.dtype)
        plan = _plan_for(first_weight)(index.shape[1], *all_saved[-5:])
        dy = dy.to(ctx.dtype).contiguous()
        dh, d_low = plan.rows_times_experts(dy, second_weight, second, transposed=False, of_tokens=True)
        d_both, d_weights = plan.gate_backward(both, dh, weights, (first is not None, second is not None))
        if for_down:
            d_down = plan.weight_gradient(plan.gathered(dy), dh, down.dtype)
        if any(for_matrices[2:]):
            found[2] = plan.narrow_gradient(dh, d_low, matrices[2], transposed=True)
            # `dy` has no weights, so the other factor has them, as `dh` does now.
            found[3] = plan.narrow_gradient(dy, plan.narrow(dh, second, transposed=True), matrices[3], of_tokens=True)
        del dh, dy
        if for_x or any(for_matrices[:2]):
            rows, d_low = plan.rows_times_experts(d_both, first_weight, first, transposed=False)
            dx = plan.sum_of_choices(rows, index, None, ctx.like) if for_x else None
            del rows
        if for_gate_up:
            d_gate_up = plan.weight_gradient(d_both, plan.gathered(x), gate_up.dtype)
        if any(for_matrices[:2]):
            found[0] = plan.narrow_gradient(x, d_low, matrices[0], transposed=True, of_tokens=True)
            found[1] = plan.narrow_gradient(d_both, low, matrices[1])
        found = [x if wanted else None for x, wanted in zip(found, for_matrices, strict=True)]
        d_weights = d_weights if for_weights else None
        return dx, None, d_weights, d_gate_up, d_down, d_shared, d_gate, None, *found
