"""The boundaries of a row whose document lengths are on the GPU alone, in a CUDA graph."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .boundaries import WHOLE, SequenceBoundaries
from .errors import unsupported


@dataclass(frozen=True, eq=False)
class DeviceBoundaries(SequenceBoundaries):
    """Boundaries without a host copy, as in a CUDA graph that is replayed for different documents.

    `cu_seqlens` may be overwritten in place, documents may be empty, and the last one must be. Counts on the host are
    upper bounds.

    Args:
        advice (`str`):
            The advice in the error of an op that needs the host copy.
    """

    advice: str = ""
    kind: ClassVar[str] = WHOLE

    @property
    def cu_seqlens_cpu(self) -> torch.Tensor:
        raise unsupported("a row without lengths on the host", "an op that reads them", self.advice)

    @property
    def total_length(self) -> int:
        assert self.length is not None
        return self.length

    max_length = total_length

    def chunk_counts(self, size: int) -> tuple[torch.Tensor, int]:
        counts = (self.cu_seqlens.diff() + (size - 1)) // size
        total = self.total_length // size + self.num_documents
        # The unused chunks are assigned to the empty document at the end, where kernels have nothing to compute.
        counts[-1:] += total - counts.sum()
        return counts, total
