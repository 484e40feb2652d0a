"""NEFTune on packed rows, with the noise of each document scaled by its own length.

The paper (https://arxiv.org/abs/2310.05914) draws noise from +-alpha / sqrt(length x hidden size). Trainer's hook on
the embedding sees one row and uses the length of the row for every document in it.
"""

from typing import Any

import torch
from transformers import TrainerCallback
from transformers.integrations.neftune import neftune_post_forward_hook

from ...boundaries import SequenceBoundaries
from ...models.inputs import resolve_boundaries
from ...parallel import RowShard


class DocumentNoise(TrainerCallback):
    """Replaces Trainer's hook for `neftune_noise_alpha` during training.

    Trainer's hook still adds the noise to batches that are not packed.
    """

    def __init__(self):
        self._lengths: torch.Tensor | None = None
        self._handle = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        found = False
        for module in model.modules():
            for key, hook in module._forward_hooks.items():
                if hook is neftune_post_forward_hook:
                    # Trainer removes the hook by this key.
                    module._forward_hooks[key] = self._add_noise
                    found = True
        if found:
            self._handle = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def on_train_end(self, args, state, control, **kwargs):
        if self._handle is not None:
            self._handle.remove()
        self._lengths, self._handle = None, None

    @torch.compiler.disable(reason="packed rows differ in the lengths of their documents")
    def _look(self, model, positional, batch: dict[str, Any]) -> None:
        self._lengths = None
        if not model.training:
            return
        # Stock models take only position_ids, and padding_tokens is not valid with position_ids alone.
        boundaries = resolve_boundaries({name: batch[name] for name in batch if name != "padding_tokens"})
        if boundaries is not None:
            self._lengths = document_lengths(boundaries)

    def _add_noise(self, embeddings, inputs, output: torch.Tensor) -> torch.Tensor:
        if self._lengths is None or not embeddings.training:
            return neftune_post_forward_hook(embeddings, inputs, output)
        bound = embeddings.neftune_noise_alpha / (self._lengths * output.shape[-1]).sqrt()
        return output + torch.zeros_like(output).uniform_(-1, 1) * bound[..., None].to(output.dtype)


def document_lengths(boundaries: SequenceBoundaries) -> torch.Tensor:
    """int32 `[1, T]`: the length of each token's document. For a shard of a row, the whole document counts."""
    row = boundaries.row if isinstance(boundaries, RowShard) else boundaries
    row.check_kind("neftune_noise_alpha")
    lengths = row.cu_seqlens.diff()[row.seq_idx.long()]
    return boundaries.of_row(lengths) if isinstance(boundaries, RowShard) else lengths
