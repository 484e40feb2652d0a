"""The parameters of linear layers with low-rank adapters (LoRA), and their products and gradients.

    y_i = x W_i^T + b_i + sum_j s_ij (x A_ij^T) B_ij^T

- The matrices with few rows, which are all `A_ij` and narrow `W_i`, form one stack. `x` times the stack is one product,
  and so are the gradients of the stack.
- An output starts as its adapters' product, and `x W_i^T` accumulates into it. The gradient of `x` starts as the product
  with the stack, and all `dy_i W_i` accumulate into it.

All products run in one dtype. Adapters in another dtype are cast, not `x`.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .float8 import Float8Layers


# Weights with at most this many rows join the stack. Their products take as long as reading `x`.
_NARROW = 128


class Adapter(NamedTuple):
    """A low-rank addition to a linear layer: `scale * (dropout(x) @ down.T @ up.T + bias)`.

    Args:
        down (`torch.Tensor` of shape `[rank, in]`):
            First matrix, `lora_A` of PEFT.
        up (`torch.Tensor` of shape `[out, rank]`):
            Second matrix, `lora_B` of PEFT.
        scale (`float`, *optional*, defaults to 1.0):
            Factor of the addition.
        dropout (`float`, *optional*, defaults to 0.0):
            Probability of zeroing an element of the adapter's input. Must be less than 1.
        bias (`torch.Tensor` of shape `[out]`, *optional*):
            Bias of the second matrix.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float = 1.0
    dropout: float = 0.0
    bias: torch.Tensor | None = None


class Projection(NamedTuple):
    """The parameters of a linear layer.

    Args:
        weight (`torch.Tensor` of shape `[out, in]`, or [`QuantizedWeight`]):
            Weight of the layer.
        bias (`torch.Tensor` of shape `[out]`, *optional*):
            Bias of the layer.
        adapters (`tuple[Adapter, ...]`, *optional*):
            Active adapters.
        float8 (`bool`, *optional*, defaults to `False`):
            Whether the products with the weight run in float8.
    """

    weight: Any
    bias: torch.Tensor | None = None
    adapters: tuple[Adapter, ...] = ()
    float8: bool = False


class QuantizedWeight(NamedTuple):
    """A frozen weight that is computed when a product needs it.

    Args:
        shape (`torch.Size`):
            Shape of the weight, `[out, in]`.
        dtype (`torch.dtype`):
            Dtype of the products.
        dequantize (`Callable[[], torch.Tensor]`):
            Returns the weight `[out, in]` in any floating dtype.
        float8 (`tuple[torch.Tensor, torch.Tensor]`, *optional*):
            The weight in e4m3, `[out, in]`, and the float32 scales of its rows, `[out]`, if it is stored like this.
    """

    shape: torch.Size
    dtype: torch.dtype
    dequantize: Callable[[], torch.Tensor]
    float8: tuple[torch.Tensor, torch.Tensor] | None = None


def flatten(projections: Sequence[Projection]) -> tuple[tuple, list[torch.Tensor | None]]:
    """Split projections into a structure without differentiable tensors, and the tensors."""
    structure, tensors = [], []
    for weight, bias, adapters, float8 in projections:
        quantized = weight if isinstance(weight, QuantizedWeight) else None
        structure.append((quantized, tuple((adapter.scale, adapter.dropout) for adapter in adapters), float8))
        tensors += [weight if quantized is None else None, bias]
        for adapter in adapters:
            tensors += [adapter.down, adapter.up, adapter.bias]
    return tuple(structure), tensors


def unflatten(structure: tuple, values: Sequence[Any]) -> list[Projection]:
    """Return the projections of [`flatten`], or the same structure with other values in place of the tensors."""
    values, projections = iter(values), []
    for quantized, factors, float8 in structure:
        weight, bias = next(values), next(values)
        adapters = []
        for scale, dropout in factors:
            down, up, extra = next(values), next(values), next(values)
            adapters.append(Adapter(down, up, scale, dropout, extra))
        projections.append(Projection(weight if quantized is None else quantized, bias, tuple(adapters), float8))
    return projections


class Products:
    """The products of layers with rows `[T, in]`, and their gradients, for use in autograd functions.

    Args:
        structure (`tuple`), tensors (`Sequence[torch.Tensor | None]`):
            The layers, from [`flatten`].
        dtype (`torch.dtype`):
            Dtype of all products.
    """

    def __init__(self, structure: tuple, tensors: Sequence[torch.Tensor | None], dtype: torch.dtype):
        self.structure, self.tensors, self.dtype = structure, tensors, dtype
        self.projections = unflatten(structure, tensors)
        self.adapters = {(i, j): a for i, p in enumerate(self.projections) for j, a in enumerate(p.adapters)}
        self.in_float8 = [i for i, p in enumerate(self.projections) if p.float8]
        self.float8 = Float8Layers([self.projections[i].weight for i in self.in_float8], dtype)
        # Without adapters, the methods return early: the host takes longer for the rest than a GPU for a short row.
        if not self.adapters:
            return
        self.dropped = [at for at, adapter in self.adapters.items() if adapter.dropout]
        # Columns of `low`: those of the stack, then one range for each adapter with dropout, whose inputs differ.
        self.narrow: dict[int, slice] = {}
        self.columns: dict[tuple[int, int], slice] = {}
        self.width = self.stacked = 0
        stacked = [at for at in self.adapters if at not in self.dropped]
        if stacked:
            for i, (weight, _, _, float8) in enumerate(self.projections):
                if not (float8 or isinstance(weight, QuantizedWeight)) and weight.shape[0] <= _NARROW:
                    self.narrow[i] = self._range(weight.shape[0])
            for at in stacked:
                self.columns[at] = self._range(len(self.adapters[at].down))
            self.stacked = self.width
        for at in self.dropped:
            self.columns[at] = self._range(len(self.adapters[at].down))

    def _range(self, size: int) -> slice:
        self.width += size
        return slice(self.width - size, self.width)

    def to_save(self) -> list[torch.Tensor | None]:
        """Return what [`Products.restore`] needs in the backward."""
        return [*self.float8.kept, *self.kept, *self.tensors]

    @classmethod
    def restore(cls, structure: tuple, saved: Sequence[torch.Tensor | None], dtype: torch.dtype) -> "Products":
        """Return the instance of the forward from its `to_save()`."""
        kept = 6 + sum(len(factors) for _, factors, _ in structure)
        products = cls(structure, saved[kept:], dtype)
        products.float8.kept, products.kept = saved[:3], saved[3:kept]
        return products

    def forward(
        self, rows: torch.Tensor | None, keep: bool = False, cast: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """Return the outputs `[T, out]` for `rows` `[T, in]` in the dtype of the products. Sets `kept`.

        Without adapters and float8, rows may have more dimensions.

        Args:
            rows (`torch.Tensor` of shape `[T, in]`, *optional*):
                Input of the layers. Not needed with `cast` if there are no adapters, and all products run in float8.
            keep (`bool`, *optional*, defaults to `False`):
                Whether to keep the rows in float8 for the gradients of weights whose products run in float8.
            cast (`tuple[torch.Tensor, torch.Tensor]`, *optional*):
                The rows in float8, and their scales, if another kernel has cast them.
        """
        numbers = range(len(self.projections))
        if not (self.adapters or self.in_float8):
            self.kept = [None, None, None]
            return [F.linear(rows, self._weight(i), self._bias(i)) for i in numbers]
        done = dict(zip(self.in_float8, self.float8.forward(rows, keep, cast), strict=True)) if self.in_float8 else {}
        if not self.adapters:
            self.kept = [None, None, None]
            biases = [self._bias(i) for i in numbers]
            return [
                F.linear(rows, self._weight(i), bias) if i not in done else done[i] if bias is None else done[i] + bias
                for i, bias in enumerate(biases)
            ]
        stack, ups = self._cast()
        low = rows.new_empty(len(rows), self.width) if self.width else None
        seeds = None
        if stack is not None:
            torch.mm(rows, stack.t(), out=low[:, : self.stacked])
        if self.dropped:
            from .backends.triton.dropout import dropped

            # Drawn on the device, so checkpointing and CUDA graphs restore them with the generator's state.
            seeds = torch.randint(2**31 - 1, (len(self.dropped),), device=rows.device)
            for at, seed in zip(self.dropped, seeds, strict=True):
                adapter = self.adapters[at]
                inputs = dropped(rows, seed, adapter.dropout)
                torch.mm(inputs, adapter.down.to(self.dtype).t(), out=low[:, self.columns[at]])
        # A stack that is a weight itself is saved as such.
        own = stack is None or any(stack is tensor for tensor in self.tensors)
        self.kept = [None if own else stack, low if ups else None, seeds, *ups]
        return [self._output(i, rows, low, done.pop(i, None)) for i in range(len(self.projections))]

    def _output(
        self, i: int, rows: torch.Tensor, low: torch.Tensor | None, float8: torch.Tensor | None
    ) -> torch.Tensor:
        adapters, start = self.projections[i].adapters, self._bias(i)
        ups = dict(zip(self.adapters, self.kept[3:], strict=True))
        y = low[:, self.narrow[i]] if i in self.narrow else float8
        if start is not None:
            y = start.expand(len(rows), -1) if y is None else y + start
        for j, adapter in enumerate(adapters):
            factors = low[:, self.columns[i, j]], ups[i, j].t()
            if j == 0 and y is None:
                y = product(*factors, adapter.scale)
            elif j == 0 and float8 is None:
                y = torch.addmm(y, *factors, alpha=adapter.scale)
            else:
                y.addmm_(*factors, alpha=adapter.scale)
        if i in self.narrow or float8 is not None:
            return y.contiguous()
        weight = self._weight(i)
        return y.addmm_(rows, weight.t()) if adapters else F.linear(rows, weight, start)

    def _cast(self) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Return the stack `[stacked, in]` and the second matrix of each adapter, in the dtype of the products."""
        ups = [adapter.up for adapter in self.adapters.values()]
        weights = [self.projections[i].weight for i in self.narrow]
        blocks = weights + [adapter.down for adapter in self.adapters.values() if not adapter.dropout]
        if all(x.dtype == self.dtype for x in (*ups, *blocks)) and len(blocks) < 2:
            return blocks[0] if blocks else None, ups
        stack, parts = None, []
        if blocks:
            stack = blocks[0].new_empty(self.stacked, blocks[0].shape[1], dtype=self.dtype)
            parts = list(stack.split([len(block) for block in blocks]))
        copies = [torch.empty_like(up, dtype=self.dtype) for up in ups]
        # All adapters are copied by one kernel. Weights may have another dtype, which would take a kernel for each.
        first = len(weights)
        if first:
            torch._foreach_copy_(parts[:first], weights)
        if ups:
            torch._foreach_copy_(parts[first:] + copies, blocks[first:] + ups)
        return stack, copies

    def _bias(self, i: int) -> torch.Tensor | None:
        """Return the sum of a layer's bias and those of its adapters."""
        _, bias, adapters, _ = self.projections[i]
        if bias is None and not adapters:
            return None
        biases = [bias, *(None if a.bias is None else a.bias * a.scale for a in adapters)]
        biases = [x.to(self.dtype) for x in biases if x is not None]
        return sum(biases[1:], biases[0]) if biases else None

    def _weight(self, i: int) -> torch.Tensor:
        weight = self.projections[i].weight
        weight = weight.dequantize() if isinstance(weight, QuantizedWeight) else weight
        return weight if weight.dtype == self.dtype else weight.to(self.dtype)

    def input_gradient(
        self, gradients: Sequence[torch.Tensor | None], wanted: bool, parameters: Sequence[bool]
    ) -> torch.Tensor | None:
        """Return the gradient of the rows if it is wanted. Prepares [`Products.parameter_gradients`].

        Args:
            gradients (`Sequence[torch.Tensor | None]` of shape `[T, out]`):
                Gradient of each output.
            wanted (`bool`):
                Whether the rows need a gradient.
            parameters (`Sequence[bool]`):
                Whether each tensor of [`flatten`] needs a gradient.
        """
        d_rows = None
        if self.in_float8:
            trained = float8_weights_wanted(self.structure, parameters)
            d_rows = self.float8.input_gradient([gradients[i] for i in self.in_float8], wanted, trained)
        if not self.adapters:
            for i, gradient in enumerate(gradients):
                if wanted and gradient is not None and i not in self.in_float8:
                    weight = self._weight(i)
                    d_rows = torch.mm(gradient, weight) if d_rows is None else d_rows.addmm_(gradient, weight)
            return d_rows
        stack, _, seeds, *ups = self.kept
        like = next(gradient for gradient in gradients if gradient is not None)
        self.d_low = like.new_empty(len(like), self.width)
        self.d_stack, self.seen = None, 0
        for i, columns in self.narrow.items():
            self.d_low[:, columns] = 0 if gradients[i] is None else gradients[i]
        for at, up in zip(self.adapters, ups, strict=True):
            columns, gradient = self.columns[at], gradients[at[0]]
            if gradient is None:
                self.d_low[:, columns] = 0
            else:
                self.d_low[:, columns].addmm_(gradient, up, beta=0, alpha=self.adapters[at].scale)
        if not wanted:
            return None
        if self.stacked:
            stack = self._cast()[0] if stack is None else stack
            d_low = self.d_low[:, : self.stacked]
            d_rows = torch.mm(d_low, stack) if d_rows is None else d_rows.addmm_(d_low, stack)
        for k, at in enumerate(self.dropped):
            from .backends.triton.dropout import dropped

            down, p = self.adapters[at].down.to(self.dtype), self.adapters[at].dropout
            part = dropped(torch.mm(self.d_low[:, self.columns[at]], down), seeds[k], p)
            d_rows = part if d_rows is None else d_rows.add_(part)
        for i, gradient in enumerate(gradients):
            if gradient is not None and i not in self.narrow and i not in self.in_float8:
                weight = self._weight(i)
                d_rows = torch.mm(gradient, weight) if d_rows is None else d_rows.addmm_(gradient, weight)
        return d_rows

    def add_stack_gradient(self, rows: torch.Tensor) -> None:
        """Add the part of the next `rows` `[N, in]` to the gradient of the stack, after [`Products.input_gradient`]."""
        d_low = self.d_low[self.seen : self.seen + len(rows), : self.stacked].t()
        self.seen += len(rows)
        d_stack = product(d_low, rows, dtype=torch.promote_types(self.dtype, torch.float32))
        self.d_stack = d_stack if self.d_stack is None else self.d_stack.add_(d_stack)

    def parameter_gradients(
        self,
        gradients: Sequence[torch.Tensor | None],
        rows: torch.Tensor | None,
        wanted: Sequence[bool],
        columns: torch.Tensor | None = None,
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the tensors of [`flatten`], after [`Products.input_gradient`].

        Args:
            gradients (`Sequence[torch.Tensor | None]` of shape `[T, out]`):
                Gradient of each output.
            rows (`torch.Tensor` of shape `[T, in]`, *optional*):
                Rows of the forward. Needed if [`needs_rows`] is true, unless [`Products.add_stack_gradient`] got them
                in pieces, and only the stack needs them.
            wanted (`Sequence[bool]`):
                Whether each tensor needs a gradient.
            columns (`torch.Tensor`, *optional*):
                The transposed rows in float8, if another kernel has written them to [`Float8Layers.new_columns`].
        """
        of_float8 = {}
        if self.float8.columns is not None:
            of_float8 = dict(zip(self.in_float8, self.float8.weight_gradients(rows, columns), strict=True))
        if not self.adapters:
            found = []
            for i, ((weight, bias, _, _), gradient, k) in enumerate(zip(self.projections, gradients, count(0, 2))):
                of_weight, of_bias = gradient is not None and wanted[k], gradient is not None and wanted[k + 1]
                d_weight = of_float8.get(i) if of_weight else None
                if of_weight and d_weight is None:
                    d_weight = product(gradient.t(), rows, dtype=weight.dtype)
                found.append(d_weight)
                found.append(gradient.sum(0, dtype=bias.dtype) if of_bias else None)
            return found
        _, low, seeds, *_ = self.kept
        wide = torch.promote_types(self.dtype, torch.float32)
        if self.stacked and rows is not None:
            self.add_stack_gradient(rows)
        d_stack = self.d_stack
        wanted, found = iter(wanted), []
        for i, ((weight, bias, adapters, _), gradient) in enumerate(zip(self.projections, gradients, strict=True)):
            for_weight, for_bias = next(wanted), next(wanted)
            if not for_weight or gradient is None:
                found.append(None)
            elif i in of_float8:
                found.append(of_float8[i])
            elif i in self.narrow:
                found.append(d_stack[self.narrow[i]].to(weight.dtype))
            else:
                found.append(product(gradient.t(), rows, dtype=weight.dtype))
            total = None
            if gradient is not None and (for_bias or any(adapter.bias is not None for adapter in adapters)):
                total = gradient.sum(0, dtype=wide)
            found.append(total.to(bias.dtype) if for_bias and total is not None else None)
            for j, (down, up, scale, p, extra) in enumerate(adapters):
                for_down, for_up, for_extra = next(wanted), next(wanted), next(wanted)
                columns = self.columns[i, j]
                d_down = d_up = d_extra = None
                if gradient is not None and for_down and p:
                    from .backends.triton.dropout import dropped

                    inputs = dropped(rows, seeds[self.dropped.index((i, j))], p)
                    d_down = product(self.d_low[:, columns].t(), inputs, dtype=down.dtype)
                elif gradient is not None and for_down:
                    d_down = d_stack[columns].to(down.dtype)
                if gradient is not None and for_up:
                    d_up = product(gradient.t(), low[:, columns], scale, up.dtype)
                if total is not None and for_extra:
                    d_extra = (total * scale).to(extra.dtype)
                found += [d_down, d_up, d_extra]
        return found


def needs_rows(structure: tuple, wanted: Sequence[bool], kept: bool = False) -> bool:
    """Whether the gradients of the wanted tensors of [`flatten`] depend on the layers' input.

    With `kept`, the weights whose products run in float8 do not count, because [`Products`] keeps their rows.
    """
    at = 0
    for _, factors, float8 in structure:
        # The weight, and the first matrix of each adapter.
        if (wanted[at] and not (kept and float8)) or any(wanted[at + 2 : at + 2 + 3 * len(factors) : 3]):
            return True
        at += 2 + 3 * len(factors)
    return False


def float8_weights_wanted(structure: tuple, wanted: Sequence[bool]) -> bool:
    """Whether the gradient of any weight whose products run in float8 is wanted."""
    starts = accumulate((2 + 3 * len(factors) for _, factors, _ in structure), initial=0)
    return any(float8 and wanted[at] for (_, _, float8), at in zip(structure, starts, strict=False))


def product(
    left: torch.Tensor, right: torch.Tensor, scale: float = 1.0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return `scale * left @ right` in `dtype`. On a GPU, float32 results are not rounded to the factors' dtype first."""
    wide = left.is_cuda and dtype == torch.float32 and left.dtype in (torch.float16, torch.bfloat16)
    if scale == 1:
        result = torch.mm(left, right, out_dtype=dtype) if wide else torch.mm(left, right)
    elif wide:
        result = left.new_empty(left.shape[0], right.shape[1], dtype=dtype)
        torch.addmm(result, left, right, beta=0, alpha=scale, out_dtype=dtype, out=result)
    else:
        result = left.new_empty(left.shape[0], right.shape[1]).addmm_(left, right, beta=0, alpha=scale)
    return result if dtype in (None, result.dtype) else result.to(dtype)


def unflattened(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return `rows` `[T, out]` as `[*shape, out]`, not as a view: autograd forbids in-place changes to views."""
    return torch.ops.aten._unsafe_view.default(rows, (*shape, rows.shape[-1]))
