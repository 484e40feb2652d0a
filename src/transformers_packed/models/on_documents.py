"""Run a stock module of a family without dedicated classes on the documents of a row, as right-padded batches."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from transformers.utils import ModelOutput, logging

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..ops.per_document import per_document
from .untouched import gathers_weights
from .versions import CACHE


logger = logging.get_logger(__name__)


def on_documents(run: Callable, module, arguments: dict[str, Any], boundaries: SequenceBoundaries) -> Any:
    """Return what `run` returns for a row, from calls with right-padded batches of documents in place of its tensors."""
    row = (1, boundaries.total_length)
    leaves, structure = tree_flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.shape[:2] == row]
    structures = []

    def on_batches(*batches: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        filled = list(leaves)
        for place, batch in zip(places, batches, strict=True):
            filled[place] = batch
        outputs, form = tree_flatten(run(**tree_unflatten(filled, structure)))
        structures.append(form)
        return tuple(outputs)

    rows = [leaves[place] for place in places]
    outputs = per_document(on_batches, *rows, boundaries=boundaries, once=_runs_once(module))
    return tree_unflatten(list(outputs), structures[0])


def _runs_once(module: torch.nn.Module) -> bool:
    """Whether a module must run once for each row, so that all processes call its parts equally often."""
    once = any(map(gathers_weights, module.children()))
    if once:
        logger.warning_once(
            f"{type(module).__name__} pads the documents of a row to the longest one, because each call of its parts "
            "gathers weights from all processes. Put documents of similar length into a row."
        )
    return once


def by_row(outputs: ModelOutput, batch: torch.Size) -> tuple[dict[str, Any], list[str]]:
    """Return the outputs but the cache, each with tensors `[B, T, ...]`, and the names of those that were `[B * T, ...]`."""
    fields, without_rows = {}, []
    for name, value in outputs.items():
        if name == CACHE:
            continue
        shapes = {x.shape for x in tree_leaves(value) if x is not None}
        if any(shape[:2] != batch and shape[0] == batch.numel() for shape in shapes):
            # Router outputs have one dimension for all tokens of the batch.
            without_rows.append(name)
            value = tree_map_only(torch.Tensor, lambda x: x.unflatten(0, batch), value)
        elif any(shape[:2] != batch for shape in shapes):
            expected = f"a packed row without {name}, which has no entry per token"
            raise input_error(expected, f"shapes {[tuple(shape) for shape in shapes]}", "Use a padded batch.")
        fields[name] = value
    return fields, without_rows
