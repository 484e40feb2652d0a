"""`transformers-packed env`: versions, devices, and the implementation of each op that would run on them."""

import argparse
import platform
from collections.abc import Iterator
from importlib import metadata

from .options import Parser


PACKAGES = {
    "needed": ("transformers_packed", "torch", "transformers", "accelerate"),
    "kernels": ("triton", "flash-linear-attention", "flash-qla", "tilelang", "causal-conv1d", "flash-attn"),
    "optional": ("peft", "trl", "datasets"),
}

# Display names of ops. Other ops are shown with their own names.
OPS = {
    "gated_delta_rule": "gated delta rule",
    "causal_conv1d": "causal convolution",
    "causal_conv1d_qkv": "convolution to heads",
    "gated_delta_gates": "decay and rate",
    "rms_norm": "norm",
    "gated_rms_norm": "gated norm",
    "gated_rms_norm_linear": "gated norm and layer",
    "qk_norm_rope": "norm and rotary positions",
    "swiglu": "SwiGLU",
    "swiglu_linear": "SwiGLU and layer",
    "sigmoid_gate": "gate of attention",
    "sigmoid_gate_linear": "gate and layer",
    "linear": "linear layers",
    "linear_lora": "linear layers with LoRA",
    "linear_cross_entropy": "head and cross entropy",
}


def add_parser(subparsers) -> Parser:
    """Declare the command."""
    return subparsers.add_parser(
        "env",
        help="print versions, devices, and the implementations that would run",
        description="Print versions and devices, the implementation of each op for training packed rows on them, and "
        "the reasons why the other implementations do not run.",
    )


def run(_: argparse.Namespace) -> int:
    """Print the description."""
    print(describe_environment())
    return 0


def describe_environment() -> str:
    """The text that `transformers-packed env` prints.

    The verifiers of the ops decide for a training call with the head dimensions of the released models (128 in the
    gated delta rule, 256 in attention).
    """
    from ..ops.availability import availability

    lines = [f"Python {platform.python_version()} on {platform.platform()}"]
    for kind, packages in PACKAGES.items():
        lines.append(f"{kind}: " + ", ".join(f"{package} {_version(package)}" for package in packages))
    for device, name, dtypes in _devices():
        for dtype in dtypes:
            lines += ["", f"On {name}, {str(dtype).removeprefix('torch.')}, a packed row would train with"]
            for op, (runs, refused) in availability(device, dtype).items():
                lines.append(f"  {OPS.get(op, op):<26} {runs or 'nothing'}")
                lines += [f"  {'':<26}   not {name}: it {reason}" for name, reason in refused]
    return "\n".join(lines)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def _devices() -> Iterator[tuple[str, str, tuple]]:
    """Yields device, display name, and the dtypes to report."""
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        name = f"cuda:{index} ({properties.name}, {memory}, compute capability {properties.major}.{properties.minor})"
        yield f"cuda:{index}", name, (torch.bfloat16, torch.float32)
    yield "cpu", "the CPU", (torch.float32,)
