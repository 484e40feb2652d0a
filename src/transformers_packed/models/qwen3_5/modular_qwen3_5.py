"""Qwen3.5 with support for packed rows of text, images and videos: the differences from Qwen3-Next."""

from functools import wraps

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin

from ...boundaries import SequenceBoundaries
from ...ops import gated_delta_gates
from ..inputs import without_packing
from ..outputs import LanguageModelMixin
from ..packed_model import PackedModelMixin
from ..padding import prompt_ids_of
from ..projections import project
from ..qwen3_next.modular_qwen3_next import Qwen3NextForSequenceClassification, Qwen3NextGatedDeltaNet, Qwen3NextModel
from ..replacements import replaces_builtin
from ..vision import features_of_tokens, packed_position_ids


class Qwen3_5GatedDeltaNet(Qwen3NextGatedDeltaNet):
    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project `[B, T, hidden]` to qkv `[B, T, conv_dim]`, z `[B, T, HV, V]`, and g and beta `[B, T, HV]`."""
        z, mixed_qkv, b, a = project(hidden_states, self.in_proj_z, self.in_proj_qkv, self.in_proj_b, self.in_proj_a)
        g, beta = gated_delta_gates(a, b, self.A_log, self.dt_bias)
        return mixed_qkv, z.unflatten(-1, (-1, self.head_v_dim)), g, beta


class Qwen3_5TextModel(Qwen3NextModel):
    pass


@replaces_builtin
class Qwen3_5Model(PackedModelMixin, builtin.Qwen3_5Model):
    @wraps(builtin.Qwen3_5Model.get_image_features)
    def get_image_features(self, *args, **kwargs):
        outputs = super().get_image_features(*args, **without_packing(kwargs))
        return features_of_tokens("image", outputs, kwargs)

    @wraps(builtin.Qwen3_5Model.get_video_features)
    def get_video_features(self, *args, **kwargs):
        outputs = super().get_video_features(*args, **without_packing(kwargs))
        return features_of_tokens("video", outputs, kwargs)

    @wraps(builtin.Qwen3_5Model.compute_3d_position_ids)
    def compute_3d_position_ids(self, *args, attention_mask=None, **kwargs):
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
            # The stock method fails on a row without real tokens, so treat its first token as real.
            first = attention_mask[:, :1].masked_fill(~attention_mask.any(1, keepdim=True), 1)
            attention_mask = torch.cat([first, attention_mask[:, 1:]], dim=1)
        return super().compute_3d_position_ids(*args, attention_mask=attention_mask, **kwargs)

    def forward_with_boundaries(self, boundaries: SequenceBoundaries | None, **inputs):
        if boundaries is not None:
            position_ids = inputs.get("position_ids")
            # Two-dimensional position ids locate the documents. M-RoPE for images needs time, height and width too.
            if position_ids is None or position_ids.ndim == 2:
                inputs["position_ids"] = packed_position_ids(self.config, boundaries, inputs)
            inputs["boundaries"] = boundaries
        elif self.share_prompts:
            inputs["prompt_ids"] = prompt_ids_of(inputs)
        return super().forward(**inputs)


@replaces_builtin
class Qwen3_5ForConditionalGeneration(LanguageModelMixin, builtin.Qwen3_5ForConditionalGeneration):
    pass


class Qwen3_5TextForSequenceClassification(Qwen3NextForSequenceClassification):
    pass


# Those of Qwen3-Next, on the stock classes of this family.
SAME = [
    ("qwen3_next", "Qwen3Next", "Qwen3_5", "Attention RMSNorm RMSNormGated MLP DecoderLayer ForCausalLM"),
    ("qwen3_next", "Qwen3Next", "Qwen3_5", "ForSequenceClassification ForTokenClassification"),
]
