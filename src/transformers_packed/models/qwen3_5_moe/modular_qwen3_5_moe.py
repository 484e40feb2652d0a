"""Qwen3.5-MoE that keeps the documents of a packed row apart. Only what differs from Qwen3.5 and Qwen3-Next is here."""

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as builtin
from transformers.processing_utils import Unpack
from transformers.utils import can_return_tuple

from ..base import replaces_builtin
from ..inputs import PackingKwargs, mask_targets_across_documents, resolve_boundaries
from ..outputs import loss_without_logits, skips_logits
from ..padding import PackedGenerationMixin
from ..qwen3_5.modular_qwen3_5 import (
    Qwen3_5Attention,
    Qwen3_5DecoderLayer,
    Qwen3_5GatedDeltaNet,
    Qwen3_5MLP,
    Qwen3_5Model,
    Qwen3_5RMSNorm,
    Qwen3_5RMSNormGated,
    Qwen3_5TextModel,
)
from ..qwen3_next.modular_qwen3_next import Qwen3NextForCausalLM


class Qwen3_5MoeGatedDeltaNet(Qwen3_5GatedDeltaNet):
    pass


class Qwen3_5MoeAttention(Qwen3_5Attention):
    pass


class Qwen3_5MoeRMSNorm(Qwen3_5RMSNorm):
    pass


class Qwen3_5MoeRMSNormGated(Qwen3_5RMSNormGated):
    pass


class Qwen3_5MoeMLP(Qwen3_5MLP):
    pass


class Qwen3_5MoeDecoderLayer(Qwen3_5DecoderLayer):
    pass


class Qwen3_5MoeTextModel(Qwen3_5TextModel):
    pass


class Qwen3_5MoeForCausalLM(Qwen3NextForCausalLM):
    pass


class Qwen3_5MoeModel(Qwen3_5Model):
    pass


@replaces_builtin
class Qwen3_5MoeForConditionalGeneration(PackedGenerationMixin, builtin.Qwen3_5MoeForConditionalGeneration):
    # The loss is a mean over the targets of the whole step, so Trainer may pass their number.
    accepts_loss_kwargs = True

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        image_grid_thw: torch.LongTensor | None = None,
        video_grid_thw: torch.LongTensor | None = None,
        mm_token_type_ids: torch.IntTensor | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
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
            use_cache=kwargs.get("use_cache"),
        )
        if boundaries is not None:
            kwargs["boundaries"] = boundaries
            labels = mask_targets_across_documents(boundaries, labels, kwargs)
        skip_logits = skips_logits(self, labels, logits_to_keep, kwargs)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "pixel_values": pixel_values,
            "pixel_values_videos": pixel_values_videos,
            "image_grid_thw": image_grid_thw,
            "video_grid_thw": video_grid_thw,
            "mm_token_type_ids": mm_token_type_ids,
            "output_router_logits": output_router_logits,
            "mm_encoder_outputs": mm_encoder_outputs,
            **kwargs,
        }
        if skip_logits:
            return loss_without_logits(self, labels, **inputs)
        return super().forward(labels=labels, logits_to_keep=logits_to_keep, **inputs)


__all__ = [
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3_5MoeModel",
    "Qwen3_5MoeTextModel",
]
