"""`transformers-packed env`: print versions and devices.

Print the versions of Python and of packages, and the devices.
"""

import argparse
import platform
from importlib import metadata

from .options import Parser


PACKAGES = {
    "needed": ("transformers_packed", "torch", "transformers", "accelerate"),
    "kernels": ("triton", "flash-linear-attention", "flash-qla", "tilelang", "causal-conv1d", "flash-attn"),
    "optional": ("peft", "trl", "datasets"),
}


def add_options(parser: Parser) -> None:
    """Declare no option."""


def run(_: argparse.Namespace) -> None:
    """Print the description."""
    print(describe_environment())


def describe_environment() -> str:
    """The text that `transformers-packed env` prints."""
    lines = [f"Python {platform.python_version()} on {platform.platform()}"]
    for kind, packages in PACKAGES.items():
        lines.append(f"{kind}: " + ", ".join(f"{package} {version(package) or 'missing'}" for package in packages))
    return "\n".join([*lines, f"devices: {', '.join([*gpus(), 'cpu'])}"])


def version(package: str) -> str | None:
    """The installed version of a package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gpus() -> list[str]:
    """Name, memory and compute capability of each GPU."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        capability = f"compute capability {properties.major}.{properties.minor}"
        found.append(f"cuda:{index} ({properties.name}, {memory}, {capability})")
    return found
