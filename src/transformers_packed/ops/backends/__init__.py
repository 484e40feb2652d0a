"""Kernels: those of other packages, a file each, and this package's own in Triton (`triton`).

Each package has a verifier that looks at the tensors of the call, so one that can be imported on a machine without a
GPU is never taken for one that can run. Packages are imported inside the functions that use them. No function here
waits for the GPU: the index tensors that the kernels want are made once per row from the host copy of its boundaries.
"""

import importlib.util
from functools import lru_cache

import torch

from ...boundaries import CHUNK_SIZE, SequenceBoundaries


@lru_cache
def importable(module: str, package: str) -> tuple[bool, str]:
    found = importlib.util.find_spec(module) is not None
    return found, "" if found else f"is not installed (pip install {package})"


def verify_convolution(hidden_states: torch.Tensor, activation: str | None) -> tuple[bool, str]:
    """What the convolutions of all packages ask for."""
    if not hidden_states.is_cuda:
        return False, "needs CUDA tensors"
    if hidden_states.dtype == torch.float64:
        return False, "has no float64"
    return activation in (None, "silu", "swish"), f"knows the activations silu and swish, not {activation}"


def chunk_indices(boundaries: SequenceBoundaries) -> torch.Tensor:
    """int32 `[chunks, 2]`: the document of each chunk, and which chunk of the document it is."""
    device = boundaries.cu_seqlens.device
    counts, total = boundaries.chunk_counts(CHUNK_SIZE)
    numbers = torch.arange(boundaries.num_documents, dtype=torch.int32, device=device)
    document = numbers.repeat_interleave(counts, output_size=total)
    chunk = torch.arange(total, device=device) - (counts.cumsum(0) - counts)[document.long()]
    return torch.stack([document, chunk.to(torch.int32)], dim=1)
