"""Inputs of a small language modeling head."""

import torch


VOCAB, HIDDEN, TOKENS = 211, 16, 23


def head_inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Return hidden states, weight and bias in `dtype`, and a target for each token."""
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return *tensors, torch.randint(0, VOCAB, (TOKENS,), generator=generator)
