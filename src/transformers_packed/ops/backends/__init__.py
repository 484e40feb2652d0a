"""Kernels of other packages, one file for each, and this package's Triton kernels (`triton`).

The verifier of a package inspects the tensors of the call. A package that can be imported on a machine without a GPU
is therefore not selected for CPU tensors. Packages are imported inside the functions that use them. No function here
needs a host sync: the index tensors of the kernels are built once per row from the host copy of the boundaries.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache

import torch

from ...boundaries import CHUNK_SIZE, SequenceBoundaries


def threads_of_this_process() -> int:
    """Return the number of threads that may compile: the share of this process of the machine's cores."""
    return max(len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)), 1)


def name_of(device: torch.device) -> str:
    """Return what kernels are compiled for: the name of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Let a thread, which has a device and a stream of its own, run on this device, and wait for it at the end."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        yield
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()


@lru_cache
def importable(module: str, package: str) -> str:
    return "" if importlib.util.find_spec(module) else f"is not installed (pip install {package})"


def verify_convolution(hidden_states: torch.Tensor, activation: str | None) -> str:
    """Check the common requirements of all convolution kernels."""
    if not hidden_states.is_cuda:
        return "needs CUDA tensors"
    if hidden_states.dtype == torch.float64:
        return "does not support float64"
    known = activation in (None, "silu", "swish")
    return "" if known else f"supports the activations silu and swish, not {activation}"


def chunk_indices(boundaries: SequenceBoundaries) -> torch.Tensor:
    """Return int32 `[chunks, 2]`: the document of each chunk, and the index of the chunk in the document."""
    device = boundaries.cu_seqlens.device
    counts, total = boundaries.chunk_counts(CHUNK_SIZE)
    numbers = torch.arange(boundaries.num_documents, dtype=torch.int32, device=device)
    document = numbers.repeat_interleave(counts, output_size=total)
    chunk = torch.arange(total, device=device) - (counts.cumsum(0) - counts)[document.long()]
    return torch.stack([document, chunk.to(torch.int32)], dim=1)
