"""Attention of long documents that gradient checkpointing does not compute again, because host memory keeps its outputs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..ops import offload
from ..ops.kept_attention import keeping_attention
from .releases import arguments_of_layer
from .segments import RowSegment


def keep_long_attention(
    host: offload.HostCheckpoints, checkpoint: Callable, function: Callable, *args: Any, **kwargs: Any
) -> Any:
    """Run a layer by `checkpoint`, with the attention of a row that has a long document kept in host memory.

    Args:
        host ([`HostCheckpoints`]):
            The copies of the model.
        checkpoint (`Callable`):
            `torch.utils.checkpoint.checkpoint` without reentrant autograd, or a function like it.
        function (`Callable`):
            The layer with its keyword arguments, as Transformers passes it to a checkpointing function.
    """
    row = (arguments_of_layer(function) | kwargs).get("boundaries")
    if row is None or torch.compiler.is_compiling():
        return checkpoint(function, *args, **kwargs)
    # At most so many keys for a query. The first piece of a segment goes on with a document.
    keys = row.max_length + (row.tokens_before if isinstance(row, RowSegment) else 0)
    kept = {"context_fn": partial(keeping_attention, host, True)} if keys >= offload.LONG_DOCUMENT else {}
    return checkpoint(function, *args, **kept, **kwargs)
