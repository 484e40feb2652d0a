# This file is generated from modular_qwen3_5.py by utils/modular_model_converter.py.
# Do not edit it: change the modular file and run `make modular`.
"""Qwen3.5 with support for packed rows of text, images and videos: the differences from Qwen3-Next."""

from functools import wraps
from typing import Any

import torch
from transformers.activations import SiLUActivation
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin
from transformers.processing_utils import Unpack

from ...boundaries import SequenceBoundaries
from ...errors import input_error
from ...ops import (
    attention,
    causal_conv1d_qkv,
    gated_delta_gates,
    gated_delta_rule,
    gated_rms_norm,
    glu,
    qk_norm_rope,
    rms_norm,
)
from ...ops.attention import options_of_layer
from ..cuda_graphs import LayerGraphs
from ..host_parameters import reads_host_weights
from ..inputs import PackingKwargs, without_packing
from ..outputs import DocumentClassifierMixin, LanguageModelMixin, TokenClassifierMixin
from ..packed_model import PackedModelMixin
from ..padding import prompt_ids_of
from ..projections import gate_and_project, project, to_fuse
from ..replacements import fast_path, replaces_builtin
from ..text_model import PackedTextModelMixin
from ..untouched import is_untouched, norm_of_stream
from ..versions import CACHE, LINEAR_CACHE, get_recurrent_state, takes_cache
from ..vision import features_of_tokens, packed_position_ids


@replaces_builtin
class Qwen3_5GatedDeltaNet(builtin.Qwen3_5GatedDeltaNet):
    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project `[B, T, hidden]` to qkv `[B, T, conv_dim]`, z `[B, T, HV, V]`, and g and beta `[B, T, HV]`."""
        z, mixed_qkv, b, a = project(hidden_states, self.in_proj_z, self.in_proj_qkv, self.in_proj_b, self.in_proj_a)
        g, beta = gated_delta_gates(a, b, self.A_log, self.dt_bias)
        return mixed_qkv, z.unflatten(-1, (-1, self.head_v_dim)), g, beta

    @property
    def heads(self) -> dict[str, Any]:
        return {"key_heads": self.num_k_heads, "key_dim": self.head_k_dim, "value_dim": self.head_v_dim}

    def rule(self, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return gated_delta_rule(*tensors, **options)

    def finish(self, output: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Apply the norm, the gate z and the output layer to `[B, T, HV, V]`."""
        return gate_and_project(self.norm, Qwen3_5RMSNormGated, self.out_proj, output, z)

    @force_accelerate_hooks("conv1d")
    @takes_cache(LINEAR_CACHE)
    def forward(  # type: ignore[misc]  # Named here, and also in `PackingKwargs`.
        self,
        hidden_states: torch.Tensor,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        seq_idx: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        **kwargs: Unpack[PackingKwargs],
    ) -> torch.Tensor:
        """Run the layer on packed, padded, unpadded or cached input.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, T, hidden]`):
                The layer's input. Packed input has one row.
            cache (`Cache`, *optional*):
                Convolution and recurrent states. Packed rows do not support a cache.
            attention_mask (`torch.Tensor` of shape `[B, T]`, *optional*):
                0 at padding. Packed rows do not support a mask.
            seq_idx (`torch.IntTensor` of shape `[1, T]`, *optional*):
                The document index of each token. A packed row needs either `seq_idx` or `cu_seqlens`.
            cu_seqlens (`torch.IntTensor` of shape `[N+1]`, *optional*):
                Cumulative sequence lengths of the documents.

        Returns:
            `torch.Tensor` of shape `[B, T, hidden]`.
        """
        length = hidden_states.shape[1]
        if not isinstance(self.conv1d, torch.nn.Conv1d):
            got = f"{type(self.conv1d).__module__}.{type(self.conv1d).__name__}"
            fix = "Exclude conv1d from the adapted or replaced modules."
            raise input_error("conv1d as a torch.nn.Conv1d, whose weight is read directly", got, fix)
        kwargs |= {"seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
        boundaries = SequenceBoundaries.from_kwargs(kwargs, length)
        hidden_states = builtin.apply_mask_to_padding_states(hidden_states, attention_mask)
        mixed_qkv, z, g, beta = self.project(hidden_states)

        recurrent_state = None
        if cache is not None:
            recurrent_state = get_recurrent_state(cache, self.layer_idx)
            # The cache expects channels first. It returns the columns that the window still needs, then the new ones.
            mixed_qkv = cache.update_conv_state(
                mixed_qkv.transpose(1, 2), self.layer_idx, conv_kernel_size=self.conv_kernel_size
            ).transpose(1, 2)
        query, key, value = causal_conv1d_qkv(
            mixed_qkv,
            self.conv1d.weight.squeeze(1),
            self.conv1d.bias,
            self.activation,
            boundaries=boundaries,
            **self.heads,
        )
        if cache is not None:
            query, key, value = (x[:, -length:] for x in (query, key, value))
        options = {"initial_state": recurrent_state, "output_final_state": cache is not None}
        output, recurrent_state = self.rule(query, key, value, g, beta, boundaries=boundaries, **options)
        if cache is not None:
            assert recurrent_state is not None
            cache.update_recurrent_state(recurrent_state, self.layer_idx)

        return self.finish(output, z)


@replaces_builtin
class Qwen3_5TextModel(PackedTextModelMixin, builtin.Qwen3_5TextModel):
    # What `use_cuda_graphs` has set. Any class with this attribute runs in graphs.
    layer_graphs: LayerGraphs | None = None


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


@replaces_builtin
class Qwen3_5TextForSequenceClassification(DocumentClassifierMixin, builtin.Qwen3_5TextForSequenceClassification):
    pass


@replaces_builtin
class Qwen3_5Attention(builtin.Qwen3_5Attention):
    def project(
        self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project `[B, T, hidden]` to queries, keys and values `[B, heads, T, dim]`, and the gate `[B, T, H, dim]`."""
        shape = hidden_states.shape[:-1]
        query_gate, key, value = (
            x.view(*shape, -1, dim)
            for x, dim in zip(
                project(hidden_states, self.q_proj, self.k_proj, self.v_proj),
                (2 * self.head_dim, self.head_dim, self.head_dim),
                strict=True,
            )
        )
        norms = self.q_norm, self.k_norm
        fused = all(is_untouched(norm, Qwen3_5RMSNorm) for norm in norms) and norms[0].eps == norms[1].eps
        if fused:
            query, key, gate = qk_norm_rope(query_gate, key, norms[0].weight, norms[1].weight, cos, sin, norms[0].eps)
        else:
            query, gate = query_gate.chunk(2, dim=-1)
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if not fused:
            query, key = builtin.apply_rotary_pos_emb(query, key, cos, sin)
        return query, key, value, gate

    def finish(self, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Apply the gate and the output layer to `[B, T, H, dim]`."""
        gate, output = gate.flatten(2), output.flatten(2)
        return glu(gate, output, to_fuse(self.o_proj, output), activation="sigmoid")

    @takes_cache(CACHE)
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | None = None,
        **kwargs: Unpack[PackingKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        options = options_of_layer(self, builtin.eager_attention_forward, kwargs, hidden_states.shape[1])
        query, key, value, gate = self.project(hidden_states, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        output, weights = attention(self, query, key, value, attention_mask, **options)
        return self.finish(output, gate), weights


@fast_path
class Qwen3_5RMSNorm(builtin.Qwen3_5RMSNorm):
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, stream: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalize `x`. With a `residual`, return the norm of their sum, and the sum; with `stream`, the norm and `x`."""
        return rms_norm(x, self.weight, self.eps, residual=residual, stream=bool(stream))


@fast_path
class Qwen3_5RMSNormGated(builtin.Qwen3_5RMSNormGated):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon)


@fast_path
class Qwen3_5MLP(builtin.Qwen3_5MLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        if not is_untouched(self.act_fn, SiLUActivation, torch.nn.SiLU):
            return project(self.act_fn(gate) * up, self.down_proj)[0]
        return glu(gate, up, to_fuse(self.down_proj, gate))


@fast_path
class Qwen3_5DecoderLayer(builtin.Qwen3_5DecoderLayer):
    @takes_cache(CACHE)
    @reads_host_weights
    def forward(  # type: ignore[misc]  # Named here, and also in `PackingKwargs`.
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        **kwargs: Unpack[PackingKwargs],
    ) -> torch.Tensor:
        hidden_states, residual = norm_of_stream(self.input_layernorm, Qwen3_5RMSNorm, hidden_states)
        options: dict[str, Any] = {"attention_mask": attention_mask, **kwargs}
        if self.block_type == "linear_attention":
            hidden_states = self.linear_attn(hidden_states=hidden_states, **{LINEAR_CACHE: cache}, **options)
        else:
            options |= {"position_ids": position_ids, "position_embeddings": position_embeddings, CACHE: cache}
            hidden_states, _ = self.self_attn(hidden_states=hidden_states, **options)
        norm = self.post_attention_layernorm
        hidden_states, residual = norm_of_stream(norm, Qwen3_5RMSNorm, hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        # Some expert blocks also return their routing.
        if isinstance(hidden_states, tuple):
            hidden_states, _ = hidden_states
        return residual + hidden_states


@replaces_builtin
class Qwen3_5ForCausalLM(LanguageModelMixin, builtin.Qwen3_5ForCausalLM):
    pass


@replaces_builtin
class Qwen3_5ForSequenceClassification(DocumentClassifierMixin, builtin.Qwen3_5ForSequenceClassification):
    pass


@replaces_builtin
class Qwen3_5ForTokenClassification(TokenClassifierMixin, builtin.Qwen3_5ForTokenClassification):
    pass
