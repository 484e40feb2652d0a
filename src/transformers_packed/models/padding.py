"""Run a padded batch as a packed row: gather its real tokens before the embedding and scatter them after the output.

The model computes nothing for padding, where hidden states and router logits are zero. A batch stays padded if packing
it would change other results: if the call fills a cache, returns hidden states or attention weights, or is traced; if
attention is not causal or cannot keep documents apart; if NEFTune scales its noise by the padded length; and if PEFT
gives its layers an argument for each row, such as `adapter_names` or the offsets of aLoRA. [`why_padded`] tells the
reason, which the log states once.

With `share_prompts`, documents that begin with the same tokens, such as the answers to one prompt or the branches of a
conversation, form a row with shared prompts ([`SharedPrompts`]). Hidden states of a shared token are copied to all of
its documents. Dropout then draws one mask for a shared token.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from ..boundaries import SequenceBoundaries
from ..boundary_checks import position_rows, restarts_in
from ..foreign import attention_of
from ..ops.attention import serves_packed_rows
from ..ops.autograd import is_transformed
from ..ops.invariance import is_batch_invariant
from ..ops.prompts import repeat_rows
from ..prefix_tree import Piece, prefix_pieces
from ..shared_prompts import Copies, SharedPrompts
from .adapters import acts_per_token
from .inputs import is_causal, tokens_of
from .masks import is_padding, read_padding
from .segments import cuts_rows
from .versions import CACHES


logger = logging.get_logger(__name__)

# The arguments of text models with one entry per token, and tokens that go to layers beside embeddings.
_TOKENS = ("input_ids", "inputs_embeds", "ple_input_ids")


@dataclass(frozen=True)
class PaddedBatch:
    """The real tokens of a padded batch `[B, T]`, `N` in all.

    Args:
        boundaries ([`SequenceBoundaries`]):
            One document for each row with at least one real token.
        slots (`torch.LongTensor` of shape `[N]`):
            The index of each real token in the flattened batch.
        shape (`tuple[int, int]`):
            `(B, T)`.
        shared (`Copies`, *optional*):
            With shared prompts, the tokens of the packed row at `slots`. The row has fewer tokens than `slots`.
        sources (`torch.LongTensor`, *optional*):
            With shared prompts, the index of each token of the packed row in the flattened batch.
    """

    boundaries: SequenceBoundaries
    slots: torch.Tensor
    shape: tuple[int, int]
    shared: Copies | None = None
    sources: torch.Tensor | None = None

    @classmethod
    def from_attention_mask(
        cls,
        attention_mask: torch.Tensor,
        device: torch.device,
        input_ids: torch.Tensor | None = None,
        packs_all: bool = False,
    ) -> "PaddedBatch | None":
        """Create it from a mask `[B, T]` of 0 and 1. Reading the mask is the only host sync.

        With `input_ids` `[B, T]`, which are read as well, documents share the tokens that they begin with.

        Returns `None` if the mask is all zeros, if it is all ones and nothing is shared, or if the ones of a row are
        not contiguous. With `packs_all`, a mask of ones makes a row too.
        """
        real = attention_mask.to("cpu", torch.bool)
        runs = real[:, 0] + (real[:, 1:] & ~real[:, :-1]).sum(1)
        counts = real.sum(1)
        if bool((runs > 1).any()):
            return None
        tokens = int(counts.sum())
        stays = tokens == real.numel() and not packs_all
        if tokens == 0 or (stays and input_ids is None):
            return None
        slots, shape = real.flatten().nonzero()[:, 0], (real.shape[0], real.shape[1])
        lengths: list[int] = counts[counts > 0].tolist()
        if input_ids is not None and len(lengths) > 1:
            documents = input_ids.flatten().to("cpu")[slots].split(lengths)
            pieces = prefix_pieces([document.numpy() for document in documents])
            if len(pieces) > len(lengths):
                return cls._sharing(pieces, lengths, slots, shape, device)
        if stays:
            return None
        boundaries = SequenceBoundaries.from_lengths(lengths)
        return cls(boundaries.to(device, non_blocking=True), slots.to(device, non_blocking=True), shape)

    @classmethod
    def _sharing(cls, pieces: list[Piece], lengths: list[int], slots, shape, device) -> "PaddedBatch":
        """Lay out the pieces of documents with common beginnings."""
        starts = np.cumsum([0, *lengths])
        tokens = [np.arange(starts[document] + begin, starts[document] + end) for document, begin, end, _ in pieces]
        row = SequenceBoundaries.from_lengths([len(own) for own in tokens])
        boundaries = SharedPrompts.of(row, [piece.parent for piece in pieces])
        # The token of the row for each real token.
        index = np.empty(len(slots), dtype=np.int64)
        for piece, path in zip(pieces, boundaries.tokens, strict=True):
            if piece.end == lengths[piece.document]:
                index[starts[piece.document] : starts[piece.document + 1]] = path.numpy()
        boundaries, slots = (x.to(device, non_blocking=True) for x in (boundaries, slots))
        sources = torch.from_numpy(np.concatenate(tokens)).to(device, non_blocking=True)
        return cls(boundaries, slots, shape, Copies.of(index, device), slots.index_select(0, sources))

    def packed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Pack the tokens `[B, T, ...]` and position ids of a forward's arguments into one row.

        Position ids are `[B, T]`, `[1, T]`, `[3, B, T]` or `[4, B, T]`. Without them, each document counts from 0.
        """
        tokens = {name: inputs[name] for name in _TOKENS if inputs.get(name) is not None}
        sources = self.slots if self.sources is None else self.sources
        tokens = {name: x.flatten(0, 1).index_select(0, sources)[None] for name, x in tokens.items()}
        position_ids = inputs.get("position_ids")
        if position_ids is None:
            return tokens | {"position_ids": self.boundaries.position_ids}
        rows = position_ids.expand(*position_ids.shape[:-2], *self.shape).flatten(-2)
        return tokens | {"position_ids": rows.index_select(-1, sources).unsqueeze(-2)}

    def unpack(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scatter the tokens of the packed row to `[B * T, ...]`, with zeros at padding."""
        rows, length = self.shape
        tokens = tokens if self.shared is None else repeat_rows(tokens, self.shared)
        return tokens.new_zeros(rows * length, *tokens.shape[1:]).index_copy(0, self.slots, tokens)


def prompt_ids_of(inputs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tokens `[B, T]` by which documents share prompts, from a forward's arguments.

    It is `None` if equal tokens may not mean equal inputs: with given embeddings, position ids, images or videos. It is
    also `None` in transforms of `torch.func`, which hide the values of tensors.
    """
    if is_transformed():
        return None
    names = ("inputs_embeds", "position_ids", "pixel_values", "pixel_values_videos")
    given = [name for name in names if inputs.get(name) is not None]
    if given:
        logger.warning_once(f"Prompts are not shared in a batch with {given[0]}, although share_prompts is set.")
    return None if given else inputs.get("input_ids")


def why_padded(model: Any, inputs: dict[str, Any]) -> str:
    """Return why a text model computes the padding of a padded batch, or an empty string if it packs the batch.

    Args:
        model (`PreTrainedModel`):
            A text model of a family with classes of this package.
        inputs (`dict`):
            The arguments of its forward. Without tokens, those tell what every call has, such as `use_cache=False`.
    """
    return next((reason for holds, reason in _reasons(model, inputs) if holds), "")


def _reasons(model: Any, inputs: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    config, allowed, embedding = model.config, inputs.get("packs_padding"), model.get_input_embeddings()
    yield not (model.packs_padding if allowed is None else allowed), "packs_padding=False"
    # The same rule as in the stock forward.
    cached = config.use_cache if inputs.get("use_cache") is None else inputs["use_cache"]
    yield cached and not (model.gradient_checkpointing and model.training), "use_cache=True"
    yield any(inputs.get(name) is not None for name in CACHES), "a cache"
    for name in ("output_hidden_states", "output_attentions"):
        yield inputs.get(name, getattr(config, name)), name
    attentions = (getattr(layer, "self_attn", None) for layer in model.layers)
    causal = is_causal(config, inputs) and all(getattr(module, "is_causal", True) for module in attentions)
    yield not causal, "attention is not causal"
    noisy = model.training and inputs.get("inputs_embeds") is None and hasattr(embedding, "neftune_noise_alpha")
    yield noisy, "NEFTune scales its noise by the padded length"
    # PEFT hooks an argument for each row into all of its layers.
    layer = next((x for x in model.layers.modules() if type(x).__module__.startswith("peft.tuners.")), None)
    by_row = layer is not None and (not acts_per_token(layer) or bool(layer._forward_pre_hooks_with_kwargs))
    yield by_row, "PEFT's layers take or mix the rows of the batch"
    implementation, tokens = attention_of(config), tokens_of(inputs)
    device = model.device if tokens is None else tokens.device
    yield not serves_packed_rows(implementation, device), f"attn_implementation={implementation!r}"


def padded_batch(model: Any, inputs: dict[str, Any], boundaries: SequenceBoundaries | None) -> PaddedBatch | None:
    """Return the real tokens to pack from a text model's forward arguments, or `None` to run the padded batch.

    It is also `None` for a row that has `boundaries`, and for a batch without padding unless [`_packs_all`] says otherwise.
    Removes `packs_padding` and `prompt_ids` from `inputs`. The first overrides the model's attribute for this call. The
    second are tokens `[B, T]` by which documents share prompts, if `input_ids` are not given.

    Raises:
        `ValueError`: the mask has other numbers than 0 and 1.
    """
    mask, tokens = inputs.get("attention_mask"), tokens_of(inputs)
    packs_all = boundaries is None and _packs_all(model, tokens)
    if mask is None and tokens is not None and packs_all:
        mask = torch.ones(tokens.shape[:2], dtype=torch.long)
    real = None if mask is None or not is_padding(mask) else read_padding(mask)
    shares = model.share_prompts and "prompt_ids" not in inputs
    why = "" if real is None else why_padded(model, inputs)
    prompt_ids, _ = inputs.pop("prompt_ids", None), inputs.pop("packs_padding", None)
    if real is None or tokens is None or real.shape != tokens.shape[:2]:
        return None
    _note_restarts(inputs.get("position_ids"), real)
    if why:
        if not real.all():
            logger.info_once(f"{type(model).__name__} computes the padding of this padded batch: {why}.")
        return None
    if shares:
        prompt_ids = prompt_ids_of(inputs)
    return PaddedBatch.from_attention_mask(real, tokens.device, prompt_ids, packs_all)


def _packs_all(model: Any, tokens: torch.Tensor | None) -> bool:
    """Whether batches without padding are packed too: other kernels would compute them, or layers cut packed rows only."""
    return tokens is not None and (is_batch_invariant() or cuts_rows(model, math.prod(tokens.shape[:2])))


def _note_restarts(position_ids: torch.Tensor | None, real: torch.Tensor) -> None:
    """Warn of a row that looks packed but has a mask."""
    positions = position_rows(position_ids)
    if positions is not None and bool(real.all()) and bool(restarts_in(positions.to("cpu"))[0].any()):
        logger.warning_once(
            "position_ids restart in a row with an attention_mask of ones, so the row is computed as one document. "
            "If it holds several documents, remove the mask."
        )
