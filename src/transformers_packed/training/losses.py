"""Log-probabilities and losses per document of a packed row, and a training loss averaged over documents.

The loss of a language model is the mean over all targets, so long documents weigh more than short ones. Evaluation,
DPO and GRPO need a value per document. Some recipes train with the mean over documents of each document's mean loss.

Targets are shifted within documents: no token predicts the first token of a document. Sums are float32 even for
bfloat16 logits, without a float32 copy of all logits. A few hundred tokens are converted at a time, and again in
backward, so no additional tensor of the vocabulary's size is kept. With hidden states and the head, even the logits
are not kept.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ..boundaries import PACKING_KEYWORDS, SequenceBoundaries
from ..data.samples import IGNORED_LABEL
from ..errors import input_error
from ..models.inputs import mask_targets_across_documents, resolve_boundaries
from ..models.releases import COUNT_ITEMS, TRAINING, check_names
from ..models.untouched import gathers_weights, is_bare_linear


# How the targets of a document count in its loss, and those of a step in its loss.
Reduction = Literal["mean", "sum"]
Normalization = Literal["token", "sample"]


class DocumentLogps(NamedTuple):
    """The result of [`per_document_logps`].

    Attributes:
        sums (`torch.FloatTensor` of shape `[N]`):
            The sum of the log-probabilities of each document's targets. 0 for a document without targets.
        token_counts (`torch.LongTensor` of shape `[N]`):
            The number of targets in each document.
        per_token (`torch.FloatTensor` of shape `[1, T]`):
            The log-probability of each target, at its position in `labels`. 0 for other tokens.
    """

    sums: torch.Tensor
    token_counts: torch.Tensor
    per_token: torch.Tensor


class DocumentLosses(NamedTuple):
    """The result of [`per_document_loss`].

    Attributes:
        losses (`torch.FloatTensor` of shape `[N]`):
            The loss of each document. 0 for a document without targets.
        token_counts (`torch.LongTensor` of shape `[N]`):
            The number of targets in each document.
    """

    losses: torch.Tensor
    token_counts: torch.Tensor


def per_document_logps(
    logits: torch.Tensor,
    labels: torch.Tensor,
    boundaries: SequenceBoundaries | torch.Tensor,
    *,
    head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    chunk_size: int | None = None,
) -> DocumentLogps:
    """Compute the log-probability of each document in a packed row. Differentiable.

    Args:
        logits (`torch.Tensor` of shape `[1, T, vocab]`):
            The logits of the row, in any floating dtype. With `head`, the last hidden states `[1, T, hidden]`.
        labels (`torch.LongTensor` of shape `[1, T]`):
            The tokens, not shifted. Tokens with label -100 and the first token of each document are not targets.
        boundaries ([`SequenceBoundaries`] or `torch.IntTensor` of shape `[N+1]`):
            The boundaries of the row, or its cumulative sequence lengths `cu_seqlens`. Tail padding counts as a
            document.
        head (`Callable`, *optional*):
            Maps hidden states `[tokens, hidden]` to logits `[tokens, vocab]`, such as `model.lm_head`. It is called in
            chunks for the tokens that predict a target, and again in backward. Finding these tokens costs one host
            sync. A plain `torch.nn.Linear` is not called: [`linear_logps`] computes with its weight. A module that
            gathers weights from all processes in each call (FSDP, ZeRO-3) is called once, for all of them.
        chunk_size (`int`, *optional*):
            The number of tokens whose logits are converted to float32 at a time. Defaults to 512, or to that of
            [`linear_logps`].

    Returns:
        [`DocumentLogps`]: `sums` `[N]`, `token_counts` `[N]` and `per_token` `[1, T]`.

    Raises:
        `ValueError`: mismatched shapes or malformed boundaries. With a plain linear `head`, also the backward with
            `create_graph=True`.

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
    if logits.ndim != 3 or logits.shape[0] != 1 or labels.shape != logits.shape[:2] or labels.is_floating_point():
        got = f"{tuple(logits.shape)} and {labels.dtype} {tuple(labels.shape)}"
        raise input_error("logits [1, T, vocab], or hidden states with head, and integer labels [1, T]", got)
    if chunk_size is not None and chunk_size < 1:
        raise input_error("chunk_size of at least 1", chunk_size)
    length, device = labels.shape[1], logits.device
    if not isinstance(boundaries, SequenceBoundaries):
        boundaries = SequenceBoundaries.from_cu_seqlens(boundaries, total_length=length)
    elif boundaries.total_length != length:
        raise input_error(f"boundaries of the row's {length} tokens", f"boundaries of {boundaries.total_length}")
    boundaries = boundaries.to(device)
    labels = mask_targets_across_documents(boundaries, labels.to(device), {})[0]
    rows, targets = logits[0], F.pad(labels[1:], (0, 1), value=IGNORED_LABEL)
    if isinstance(head, torch.nn.Module) and is_bare_linear(head) and head.weight.dtype == rows.dtype:
        # The ops import the compiler of torch.
        from ..ops import linear_logps

        options: dict[str, Any] = {"ignore_index": IGNORED_LABEL, "chunk_size": chunk_size}
        values = linear_logps(rows, head.weight, targets, head.bias, **options)
        assert isinstance(values, torch.Tensor)
    else:
        once = isinstance(head, torch.nn.Module) and gathers_weights(head)
        values = _called_logps(head, rows, targets, length if once else chunk_size or 512)
    # Move each value from the predicting token to the predicted token.
    per_token = F.pad(values[:-1], (1, 0))
    wide = torch.float32 if device.type == "mps" else torch.float64
    sums = per_token.new_zeros(boundaries.num_documents, dtype=wide)
    sums.index_add_(0, boundaries.seq_idx[0].long(), per_token.to(wide))
    return DocumentLogps(sums.to(per_token.dtype), _count(labels, boundaries), per_token[None])


def _called_logps(head, rows: torch.Tensor, targets: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """The log-probabilities `[T]` of targets `[T]`, from logits or from hidden states and a function."""
    predicting, length = None, len(rows)
    if head is not None:
        predicting = (targets != IGNORED_LABEL).nonzero()[:, 0]
        rows, targets = rows.index_select(0, predicting), targets.index_select(0, predicting)
    chunks = zip(rows.split(chunk_size), targets.split(chunk_size), strict=True)
    # Backward recomputes the float32 logits of each chunk instead of keeping them.
    values = torch.cat([checkpoint(_chunk_logps, head, *chunk, use_reentrant=False) for chunk in chunks])
    return values if predicting is None else values.new_zeros(length).index_copy(0, predicting, values)


def per_document_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    boundaries: SequenceBoundaries | torch.Tensor,
    *,
    normalization: Reduction = "mean",
    head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    chunk_size: int | None = None,
) -> DocumentLosses:
    """Compute the loss of each document in a packed row, equal to the loss of the document alone. Differentiable.

    Args:
        logits (`torch.Tensor` of shape `[1, T, vocab]`):
            The logits of the row, in any floating dtype. With `head`, the last hidden states `[1, T, hidden]`.
        labels (`torch.LongTensor` of shape `[1, T]`):
            The tokens, not shifted. Tokens with label -100 and the first token of each document are not targets.
        boundaries ([`SequenceBoundaries`] or `torch.IntTensor` of shape `[N+1]`):
            The boundaries of the row, or its cumulative sequence lengths.
        normalization (`str`, *optional*, defaults to `"mean"`):
            `"mean"` over each document's targets, or `"sum"`.
        head (`Callable`, *optional*):
            Maps hidden states to logits. See [`per_document_logps`].
        chunk_size (`int`, *optional*):
            The number of tokens whose logits are converted to float32 at a time. See [`per_document_logps`].

    Returns:
        [`DocumentLosses`]: `losses` `[N]` and `token_counts` `[N]`, both 0 for a document without targets. With
        `"mean"`, the model's loss of the row is `(losses * token_counts).sum() / token_counts.sum()`.

    Raises:
        `ValueError`: mismatched shapes, malformed boundaries, or an unknown `normalization`.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed import per_document_loss
    >>> labels = torch.tensor([[5, 7, 7, 1, 3, 9]])
    >>> per_document_loss(torch.zeros(1, 6, 10), labels, torch.tensor([0, 3, 5, 6]))
    DocumentLosses(losses=tensor([2.3026, 2.3026, 0.0000]), token_counts=tensor([2, 1, 0]))

    ```
    """
    if normalization not in get_args(Reduction):
        raise input_error('normalization "mean" or "sum"', repr(normalization))
    sums, counts, _ = per_document_logps(logits, labels, boundaries, head=head, chunk_size=chunk_size)
    # Not `-sums`: the loss of a document without targets is 0, not -0.
    return DocumentLosses((0 - sums) / counts.clamp(min=1) if normalization == "mean" else 0 - sums, counts)


def _chunk_logps(head, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The log-probability of each row's target, in at least float32. 0 without a target."""
    logits = rows if head is None else head(rows)
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    return 0 - F.cross_entropy(logits, targets.to(logits.device), ignore_index=IGNORED_LABEL, reduction="none")


def _count(labels: torch.Tensor, boundaries: SequenceBoundaries) -> torch.Tensor:
    """The number of targets in each document, for `labels` `[T]`."""
    counts = torch.zeros(boundaries.num_documents, dtype=torch.int64, device=labels.device)
    return counts.index_add(0, boundaries.seq_idx[0].long(), (labels != IGNORED_LABEL).long())


def set_loss_normalization(trainer: Any, normalization: Normalization) -> None:
    """Normalize a Trainer's loss per token or per document, over all rows and processes of an optimizer step.

    Args:
        trainer (`Trainer`):
            A `Trainer`, or a subclass that uses `compute_loss_func`, such as TRL's `SFTTrainer`. Its batches are
            packed rows, or padded batches with one sample per row.
        normalization (`str`):
            `"token"` averages over all targets, as models do by default. `"sample"` averages the mean losses of all
            documents with a target, so short documents weigh as much as long ones. `"sample"` materializes the logits
            of the row in the model's dtype.

    Raises:
        `ValueError`: an unknown `normalization`, a trainer with a `compute_loss_func` or label smoothing, or, with
            `"token"`, a model that does not accept `num_items_in_batch`. During training also a trainer that computes
            its own loss.

    Example:

    ```python
    >>> from types import SimpleNamespace
    >>> from transformers_packed import set_loss_normalization
    >>> set_loss_normalization(SimpleNamespace(), "row")
    Traceback (most recent call last):
    ValueError: expected normalization "token" or "sample", got 'row'.

    ```
    """
    if normalization not in get_args(Normalization):
        raise input_error('normalization "token" or "sample"', repr(normalization))
    if isinstance(trainer.compute_loss_func, SampleMean):
        for name in trainer.compute_loss_func.methods:
            delattr(trainer, name)
        trainer.compute_loss_func = None
    if normalization == "token":
        if not trainer.model_accepts_loss_kwargs:
            got = f"{type(trainer.model).__name__}, which does not accept num_items_in_batch"
            fix = 'Use "sample" or your own compute_loss_func.'
            raise input_error("a model that can average its loss over the tokens of a step", got, fix)
        return
    loss_type = getattr(trainer.args, "loss_type", "nll")
    for name, given in (
        ("compute_loss_func", trainer.compute_loss_func is not None),
        ("label_smoothing_factor", trainer.args.label_smoothing_factor != 0),
        (f"loss_type={loss_type!r}", loss_type != "nll"),
    ):
        if given:
            raise input_error("a trainer without another loss", name, f"Remove {name}.")
    check_names(TRAINING)
    trainer.compute_loss_func = SampleMean(trainer)
    vars(trainer).update(trainer.compute_loss_func.methods)


class SampleMean:
    """A `compute_loss_func` that averages the mean losses of documents.

    It replaces two methods of this trainer instance, so that a batch counts its documents as items and the loss
    receives their boundaries.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._count_items, self._loss = getattr(trainer, COUNT_ITEMS), trainer.compute_loss
        self.methods: dict[str, Callable] = {COUNT_ITEMS: self.count_items, "compute_loss": self.compute_loss}
        # Most models with an auxiliary router loss store its weight when they are built.
        default = getattr(trainer.model.config.get_text_config(), "router_aux_loss_coef", 0.0)
        self._router_aux_loss_coef = getattr(trainer.model, "router_aux_loss_coef", default)
        self._boundaries: SequenceBoundaries | None = None

    def __call__(self, outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        """`num_items_in_batch`: documents with targets in the whole step. Defaults to those of this batch."""
        boundaries, self._boundaries = self._boundaries, None
        assert boundaries is not None
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        losses, counts = per_document_loss(logits.flatten(0, 1)[None], labels.flatten()[None], boundaries)
        if num_items_in_batch is None:
            num_items_in_batch = (counts > 0).sum()
        loss = losses.sum() / torch.as_tensor(num_items_in_batch, device=losses.device).clamp(min=1)
        aux_loss = outputs.get("aux_loss") if isinstance(outputs, Mapping) else None
        # The model adds it to its own loss in the same way.
        return loss if aux_loss is None else loss + self._router_aux_loss_coef * aux_loss.to(loss.device)

    def count_items(self, batch_samples: list, device: torch.device):
        items = []
        for batch in batch_samples:
            # One label per document. Trainer counts them and sums over processes.
            item = torch.where(documents_with_targets(batch), 0, IGNORED_LABEL)
            items.append({"labels": item, "shift_labels": item})
        return self._count_items(items, device)

    def compute_loss(self, model, inputs, *args, **kwargs):
        self._boundaries = _documents(inputs)
        result = self._loss(model, inputs, *args, **kwargs)
        if self._boundaries is not None:
            got = f"{type(self._trainer).__name__}, which computes its own loss"
            fix = 'Keep its own loss with set_loss_normalization(trainer, "token").'
            raise input_error("a trainer that uses compute_loss_func", got, fix)
        return result


def documents_with_targets(batch: Mapping[str, Any]) -> torch.Tensor:
    """Whether each document of a batch has a target, a boolean tensor `[N]`."""
    boundaries = _documents(batch)
    labels = mask_targets_across_documents(boundaries, batch["labels"].flatten()[None], {})[0]
    return _count(labels, boundaries.to(labels.device)) > 0


def _documents(batch: Mapping[str, Any]) -> SequenceBoundaries:
    """The boundaries of a packed row. The rows of a padded batch count as documents of one row."""
    labels = batch.get("labels")
    if labels is None or "shift_labels" in batch or labels.ndim != 2:
        got = "none" if labels is None else "shift_labels" if "shift_labels" in batch else f"{tuple(labels.shape)}"
        fix = "Use DataCollatorWithFlattening or a padding collator."
        raise input_error("batches with labels [rows, tokens] and without shift_labels", got, fix)
    names = (*PACKING_KEYWORDS, "boundaries", "input_ids", "inputs_embeds", "attention_mask", "position_ids")
    boundaries = resolve_boundaries({name: batch.get(name) for name in names})
    if boundaries is None:
        boundaries = SequenceBoundaries.from_lengths([labels.shape[1]] * labels.shape[0], device=labels.device)
    return boundaries
