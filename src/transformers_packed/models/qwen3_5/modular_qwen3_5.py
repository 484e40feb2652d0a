"""Qwen3.5 that keeps the documents of a packed row apart, text and vision. Only what differs from Qwen3-Next is here."""

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutputWithPast
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin
from transformers.processing_utils import Unpack
from transformers.utils import can_return_tuple

from ..base import PackedModelMixin, project, replaces_builtin
from ..inputs import PackingKwargs, mask_targets_across_documents, resolve_boundaries, without_packing
from ..outputs import classify_documents, loss_without_logits, skips_logits
from ..padding import PackedGenerationMixin
from ..qwen3_next.modular_qwen3_next import (
    Qwen3NextAttention,
    Qwen3NextDecoderLayer,
    Qwen3NextForSequenceClassification,
    Qwen3NextForTokenClassification,
    Qwen3NextGatedDeltaNet,
    Qwen3NextMLP,
    Qwen3NextModel,
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
)
from ..vision import features_of_tokens, packed_mrope_position_ids


class Qwen3_5GatedDeltaNet(Qwen3NextGatedDeltaNet):
    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[B, T, hidden]` to qkv `[B, T, conv_dim]`, z `[B, T, HV, V]`, and b and a `[B, T, HV]`."""
        z, mixed_qkv, b, a = project(hidden_states, self.in_proj_z, self.in_proj_qkv, self.in_proj_b, self.in_proj_a)
        return mixed_qkv, z.unflatten(-1, (-1, self.head_v_dim)), b, a


class Qwen3_5Attention(Qwen3NextAttention):
    pass


class Qwen3_5RMSNorm(Qwen3NextRMSNorm):
    pass


class Qwen3_5RMSNormGated(Qwen3NextRMSNormGated):
    pass


class Qwen3_5MLP(Qwen3NextMLP):
    pass


class Qwen3_5DecoderLayer(Qwen3NextDecoderLayer):
    pass


class Qwen3_5TextModel(Qwen3NextModel):
    pass


@replaces_builtin
class Qwen3_5ForCausalLM(PackedGenerationMixin, builtin.Qwen3_5ForCausalLM):
    @can_return_tuple
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
        skip_logits = skips_logits(self, labels, logits_to_keep, kwargs)
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            **kwargs,
        }
        if skip_logits:
            return loss_without_logits(self, labels, **inputs)
        return super().forward(labels=labels, logits_to_keep=logits_to_keep, **inputs)


@replaces_builtin
class Qwen3_5Model(PackedModelMixin, builtin.Qwen3_5Model):
    def get_image_features(
        self,
        pixel_values: torch.Tensor,
        image_grid_thw: torch.LongTensor | None = None,
        **kwargs: Unpack[PackingKwargs],
    ):
        outputs = super().get_image_features(pixel_values, image_grid_thw, **without_packing(kwargs))
        return features_of_tokens("image", outputs, kwargs)

    def get_video_features(
        self,
        pixel_values_videos: torch.Tensor,
        video_grid_thw: torch.LongTensor | None = None,
        **kwargs: Unpack[PackingKwargs],
    ):
        outputs = super().get_video_features(pixel_values_videos, video_grid_thw, **without_packing(kwargs))
        return features_of_tokens("video", outputs, kwargs)

    def compute_3d_position_ids(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        image_grid_thw: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: torch.Tensor | None = None,
        mm_token_type_ids: torch.IntTensor | None = None,
    ):
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            # The built-in cannot count a row without any real token: the first one stands in.
            first = attention_mask[:, :1].masked_fill(~attention_mask.any(1, keepdim=True), 1)
            attention_mask = torch.cat([first, attention_mask[:, 1:]], dim=1)
        return super().compute_3d_position_ids(
            input_ids,
            inputs_embeds,
            image_grid_thw=image_grid_thw,
            video_grid_thw=video_grid_thw,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            mm_token_type_ids=mm_token_type_ids,
        )

    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        image_grid_thw: torch.LongTensor | None = None,
        video_grid_thw: torch.LongTensor | None = None,
        mm_token_type_ids: torch.IntTensor | None = None,
        mm_encoder_outputs: dict[str, BaseModelOutputWithPooling] | None = None,
        **kwargs: Unpack[PackingKwargs],
    ):
        call = f"{type(self).__name__}.forward"
        boundaries = resolve_boundaries(
            call,
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
            if position_ids is None or position_ids.ndim == 2:
                # Two dimensions say where documents are; where images are, M-RoPE needs more.
                position_ids = boundaries.position_ids
                if image_grid_thw is not None or video_grid_thw is not None:
                    position_ids = packed_mrope_position_ids(
                        call,
                        self.config,
                        boundaries,
                        input_ids=input_ids,
                        mm_token_type_ids=mm_token_type_ids,
                        image_grid_thw=image_grid_thw,
                        video_grid_thw=video_grid_thw,
                    )
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            pixel_values=pixel_values,
            pixel_values_videos=pixel_values_videos,
            image_grid_thw=image_grid_thw,
            video_grid_thw=video_grid_thw,
            mm_token_type_ids=mm_token_type_ids,
            mm_encoder_outputs=mm_encoder_outputs,
            **kwargs,
        )


@replaces_builtin
class Qwen3_5ForConditionalGeneration(PackedGenerationMixin, builtin.Qwen3_5ForConditionalGeneration):
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
            "mm_encoder_outputs": mm_encoder_outputs,
            **kwargs,
        }
        if skip_logits:
            return loss_without_logits(self, labels, **inputs)
        return super().forward(labels=labels, logits_to_keep=logits_to_keep, **inputs)


class Qwen3_5TextForSequenceClassification(Qwen3NextForSequenceClassification):
    pass


@replaces_builtin
class Qwen3_5ForSequenceClassification(PackedModelMixin, builtin.Qwen3_5ForSequenceClassification):
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        image_grid_thw: torch.LongTensor | None = None,
        video_grid_thw: torch.LongTensor | None = None,
        mm_token_type_ids: torch.IntTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[PackingKwargs],
    ) -> SequenceClassifierOutputWithPast:
        """As the built-in, and for a packed row one result per document: `labels` `[N]`, logits `[N, num_labels]`."""
        call = f"{type(self).__name__}.forward"
        boundaries = resolve_boundaries(
            call,
            kwargs,
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
        )
        inputs = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "pixel_values": pixel_values,
            "pixel_values_videos": pixel_values_videos,
            "image_grid_thw": image_grid_thw,
            "video_grid_thw": video_grid_thw,
            "mm_token_type_ids": mm_token_type_ids,
            **kwargs,
        }
        if boundaries is not None:
            return classify_documents(call, self, boundaries, labels, **inputs)
        return super().forward(
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            labels=labels,
            use_cache=use_cache,
            **inputs,
        )


class Qwen3_5ForTokenClassification(Qwen3NextForTokenClassification):
    pass


__all__ = [
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5ForSequenceClassification",
    "Qwen3_5ForTokenClassification",
    "Qwen3_5Model",
    "Qwen3_5TextForSequenceClassification",
    "Qwen3_5TextModel",
]
