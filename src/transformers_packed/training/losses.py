"""From a packed row to one number per document: log-probabilities, losses, and a training loss with samples' means.

A language model's loss is one mean over all targets, so long documents weigh more than short ones. For evaluation, DPO
or GRPO one wants each document's own number, and some train with the mean over documents of each document's own mean.

Targets are shifted inside documents only: the first token of a document is predicted by nothing. Sums are float32 even
of bfloat16 logits, without a float32 copy of the row's logits: a few hundred tokens are widened at a time, and again in
backward, so that nothing of the vocabulary's size is kept. Given hidden states and the head, not even the logits are.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ..boundaries import SequenceBoundaries
from ..data.samples import IGNORED_LABEL as _IGNORED_LABEL
from ..errors import input_error
from ..models.inputs import METADATA, mask_targets_across_documents, resolve_boundaries


class DocumentLogps(NamedTuple):
    """What [`per_document_logps`] returns.

    Args:
        sums (`torch.FloatTensor` of shape `[N]`):
            The log-probability of each document's targets together; 0 without a target.
        token_counts (`torch.LongTensor` of shape `[N]`):
            How many targets each document has.
        per_token (`torch.FloatTensor` of shape `[1, T]`):
            The log-probability of each token that is a target, where it stands in `labels`; 0 at the others.
    """

    sums: torch.Tensor
    token_counts: torch.Tensor
    per_token: torch.Tensor


class DocumentLosses(NamedTuple):
    """What [`per_document_loss`] returns.

    Args:
        losses (`torch.FloatTensor` of shape `[N]`):
            The loss of each document; 0 without a target.
        token_counts (`torch.LongTensor` of shape `[N]`):
            How many targets each document has.
    """

    losses: torch.Tensor
    token_counts: torch.Tensor


def per_document_logps(
    logits: torch.Tensor,
    labels: torch.Tensor,
    boundaries: SequenceBoundaries | torch.Tensor,
    *,
    head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    chunk_size: int = 512,
) -> DocumentLogps:
    """The log-probability of each document of a packed row under a model. Differentiable.

    Args:
        logits (`torch.Tensor` of shape `[1, T, vocab]`):
            The model's logits for the row, in any floating dtype; with `head`, its last hidden states `[1, T, hidden]`.
        labels (`torch.LongTensor` of shape `[1, T]`):
            The tokens themselves, not shifted, as models take them; -100 is no target, nor is a document's first token.
        boundaries ([`SequenceBoundaries`] or `torch.IntTensor` of shape `[N+1]`):
            The documents of the row, or their cumulative lengths `cu_seqlens`. Tail padding is a document too.
        head (`Callable`, *optional*):
            From hidden states `[tokens, hidden]` to logits `[tokens, vocab]`, such as `model.lm_head`. It is called for
            the tokens that predict a target, in chunks, and once more in backward. To find these tokens costs one wait
            for the GPU.
        chunk_size (`int`, *optional*, defaults to 512):
            How many tokens' logits exist in float32 at a time.

    Returns:
        [`DocumentLogps`]: `sums` `[N]`, `token_counts` `[N]` and `per_token` `[1, T]`.

    Raises:
        `ValueError`: shapes that do not fit one another, or malformed boundaries.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed import per_document_logps
    >>> labels = torch.tensor([[5, 7, 7, 1, 3]])
    >>> logps = per_document_logps(torch.zeros(1, 5, 10), labels, torch.tensor([0, 3, 5]))
    >>> logps.sums / torch.tensor(10.0).log(), logps.token_counts
    (tensor([-2., -1.]), tensor([2, 1]))

    ```
    """
    return _logps("per_document_logps", logits, labels, boundaries, head, chunk_size)


def per_document_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    boundaries: SequenceBoundaries | torch.Tensor,
    *,
    normalization: str = "mean",
    head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    chunk_size: int = 512,
) -> DocumentLosses:
    """The loss of each document of a packed row: what the model gives for the document alone. Differentiable.

    Args:
        logits (`torch.Tensor` of shape `[1, T, vocab]`):
            As in [`per_document_logps`], like the other arguments that are not named here.
        labels (`torch.LongTensor` of shape `[1, T]`):
            The tokens, not shifted; -100 is no target.
        boundaries ([`SequenceBoundaries`] or `torch.IntTensor` of shape `[N+1]`):
            The documents of the row.
        normalization (`str`, *optional*, defaults to `"mean"`):
            `"mean"`, over each document's targets, or `"sum"`.
        head (`Callable`, *optional*):
            From hidden states to logits.
        chunk_size (`int`, *optional*, defaults to 512):
            How many tokens' logits exist in float32 at a time.

    Returns:
        [`DocumentLosses`]: `losses` `[N]` and `token_counts` `[N]`, both 0 for a document without targets. The loss of
        the row, as the model gives it, is `(losses * token_counts).sum() / token_counts.sum()` of the means.

    Raises:
        `ValueError`: shapes that do not fit one another, malformed boundaries, or another `normalization`.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed import per_document_loss
    >>> labels = torch.tensor([[5, 7, 7, 1, 3, 9]])
    >>> per_document_loss(torch.zeros(1, 6, 10), labels, torch.tensor([0, 3, 5, 6]))
    DocumentLosses(losses=tensor([2.3026, 2.3026, 0.0000]), token_counts=tensor([2, 1, 0]))

    ```
    """
    call = "per_document_loss"
    if normalization not in ("mean", "sum"):
        raise input_error('normalization "mean" or "sum"', repr(normalization), "Change it.")
    sums, counts, _ = _logps(call, logits, labels, boundaries, head, chunk_size)
    # Not `-sums`: a document without targets has a loss of 0, not of -0.
    return DocumentLosses((0 - sums) / counts.clamp(min=1) if normalization == "mean" else 0 - sums, counts)


def _logps(call, logits, labels, boundaries, head, chunk_size) -> DocumentLogps:
    if logits.ndim != 3 or logits.shape[0] != 1 or labels.shape != logits.shape[:2] or labels.is_floating_point():
        raise input_error(
            "logits [1, T, vocab], or hidden states [1, T, hidden] beside head, and integer labels [1, T]",
            f"{tuple(logits.shape)} and {labels.dtype} {tuple(labels.shape)}",
            "Pass what the model returned for one packed row, and that row's labels, not shifted.",
        )
    if chunk_size < 1:
        raise input_error("chunk_size of at least 1", str(chunk_size), "Leave it out.")
    length, device = labels.shape[1], logits.device
    if not isinstance(boundaries, SequenceBoundaries):
        boundaries = SequenceBoundaries.from_cu_seqlens(boundaries, total_length=length)
    elif boundaries.total_length != length:
        raise input_error(
            f"boundaries of the row's {length} tokens",
            f"boundaries of {boundaries.total_length}",
            "Pass the boundaries of this row.",
        )
    boundaries = boundaries.to(device)
    labels = mask_targets_across_documents(boundaries, labels.to(device), {})[0]
    rows, targets, predicting = logits[0], F.pad(labels[1:], (0, 1), value=_IGNORED_LABEL), None
    if head is not None:
        predicting = (targets != _IGNORED_LABEL).nonzero()[:, 0]
        rows, targets = rows.index_select(0, predicting), targets.index_select(0, predicting)
    chunks = zip(rows.split(chunk_size), targets.split(chunk_size), strict=True)
    # Not kept for backward but made again there: each chunk's logits in float32.
    values = torch.cat([checkpoint(_chunk_logps, head, *chunk, use_reentrant=False) for chunk in chunks])
    if predicting is not None:
        values = values.new_zeros(length).index_copy(0, predicting, values)
    # From the token that predicts to the token that is predicted.
    per_token = F.pad(values[:-1], (1, 0))
    documents = boundaries.seq_idx[0].long()
    wide = torch.float32 if device.type == "mps" else torch.float64
    sums = per_token.new_zeros(boundaries.num_documents, dtype=wide).index_add(0, documents, per_token.to(wide))
    return DocumentLogps(sums.to(per_token.dtype), _count(labels, boundaries), per_token[None])


def _chunk_logps(head, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The log-probability of each row's target, 0 without one; at least float32."""
    logits = rows if head is None else head(rows)
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    return 0 - F.cross_entropy(logits, targets.to(logits.device), ignore_index=_IGNORED_LABEL, reduction="none")


def _count(labels: torch.Tensor, boundaries: SequenceBoundaries) -> torch.Tensor:
    """How many of `labels` `[T]` are targets, in each document."""
    counts = torch.zeros(boundaries.num_documents, dtype=torch.int64, device=labels.device)
    return counts.index_add(0, boundaries.seq_idx[0].long(), (labels != _IGNORED_LABEL).long())


def set_loss_normalization(trainer: Any, normalization: str) -> None:
    """Choose what a Trainer's loss is a mean of, over all rows and processes of an optimizer step.

    Args:
        trainer (`Trainer`):
            A built `Trainer`, or a subclass that uses `compute_loss_func`, such as TRL's `SFTTrainer`. Its batches are
            packed rows, or padded batches with a sample per row.
        normalization (`str`):
            `"token"`: over all targets, as models do it by themselves. `"sample"`: over all documents that have a
            target, of each document's own mean, so that short documents weigh as much as long ones. `"sample"` makes
            the row's logits, in the model's dtype.

    Raises:
        `ValueError`: another `normalization`, a trainer with a `compute_loss_func` or label smoothing, or, with
        `"token"`, a model that does not take `num_items_in_batch`; in training a trainer that computes its own loss.

    Example:

    ```python
    >>> from types import SimpleNamespace
    >>> from transformers_packed import set_loss_normalization
    >>> set_loss_normalization(SimpleNamespace(), "row")
    Traceback (most recent call last):
    ValueError: set_loss_normalization: expected normalization "token" or "sample", got 'row'. Change it.

    ```
    """
    if normalization not in ("token", "sample"):
        raise input_error('normalization "token" or "sample"', repr(normalization), "Change it.")
    if isinstance(trainer, _SampleMeanTrainer):
        trainer.__class__ = type(trainer).__bases__[1]
        trainer.compute_loss_func = None
    if normalization == "token":
        if not trainer.model_accepts_loss_kwargs:
            raise input_error(
                "a model whose loss can be a mean over the tokens of a step",
                f"{type(trainer.model).__name__}, which takes no num_items_in_batch",
                'Use "sample", or a compute_loss_func of your own.',
            )
        return
    loss_type = getattr(trainer.args, "loss_type", "nll")
    for name, given in (
        ("compute_loss_func", trainer.compute_loss_func is not None),
        ("label_smoothing_factor", trainer.args.label_smoothing_factor != 0),
        (f"loss_type={loss_type!r}", loss_type != "nll"),
    ):
        if given:
            raise input_error("a trainer without another loss", name, f"Leave {name} out.")
    config = trainer.model.config.get_text_config()
    # Most models that add an auxiliary loss of their experts keep its weight from when they were built.
    weight = getattr(trainer.model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", 0.0))
    trainer.compute_loss_func = _SampleMean(weight)
    cls = type(trainer)
    trainer.__class__ = type(cls.__name__, (_SampleMeanTrainer, cls), {"__module__": cls.__module__})


class _SampleMean:
    """A `compute_loss_func`: the mean over documents of their means. `boundaries` are set before each call."""

    def __init__(self, router_aux_loss_coef: float):
        self.router_aux_loss_coef = router_aux_loss_coef
        self.boundaries: SequenceBoundaries | None = None

    def __call__(
        self,
        outputs: Any,
        labels: torch.Tensor,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`num_items_in_batch` is the number of documents with targets in the whole step; by default, of this batch."""
        boundaries, self.boundaries = self.boundaries, None
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        losses, counts = per_document_loss(logits.flatten(0, 1)[None], labels.flatten()[None], boundaries)
        if num_items_in_batch is None:
            num_items_in_batch = (counts > 0).sum()
        loss = losses.sum() / torch.as_tensor(num_items_in_batch, device=losses.device).clamp(min=1)
        aux_loss = outputs.get("aux_loss") if isinstance(outputs, Mapping) else None
        # As the model adds it to a loss of its own.
        return loss if aux_loss is None else loss + self.router_aux_loss_coef * aux_loss.to(loss.device)


class _SampleMeanTrainer:
    """Mixed into a trainer's class: the items of a batch are its documents, and the loss learns where they are."""

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device):
        items = []
        for batch in batch_samples:
            boundaries = _documents(batch)
            labels = mask_targets_across_documents(boundaries, batch["labels"].flatten()[None], {})[0]
            # One label per document, for Trainer to count and to add up over processes.
            item = torch.where(_count(labels, boundaries.to(labels.device)) > 0, 0, _IGNORED_LABEL)
            items.append({"labels": item, "shift_labels": item})
        return super()._get_num_items_in_batch(items, device)

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.compute_loss_func.boundaries = _documents(inputs)
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if self.compute_loss_func.boundaries is not None:
            raise input_error(
                "a trainer that uses compute_loss_func",
                f"{type(self).__name__}, which computes its own loss",
                'Leave its loss as it is, by set_loss_normalization(trainer, "token").',
            )
        return result


def _documents(batch: Mapping[str, Any]) -> SequenceBoundaries:
    """The documents of a packed row, or the rows of a batch as documents of one row."""
    call = "set_loss_normalization"
    labels = batch.get("labels")
    if labels is None or "shift_labels" in batch or labels.ndim != 2:
        raise input_error(
            "batches with labels [rows, tokens] and without shift_labels",
            "none" if labels is None else "shift_labels" if "shift_labels" in batch else f"{tuple(labels.shape)}",
            "Use DataCollatorWithFlattening or a collator that pads.",
        )
    boundaries = resolve_boundaries(
        call,
        {name: batch.get(name) for name in METADATA},
        use_cache=None,
        **{n: batch.get(n) for n in ("input_ids", "inputs_embeds", "attention_mask", "position_ids")},
        past_key_values=None,
    )
    if boundaries is None:
        boundaries = SequenceBoundaries.from_lengths([labels.shape[1]] * labels.shape[0], device=labels.device)
    return boundaries
