"""The check that packed training equals what it stands for: of a model on a row, and the comparisons of any such check.

`callbacks/verify.py` makes the comparisons for a Trainer.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from ..audit.isolation import leak_between
from ..audit.model_state import quiet
from ..boundaries import SequenceBoundaries
from ..data.samples import IGNORED_LABEL
from ..errors import input_error
from ..models.cuda_graphs import without_graphs
from ..models.float8 import has_float8
from ..models.inputs import mask_targets_across_documents, resolve_boundaries
from ..models.untouched import gathers_weights
from ..shared_prompts import SharedPrompts
from .restore import as_before


PADDED = "Use padded batches, or pass verify=False to train anyway."
# Largest relative difference of a loss, and of a gradient, by the precision of the matrix products. In bfloat16, gradients
# of the row and of the padded batch were 1 to 5 % apart with 4 to 24 layers, and a loss per sample 36 %.
BARS = {"float32": (1e-4, 1e-3), "tf32": (1e-3, 2e-2), "half": (2e-2, 0.15), "float8": (5e-2, 0.5)}
# A loss, and its gradient with respect to the documents' embeddings.
Measured = tuple[float, torch.Tensor]


class DifferenceError(ValueError):
    """Packed training differs from what it stands for."""


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
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    with without_graphs(inner), as_before(inner, next(inner.parameters()).device):
        leak = leak_between(inner, lambda: inner(**batch), batch, places[few], sources[few])
        check_leak(leak, len(places))
        loss, alone = _losses(inner, batch, sources, boundaries)
    if loss is not None and alone is not None and not abs(loss - alone) <= BARS[precision_of(inner)][0] * abs(alone):
        raise DifferenceError(f"{difference('the documents alone', loss, alone)} {PADDED}")
    return Verified(len(places), leak, loss, alone)


def _losses(
    model: torch.nn.Module, batch: Mapping[str, Any], sources: list[torch.Tensor], boundaries: SequenceBoundaries
) -> tuple[float | None, float | None]:
    """The loss of a row, and the mean of the losses of its documents alone, if it has a label for each token."""
    labels = batch.get("labels")
    if labels is None or labels.shape != batch["input_ids"].shape:
        return None, None
    targets = {"labels": labels, "shift_labels": batch.get("shift_labels")}
    mask_targets_across_documents(boundaries, None, targets)
    with quiet(model), torch.no_grad():
        row = model(**batch).loss.item()
        parts = [_alone(model, batch, targets, *part) for part in zip(sources, boundaries.lengths, strict=True)]
    counts = sum(count for _, count in parts)
    return row, sum(loss * count for loss, count in parts) / counts if counts else None


def _alone(
    model: torch.nn.Module, batch: Mapping[str, Any], targets: dict[str, Any], source: torch.Tensor, length: int
) -> tuple[float, int]:
    """The loss of the last `length` tokens of a document alone, and its targets."""
    own = {name: x[:, source] for name, x in targets.items() if x is not None}
    for name, x in own.items():
        # The row has no target for the first one either. That of its last one may be in the next document.
        x[:, : len(source) - length + (name == "labels")] = IGNORED_LABEL
    count = int((own.get("shift_labels", own["labels"]) != IGNORED_LABEL).sum())
    ids = batch["input_ids"][:, source]
    return (model(input_ids=ids, **own, use_cache=False).loss.item() if count else 0.0), count


def compare(
    loss: float,
    gradient: torch.Tensor,
    other: float,
    expected: torch.Tensor,
    precision: str,
    what: str = "the padded batch of the same documents",
) -> str | None:
    """What differs between the row and `what`, if anything does."""
    bar, gradient_bar = BARS[precision]
    if not abs(loss - other) <= bar * max(abs(other), 1e-3):
        return difference(what, loss, other)
    if gradient.shape != expected.shape:
        return None
    norm = expected.norm()
    error = ((gradient - expected).norm() / norm).item() if norm else 0.0
    if not error <= gradient_bar:
        expected_words = f"gradients of the row that equal those of {what}"
        return str(input_error(expected_words, f"a relative difference of {error:.1e}"))
    return None


def is_as_close(row: Measured, padded: Measured, exact: Measured) -> bool:
    """Whether the loss and the gradient of a row are at most twice as far from the exact ones as those of the padded batch.

    What is not different by the bar of 16 bits is close too.
    """
    for bar, *three in zip(BARS["half"], row, padded, exact, strict=True):
        a, b, truth = map(torch.as_tensor, three)
        if a.shape != b.shape:
            # `compare` does not compare them either.
            continue
        if truth.shape != a.shape or not (a - truth).norm() <= max(2 * (b - truth).norm(), bar * truth.norm()):
            return False
    return True


def difference(what: str, loss: float, expected: float) -> str:
    error = abs(loss - expected) / max(abs(expected), 1e-12)
    got = f"{loss:.4f}, which differs by {error:.1e}"
    return str(input_error(f"the loss {expected:.4f} of {what}", got))


def check_leak(leak: float, documents: int) -> None:
    if leak != 0:
        expected = f"no gradient between the {documents} documents of a row"
        raise DifferenceError(str(input_error(expected, f"one of {leak:.1e} of that within them", PADDED)))


def precision_of(model: torch.nn.Module, args: Any = None) -> str:
    """The precision of the matrix products, a key of `BARS`. `args` are those of a Trainer, which runs autocast."""
    weight = next(x for x in model.parameters() if x.is_floating_point())
    device = weight.device.type
    if has_float8(model):
        return "float8"
    autocast = torch.is_autocast_enabled(device) if args is None else args.bf16 or args.fp16
    if weight.dtype.itemsize < 4 or autocast:
        return "half"
    return "float32" if device == "cpu" else "tf32"
