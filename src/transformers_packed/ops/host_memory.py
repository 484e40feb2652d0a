"""Memory of the host: what is free, and pinned pages."""

import mmap
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch


# The control groups of this process, in a container its own ones.
_GROUPS = Path("/sys/fs/cgroup")


def free_device_memory(device: torch.device, allocated: int | None = None) -> int:
    """Return the bytes of a GPU that are free, or reserved by this process and not allocated, of `allocated` or those of now."""
    allocated = torch.cuda.memory_allocated(device) if allocated is None else allocated
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - allocated


def free_host_memory() -> int:
    """Return the bytes of host memory that are free, within the limit of the container."""
    free = psutil.virtual_memory().available
    # Control groups of version 2 and 1. Files in memory count as used there, and make room.
    for folder, most, used in (("", "max", "current"), ("memory", "limit_in_bytes", "usage_in_bytes")):
        group = _GROUPS / folder
        with suppress(OSError, ValueError, KeyError):
            limit, now = (int((group / f"memory.{name}").read_text()) for name in (most, used))
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            files = int(counts["inactive_file"]) + int(counts["active_file"])
            free = min(free, max(limit - now, 0) + files)
    return free


def whole_pages(size: int) -> int:
    """Bytes of the buffer of a tensor, which cannot be empty, and serves slightly larger ones too."""
    step = max(1 << 16, 1 << max(size.bit_length() - 5, 0))
    return -(-max(size, 1) // step) * step


def new_pages(size: int) -> torch.Tensor:
    """Return `size` bytes of host memory in uint8, which share no page with others.

    Pages are large where the system has them: CUDA pins them faster.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
    # Kernels without large pages refuse the advice.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def pin(pages: torch.Tensor, stream: Any, device: torch.device, what: str, fix: str) -> None:
    """Pin pages of [`new_pages`] until they are freed, and until the stream that copies them has nothing to do.

    Args:
        pages (`torch.Tensor`):
            The pages.
        stream (`torch.cuda.Stream`), device (`torch.device`):
            The stream of the copies, and its device.
        what (`str`), fix (`str`):
            What the pages are for, and what to do without them.

    Raises:
        `MemoryError`: CUDA cannot pin so many pages.
    """
    failed = int(_cudart().cudaHostRegister(pages.data_ptr(), pages.nbytes, 0))
    if failed:
        with suppress(RuntimeError):
            # The next launch of a kernel would raise this error.
            torch.ones(1, device=device)
        expected = f"{max(pages.nbytes / 2**20, 1):,.0f} MiB more of host memory that CUDA can pin"
        raise MemoryError(f"{what}: expected {expected}, got error {failed}. {fix}")
    weakref.finalize(pages, _unpin, pages.data_ptr(), stream).atexit = False


def _cudart() -> Any:
    return torch.cuda.cudart()


def _unpin(address: int, stream: Any) -> None:
    # A copy may still read it.
    stream.synchronize()
    _cudart().cudaHostUnregister(address)
