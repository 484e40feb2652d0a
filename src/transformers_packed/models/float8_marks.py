"""The layers whose products run in float8, which [`use_float8`] marks."""

from typing import Any

import torch
from transformers.utils import logging

from ..ops.invariance import is_batch_invariant


logger = logging.get_logger(__name__)

# The attribute of a layer with the fewest tokens whose products run in float8. Copies and pickles of a model keep it,
# unlike an entry of a table.
MARK = "_float8_from"


def has_float8(model: torch.nn.Module) -> bool:
    """Whether a layer of this model trains in float8, for rows of some length."""
    return any(vars(module).get(MARK) is not None for module in model.modules())


def is_in_float8(layer: Any, hidden_states: torch.Tensor) -> bool:
    """Whether the products of this layer with these inputs run in float8."""
    fewest = vars(layer).get(MARK)
    if fewest is None or not layer.training or torch.compiler.is_compiling():
        return False
    # Experts have no least number. A document has the same bits in every row only if short rows run in float8 too.
    if not fewest or is_batch_invariant() or hidden_states.numel() >= fewest * layer.in_features:
        return True
    # One line for all shapes of layers.
    logger.warning_once(
        "use_float8: rows that are too short for a layer to gain from float8 are computed in the dtype of the model."
    )
    return False


def warn_about(layer: torch.nn.Module, hidden_states: torch.Tensor, reason: str) -> None:
    """Log once that layers like this one do not run in float8, if it or a layer that it wraps should."""
    # A linear layer wraps no other. Those in 4 bit come here in each forward.
    inner = (layer,) if isinstance(layer, torch.nn.Linear) else layer.modules()
    if not any(is_in_float8(module, hidden_states) for module in inner):
        return
    logger.warning_once(f"use_float8: a {type(layer).__name__} runs in its own dtype, because {reason}.")
