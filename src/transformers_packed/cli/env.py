"""`transformers-packed env`: versions, devices, and which implementation of each op would run on them."""

import platform
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata
from types import SimpleNamespace

import torch
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from transformers.utils.import_utils import is_flash_attn_4_available

from ..boundaries import SequenceBoundaries
from ..ops.attention import IMPLEMENTATIONS as ATTENTION
from ..ops.convolution import IMPLEMENTATIONS as CAUSAL_CONV1D
from ..ops.convolution import QUERY_KEY_VALUE
from ..ops.cross_entropy import IMPLEMENTATIONS as LINEAR_CROSS_ENTROPY
from ..ops.dispatch import Implementation
from ..ops.gated_delta_rule import IMPLEMENTATIONS as GATED_DELTA_RULE
from ..ops.glu import DECAY_AND_RATE, SIGMOID_GATE, SIGMOID_GATE_LINEAR, SWIGLU, SWIGLU_LINEAR
from ..ops.norm import GATED_RMS_NORM, GATED_RMS_NORM_LINEAR, RMS_NORM
from ..ops.rotary import IMPLEMENTATIONS as NORMED_ROTARY


PACKAGES = {
    "needed": ("transformers_packed", "torch", "transformers", "accelerate"),
    "kernels": ("triton", "flash-linear-attention", "flash-qla", "tilelang", "causal-conv1d", "flash-attn"),
    "optional": ("peft", "trl", "datasets"),
}

FLASH_ATTENTION = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_4": is_flash_attn_4_available,
}


def describe_environment() -> str:
    """The text that `transformers-packed env` prints.

    What would run is found by asking the ops' own verifiers about a training call with the head dimensions of the
    released models (128 in the gated delta rule, 256 in attention).
    """
    lines = [f"Python {platform.python_version()} on {platform.platform()}"]
    for kind, packages in PACKAGES.items():
        lines.append(f"{kind}: " + ", ".join(f"{package} {_version(package)}" for package in packages))
    for device, name, dtypes in _devices():
        for dtype in dtypes:
            lines += ["", f"On {name}, {str(dtype).removeprefix('torch.')}, a packed row would train with"]
            for op, table, call, options in _calls(device, dtype):
                lines += _verdicts(op, table, call, options)
    return "\n".join(lines)


def planned_implementations(
    device: torch.device | str, dtype: torch.dtype, attention: str, delta_head_dim: int, attention_head_dim: int
) -> dict[str, tuple[str | None, str]]:
    """What would run of each op that keeps documents apart, `{op: (name, "")}`, or `(None, why nothing would)`.

    Args:
        device (`torch.device` or `str`):
            Where the model computes.
        dtype (`torch.dtype`):
            In what type.
        attention (`str`):
            The attention implementation that the model's configuration names.
        delta_head_dim, attention_head_dim (`int`):
            The head dimensions of the gated delta rule and of attention.
    """
    planned: dict[str, tuple[str | None, str]] = {}
    names = {
        "gated delta rule": "gated delta rule",
        "causal convolution": "causal convolution",
        "convolution to heads": "causal convolution",
        f"attention {attention}": "attention",
    }
    for op, table, call, options in _calls(str(device), dtype, delta_head_dim, attention_head_dim):
        if op not in names:
            continue
        runs, refused = _first(table, call, options)
        # The reference of the convolution to heads is the causal convolution.
        if (op, runs) != ("convolution to heads", "reference"):
            planned[names[op]] = (runs, "; ".join(f"{name} {reason}" for name, reason in refused))
    return planned


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _devices() -> Iterator[tuple[str, str, tuple[torch.dtype, ...]]]:
    """(device, what to call it, the types to ask about)"""
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        name = f"cuda:{index} ({properties.name}, {memory}, compute capability {properties.major}.{properties.minor})"
        yield f"cuda:{index}", name, (torch.bfloat16, torch.float32)
    yield "cpu", "the CPU", (torch.float32,)


def _calls(
    device: str, dtype: torch.dtype, delta: int = 128, heads: int = 256
) -> Iterator[tuple[str, dict[str, Implementation], tuple, dict]]:
    """(op, its implementations, arguments, options) of a call of each op on a row of two documents"""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)

    options = {"boundaries": SequenceBoundaries.from_lengths([1, 2], device=device)}
    queries = (zeros(1, 3, 2, delta), zeros(1, 3, 2, delta), zeros(1, 3, 4, delta))
    gates = (zeros(1, 3, 4, dtype=torch.float32), zeros(1, 3, 4))
    yield "gated delta rule", GATED_DELTA_RULE, (*queries, *gates), options
    yield "causal convolution", CAUSAL_CONV1D, (zeros(1, 3, 16), zeros(16, 4), None, "silu"), options
    for name, table in ATTENTION.items():
        module = SimpleNamespace(config=SimpleNamespace(_attn_implementation=name))
        yield f"attention {name}", table, (module, *(zeros(1, 2, 3, heads) for _ in range(3))), options
    for version, available in FLASH_ATTENTION.items():
        table = {"its own kernel": Implementation(run=None, verify=partial(_verify_flash_attention, available))}
        yield f"attention {version}", table, (zeros(1),), options
    yield from _fused_calls(zeros, options)


def _fused_calls(zeros: Callable[..., torch.Tensor], options: dict) -> Iterator[tuple]:
    """As [`_calls`], of the parts of a layer that run in one kernel each."""
    row, weight, heads = zeros(1, 3, 256), zeros(256), zeros(1, 3, 4)
    heads_of_rule = options | {"key_heads": 1, "key_dim": 128, "value_dim": 128}
    angles = [zeros(1, 3, 64).detach() for _ in range(2)]
    yield "convolution to heads", QUERY_KEY_VALUE, (zeros(1, 3, 384), zeros(384, 4), None, "silu"), heads_of_rule
    yield "decay and rate", DECAY_AND_RATE, (heads, heads, zeros(4), zeros(4)), {}
    yield "norm", RMS_NORM, (row, weight, 1e-6), {"residual": row, "offset": 1.0}
    yield "gated norm", GATED_RMS_NORM, (row, row, weight, 1e-6), {}
    layer = zeros(8, 256)
    yield "gated norm and layer", GATED_RMS_NORM_LINEAR, (row[:, :, None], row[:, :, None], weight, layer, 1e-6), {}
    rotary = (zeros(1, 3, 2, 512), zeros(1, 3, 1, 256), weight, weight, *angles, 1e-6)
    yield "norm and rotary positions", NORMED_ROTARY, rotary, {}
    yield "SwiGLU", SWIGLU, (row, row), {}
    yield "SwiGLU and layer", SWIGLU_LINEAR, (row, row, layer), {}
    yield "gate of attention", SIGMOID_GATE, (row, row), {}
    yield "gate and layer", SIGMOID_GATE_LINEAR, (row, row, layer), {}
    yield "head and cross entropy", LINEAR_CROSS_ENTROPY, (row[0], layer, torch.zeros(3), None), {}


def _verify_flash_attention(available: Callable[[], bool], tensor: torch.Tensor, **options) -> tuple[bool, str]:
    """Models check these when they are loaded, so the op does not."""
    if not tensor.is_cuda or tensor.dtype == torch.float32:
        return False, "needs CUDA tensors in float16 or bfloat16"
    return available(), "is not installed"


def _verdicts(op: str, table: dict[str, Implementation], call: tuple, options: dict) -> list[str]:
    """A line for what would run, and one for each preferred implementation that would not."""
    runs, refused = _first(table, call, options)
    why_not = (f"  {'':<26}   not {name}: it {reason}" for name, reason in refused)
    return [f"  {op:<26} {runs or 'nothing'}", *why_not]


def _first(table: dict[str, Implementation], call: tuple, options: dict) -> tuple[str | None, list[tuple[str, str]]]:
    """The first implementation that can serve, and those before it with the reason why they cannot."""
    refused = []
    for name, implementation in table.items():
        ok, reason = implementation.verify(*call, **options)
        if ok:
            return name, refused
        refused.append((name, reason))
    return None, refused
