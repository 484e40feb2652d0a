"""The memory that CUDA graphs keep beside what the allocator counts as allocated.

Activations in the memory pool of a graph are free for the allocator, but nothing else can use them. Gaps in other segments are
no memory of graphs: a step whose peak counts them as allocated fills them.
"""

from collections.abc import Iterable
from typing import Any


# The pool of what no graph allocates.
_COMMON_POOL = (0, 0)


def free_in_pools(segments: Iterable[dict[str, Any]]) -> int:
    """The bytes in pools of graphs that are not allocated, of `torch.cuda.memory_snapshot()`."""
    own = (x for x in segments if tuple(x["segment_pool_id"]) != _COMMON_POOL)
    return sum(x["total_size"] - x["allocated_size"] for x in own)


def memory_of_graphs(model) -> float | None:
    """The GiB that the CUDA graphs of a model keep without allocating them, or `None` without graphs."""
    import torch

    from transformers_packed.models.cuda_graphs import find_text_models, records_graphs

    if not any(records_graphs(text) for text in find_text_models(model)):
        return None
    torch.cuda.synchronize()
    return round(free_in_pools(torch.cuda.memory_snapshot()) / 2**30, 2)
