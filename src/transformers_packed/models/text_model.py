"""`PackedTextModelMixin`, the base of our text models of hybrids: what a packed row and a padded batch become."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers.utils import can_return_tuple

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..foreign import attention_of
from .cuda_graphs import layers_as_graphs
from .inputs import check_config
from .packed_model import PackedModelMixin
from .padding import padded_batch


# The kinds of layers for which models make masks.
_KINDS = ("full_attention", "linear_attention", "indexed_attention")


class PackedTextModelMixin(PackedModelMixin):
    """Runs the stock forward without masks and without a cache on a packed row, whose layers get the boundaries."""

    @can_return_tuple
    def forward_with_boundaries(self, boundaries: SequenceBoundaries | None, **inputs: Any) -> Any:
        trunk_row, _ = inputs.pop("trunk_row", None), inputs.pop("settled", None)
        padded = padded_batch(self, inputs, boundaries)
        if padded is not None:
            boundaries = padded.boundaries
            inputs |= padded.packed(inputs)
        if trunk_row is not None:
            trunk_row.embed(self, inputs)
        if boundaries is not None:
            check_config(self.config, inputs)
            wants_weights = inputs.get("output_attentions", self.config.output_attentions)
            implementation = attention_of(self.config)
            if wants_weights and implementation != "eager":
                expected = 'attn_implementation="eager" for the attention weights of a packed row'
                raise input_error(expected, f'"{implementation}"', "Change it, or remove output_attentions.")
            # Boundaries replace the masks, and packed rows have no cache.
            inputs |= {"attention_mask": dict.fromkeys(_KINDS), "use_cache": False}
            if inputs.get("position_ids") is None:
                inputs["position_ids"] = boundaries.position_ids
            inputs["boundaries"] = boundaries
        with layers_as_graphs(self, boundaries, inputs):
            outputs = super().forward(**inputs)
        length = outputs.last_hidden_state.shape[1]
        if trunk_row is not None:
            trunk_row.finish(self, inputs, outputs.last_hidden_state, boundaries, padded)
        if padded is not None:
            outputs.last_hidden_state = padded.unpack(outputs.last_hidden_state[0]).unflatten(0, padded.shape)
        if boundaries is not None and outputs.get("router_logits") is not None:
            restored = boundaries.real_tokens if padded is None else padded.unpack
            layers = _whole_rows(outputs.router_logits, length)
            outputs.router_logits = tuple(restored(layer) for layer in layers)
        return outputs


def _whole_rows(recorded: Iterable[torch.Tensor], length: int) -> Iterator[torch.Tensor]:
    """Join what was recorded `[n, ...]` in each segment of a layer to rows `[length, ...]`."""
    pieces: list[torch.Tensor] = []
    for piece in recorded:
        pieces.append(piece)
        if sum(map(len, pieces)) == length:
            yield torch.cat(pieces) if len(pieces) > 1 else piece
            pieces = []
