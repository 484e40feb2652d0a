"""Low-rank adapters (LoRA): `sum_j s_ij (x A_ij^T) B_ij^T` for the adapters `j` of each layer `i`.

- The matrices with few rows, which are all `A_ij` and narrow `W_i`, form one stack. `x` times the stack is one product,
  and so are the gradients of the stack.
- An output starts as its adapters' product, and `x W_i^T` accumulates into it. The gradient of `x` starts as the product
  with the stack, and all `dy_i W_i` accumulate into it.

All products run in one dtype. Adapters in another dtype are cast, not `x`.
"""

from typing import NamedTuple

import torch

from .term import Term, accumulated, product


# Weights with at most this many rows join the stack. Their products take as long as reading `x`.
_NARROW = 128


class Adapter(NamedTuple):
    """A low-rank addition to a linear layer: `scale * (dropout(x) @ down.T @ up.T + bias)`.

    The adapters of a group of layers, such as experts, are one adapter whose tensors have the group as first dimension.

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


class _Plan(NamedTuple):
    """The columns of `low`, which are those of the stack, and then those of each adapter with dropout.

    The narrow weights have a layer and columns; the adapters also a scale and a dropout.
    """

    narrow: list[tuple[int, slice]]
    adapters: list[tuple[int, slice, float, float]]
    stacked: int
    width: int


class LowRank(Term):
    """The adapters of all layers, and the narrow weights, which the same products serve.

    The tensors are the narrow weights, then the first matrices of all adapters, then their second ones.
    """

    def __init__(self, plan, tensors, wanted, dtype):
        super().__init__(plan, tensors, wanted, dtype)
        first, number = len(plan.narrow), len(plan.adapters)
        self.weights, self.downs, self.ups = tensors[:first], tensors[first:-number], tensors[-number:]
        # The adapters whose inputs differ, because each has a dropout of its own.
        self.dropped = [k for k, (*_, dropout) in enumerate(plan.adapters) if dropout]
        self.takes_pieces = not (self.dropped or any(wanted[:first]))

    @staticmethod
    def take(projections, weights):
        adapters = [(i, adapter) for i, projection in enumerate(projections) for adapter in projection.adapters]
        if not adapters:
            return None
        width, narrow, columns = 0, {}, {}

        def next_columns(matrix):
            nonlocal width
            width += len(matrix)
            return slice(width - len(matrix), width)

        stacked = [k for k, (_, adapter) in enumerate(adapters) if not adapter.dropout]
        if stacked:
            narrow = {i: w for i, w in weights.items() if isinstance(w, torch.Tensor) and len(w) <= _NARROW}
        of_narrow = [(i, next_columns(weights.pop(i))) for i in narrow]
        for k in stacked:
            columns[k] = next_columns(adapters[k][1].down)
        end = width
        of_adapters = [
            (i, columns[k] if k in columns else next_columns(adapter.down), adapter.scale, adapter.dropout)
            for k, (i, adapter) in enumerate(adapters)
        ]
        matrices = [*narrow.values(), *(a.down for _, a in adapters), *(a.up for _, a in adapters)]
        return _Plan(of_narrow, of_adapters, end, width), matrices

    def prepare(self, rows, keep):
        stack, ups = self._cast()
        low, seeds = rows.new_empty(len(rows), self.plan.width), None
        if stack is not None:
            torch.mm(rows, stack.t(), out=low[:, : self.plan.stacked])
        if self.dropped:
            # Drawn on the device, so checkpointing and CUDA graphs restore them with the generator's state.
            seeds = torch.randint(2**31 - 1, (len(self.dropped),), device=rows.device)
            for k, seed in zip(self.dropped, seeds, strict=True):
                _, columns, _, dropout = self.plan.adapters[k]
                torch.mm(_dropped(rows, seed, dropout), self.downs[k].to(self.dtype).t(), out=low[:, columns])
        # A stack that is a weight itself is saved as such.
        own = stack is None or any(stack is tensor for tensor in self.tensors)
        self.kept = [None if own else stack, low, seeds, *ups]

    def forward(self, rows, outputs, known=()):
        _, low, _, *ups = self.kept
        # Only products with weights in float8 have memory of their own, in which sums may run.
        own = {i for i, y in enumerate(outputs) if y is not None and y.ndim == 2}
        narrow = [(i, columns) for i, columns in self.plan.narrow if i not in known]
        for i, columns in narrow:
            outputs[i] = low[:, columns] if outputs[i] is None else low[:, columns] + outputs[i]
        for (i, columns, scale, _), up in zip(self.plan.adapters, ups, strict=True):
            if i in known:
                continue
            y, factors = outputs[i], (low[:, columns], up.t())
            if y is None:
                outputs[i] = product(*factors, scale)
            elif i in own:
                y.addmm_(*factors, alpha=scale)
            else:
                y = y.expand(len(low), -1) if y.ndim == 1 else y
                outputs[i] = torch.addmm(y, *factors, alpha=scale)
            own.add(i)
        for i, _ in narrow:
            outputs[i] = outputs[i].contiguous()

    def _cast(self) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Return the stack `[stacked, in]` and the second matrix of each adapter, in the dtype of the products."""
        downs = [down for k, down in enumerate(self.downs) if k not in self.dropped]
        blocks = [*self.weights, *downs]
        if all(x.dtype == self.dtype for x in (*self.ups, *blocks)) and len(blocks) < 2:
            return blocks[0] if blocks else None, self.ups
        stack, parts = None, []
        if blocks:
            stack = blocks[0].new_empty(self.plan.stacked, blocks[0].shape[1], dtype=self.dtype)
            parts = list(stack.split([len(block) for block in blocks]))
        copies = [torch.empty_like(up, dtype=self.dtype) for up in self.ups]
        # All adapters are copied by one kernel. Weights may have another dtype, which would take a kernel for each.
        first = len(self.weights)
        if first:
            torch._foreach_copy_(parts[:first], self.weights)
        torch._foreach_copy_(parts[first:] + copies, [*downs, *self.ups])
        return stack, copies

    def needs_rows(self):
        return any(self.wanted[: -len(self.ups)])

    def input_gradient(self, gradients, d_rows, wanted):
        stack, _, seeds, *ups = self.kept
        like = next(gradient for gradient in gradients if gradient is not None)
        self.d_low, self.d_stack, self.seen = like.new_empty(len(like), self.plan.width), None, 0
        for i, columns in self.plan.narrow:
            self.d_low[:, columns] = 0 if gradients[i] is None else gradients[i]
        for (i, columns, scale, _), up in zip(self.plan.adapters, ups, strict=True):
            if gradients[i] is None:
                self.d_low[:, columns] = 0
            else:
                self.d_low[:, columns].addmm_(gradients[i], up, beta=0, alpha=scale)
        if not wanted:
            return d_rows
        if self.plan.stacked:
            stack = self._cast()[0] if stack is None else stack
            d_rows = accumulated(d_rows, self.d_low[:, : self.plan.stacked], stack)
        for k, seed in zip(self.dropped, seeds if self.dropped else (), strict=True):
            _, columns, _, dropout = self.plan.adapters[k]
            part = _dropped(torch.mm(self.d_low[:, columns], self.downs[k].to(self.dtype)), seed, dropout)
            d_rows = part if d_rows is None else d_rows.add_(part)
        return d_rows

    def add_rows(self, rows):
        d_low = self.d_low[self.seen : self.seen + len(rows), : self.plan.stacked].t()
        self.seen += len(rows)
        d_stack = product(d_low, rows, dtype=torch.promote_types(self.dtype, torch.float32))
        self.d_stack = d_stack if self.d_stack is None else self.d_stack.add_(d_stack)

    def parameter_gradients(self, gradients, rows):
        _, low, seeds, *_ = self.kept
        if rows is not None and self.plan.stacked and self.needs_rows():
            self.add_rows(rows)
        found, seeds = [], dict(zip(self.dropped, seeds, strict=True)) if self.dropped else {}
        for (i, columns), weight in zip(self.plan.narrow, self.weights, strict=True):
            skip = gradients[i] is None or not self.wanted[len(found)]
            found.append(None if skip else self.d_stack[columns].to(weight.dtype))
        for k, ((i, columns, _, dropout), down) in enumerate(zip(self.plan.adapters, self.downs, strict=True)):
            if gradients[i] is None or not self.wanted[len(found)]:
                found.append(None)
            elif dropout:
                inputs = _dropped(rows, seeds[k], dropout)
                found.append(product(self.d_low[:, columns].t(), inputs, dtype=down.dtype))
            else:
                found.append(self.d_stack[columns].to(down.dtype))
        for (i, columns, scale, _), up in zip(self.plan.adapters, self.ups, strict=True):
            skip = gradients[i] is None or not self.wanted[len(found)]
            found.append(None if skip else product(gradients[i].t(), low[:, columns], scale, up.dtype))
        return found


def _dropped(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    from ..backends.triton.dropout import dropped

    return dropped(x, seed, p)
