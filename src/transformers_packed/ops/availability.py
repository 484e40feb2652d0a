"""The implementation of each op that a training call would select on a device, according to the ops' verifiers."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from transformers.utils.import_utils import is_flash_attn_4_available

from ..boundaries import SequenceBoundaries
from . import float8
from .attention import IMPLEMENTATIONS as ATTENTION
from .convolution import IMPLEMENTATIONS as CAUSAL_CONV1D
from .convolution import QUERY_KEY_VALUE
from .cross_entropy import IMPLEMENTATIONS as LINEAR_CROSS_ENTROPY
from .dispatch import Implementation, always
from .gated_delta_rule import GATES
from .gated_delta_rule import IMPLEMENTATIONS as GATED_DELTA_RULE
from .glu import IMPLEMENTATIONS as GATED_LINEAR_UNIT
from .linear import IMPLEMENTATIONS as LINEAR
from .moe import EXPERTS
from .norm import IMPLEMENTATIONS as RMS_NORM
from .projection import Adapter, Projection
from .rotary import IMPLEMENTATIONS as QK_NORM_ROPE


_FLASH_ATTENTION = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_4": is_flash_attn_4_available,
}


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
    found = {}
    sizes = delta_head_dim, value_head_dim or delta_head_dim, attention_head_dim, expert_sizes
    for op, table, call, options in _calls(device, dtype, *sizes):
        refused = []
        for name, implementation in table.items():
            ok, reason = implementation.verify(*call, **options)
            if ok:
                break
            refused.append((name, reason))
        found[op] = (name if ok else None, refused)
    return found


def is_kernel(name: str | None) -> bool:
    """Whether an implementation from [`availability`] is more than PyTorch code that any device can run."""
    return name not in (None, "reference", "torch") and not name.startswith("per_document")


def _calls(
    device, dtype, delta: int, value: int, heads: int, expert_sizes: tuple[int, int]
) -> Iterator[tuple[str, dict[str, Implementation], tuple, dict]]:
    """Yield (op, implementations, arguments, options) of a call of each op on a row of two documents."""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)

    options: dict[str, Any] = {"boundaries": SequenceBoundaries.from_lengths([1, 2], device=device)}
    queries = (zeros(1, 3, 2, delta), zeros(1, 3, 2, delta), zeros(1, 3, 4, value))
    gates = (zeros(1, 3, 4, dtype=torch.float32), zeros(1, 3, 4))
    yield "gated_delta_rule", GATED_DELTA_RULE, (*queries, *gates), options
    yield "causal_conv1d", CAUSAL_CONV1D, (zeros(1, 3, 16), zeros(16, 4), None, "silu"), options
    for name, table in ATTENTION.items():
        module = SimpleNamespace(config=SimpleNamespace(_attn_implementation=name))
        yield f"attention {name}", table, (module, *(zeros(1, 2, 3, heads) for _ in range(3))), options
    for name, is_available in _FLASH_ATTENTION.items():
        table = {"its own kernel": _only_verified(_verify_flash_attention)}
        yield f"attention {name}", table, (is_available, zeros(1)), {}
    row, weight, gate = zeros(1, 3, 256), zeros(256), zeros(1, 3, 4)
    options |= {"key_heads": 1, "key_dim": delta, "value_dim": value}
    channels = 2 * delta + value
    yield "causal_conv1d_qkv", QUERY_KEY_VALUE, (zeros(1, 3, channels), zeros(channels, 4), None, "silu"), options
    yield "gated_delta_gates", GATES, (gate, gate, zeros(4), zeros(4)), {}
    yield "rms_norm", RMS_NORM, (row, weight, 1e-6, 1.0, row), {}
    layer, head = zeros(8, 256), row[:, :, None]
    yield "linear", LINEAR, (row, Projection(layer)), {}
    yield "linear_lora", LINEAR, (row, Projection(layer, None, (Adapter(zeros(4, 256), zeros(8, 4)),))), {}
    table = {"fused": _only_verified(float8.verify)}
    yield "linear_float8", table, (row[0], zeros(16, 256), dtype), {}
    yield "gated_rms_norm", RMS_NORM, (head, weight, 1e-6, 0.0, None, head), {}
    yield "gated_rms_norm_linear", RMS_NORM, (head, weight, 1e-6, 0.0, None, head, layer), {}
    angles = [zeros(1, 3, max(2, heads // 4)).detach() for _ in range(2)]
    heads_and_angles = (zeros(1, 3, 2, 2 * heads), zeros(1, 3, 1, heads), zeros(heads), zeros(heads), *angles, 1e-6)
    yield "qk_norm_rope", QK_NORM_ROPE, heads_and_angles, {}
    for op, activation in (("swiglu", "silu"), ("sigmoid_gate", "sigmoid")):
        yield op, GATED_LINEAR_UNIT, (row, row, None, activation), {}
        yield f"{op}_linear", GATED_LINEAR_UNIT, (row, row, layer, activation), {}
    hidden, width = expert_sizes
    matrices = zeros(1, 2 * width, hidden), zeros(1, hidden, width)
    # The model calls Transformers' `grouped_mm` on a GPU without the kernel.
    table = {"triton": EXPERTS["triton"], "grouped_mm": _only_verified(_verify_grouped_mm)}
    table["reference"] = _only_verified(always)
    yield "experts", table, (zeros(3, hidden), None, None, *matrices, None, None, None), {}
    yield "linear_cross_entropy", LINEAR_CROSS_ENTROPY, (row[0], layer, torch.zeros(3), None), {}


def _only_verified(verify: Callable[..., tuple[bool, str]]) -> Implementation:
    """Return an implementation for a table of this module, from which nothing runs."""
    return Implementation(verify, verify)


def _verify_grouped_mm(hidden_states, *others):
    """Stand in for the choice of a model's experts."""
    return hidden_states.is_cuda, "needs CUDA tensors"


def _verify_flash_attention(is_available, tensor):
    """Stand in for the check that Transformers makes when it loads a model. The op itself has no check."""
    if not tensor.is_cuda or tensor.dtype == torch.float32:
        return False, "needs CUDA tensors in float16 or bfloat16"
    return is_available(), "is not installed"
