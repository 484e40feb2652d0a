"""How many of the tokens that a head of multi-token prediction drafts a model would accept, on given texts.

Servers draft a token with the head, and keep it if the model's own first choice is the same. [`mtp_acceptance`] compares
these choices on given texts, in one forward of packed rows and without generation: at each token, the head's first choice
for the token after the next one with the model's first choice there.

Servers run the one layer of the head several times to draft several tokens. The later steps read the token that was
drafted before and the head's own output, attend to the true pairs of earlier tokens, and have the next position. A later
draft counts only where the earlier ones are both the model's choices and the text, because the model's next choice is
known there. Each step is then a share of the drafts that a server would verify.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..data.collator import DataCollatorWithFlattening
from ..data.samples import IGNORED_LABEL
from ..errors import input_error
from ..foreign import attention_of, swapped
from ..models.losses.head import head_loss
from ..models.mtp_head import add_mtp, first_choices, head_of, language_model
from ..models.trunk_row import TrunkRow


# Documents that later steps take at most, in tokens: their attention holds a mask of so many rows times the steps.
_LONGEST = 2048


@dataclass(frozen=True, eq=False)
class MtpAcceptance:
    """The result of [`mtp_acceptance`].

    Attributes:
        accepted (`torch.LongTensor` of shape `[documents, steps]`):
            The drafts that are the model's own first choice.
        drafted (`torch.LongTensor` of shape `[documents, steps]`):
            The drafts that were compared.
        losses (`torch.FloatTensor` of shape `[documents]`):
            The mean cross entropy of the head over the first step's targets. NaN for a document without any.
    """

    accepted: torch.Tensor
    drafted: torch.Tensor
    losses: torch.Tensor

    @property
    def rates(self) -> list[float]:
        """The share of accepted drafts of each step, over all documents. NaN where nothing was compared."""
        return (self.accepted.sum(0) / self.drafted.sum(0)).tolist()

    @property
    def loss(self) -> float:
        """The mean cross entropy of the head over all targets."""
        counts = self.drafted[:, 0]
        return float((self.losses.nan_to_num() * counts).sum() / counts.sum())

    @property
    def tokens_per_forward(self) -> float:
        """The mean number of tokens that a forward of the model yields, if it drafts as many as there are steps."""
        total = reached = 1.0
        for rate in self.rates:
            reached *= rate if rate == rate else 0.0
            total += reached
        return total


@torch.no_grad()
def mtp_acceptance(
    model: torch.nn.Module, samples: Sequence[Mapping[str, Any]], *, steps: int = 1, max_tokens: int = 8192
) -> MtpAcceptance:
    """Measure how often a head's first choice is the model's own, on the targets of given samples.

    Args:
        model (`torch.nn.Module`):
            A language model with classes of this package ([`register`], [`patch_model`]). If it has no head yet, it gets
            that of its checkpoint ([`add_mtp`]).
        samples (`Sequence[Mapping]`):
            Samples with `input_ids` and, optionally, `labels`. Without labels, all tokens are targets.
        steps (`int`, *optional*, defaults to 1):
            The number of tokens to draft one after the other. Of documents with more than 2,048 tokens, later steps take
            the first 2,048.
        max_tokens (`int`, *optional*, defaults to 8192):
            The most tokens of a packed row, if its documents are shorter.

    Returns:
        [`MtpAcceptance`]: counts for each document and step, and the loss of the head.

    Raises:
        `ValueError`: no samples, `steps` below 1, or a model without a head ([`add_mtp`]). With several steps, also an
            attention implementation that takes no mask.

    Example:

    ```python
    >>> from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    >>> from transformers_packed import mtp_acceptance, patch_model
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4}
    >>> model = patch_model(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, mtp_num_hidden_layers=1)))
    >>> mtp_acceptance(model, [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 5]}]).drafted.tolist()
    [[2], [0]]

    ```
    """
    if not len(samples) or steps < 1:
        raise input_error("samples, and steps of at least 1", f"{len(samples)} samples and steps={steps}")
    inner = language_model(model)
    head = head_of(inner) or add_mtp(inner)
    implementation = attention_of(inner.config.get_text_config())
    if steps > 1 and implementation not in ("sdpa", "eager"):
        fix = 'Load the model with attn_implementation="sdpa".'
        raise input_error("attention that takes a mask for several steps", f'"{implementation}"', fix)
    collator = DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore", model=inner)
    found: list[tuple] = []
    with swapped(*map(vars, inner.modules()), training=False):
        for row in _rows(samples, max_tokens):
            found += _of_row(inner, head, collator, row, steps)
    accepted, drafted, losses = (torch.stack(x) for x in zip(*found, strict=True))
    return MtpAcceptance(accepted, drafted, losses)


def _rows(samples: Sequence[Mapping[str, Any]], max_tokens: int) -> Iterator[list[dict[str, list[int]]]]:
    """Yield the samples in rows, in their order."""
    row: list[dict[str, list[int]]] = []
    tokens = 0
    for sample in samples:
        ids = torch.as_tensor(sample["input_ids"]).tolist()
        labels = torch.as_tensor(sample.get("labels", ids)).tolist()
        if row and tokens + len(ids) > max_tokens:
            yield row
            row, tokens = [], 0
        row.append({"input_ids": ids, "labels": labels})
        tokens += len(ids)
    yield row


def _of_row(model: Any, head: Any, collator: Any, samples: list[dict[str, list[int]]], steps: int) -> Iterator[tuple]:
    """Yield accepted and drafted tokens of each step, and the loss, for each document of a row."""
    device = model.get_input_embeddings().weight.device
    batch = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in collator(samples).items()}
    row, ids, labels = TrunkRow(), batch["input_ids"][0], torch.cat([torch.as_tensor(x["labels"]) for x in samples])
    model.model(**{name: x for name, x in batch.items() if name != "labels"}, trunk_row=row, use_cache=False)
    hidden, labels, starts = head(row), labels.to(device), row.boundaries.cu_seqlens_cpu.tolist()
    choices = first_choices(model.lm_head, row.hidden_states[0])
    pairs = head.pairs(row) if steps > 1 else None
    for start, end in zip(starts, starts[1:], strict=False):
        part = slice(start, end)
        targets, rows = labels[part][2:], hidden[0, part][:-2]
        drafts = _drafts(model, head, row, hidden[:, part], pairs, part, steps)
        counts = _count(drafts, ids[part], labels[part], choices[part])
        accepted, drafted = (torch.stack(x).cpu() for x in zip(*counts, strict=True))
        loss = head_loss(model.lm_head, rows, targets, num_items_in_batch=1)
        yield accepted, drafted, loss.float().cpu() / drafted[0]


def _count(drafts: Iterator[torch.Tensor], ids, labels, choices) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield for each step how many drafts are the model's choices, and how many it would see.

    Row `t` drafts token `t + 2` first. `choices[t]` is the model's first choice for token `t + 1` of the document `ids`.
    """
    alive = torch.ones_like(ids, dtype=torch.bool)
    for ahead, draft in enumerate(drafts, start=2):
        length = max(min(len(ids) - ahead, len(draft)), 0)
        alive, draft, end = alive[:length], draft[:length], length + ahead
        compared = alive & (labels[ahead:end] != IGNORED_LABEL)
        same = draft == choices[ahead - 1 : end - 1]
        yield (same & compared).sum(), compared.sum()
        alive = alive & same & (draft == ids[ahead:end])


def _drafts(
    model: Any, head: Any, row: TrunkRow, hidden: torch.Tensor, first: torch.Tensor | None, part: slice, steps: int
) -> Iterator[torch.Tensor]:
    """Yield the tokens that each row of a document drafts, step by step, from the head's output `[1, L, hidden]`.

    Several steps need the input of the head's layer for the whole row, `first`.
    """
    yield (tokens := first_choices(model.lm_head, hidden[0]))
    if first is None:
        return
    length = min(hidden.shape[1], _LONGEST)
    kept = slice(part.start, part.start + length)
    # Later steps have the text position, for images too.
    pairs, positions = [first[:, kept]], [row.position_ids[..., kept]]
    text_positions = positions[0][:1] if positions[0].ndim == 3 else positions[0]
    for step in range(1, steps):
        embeddings = model.get_input_embeddings()(tokens[None, :length])
        pairs.append(head.join(embeddings, hidden[:, :length]))
        positions.append((text_positions + step).expand_as(positions[0]))
        rotary = model.get_decoder().rotary_emb(hidden, torch.cat(positions, dim=-1))
        mask = _mask_of_chains(length, step, hidden)
        states = head.layers[0](torch.cat(pairs, dim=1), position_embeddings=rotary, attention_mask=mask)
        hidden = head.norm(states[:, -length:])
        yield (tokens := first_choices(model.lm_head, hidden[0]))


def _mask_of_chains(length: int, step: int, like: torch.Tensor) -> torch.Tensor:
    """A mask for attention of steps 0 to `step` of a document, one after the other.

    Each row sees the first step of the tokens up to its own, and its own later steps.
    """
    token = torch.arange(length, device=like.device).repeat(step + 1)
    number = torch.arange(step + 1, device=like.device).repeat_interleave(length)
    first = (number[None] == 0) & (token[None] <= token[:, None])
    own = (token[None] == token[:, None]) & (number[None] <= number[:, None])
    mask = torch.zeros_like(first, dtype=like.dtype).masked_fill(~(first | own), torch.finfo(like.dtype).min)
    return mask[None, None]
