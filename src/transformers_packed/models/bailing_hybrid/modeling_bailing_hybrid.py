# This file is generated from modular_bailing_hybrid.py by utils/modular_model_converter.py.
# Do not edit it: change the modular file and run `make modular`.
"""Bailing-Hybrid with support for packed rows: the differences from Kimi Linear."""

from typing import Any

import torch
from transformers.activations import SiLUActivation
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as builtin
from transformers.processing_utils import Unpack

from ...boundaries import SequenceBoundaries
from ...errors import input_error
from ...ops import attention, causal_conv1d_qkv, gated_rms_norm, glu, kimi_delta_rule, rms_norm
from ...ops.attention import options_of_layer
from ..cuda_graphs import LayerGraphs
from ..experts import run_experts
from ..host_parameters import reads_host_weights
from ..inputs import PackingKwargs
from ..outputs import LanguageModelMixin
from ..projections import gate_and_project, project, to_fuse
from ..replacements import fast_path, replaces_builtin
from ..text_model import PackedTextModelMixin
from ..untouched import is_untouched, norm_of_stream
from ..versions import CACHE, LINEAR_CACHE, get_recurrent_state, takes_cache


@replaces_builtin
class BailingHybridDeltaAttention(builtin.BailingHybridDeltaAttention):
    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project `[B, T, hidden]` to qkv `[B, T, conv_dim]`, z and g `[B, T, H, K]`, and beta `[B, T, H]`.

        `g` is the projection for the decay, or the decay if the module that computes it has to run.
        """
        gate, layers = self.forget_gate, (self.q_proj, self.k_proj, self.v_proj, self.b_proj, self.g_proj)
        if self.fuses_gate:
            *qkv, b, z, g = project(hidden_states, *layers, gate.f_proj)
            g = g.unflatten(-1, (-1, self.head_dim))
        else:
            *qkv, b, z = project(hidden_states, *layers)
            g = gate(hidden_states)
        return torch.cat(qkv, dim=-1), z.unflatten(-1, (-1, self.head_dim)), g, b.sigmoid()

    @property
    def heads(self) -> dict[str, Any]:
        return {"key_heads": self.num_heads, "key_dim": self.head_dim, "value_dim": self.head_dim}

    def rule(self, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        gate = self.forget_gate
        if self.fuses_gate:
            # The decay stays in float32, which the stock class rounds to the dtype of the layer.
            options |= {"a_log": gate.A_log, "dt_bias": gate.dt_bias}
            options |= {"lower_bound": gate.lower_bound if gate.safe_gate else None}
        return kimi_delta_rule(*tensors, **options)

    def finish(self, output: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Apply the norm, the gate z and the output layer to `[B, T, H, V]`."""
        return gate_and_project(self.o_norm, BailingHybridRMSNormGated, self.o_proj, output, z, activation="sigmoid")

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

    @property
    def fuses_gate(self) -> bool:
        """Whether the rule computes the decay from its projection."""
        return is_untouched(self.forget_gate, builtin.BailingHybridForgetGate)


@replaces_builtin
class BailingHybridAttention(builtin.BailingHybridAttention):
    def project(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project to queries `[B, H, T, QK]`, latents `[B, 1, T, rank]`, and the part of the keys that heads share."""
        if self.q_proj is not None:
            query, compressed = project(hidden_states, self.q_proj, self.kv_a_proj_with_mqa)
        else:
            # Queries of low rank.
            assert self.q_a_proj is not None and self.q_a_layernorm is not None and self.q_b_proj is not None
            query, compressed = project(hidden_states, self.q_a_proj, self.kv_a_proj_with_mqa)
            (query,) = project(self.q_a_layernorm(query), self.q_b_proj)
        latent, shared = compressed.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        query = query.unflatten(-1, (-1, self.qk_head_dim)).transpose(1, 2)
        return query, self.kv_a_layernorm(latent)[:, None], shared[:, None]

    def attend(
        self, query, latent, shared, attention_mask, cache: Cache | None, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output `[B, T, H, V]` and the weights of attention, whose keys and values are made of latents."""
        options = options_of_layer(self, builtin.eager_attention_forward, kwargs, query.shape[2])
        # The cache has the latents.
        if cache is not None:
            latent, shared = cache.update(latent, shared, self.layer_idx)
        (expanded,) = project(latent[:, 0], self.kv_b_proj)
        sizes: list[Any] = [self.qk_nope_head_dim, self.v_head_dim]
        expanded = expanded.unflatten(-1, (-1, sum(sizes))).transpose(1, 2)
        key, value = expanded.split(sizes, dim=-1)
        key = torch.cat([key, shared.expand(-1, key.shape[1], -1, -1)], dim=-1)
        return attention(self, query, key, value, attention_mask, **options)

    @takes_cache(CACHE)
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | None = None,
        **kwargs: Unpack[PackingKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, latent, shared = self.project(hidden_states)
        plain, rotated = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        rotated, shared = builtin.apply_rotary_pos_emb_interleave(rotated, shared, *position_embeddings)
        query = torch.cat([plain, rotated], dim=-1)
        output, weights = self.attend(query, latent, shared, attention_mask, cache, dict(kwargs))
        gate = torch.sigmoid(project(hidden_states, self.g_proj)[0].float()).to(output.dtype)
        return project((output * gate[..., None]).flatten(2), self.o_proj)[0], weights


@fast_path
class BailingHybridRMSNorm(builtin.BailingHybridRMSNorm):
    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor | None = None, stream: bool | None = None):
        """Normalize the input. With a `residual`, return the norm of their sum, and the sum; with `stream`, both too."""
        weight, eps = self.weight, self.variance_epsilon
        return rms_norm(hidden_states, weight, eps, residual=residual, stream=bool(stream), offset=0.0)


@fast_path
class BailingHybridRMSNormGated(builtin.BailingHybridRMSNormGated):
    def forward(self, hidden_states, gate=None) -> torch.Tensor:
        return gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon, activation="sigmoid")


@fast_path
class BailingHybridMLP(builtin.BailingHybridMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        if not is_untouched(self.act_fn, SiLUActivation, torch.nn.SiLU):
            return project(self.act_fn(gate) * up, self.down_proj)[0]
        return glu(gate, up, to_fuse(self.down_proj, gate))


@fast_path
class BailingHybridTopkRouter(builtin.BailingHybridTopkRouter):
    # Set by `PackingMetricsCallback`: the counts of the experts in this forward, and the number of real choices.
    expert_counts: torch.Tensor | None = None

    def forward(self, hidden_states):
        """Return the logits of all experts, and the weights and indices of the chosen ones, for each token."""
        router_logits, weights, index = builtin.BailingHybridTopkRouter.forward(self, hidden_states)
        if self.expert_counts is not None and self.training:
            self.count_choices(index, self.expert_counts)
        return router_logits, weights, index

    @property
    def count_columns(self) -> int:
        """The size of `expert_counts`."""
        return self.num_experts + 1

    def count_choices(self, index: torch.Tensor, expert_counts: torch.Tensor) -> None:
        """Add to `expert_counts` how often each expert is in `index`, without the padding at the end of a row."""
        counts, choices = expert_counts.split((self.num_experts, 1))
        index = index.flatten()
        # Earlier segments of the row have been counted.
        is_real = torch.arange(len(index), device=index.device) < choices - counts.sum()
        counts.scatter_add_(0, index, is_real.to(counts.dtype))


@fast_path
class BailingHybridMoE(builtin.BailingHybridMoE):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.flatten(0, 1)
        _, weights, index = self.gate(rows)
        return run_experts(self.experts, rows, index, weights, self.shared_experts(rows)).view_as(hidden_states)


@fast_path
class BailingHybridDecoderLayer(builtin.BailingHybridDecoderLayer):
    @takes_cache(CACHE)
    @reads_host_weights
    def forward(  # type: ignore[misc]  # Named here, and also in `PackingKwargs`.
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = False,
        **kwargs: Unpack[PackingKwargs],
    ) -> torch.Tensor:
        hidden_states, residual = norm_of_stream(self.input_layernorm, BailingHybridRMSNorm, hidden_states)
        options: dict[str, Any] = {"attention_mask": attention_mask, **kwargs}
        if self.block_type == "linear_attention":
            hidden_states = self.self_attn(hidden_states=hidden_states, **{LINEAR_CACHE: cache}, **options)
        else:
            options |= {"position_ids": position_ids, CACHE: cache}
            hidden_states, _ = self.self_attn(hidden_states=hidden_states, **options)
        norm = self.post_attention_layernorm
        hidden_states, residual = norm_of_stream(norm, BailingHybridRMSNorm, hidden_states, residual)
        return residual + self.mlp(hidden_states)


@replaces_builtin
class BailingHybridModel(PackedTextModelMixin, builtin.BailingHybridModel):
    # What `use_cuda_graphs` has set. Any class with this attribute runs in graphs.
    layer_graphs: LayerGraphs | None = None


@replaces_builtin
class BailingHybridForCausalLM(LanguageModelMixin, builtin.BailingHybridForCausalLM):
    pass
