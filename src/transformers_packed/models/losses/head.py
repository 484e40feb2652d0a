"""Cross-entropy of a language modeling head without logits, which several losses of a step may share."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ...foreign import swapped
from ...ops import linear_cross_entropy
from ..untouched import is_bare_linear, is_sharded_linear


@dataclass
class Prediction:
    """Hidden states from which a language modeling head predicts tokens.

    Args:
        hidden_states (`torch.Tensor` of shape `[B, L, hidden]`):
            The input of the head.
        targets (`torch.LongTensor` of shape `[B, L]`):
            What each of them predicts.
        number (`int`):
            The number of targets that are not ignored.
        items (`int` or `torch.Tensor`, *optional*):
            The divisor of the sum over the targets. Defaults to their number.
        ignore_index (`int`, *optional*, defaults to -100), label_smoothing (`float`, *optional*, defaults to 0.0):
            As in the loss of every causal language model.
        note (`Callable`, *optional*):
            Gets the loss of each target, without a gradient.
    """

    hidden_states: torch.Tensor
    targets: torch.Tensor
    number: int
    items: int | torch.Tensor | None
    ignore_index: int = -100
    label_smoothing: float = 0.0
    note: Callable[[torch.Tensor], None] | None = None

    @property
    def divisor(self) -> Any:
        return (self.number or math.nan) if self.items is None else self.items


def is_plain(lm_head: Any) -> bool:
    """Whether the weight of a head is all that it computes with. FSDP2 or ZeRO-3 may have sharded it."""
    return is_bare_linear(lm_head) or is_sharded_linear(lm_head)


def weighted_sum(lm_head: Any, predictions: list[tuple[float, Prediction]]) -> torch.Tensor:
    """Compute the weighted sum of the losses of predictions, with one gradient of the vocabulary's weight if possible."""
    usual = all(x.ignore_index == -100 and not x.label_smoothing for _, x in predictions)
    if len(predictions) == 1 or not usual or not is_plain(lm_head):
        return sum_of([weight * _loss_of(lm_head, x) for weight, x in predictions])
    first, numbers = predictions[0][1], [x.targets.numel() for _, x in predictions]
    like, device = first.hidden_states, first.hidden_states.device
    weights = []
    for weight, x in predictions:
        share = weight if x is first else weight * first.divisor / x.divisor
        weights.append(torch.as_tensor(share, dtype=torch.float32, device=device).expand(x.targets.numel()))
    rows = torch.cat([x.hidden_states.flatten(0, 1).to(like.dtype) for _, x in predictions])
    targets = torch.cat([x.targets.flatten().to(device) for _, x in predictions])
    options = {"num_items_in_batch": first.divisor, "num_targets": sum(x.number for _, x in predictions)}
    options |= {"token_weights": torch.cat(weights), "return_losses": True}
    loss, losses = head_loss(lm_head, rows, targets, **options)
    for (_, x), own in zip(predictions, losses.split(numbers), strict=True):
        if x.note is not None:
            x.note(own)
    return loss


def sum_of(terms: list[torch.Tensor]) -> torch.Tensor:
    """Sum losses, on the device of the first one."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term.to(total.device)
    return total


def _loss_of(lm_head: Any, one: Prediction) -> torch.Tensor:
    options: dict[str, Any] = {"ignore_index": one.ignore_index, "label_smoothing": one.label_smoothing}
    options |= {"num_items_in_batch": one.items, "num_targets": one.number}
    if one.note is None:
        return head_loss(lm_head, one.hidden_states, one.targets, **options)
    loss, losses = head_loss(lm_head, one.hidden_states, one.targets, return_losses=True, **options)
    one.note(losses)
    return loss


def with_weight(lm_head: Any, compute: Callable[[torch.Tensor], Any], hidden_states: torch.Tensor) -> Any:
    """Return `compute(hidden_states)`, which reads the weight of a plain head."""
    if is_bare_linear(lm_head):
        return compute(hidden_states)
    # FSDP2 and ZeRO-3 gather the weight only around the head's forward, so that forward must compute the loss.
    with swapped(vars(lm_head), forward=compute):
        return lm_head(hidden_states)


def head_loss(lm_head: Any, hidden_states: torch.Tensor, targets: torch.Tensor, **options: Any) -> Any:
    """Call [`linear_cross_entropy`] with a language modeling head, or the head if its weight does not say what it does."""

    def loss_of(hidden_states: torch.Tensor) -> Any:
        return linear_cross_entropy(hidden_states, lm_head.weight, targets, lm_head.bias, **options)

    if is_plain(lm_head):
        return with_weight(lm_head, loss_of, hidden_states)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    kept = (targets.flatten() != -100).nonzero()[:, 0]
    logits = lm_head(rows.index_select(0, kept)).float()
    losses = F.cross_entropy(logits, targets.flatten().index_select(0, kept).to(logits.device), reduction="none")
    loss = losses.sum() / torch.as_tensor(options["num_items_in_batch"], device=losses.device)
    return (loss, losses.detach()) if options.get("return_losses") else loss
