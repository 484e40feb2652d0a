# This file is generated from modular_olmo_hybrid.py by utils/modular_model_converter.py.
# Do not edit it: change the modular file and run `make modular`.
"""OLMo-Hybrid with support for packed rows: the differences from Qwen3-Next."""

from typing import Any

import torch
from transformers.activations import SiLUActivation
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as builtin
from transformers.processing_utils import Unpack

from ...boundaries import SequenceBoundaries
from ...errors import input_error
from ...ops import attention, causal_conv1d_qkv, gated_delta_gates, gated_delta_rule, gated_rms_norm, glu, rms_norm
from ...ops.attention import options_of_layer
from ..cuda_graphs import LayerGraphs
from ..inputs import PackingKwargs
from ..outputs import LanguageModelMixin
from ..projections import gate_and_project, project, to_fuse
from ..replacements import fast_path, replaces_builtin
from ..text_model import PackedTextModelMixin
from ..untouched import is_untouched, norm_of_stream
from ..versions import CACHE, LINEAR_CACHE, get_recurrent_state, takes_cache


@replaces_builtin
class OlmoHybridGatedDeltaNet(builtin.OlmoHybridGatedDeltaNet):
    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project `[B, T, hidden]` to qkv `[B, T, conv_dim]`, z `[B, T, HV, V]`, and g and beta `[B, T, HV]`."""
        layers = self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.b_proj, self.a_proj
        query, key, value, z, b, a = project(hidden_states, *layers)
        g, beta = gated_delta_gates(a, b, self.A_log, self.dt_bias)
        beta = 2.0 * beta if self.allow_neg_eigval else beta
        return torch.cat([query, key, value], dim=-1), z.unflatten(-1, (-1, self.head_v_dim)), g, beta

    @property
    def heads(self) -> dict[str, Any]:
        return {"key_heads": self.num_k_heads, "key_dim": self.head_k_dim, "value_dim": self.head_v_dim}

    def rule(self, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return gated_delta_rule(*tensors, **options)

    def finish(self, output: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Apply the norm, the gate z and the output layer to `[B, T, HV, V]`."""
        return gate_and_project(self.o_norm, OlmoHybridRMSNormGated, self.o_proj, output, z)

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
class OlmoHybridAttention(builtin.OlmoHybridAttention):
    @takes_cache(CACHE)
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None,
        attention_mask: torch.Tensor | None,
        cache: Cache | None = None,
        **kwargs: Unpack[PackingKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        options = options_of_layer(self, builtin.eager_attention_forward, kwargs, hidden_states.shape[1])
        query, key, value = project(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (
            x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in (self.q_norm(query), self.k_norm(key), value)
        )
        if position_embeddings is not None:
            query, key = builtin.apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        output, weights = attention(self, query, key, value, attention_mask, **options)
        return project(output.flatten(2), self.o_proj)[0], weights


@fast_path
class OlmoHybridRMSNorm(builtin.OlmoHybridRMSNorm):
    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None, stream: bool | None = None):
        """Normalize the input. With a `residual`, return the norm of their sum, and the sum; with `stream`, both too."""
        weight, eps = self.weight, self.variance_epsilon
        return rms_norm(hidden_states, weight, eps, residual=residual, stream=bool(stream), offset=0.0)


@fast_path
class OlmoHybridRMSNormGated(builtin.OlmoHybridRMSNormGated):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon)


@fast_path
class OlmoHybridLinearAttentionDecoderLayer(builtin.OlmoHybridLinearAttentionDecoderLayer):
    @takes_cache(CACHE)
    def forward(  # type: ignore[misc]  # Named here, and also in `PackingKwargs`.
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        output_attentions: bool | None = False,
        **kwargs: Unpack[PackingKwargs],
    ) -> torch.Tensor:
        hidden_states, residual = norm_of_stream(self.input_layernorm, OlmoHybridRMSNorm, hidden_states)
        options = {LINEAR_CACHE: cache, **kwargs}
        hidden_states = self.linear_attn(hidden_states=hidden_states, attention_mask=attention_mask, **options)
        norm = self.post_attention_layernorm
        hidden_states, residual = norm_of_stream(norm, OlmoHybridRMSNorm, hidden_states, residual)
        return residual + self.mlp(hidden_states)


@replaces_builtin
class OlmoHybridModel(PackedTextModelMixin, builtin.OlmoHybridModel):
    # What `use_cuda_graphs` has set. Any class with this attribute runs in graphs.
    layer_graphs: LayerGraphs | None = None


@fast_path
class OlmoHybridMLP(builtin.OlmoHybridMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        if not is_untouched(self.act_fn, SiLUActivation, torch.nn.SiLU):
            return project(self.act_fn(gate) * up, self.down_proj)[0]
        return glu(gate, up, to_fuse(self.down_proj, gate))


@replaces_builtin
class OlmoHybridForCausalLM(LanguageModelMixin, builtin.OlmoHybridForCausalLM):
    pass
