"""Which implementation of each op would run on a device: the ops' own verifiers, asked about a training call."""

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from transformers.utils.import_utils import is_flash_attn_4_available

from ..boundaries import SequenceBoundaries
from .attention import IMPLEMENTATIONS as ATTENTION
from .convolution import IMPLEMENTATIONS as CAUSAL_CONV1D
from .convolution import QUERY_KEY_VALUE
from .cross_entropy import IMPLEMENTATIONS as LINEAR_CROSS_ENTROPY
from .dispatch import Implementation
from .gated_delta_rule import GATES
from .gated_delta_rule import IMPLEMENTATIONS as GATED_DELTA_RULE
from .glu import IMPLEMENTATIONS as GATED_LINEAR_UNIT
from .norm import IMPLEMENTATIONS as RMS_NORM
from .rotary import IMPLEMENTATIONS as QK_NORM_ROPE


_FLASH_ATTENTION = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_4": is_flash_attn_4_available,
}


def availability(
    device: torch.device | str, dtype: torch.dtype, delta_head_dim: int = 128, attention_head_dim: int = 256
) -> dict[str, tuple[str | None, list[tuple[str, str]]]]:
    """What a packed row would train with; by default with the head dimensions of the released models.

    Args:
        device (`torch.device` or `str`):
            Where the model computes.
        dtype (`torch.dtype`):
            In what type.
        delta_head_dim, attention_head_dim (`int`, *optional*, defaults to 128 and 256):
            The head dimensions of the gated delta rule and of attention.

    Returns:
        `dict`: for each op, as [`implementations_used`] calls it, the implementation that would run, or `None`, and a list of
        those before it in order of preference, each with the reason why it would not. Attention is there once for each
        implementation of Transformers, as `"attention sdpa"` for example.
    """
    found = {}
    for op, table, call, options in _calls(device, dtype, delta_head_dim, attention_head_dim):
        refused = []
        for name, implementation in table.items():
            ok, reason = implementation.verify(*call, **options)
            if ok:
                break
            refused.append((name, reason))
        found[op] = (name if ok else None, refused)
    return found


def _calls(device, dtype, delta: int, heads: int) -> Iterator[tuple[str, dict[str, Implementation], tuple, dict]]:
    """(op, its implementations, arguments, options) of a call of each op on a row of two documents"""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)

    options = {"boundaries": SequenceBoundaries.from_lengths([1, 2], device=device)}
    queries = (zeros(1, 3, 2, delta), zeros(1, 3, 2, delta), zeros(1, 3, 4, delta))
    gates = (zeros(1, 3, 4, dtype=torch.float32), zeros(1, 3, 4))
    yield "gated_delta_rule", GATED_DELTA_RULE, (*queries, *gates), options
    yield "causal_conv1d", CAUSAL_CONV1D, (zeros(1, 3, 16), zeros(16, 4), None, "silu"), options
    for name, table in ATTENTION.items():
        module = SimpleNamespace(config=SimpleNamespace(_attn_implementation=name))
        yield f"attention {name}", table, (module, *(zeros(1, 2, 3, heads) for _ in range(3))), options
    for name, is_available in _FLASH_ATTENTION.items():
        table = {"its own kernel": Implementation(None, _verify_flash_attention)}
        yield f"attention {name}", table, (is_available, zeros(1)), {}
    row, weight, heads = zeros(1, 3, 256), zeros(256), zeros(1, 3, 4)
    options |= {"key_heads": 1, "key_dim": 128, "value_dim": 128}
    yield "causal_conv1d_qkv", QUERY_KEY_VALUE, (zeros(1, 3, 384), zeros(384, 4), None, "silu"), options
    yield "gated_delta_gates", GATES, (heads, heads, zeros(4), zeros(4)), {}
    yield "rms_norm", RMS_NORM, (row, weight, 1e-6, 1.0, row), {}
    layer, head = zeros(8, 256), row[:, :, None]
    yield "gated_rms_norm", RMS_NORM, (head, weight, 1e-6, 0.0, None, head), {}
    yield "gated_rms_norm_linear", RMS_NORM, (head, weight, 1e-6, 0.0, None, head, layer), {}
    angles = [zeros(1, 3, 64).detach() for _ in range(2)]
    heads_and_angles = (zeros(1, 3, 2, 512), zeros(1, 3, 1, 256), weight, weight, *angles, 1e-6)
    yield "qk_norm_rope", QK_NORM_ROPE, heads_and_angles, {}
    for op, activation in (("swiglu", "silu"), ("sigmoid_gate", "sigmoid")):
        yield op, GATED_LINEAR_UNIT, (row, row, None, activation), {}
        yield f"{op}_linear", GATED_LINEAR_UNIT, (row, row, layer, activation), {}
    yield "linear_cross_entropy", LINEAR_CROSS_ENTROPY, (row[0], layer, torch.zeros(3), None), {}


def _verify_flash_attention(is_available, tensor):
    """Models check these when they are loaded, so the op does not."""
    if not tensor.is_cuda or tensor.dtype == torch.float32:
        return False, "needs CUDA tensors in float16 or bfloat16"
    return is_available(), "is not installed"
