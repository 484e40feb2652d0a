"""Qwen3.5 text models that keep the documents of a packed row apart. Only what differs from Qwen3-Next is here."""

import torch
from transformers.cache_utils import Cache
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin
from transformers.processing_utils import Unpack

from ..base import PackedModelMixin, replaces_builtin
from ..packed_inputs import PackingKwargs, mask_targets_across_documents, resolve_boundaries
from ..qwen3_next.modular_qwen3_next import (
    Qwen3NextAttention,
    Qwen3NextForSequenceClassification,
    Qwen3NextForTokenClassification,
    Qwen3NextGatedDeltaNet,
    Qwen3NextModel,
)


class Qwen3_5GatedDeltaNet(Qwen3NextGatedDeltaNet):
    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[B, T, hidden]` to qkv `[B, T, conv_dim]`, z `[B, T, HV, V]`, and b and a `[B, T, HV]`."""
        z = self.in_proj_z(hidden_states).unflatten(-1, (-1, self.head_v_dim))
        return self.in_proj_qkv(hidden_states), z, self.in_proj_b(hidden_states), self.in_proj_a(hidden_states)


class Qwen3_5Attention(Qwen3NextAttention):
    pass


class Qwen3_5TextModel(Qwen3NextModel):
    pass


@replaces_builtin
class Qwen3_5ForCausalLM(PackedModelMixin, builtin.Qwen3_5ForCausalLM):
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Unpack[PackingKwargs],
    ):
        boundaries = resolve_boundaries(
            f"{type(self).__name__}.forward",
            kwargs,
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )
        if boundaries is not None:
            kwargs["boundaries"] = boundaries
            labels = mask_targets_across_documents(boundaries, labels, kwargs)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **kwargs,
        )


class Qwen3_5TextForSequenceClassification(Qwen3NextForSequenceClassification):
    pass


class Qwen3_5ForTokenClassification(Qwen3NextForTokenClassification):
    pass


__all__ = [
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForTokenClassification",
    "Qwen3_5TextForSequenceClassification",
    "Qwen3_5TextModel",
]
