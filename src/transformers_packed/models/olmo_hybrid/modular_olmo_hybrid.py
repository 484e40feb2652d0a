"""OLMo-Hybrid with support for packed rows: the differences from Qwen3-Next."""

import torch
from transformers.cache_utils import Cache
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as builtin
from transformers.processing_utils import Unpack

from ...ops import attention, gated_delta_gates
from ...ops.attention import options_of_layer
from ..cuda_graphs import LayerGraphs
from ..inputs import PackingKwargs
from ..kimi_linear.modular_kimi_linear import KimiLinearRMSNorm
from ..projections import gate_and_project, project
from ..qwen3_next.modular_qwen3_next import Qwen3NextGatedDeltaNet, Qwen3NextRMSNormGated
from ..replacements import fast_path, replaces_builtin
from ..text_model import PackedTextModelMixin
from ..untouched import norm_of_stream
from ..versions import CACHE, LINEAR_CACHE, takes_cache


class OlmoHybridGatedDeltaNet(Qwen3NextGatedDeltaNet):
    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project `[B, T, hidden]` to qkv `[B, T, conv_dim]`, z `[B, T, HV, V]`, and g and beta `[B, T, HV]`."""
        layers = self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.b_proj, self.a_proj
        query, key, value, z, b, a = project(hidden_states, *layers)
        g, beta = gated_delta_gates(a, b, self.A_log, self.dt_bias)
        beta = 2.0 * beta if self.allow_neg_eigval else beta
        return torch.cat([query, key, value], dim=-1), z.unflatten(-1, (-1, self.head_v_dim)), g, beta

    def finish(self, output: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Apply the norm, the gate z and the output layer to `[B, T, HV, V]`."""
        return gate_and_project(self.o_norm, OlmoHybridRMSNormGated, self.o_proj, output, z)


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


class OlmoHybridRMSNorm(KimiLinearRMSNorm):
    pass


class OlmoHybridRMSNormGated(Qwen3NextRMSNormGated):
    pass


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


# Those of Qwen3-Next, on the stock classes of this family.
SAME = [("qwen3_next", "Qwen3Next", "OlmoHybrid", "MLP ForCausalLM")]
