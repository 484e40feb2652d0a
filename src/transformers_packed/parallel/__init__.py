"""Sequence parallelism: several processes compute one packed row. Each process holds a part of its tokens.

`groups.py` has the processes that share a row, `shard.py` the parts of a row and of losses, and `collectives.py`
communication with gradients. `mixers.py` and `vision.py` compute layers on a part. `host_pages.py` is apart from these:
processes of a machine share pages of host memory.
"""

from . import mixers  # noqa: F401  the forms of the ops for parts of a row
from .groups import SequenceParallel
from .shard import RowShard, gather_loss_tensors, shard_batch


__all__ = ["RowShard", "SequenceParallel", "gather_loss_tensors", "shard_batch"]
