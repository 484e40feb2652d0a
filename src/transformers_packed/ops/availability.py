"""The implementation of each op that a training call would select on a device, according to the ops' verifiers."""

from importlib import import_module

import torch

from .example import Setting


# The modules of ops with an `example`.
_OPS = (
    "gated_delta_rule kimi_delta_rule convolution attention norm linear rotary glu moe ssd selective_scan cross_entropy"
).split()


def availability(
    device: torch.device | str,
    dtype: torch.dtype,
    delta_head_dim: int = 128,
    attention_head_dim: int = 256,
    value_head_dim: int | None = None,
    expert_sizes: tuple[int, int] = (2048, 512),
) -> dict[str, tuple[str | None, list[tuple[str, str]]]]:
    """Return the implementations that would train a packed row.

    Args:
        device (`torch.device` or `str`):
            Device of the model.
        dtype (`torch.dtype`):
            Dtype of the model.
        delta_head_dim (`int`, *optional*, defaults to 128):
            Head dimension of the gated delta rule. The default is that of the released models.
        attention_head_dim (`int`, *optional*, defaults to 256):
            Head dimension of attention. The default is that of the released models.
        value_head_dim (`int`, *optional*):
            Head dimension of the values in the gated delta rule. Defaults to `delta_head_dim`.
        expert_sizes (`tuple[int, int]`, *optional*, defaults to `(2048, 512)`):
            Hidden size of a mixture, and width of its experts.

    Returns:
        `dict`: maps the name of each op, as in [`implementations_used`], to a tuple. The tuple holds the
            implementation that would run, or `None`, and a list of the preferred implementations that would not run,
            each with the reason. Attention has one entry for each implementation of Transformers, for example
            `"attention sdpa"`.
    """
    setting = Setting(
        device, dtype, delta_head_dim, value_head_dim or delta_head_dim, attention_head_dim, *expert_sizes
    )
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
