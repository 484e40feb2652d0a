"""The implementation of each op that a training call would select on a device, according to the ops' verifiers."""

import torch

from .attention import example as attention
from .convolution import example as convolution
from .cross_entropy import example as cross_entropy
from .example import Setting
from .gated_delta_rule import example as gated_delta_rule
from .glu import example as glu
from .kimi_delta_rule import example as kimi_delta_rule
from .linear import example as linear
from .moe import example as moe
from .norm import example as norm
from .rotary import example as rotary
from .selective_scan import example as selective_scan
from .ssd import example as ssd


_EXAMPLES = (
    gated_delta_rule,
    kimi_delta_rule,
    convolution,
    attention,
    norm,
    linear,
    rotary,
    glu,
    moe,
    ssd,
    selective_scan,
    cross_entropy,
)


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
    for example in _EXAMPLES:
        for op, (table, args, options) in example(setting).items():
            runs, refused = None, []
            for name, implementation in table.items():
                verify = implementation.verify
                ok, reason = (True, "") if verify is None else verify(*args, **options)
                if ok:
                    runs = name
                    break
                refused.append((name, reason))
            found[op] = runs, refused
    return found


def is_kernel(name: str | None) -> bool:
    """Whether an implementation from [`availability`] is more than PyTorch code that any device can run."""
    return name not in (None, "reference", "torch") and not name.startswith("per_document")
