"""Representative calls of ops, for whoever must ask which implementation would run.

Each op has a function `example(setting)` in its file, which returns the calls of a layer of a model by the name of the op.
"""

from importlib import import_module
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


# The modules of ops with an `example`.
_OPS = (
    "gated_delta_rule kimi_delta_rule convolution attention norm linear rotary glu moe ssd selective_scan cross_entropy"
).split()


def availability(setting: Setting) -> dict[str, tuple[str | None, list[tuple[str, str]]]]:
    """Return the implementations that would train a packed row of a model.

    Returns:
        `dict`: maps the name of each op, as in [`implementations_used`], to a tuple. The tuple holds the
            implementation that would run, or `None`, and a list of the preferred implementations that would not run,
            each with the reason. Attention has one entry for each implementation of Transformers, for example
            `"attention sdpa"`.
    """
    found = {}
    for module in _OPS:
        example = import_module(f"{__package__}.{module}").example
        for op, (table, args, options) in example(setting).items():
            runs, refused = None, []
            for name, implementation in table.items():
                reason = implementation.verify(*args, **options)
                if not reason:
                    runs = name
                    break
                refused.append((name, reason))
            found[op] = runs, refused
    return found


def is_kernel(name: str | None) -> bool:
    """Whether an implementation from [`availability`] is more than PyTorch code that any device can run."""
    return name not in (None, "reference", "torch") and not name.startswith("per_document")
