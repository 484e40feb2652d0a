"""Linear layers with a shared input and low-rank adapters (LoRA), in one autograd function.

Separate layers each return a gradient of `x`, and autograd adds these gradients in extra kernels. Separate adapters read
`x` and write an output each. Here, each matrix product accumulates into the result of the previous one, as
[`Products`] describes. `x` is saved once, and only if a weight or an adapter needs a gradient. Frozen weights get none.

The products run in the dtype of autocast, or else in that of the weights. The gradient of `x` accumulates in this dtype.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..errors import input_error, shapes
from . import float8, float8_blocks
from .autograd import autocast_dtype, first_order, free, is_transformed
from .backends import triton
from .dispatch import Call, Implementation, Setting, ran, run
from .kept_outputs import running_layer
from .recipes import recipe_of
from .terms import Adapter, BlocksWeight, Dequantized, Float8Weight, Plan, Products, Projection, planned
from .terms.products import unflattened


# Weights whose products run in float8.
_IN_FLOAT8 = Float8Weight, BlocksWeight


def as_projection(layer: torch.Tensor | Projection) -> Projection:
    """Return the projection with only this weight, or the projection itself."""
    return Projection(layer) if isinstance(layer, torch.Tensor) else layer


def check_layer(width: int, layer: torch.Tensor | Projection) -> None:
    """Raise an error if `layer` does not belong to a linear layer with `width` inputs."""
    weight, _, adapters = as_projection(layer)
    if len(weight.shape) != 2 or weight.shape[1] != width:
        raise input_error(f"a weight [out, {width}] of the linear layer", tuple(weight.shape))
    for down, up, _, dropout, _ in adapters:
        if down.shape[1:] != (width,) or up.shape != (weight.shape[0], len(down)):
            raise input_error(f"an adapter [rank, {width}] and [{weight.shape[0]}, rank]", shapes(down, up))
        if not 0 <= dropout < 1:
            raise input_error("a dropout from 0 to less than 1", dropout)


def product_dtype(hidden_states: torch.Tensor, layer: torch.Tensor | Projection) -> torch.dtype | None:
    """Return the dtype of the outputs if one function can compute this layer, or `None` if the layer has to be called.

    Autocast casts the input and the weight to its own dtype, but leaves float64. Without autocast, the input has the dtype of
    the weight, or a quantized weight casts it.
    """
    weight = as_projection(layer).weight
    dtype = autocast_dtype(hidden_states)
    if dtype is not None:
        return None if torch.float64 in (hidden_states.dtype, weight.dtype) else dtype
    dtype = weight.dtype
    if hidden_states.dtype == dtype:
        return dtype
    casts_input = not isinstance(weight, torch.Tensor) and weight.casts_input
    return dtype if hidden_states.dtype == torch.float32 and casts_input else None


def verify_layer(hidden_states: torch.Tensor, layer: torch.Tensor | Projection | None) -> str:
    """Whether a kernel that computes `hidden_states` can apply this layer to them, if there is one."""
    if layer is None:
        return ""
    weight = as_projection(layer).weight
    if product_dtype(hidden_states, layer) != hidden_states.dtype:
        return f"needs {hidden_states.dtype} for the weight too, and no autocast to another dtype"
    return _verify_float8(hidden_states, weight, hidden_states.dtype) if isinstance(weight, _IN_FLOAT8) else ""


def _verify_float8(hidden_states, weight, dtype):
    rule = float8_blocks if isinstance(weight, BlocksWeight) else float8
    return rule.verify(hidden_states, weight, dtype)


def shared_input_linears(
    hidden_states: torch.Tensor, *layers: torch.Tensor | Projection, impl: str = "auto"
) -> tuple[torch.Tensor, ...]:
    """Apply linear layers, with their adapters, to the same input.

    Args:
        hidden_states (`torch.Tensor` of shape `[..., in]`):
            Shared input.
        *layers (`torch.Tensor` of shape `[out, in]`, or [`Projection`]):
            Weights, or projections with biases and adapters. `out` may differ between layers.
        impl (`str`, *optional*, defaults to `"auto"`):
            `"auto"`, `"fused"` (one autograd function, on a GPU) or `"reference"`.

    Returns:
        `tuple` of `torch.Tensor` of shape `[..., out]`.

    Raises:
        `ValueError`: the shapes do not match, or `impl` does not support the call.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.ops.linear import shared_input_linears
    >>> from transformers_packed.ops.terms import Adapter, Projection
    >>> adapter = Adapter(torch.ones(1, 2), torch.ones(3, 1), scale=10.0)
    >>> y, z = shared_input_linears(torch.ones(1, 2), torch.ones(1, 2), Projection(torch.ones(3, 2), None, (adapter,)))
    >>> y.tolist(), z.tolist()
    ([[2.0]], [[22.0, 22.0, 22.0]])

    ```
    """
    for layer in layers:
        check_layer(hidden_states.shape[-1], layer)
    projections = tuple(map(as_projection, layers))
    table = FLOAT8 if _in_float8(projections) else IMPLEMENTATIONS
    return run(_name(projections), impl, table, hidden_states, *projections)


def fused_linears(
    hidden_states: torch.Tensor, projections: Sequence[Projection], dtype: torch.dtype, keep: bool = True
) -> tuple[torch.Tensor, ...]:
    """[`shared_input_linears`] on a GPU, for layers whose [`product_dtype`] is `dtype`.

    It skips the checks of each layer. On short rows, the host would take longer for them than the GPU for the layers.
    Without `keep`, host memory gets no outputs: kernels of others may write into them, which PyTorch does not notice.
    """
    name = _name(projections)
    if is_transformed() or (name != "linear" and _verify_fused(hidden_states, *projections)):
        return shared_input_linears(hidden_states, *projections)
    ran(name, "fused")
    return _fused(hidden_states, *projections, dtype=dtype, keep=keep)


def _in_float8(projections: Sequence[Projection]) -> list[Float8Weight | BlocksWeight]:
    return [projection.weight for projection in projections if isinstance(projection.weight, _IN_FLOAT8)]


def _name(projections):
    name = "linear_float8" if _in_float8(projections) else "linear"
    return f"{name}_lora" if any(projection.adapters for projection in projections) else name


def _reference(hidden_states, *projections):
    return tuple(apply_reference(hidden_states, projection) for projection in projections)


def apply_reference(hidden_states: torch.Tensor, layer: torch.Tensor | Projection) -> torch.Tensor:
    """Apply one layer with PyTorch's own functions."""
    weight, bias, adapters = as_projection(layer)
    if isinstance(weight, _IN_FLOAT8):
        return shared_input_linears(hidden_states, layer)[0]
    if isinstance(weight, Dequantized):
        # Through a plain weight, and back to the input's dtype, which autocast alone changes.
        bias = None if bias is None else bias.to(weight.dtype)
        plain = Projection(weight.compute().to(weight.dtype), bias, adapters)
        y = apply_reference(hidden_states.to(weight.dtype), plain)
        return y if autocast_dtype(y) else y.to(hidden_states.dtype)
    y = F.linear(hidden_states, weight, bias)
    for down, up, scale, dropout, bias in adapters:
        x = F.dropout(hidden_states, dropout).to(y.dtype)
        bias = None if bias is None else bias.to(y.dtype)
        y = y + scale * F.linear(F.linear(x, down.to(y.dtype)), up.to(y.dtype), bias)
    return y


def _fused(hidden_states, *projections, dtype=None, keep=True):
    plan, tensors = planned(projections)
    recipe = None, None, None
    # The gradient of a weight takes long and needs its input. In float8, weights keep the input in a form of their own.
    trained = any(isinstance(p.weight, torch.Tensor) and p.weight.requires_grad for p in projections)
    if not trained or _in_float8(projections):
        recipe = recipe_of(hidden_states)
    dtype = dtype or product_dtype(hidden_states, projections[0])
    outputs = _SharedInputLinears.apply(hidden_states, plan, dtype, keep, *recipe, *tensors)
    if autocast_dtype(hidden_states):
        return outputs
    # A quantized layer returns the dtype of its input, even if its products have another one.
    return outputs if dtype == hidden_states.dtype else tuple(y.to(hidden_states.dtype) for y in outputs)


def _verify_fused(hidden_states, *projections):
    in_float8 = _in_float8(projections)
    if in_float8 and is_transformed():
        return "does not support torch.func transforms"
    if not in_float8 and not triton.on_gpu(hidden_states):
        return "needs CUDA tensors"
    dtypes = {product_dtype(hidden_states, projection) for projection in projections}
    if len(dtypes) != 1 or None in dtypes:
        return "needs one dtype for all products"
    for weight in in_float8:
        if reason := _verify_float8(hidden_states, weight, *dtypes):
            return reason
    return triton.verify(hidden_states) if any(a.dropout for p in projections for a in p.adapters) else ""


class _SharedInputLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, plan: Plan, dtype, keep, recompute, source, weight, *tensors):
        ctx.like, ctx.recompute = (hidden_states.shape, hidden_states.dtype), recompute
        inputs = hidden_states if hidden_states.dtype == dtype else hidden_states.to(dtype)
        products = Products(ctx, plan, tensors, dtype)
        by_row = products.by_row
        rows = inputs.reshape(-1, inputs.shape[-1]) if by_row else inputs
        products.prepare(rows, keep=True)
        if not products.needs_rows():
            ctx.recompute = source = weight = None
        elif recompute is None:
            source = inputs
        products.save(ctx, source, weight)
        ctx.set_materialize_grads(False)
        layer = running_layer() if keep else None
        known = {} if layer is None else layer.known()
        outputs = products.forward(rows, known)
        if by_row or any(y._is_view() for y in outputs if y is not None):
            outputs = [y if y is None else unflattened(y, inputs.shape[:-1]) for y in outputs]
        if layer is not None:
            # Without a gradient, nobody may compute the layer again, as for those before the first trained one.
            layer.keep(outputs if any(ctx.needs_input_grad) else [])
        return tuple(known.get(i, y) for i, y in enumerate(outputs))

    @staticmethod
    @first_order("Call the layers one by one, as on a CPU, and without float8.")
    def backward(ctx, *gradients):
        if all(gradient is None for gradient in gradients):
            free(ctx)
            return (None,) * len(ctx.needs_input_grad)
        products, (rows, weight) = Products.restored(ctx)
        if ctx.recompute is not None:
            rows = ctx.recompute(rows, weight).to(products.dtype)
        rows = None if rows is None else rows.reshape(-1, rows.shape[-1])
        gradients = [None if g is None else g.reshape(-1, g.shape[-1]) for g in gradients]
        d_rows = products.input_gradient(gradients, ctx.needs_input_grad[0])
        found = products.parameter_gradients(gradients, rows)
        shape, dtype = ctx.like
        return None if d_rows is None else d_rows.view(shape).to(dtype), *[None] * 6, *found


IMPLEMENTATIONS = {
    "fused": Implementation(_fused, _verify_fused),
    "reference": Implementation(_reference),
}
# The same on a CPU: the function is written for tensors of any device, and only its casts and products differ.
FLOAT8 = {"fused": Implementation(_fused, _verify_fused)}


def example(setting: Setting) -> dict[str, Call]:
    """The calls of a linear layer, plain, with an adapter, and in float8, for [`availability`]."""
    row, layer = setting.zeros(1, 3, 256), setting.zeros(8, 256)
    adapter = Adapter(setting.zeros(4, 256), setting.zeros(8, 4))
    in_float8 = {"fused": Implementation(_fused, float8.verify)}
    return {
        "linear": Call(IMPLEMENTATIONS, (row, Projection(layer))),
        "linear_lora": Call(IMPLEMENTATIONS, (row, Projection(layer, None, (adapter,)))),
        "linear_float8": Call(in_float8, (row[0], setting.zeros(16, 256), setting.dtype)),
    }
