"""Isolation by unpacking: the whole base model runs on the documents of a packed row as right-padded batches.

For models whose attention looks beyond documents in ways that no argument can stop. The batches are causal, so padding
on the right is never seen, and positions start at 0 in each row by themselves. Costs what `ops.per_document` does: at
most a fifth of padding, and one run of the model per bucket of lengths.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import ModelOutput

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..ops.per_document import per_document
from .current import boundaries_set_to


def run_unpacked(
    model: torch.nn.Module, forward: Callable, boundaries: SequenceBoundaries, inputs: dict[str, Any]
) -> ModelOutput | tuple:
    """The outputs of a base model for a packed row, computed on each document alone.

    Args:
        model (`PreTrainedModel`):
            The base model.
        forward (`Callable`):
            Its built-in forward.
        boundaries ([`SequenceBoundaries`]):
            The documents of the row.
        inputs (`dict`):
            The built-in's arguments for the row.

    Raises:
        `ValueError`: an output has no entry per token, so that it cannot be told for documents alone.
    """
    row = (1, boundaries.total_length)
    inputs = {name: value for name, value in inputs.items() if name != "position_ids"}
    if inputs.get("inputs_embeds") is None:
        # Once for the row, as without packing.
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    as_tuple = inputs.pop("return_dict", None) is False
    names = [name for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.shape[:2] == row]
    shapes = []

    def run(*batches: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        outputs = forward(model, **(inputs | dict(zip(names, batches, strict=True)) | {"return_dict": True}))
        flat, shape = _flatten(type(model).__name__, outputs, batches[0].shape[:2])
        shapes.append(shape)
        return flat

    with boundaries_set_to(None):
        flat = per_document(run, *(inputs[name] for name in names), boundaries=boundaries)
    make, fields = shapes[0]
    flat, outputs = list(flat), {}
    for name, (many, squeezed) in fields.items():
        count = many if many is not None else 1
        values = [value[0] if squeezed and value is not None else value for value in flat[:count]]
        outputs[name] = values[0] if many is None else tuple(values)
        del flat[:count]
    outputs = make(**outputs)
    return outputs.to_tuple() if as_tuple else outputs


def _flatten(call: str, outputs: ModelOutput, batch: torch.Size) -> tuple[tuple, tuple]:
    """The tensors `[documents, length, ...]` of a model's outputs, and how to put them together again."""
    flat, fields = [], {}
    for name, value in outputs.items():
        if value is None or name == "past_key_values":
            continue
        many = value if isinstance(value, tuple) else (value,)
        # Routers see tokens without rows.
        squeezed = any(x is not None and x.shape[0] == batch.numel() and x.shape[:2] != batch for x in many)
        many = [x.unflatten(0, batch) if squeezed and x is not None else x for x in many]
        if any(x is not None and x.shape[:2] != batch for x in many):
            raise input_error(
                f"a packed row without {name}, which has no entry per token",
                f"shapes {[tuple(x.shape) for x in many if x is not None]}",
                "Do not ask for it, or use a padded batch.",
            )
        flat += many
        fields[name] = (len(many) if isinstance(value, tuple) else None, squeezed)
    return tuple(flat), (type(outputs), fields)
