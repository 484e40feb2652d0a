"""Biases of layers and of their adapters."""

import torch

from .term import Term


class Bias(Term):
    """The biases of each layer, times the scales of their adapters."""

    reads_rows = by_row = False

    @staticmethod
    def take(projections, weights):
        plan, tensors = [], []
        for i, (_, bias, adapters) in enumerate(projections):
            if bias is None and not adapters:
                continue
            biases = [(1.0, bias), *((adapter.scale, adapter.bias) for adapter in adapters)]
            biases = [(scale, tensor) for scale, tensor in biases if tensor is not None]
            if biases:
                plan.append((i, [scale for scale, _ in biases]))
                tensors += [tensor for _, tensor in biases]
        return (plan, tensors) if plan else None

    def forward(self, rows, outputs):
        biases = iter(self.tensors)
        for i, scales in self.plan:
            first, *others = [_scaled(bias, scale).to(self.dtype) for scale, bias in zip(scales, biases, strict=False)]
            outputs[i] = sum(others, first)

    def needs_rows(self):
        return False

    def parameter_gradients(self, gradients, rows):
        found, wide = [], torch.promote_types(self.dtype, torch.float32)
        for i, scales in self.plan:
            start, total = len(found), None
            wanted = self.wanted[start : start + len(scales)]
            if gradients[i] is not None and any(wanted):
                total = gradients[i].sum(0, dtype=wide)
            for scale, for_bias in zip(scales, wanted, strict=True):
                dtype = self.tensors[len(found)].dtype
                found.append(None if total is None or not for_bias else _scaled(total, scale).to(dtype))
        return found


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1 else x * scale
