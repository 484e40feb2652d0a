"""The check that a model on a packed row computes what it stands for. `callbacks/verify.py` checks a Trainer."""

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

import torch

from ..audit.isolation import NotFiniteError, UnseenError, leak_between, watch
from ..audit.model_state import as_before, quiet
from ..boundaries import SequenceBoundaries
from ..data.samples import IGNORED_LABEL
from ..errors import input_error
from ..models.cuda_graphs import without_graphs
from ..models.inputs import mask_targets_across_documents, resolve_boundaries
from ..models.untouched import gathers_weights
from ..shared_prompts import SharedPrompts
from .compare import LOSS, PADDED, DifferenceError, Measured, Side, check_leak, find_difference, precision_of
from .restore import exact_for, inside_ddp
from .state import same_state


_ALONE = "the documents alone"


class Verified(NamedTuple):
    """What [`verify_packing`] measured.

    Attributes:
        documents (`int`):
            The documents of the row.
        leak (`float`):
            The largest gradient between documents, relative to the largest within them. 0 if they are isolated.
        loss (`float`, *optional*):
            The loss of the row, if the batch has labels.
        loss_alone (`float`, *optional*):
            The mean of the losses of its documents alone, weighted by their targets.
    """

    documents: int
    leak: float
    loss: float | None = None
    loss_alone: float | None = None


def verify_packing(model: torch.nn.Module, batch: Mapping[str, Any]) -> Verified:
    """Check on a packed row that a model keeps its documents apart, and that its loss is that of the documents alone.

    For training loops without a Trainer. Runs a forward and a backward of the row for each of up to four documents, and a
    forward of the row and of each document. Gradients, buffers, modes and random states remain as they were. Call it under
    the autocast of the training loop.

    Args:
        model (`torch.nn.Module`):
            The model to train, which may be inside another one (PEFT, DistributedDataParallel).
        batch (`Mapping`):
            A packed row on the device of the model: `input_ids` `[1, T]` with boundaries, such as the output of
            [`DataCollatorWithFlattening`], and `labels` `[1, T]` (optional). A row of some hundred tokens is enough.
            With shared prompts, a document alone is the one that its ancestors and it are together.

    Returns:
        [`Verified`]: the figures.

    Raises:
        `ValueError`: the batch is not a packed row of several documents, FSDP shards the model, documents change one
            another, or the losses differ. The message has the figures.

    Example:

    ```python
    >>> import torch
    >>> from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    >>> from transformers_packed import patch_model, verify_packing
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> model = patch_model(Qwen3_5ForCausalLM(config))
    >>> batch = {"input_ids": torch.arange(1, 13)[None], "cu_seqlens": torch.tensor([0, 5, 12])}
    >>> verify_packing(model, batch)
    Verified(documents=2, leak=0.0, loss=None, loss_alone=None)

    ```
    """
    boundaries = resolve_boundaries(dict(batch))
    if boundaries is None or boundaries.num_documents < 2:
        got = "no boundaries" if boundaries is None else f"{boundaries.num_documents} document"
        raise input_error("a packed row of several documents", got, "Pass a batch of DataCollatorWithFlattening.")
    if gathers_weights(model):
        raise input_error("a model without FSDP and ZeRO-3", "a sharded one", "Verify the model before sharding it.")
    places = list(torch.arange(boundaries.total_length).split(boundaries.lengths))
    # A document may depend on those that it continues. They come first.
    sources, few = places, slice(4)
    if isinstance(boundaries, SharedPrompts):
        sources, few = boundaries.tokens, slice(-4, None)
    inner = inside_ddp(model)
    with without_graphs(inner), as_before(inner), same_state(inner):
        try:
            leak = leak_between(inner, lambda: inner(**batch), batch, places[few], sources[few])
        except NotFiniteError as error:
            _refuse_not_finite(inner, batch, sources, error)
        check_leak(leak, len(places))
        loss, alone = _losses(inner, batch, sources, boundaries)
    return Verified(len(places), leak, loss, alone)


def _refuse_not_finite(
    model: torch.nn.Module, batch: Mapping[str, Any], sources: list[torch.Tensor], error: NotFiniteError
) -> NoReturn:
    """Raise the error of a row with values that are not finite, which says whether its documents alone have them too."""
    with quiet(model), watch(model) as seen:
        for source in sources:
            model(input_ids=batch["input_ids"][:, source], use_cache=False)
            if seen.hidden is None or not seen.hidden.isfinite().all():
                raise DifferenceError(f"{input_error('finite values', error, 'A document alone has them too.')}")
    raise DifferenceError(f"{input_error(f'finite values, as of {_ALONE}', error)} {PADDED}")


def _losses(
    model: torch.nn.Module, batch: Mapping[str, Any], sources: list[torch.Tensor], boundaries: SequenceBoundaries
) -> tuple[float | None, float | None]:
    """The loss of a row, and the mean of the losses of its documents alone, if it has a label for each token."""
    labels = batch.get("labels")
    if labels is None or labels.shape != batch["input_ids"].shape:
        return None, None
    targets = {"labels": labels, "shift_labels": batch.get("shift_labels")}
    mask_targets_across_documents(boundaries, None, targets)

    parts = [_alone(batch, targets, *part) for part in zip(sources, boundaries.lengths, strict=True)]
    number = sum(count for _, count in parts)

    def of_row() -> Measured:
        return {LOSS: model(**batch).loss}

    def of_documents() -> Measured:
        losses = [count * model(**part, use_cache=False).loss for part, count in parts if count]
        return {LOSS: torch.stack(losses).sum() / number}

    with quiet(model), torch.no_grad():
        row = Side(of_row)
        if not number:
            return row.loss, None
        alone = Side(of_documents)
        try:
            find_difference(row, alone, precision_of(model), exact_for(model), what=_ALONE)
        except UnseenError as error:
            raise DifferenceError(f"{input_error('finite losses', error)} {PADDED}") from None
    return row.loss, alone.loss


def _alone(
    batch: Mapping[str, Any], targets: dict[str, Any], source: torch.Tensor, length: int
) -> tuple[dict[str, torch.Tensor], int]:
    """The tokens `source`, of which the last `length` have the targets that they have in the row, and their number."""
    own = {name: x[:, source] for name, x in targets.items() if x is not None}
    for name, x in own.items():
        # The row has no target for the first one either. That of its last one may be in the next document.
        x[:, : len(source) - length + (name == "labels")] = IGNORED_LABEL
    count = int((own.get("shift_labels", own["labels"]) != IGNORED_LABEL).sum())
    return {"input_ids": batch["input_ids"][:, source], **own}, count
