"""What a text model computed in a forward, for whatever reads it beside the language modeling head."""

from dataclasses import dataclass, field
from typing import Any

import torch

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..ops.prompts import repeat_rows
from ..shared_prompts import SharedPrompts, Successors
from .masks import is_padding, read_padding
from .padding import PaddedBatch


_BESIDE = "for a loss beside those of the stock model, such as multi-token prediction (mtp)"


@dataclass
class TrunkRow:
    """What a loss reads of the trunk. The text model fills it in its forward, which gets it as `trunk_row`.

    Args:
        embeddings (`torch.Tensor` of shape `[1, T, hidden]`):
            The embeddings of the packed row, with images in their places.
        hidden_states (`torch.Tensor` of shape `[1, T, hidden]`):
            The last hidden states of the same tokens, after the last norm.
        position_ids (`torch.LongTensor` of shape `[1, T]` or `[3, 1, T]`):
            The positions of the trunk's rotary embeddings.
        text_model (`PreTrainedModel`):
            The text model.
        boundaries ([`SequenceBoundaries`]):
            The documents of the row. The rows of a padded batch are documents.
        batch (`PaddedBatch`, *optional*):
            The places of the row's tokens in a batch that is not packed.
        successors ([`Successors`], *optional*):
            The rows of a head of multi-token prediction, if documents continue others. The last token of a document is
            then followed by the first token of each of its children, which has a row of the head in the child.
    """

    embeddings: torch.Tensor = field(init=False)
    hidden_states: torch.Tensor = field(init=False)
    position_ids: torch.Tensor = field(init=False)
    text_model: Any = field(init=False)
    boundaries: SequenceBoundaries = field(init=False)
    batch: PaddedBatch | None = None
    successors: Successors | None = None

    def embed(self, model: Any, inputs: dict[str, Any]) -> None:
        """Embed the tokens of a text model's forward, so that all read the same embeddings."""
        if inputs.get("inputs_embeds") is None:
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
        self.embeddings = inputs["inputs_embeds"]

    def finish(
        self,
        model: Any,
        inputs: dict[str, Any],
        hidden_states: torch.Tensor,
        boundaries: SequenceBoundaries | None,
        batch: PaddedBatch | None,
    ) -> None:
        """Take the last hidden states of the text model that ran on `inputs`."""
        self.text_model, self.batch, self.hidden_states = model, batch, hidden_states
        position_ids = inputs.get("position_ids")
        if boundaries is None:
            self.batch = batch = _whole(inputs, self.embeddings)
            boundaries = batch.boundaries
            packed = batch.packed({"inputs_embeds": self.embeddings, "position_ids": position_ids})
            self.embeddings, position_ids = packed["inputs_embeds"], packed["position_ids"]
            self.hidden_states = self.of_row(hidden_states)
        if batch is not None and batch.shared is not None:
            expected = f"rows that are documents of their own {_BESIDE}"
            raise input_error(expected, "a padded batch with shared prompts", "Do not share them.")
        self.boundaries = boundaries
        assert position_ids is not None
        if isinstance(boundaries, SharedPrompts):
            self.successors = boundaries.successors
            position_ids = position_ids.index_select(-1, self.successors.before.rows)
        if position_ids.ndim == 3 and len(position_ids) == 4:
            # The first row is the position in the text.
            position_ids = position_ids[1:]
        self.position_ids = position_ids

    @property
    def position_embeddings(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines of the rotary embeddings."""
        return self.text_model.rotary_emb(self.embeddings, self.position_ids)

    @property
    def documents(self) -> SequenceBoundaries:
        """The boundaries of the rows of the head."""
        return self.boundaries if self.successors is None else self.successors.boundaries

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return for each row of the head what belongs to its token, from the row `[1, T, ...]`."""
        return tokens if self.successors is None else repeat_rows(tokens[0], self.successors.before)[None]

    def following(self, tokens: torch.Tensor, fill: float) -> torch.Tensor:
        """Return for each row of the head what belongs to the token after its own, and `fill` if there is none."""
        if self.successors is None:
            return fill_ends(self.boundaries.next_tokens(tokens), self.boundaries, fill)
        return tokens.index_select(1, self.successors.tokens)

    def of_row(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what belongs to the tokens of the row `[1, T, ...]`, from all tokens of the batch `[B, L, ...]`."""
        if self.batch is None:
            return tokens
        return tokens.flatten(0, 1).index_select(0, self.batch.slots.to(tokens.device))[None]


def _whole(inputs: dict[str, Any], embeddings: torch.Tensor) -> PaddedBatch:
    """The real tokens of a batch that the trunk did not pack."""
    mask, (rows, length) = inputs.get("attention_mask"), embeddings.shape[:2]
    batch = None
    if mask is not None:
        real = read_padding(mask) if is_padding(mask) else None
        if real is None or bool(((real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0] > 1).any()):
            expected = f"a mask of padding around each row {_BESIDE}"
            raise input_error(expected, f"another of shape {tuple(mask.shape)}", "Train without that loss.")
        batch = PaddedBatch.from_attention_mask(real, embeddings.device)
    if batch is None:
        boundaries = SequenceBoundaries.from_lengths([length] * rows, device=embeddings.device)
        batch = PaddedBatch(boundaries, torch.arange(rows * length, device=embeddings.device), (rows, length))
    return batch


def fill_ends(tokens: torch.Tensor, boundaries: SequenceBoundaries, fill: float) -> torch.Tensor:
    """Put `fill` at the last token of each document of a row `[1, T, ...]`, unless another part of the row has it."""
    return tokens.index_fill(1, boundaries.ends.to(tokens.device), fill)
