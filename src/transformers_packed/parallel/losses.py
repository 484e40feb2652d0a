"""From the parts of a row back to the row, for losses that look at whole documents."""

import torch

from ..errors import input_error
from .collectives import all_gather
from .shard import RowShard


def gather_loss_tensors(*tensors: torch.Tensor, boundaries: RowShard) -> tuple[torch.Tensor, ...]:
    """The whole row's log-probabilities, labels, and whatever else has one entry per token. Differentiable.

    Every rank gets the same tensors and computes the loss of the row from them and `boundaries.row`, per document for
    example. As in data parallelism, the mean of the gradients over all processes (DDP, FSDP) is then the gradient of the
    mean of the rows' losses. All ranks have to call this function, and to use the same outputs.

    Args:
        tensors (`torch.Tensor` of shape `[1, T / P, ...]`):
            This rank's log-probabilities, its `shift_labels`, and so on.
        boundaries ([`RowShard`]):
            Which part of the row they are of.

    Returns:
        `tuple` of `torch.Tensor` of shape `[1, T, ...]`, without the row's tail padding.

    Raises:
        `ValueError`: a tensor is not this part of the row, or the other ranks are not known.
    """
    for x in tensors:
        if x.shape[:2] != (1, boundaries.total_length):
            expected = f"tensors [1, {boundaries.total_length}, ...] of a shard of the row"
            raise input_error(expected, f"shape {tuple(x.shape)}", "Pass the boundaries of these tensors' batch.")
    group, row = boundaries.processes.group, boundaries.row
    length = row.total_length - row.padding_tokens
    return tuple(all_gather(x, 1, group)[:, :length] for x in tensors)
