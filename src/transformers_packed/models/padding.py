"""Run a padded batch as a packed row: gather its real tokens before the embedding and scatter them after the output.

The model computes nothing for padding, where hidden states and router logits are zero. A batch stays padded if packing
it would change other results: if the call fills a cache, returns hidden states or attention weights, or is traced; if
attention is not causal or cannot keep documents apart; if NEFTune scales its noise by the padded length; and if PEFT
gives its layers an argument for each row, such as `adapter_names` or the offsets of aLoRA.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.import_utils import is_tracing

from ..boundaries import SequenceBoundaries
from ..ops.attention import serves_packed_rows
from .inputs import is_causal


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
    """

    boundaries: SequenceBoundaries
    slots: torch.Tensor
    shape: tuple[int, int]

    @classmethod
    def from_attention_mask(cls, attention_mask: torch.Tensor, device: torch.device) -> "PaddedBatch | None":
        """Create it from a mask `[B, T]`. Reading the mask is the only host sync.

        Returns `None` if the mask is all ones or all zeros, if the ones of a row are not contiguous, or if it has
        values other than 0 and 1.
        """
        mask = attention_mask.to("cpu")
        real = mask == 1
        runs = real[:, 0] + (real[:, 1:] & ~real[:, :-1]).sum(1)
        lengths = real.sum(1)
        if bool((real | (mask == 0)).logical_not().any()) or bool((runs > 1).any()):
            return None
        if int(lengths.sum()) in (0, real.numel()):
            return None
        boundaries = SequenceBoundaries.from_lengths(lengths[lengths > 0])
        slots = real.flatten().nonzero()[:, 0]
        return cls(boundaries.to(device, non_blocking=True), slots.to(device, non_blocking=True), tuple(mask.shape))

    def packed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Pack the tokens `[B, T, ...]` and position ids of a forward's arguments into one row.

        Position ids are `[B, T]`, `[1, T]`, `[3, B, T]` or `[4, B, T]`. Without them, each document counts from 0.
        """
        tokens = {name: inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None}
        tokens = {name: x.flatten(0, 1).index_select(0, self.slots)[None] for name, x in tokens.items()}
        position_ids = inputs.get("position_ids")
        if position_ids is None:
            return tokens | {"position_ids": self.boundaries.position_ids}
        rows = position_ids.expand(*position_ids.shape[:-2], *self.shape).flatten(-2)
        return tokens | {"position_ids": rows.index_select(-1, self.slots).unsqueeze(-2)}

    def unpack(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scatter real tokens `[N, ...]` to `[B * T, ...]`, with zeros at padding."""
        rows, length = self.shape
        return tokens.new_zeros(rows * length, *tokens.shape[1:]).index_copy(0, self.slots, tokens)


def _layers_take_rows(model: Any) -> bool:
    """Whether PEFT's layers get an argument for each row of the batch. PEFT hooks it into all of its layers."""
    adapted = (module for module in model.layers.modules() if type(module).__module__.startswith("peft.tuners."))
    return bool(getattr(next(adapted, None), "_forward_pre_hooks_with_kwargs", None))


def padded_batch(model: Any, inputs: dict[str, Any]) -> PaddedBatch | None:
    """Return the real tokens to pack from a text model's forward arguments, or `None` to run the padded batch.

    Removes `packs_padding` from `inputs`. The argument overrides the model's attribute for this call.
    """
    allowed = inputs.pop("packs_padding", None)
    if not (model.packs_padding if allowed is None else allowed):
        return None
    inputs_embeds, attention_mask = inputs.get("inputs_embeds"), inputs.get("attention_mask")
    tokens = inputs.get("input_ids") if inputs_embeds is None else inputs_embeds
    if tokens is None or inputs.get("past_key_values") is not None:
        return None
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != tokens.shape[:2]:
        return None
    config = model.config
    # The same rule as in the stock forward.
    cached = config.use_cache if inputs.get("use_cache") is None else inputs["use_cache"]
    if cached and not (model.gradient_checkpointing and model.training):
        return None
    if any(inputs.get(name, getattr(config, name)) for name in ("output_hidden_states", "output_attentions")):
        return None
    attentions = (getattr(layer, "self_attn", None) for layer in model.layers)
    if not is_causal(config, inputs) or not all(getattr(module, "is_causal", True) for module in attentions):
        return None
    if inputs_embeds is None and model.training and hasattr(model.get_input_embeddings(), "neftune_noise_alpha"):
        # Trainer's hook on the embedding scales its noise by the padded length.
        return None
    if _layers_take_rows(model):
        return None
    if not serves_packed_rows(config._attn_implementation, tokens.device) or is_tracing(attention_mask):
        return None
    return PaddedBatch.from_attention_mask(attention_mask, tokens.device)
