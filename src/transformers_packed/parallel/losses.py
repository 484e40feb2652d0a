"""Gathering of the parts of a row, for losses on whole documents."""

import torch

from ..errors import input_error
from .collectives import all_gather
from .shard import RowShard


def gather_loss_tensors(*tensors: torch.Tensor, boundaries: RowShard) -> tuple[torch.Tensor, ...]:
    """Gather tensors with one entry per token, such as log-probabilities and labels, to the whole row. Differentiable.

    Every rank receives the same tensors and computes the loss of the row from them and `boundaries.row`, for example
    per document. As in data parallelism, the mean of the gradients over all processes (DDP, FSDP) is then the gradient
    of the mean loss of the rows. All ranks must call this function and use the same outputs.

    Args:
        *tensors (`torch.Tensor` of shape `[1, T / P, ...]`):
            Tensors of this rank's part, for example log-probabilities and `shift_labels`.
        boundaries ([`RowShard`]):
            Boundaries of the part.

    Returns:
        `tuple` of `torch.Tensor` of shape `[1, T, ...]`, without the row's tail padding.

    Raises:
        `ValueError`: a tensor does not have the length of the part, or `boundaries.parallel` is `None`.
    """
    for x in tensors:
        if x.shape[:2] != (1, boundaries.total_length):
            expected = f"tensors [1, {boundaries.total_length}, ...] of a shard of the row"
            raise input_error(expected, f"shape {tuple(x.shape)}", "Pass the boundaries of these tensors' batch.")
    group, row = boundaries.processes.group, boundaries.row
    length = row.total_length - row.padding_tokens
    return tuple(all_gather(x, 1, group)[:, :length] for x in tensors)
