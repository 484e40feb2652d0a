"""Representative calls of ops, for whoever must ask which implementation would run.

Each op has a function `example(setting)` in its file, which returns the calls of a layer of a model by the name of the op.
"""

from typing import Any, NamedTuple

import torch

from ..boundaries import SequenceBoundaries
from .dispatch import Implementation


class Call(NamedTuple):
    """A call of an op: its table of implementations, and the arguments of their verifiers."""

    table: dict[str, Implementation]
    args: tuple
    options: dict[str, Any] = {}


class Setting(NamedTuple):
    """The model whose training step makes the calls: its device and dtype, and the sizes that verifiers look at."""

    device: torch.device | str
    dtype: torch.dtype
    key_dim: int = 128
    value_dim: int = 128
    head_dim: int = 256
    hidden_size: int = 2048
    expert_width: int = 512

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an input or a weight that is trained."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device, requires_grad=True)

    def row(self) -> dict[str, Any]:
        """Return the options of an op that mixes tokens, for a packed row `[1, 3, ...]` of two documents."""
        return {"boundaries": SequenceBoundaries.from_lengths([1, 2], device=self.device)}
