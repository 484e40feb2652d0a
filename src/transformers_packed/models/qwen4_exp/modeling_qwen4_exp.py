# This file is generated from modular_qwen4_exp.py by utils/modular_model_converter.py.
# Do not edit it: change the modular file and run `make modular`.
"""Qwen4-Exp with support for packed rows: the differences from Qwen3.5 and Qwen3-Next."""

from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from transformers.activations import SiLUActivation
from transformers.cache_utils import Cache
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.models.qwen4_exp import modeling_qwen4_exp as builtin
from transformers.processing_utils import Unpack

from ...boundaries import SequenceBoundaries
from ...errors import input_error
from ...ops import (
    attention,
    causal_conv1d,
    causal_conv1d_qkv,
    choose_experts,
    gated_delta_gates,
    gated_delta_rule,
    gated_rms_norm,
    glu,
    per_document,
    qk_norm_rope,
    rms_norm,
)
from ...ops.attention import options_of_layer
from ...ops.contexts import with_contexts
from ...ops.indexed_attention import Index, choose_blocks, indexed_attention, needs_index, tokens_of_blocks
from ...ops.streams import add_to_streams, mix_streams, stream_gates
from ...shared_prompts import SharedPrompts
from ..experts import run_experts
from ..family import INDEXER_UNDER_ZERO_3
from ..host_parameters import reads_host_weights
from ..inputs import PackingKwargs, without_packing
from ..outputs import LanguageModelMixin
from ..packed_model import PackedModelMixin
from ..padding import prompt_ids_of
from ..projections import gate_and_project, project, to_fuse
from ..replacements import fast_path, replaces_builtin
from ..text_model import PackedTextModelMixin
from ..untouched import gathers_weights, is_untouched, norm_of_stream
from ..versions import CACHE, LINEAR_CACHE, get_recurrent_state, takes_cache
from ..vision import features_of_tokens, packed_position_ids


# Elements of the keys that the indexer gathers for the queries of a chunk.
_GATHERED = 1 << 24


@replaces_builtin
class Qwen4ExpTextGatedDeltaNet(builtin.Qwen4ExpTextGatedDeltaNet):
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
        activation = getattr(self.norm, "activation", "silu")
        return gate_and_project(self.norm, Qwen4ExpTextRMSNormGated, self.out_proj, output, z, activation=activation)

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


@fast_path
class Qwen4ExpTextRMSNorm(builtin.Qwen4ExpTextRMSNorm):
    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, stream: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Normalize `x`, in groups. With a `residual`, return the norm of their sum, and the sum; with `stream`, both too."""
        if self.group_size is None:
            return rms_norm(x, self.weight, self.eps, residual=residual, stream=bool(stream))
        groups = (-1, self.group_size)
        residual = None if residual is None else residual.unflatten(-1, groups)
        weight = self.weight.view(groups)
        normed = rms_norm(x.unflatten(-1, groups), weight, self.eps, residual=residual, stream=bool(stream))
        return (normed[0].flatten(-2), normed[1].flatten(-2)) if isinstance(normed, tuple) else normed.flatten(-2)


@fast_path
class Qwen4ExpTextRMSNormGated(builtin.Qwen4ExpTextRMSNormGated):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon, activation=self.activation)


@replaces_builtin
class Qwen4ExpTextQSAIndexer(builtin.Qwen4ExpTextQSAIndexer):
    def project(
        self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project `[B, T, hidden]` to rotated queries `[B, T, heads, dim]`, and to keys `[B, T, dim]` before pooling."""
        dim: Any = self.index_head_dim
        (both,) = project(hidden_states, self.index_qk_proj)
        query, key = both.split([self.index_n_heads * dim, self.index_kv_heads * dim], dim=-1)
        query = self.q_layernorm(query.unflatten(-1, (-1, dim)))
        return builtin.apply_rotary_pos_emb(query, cos=cos, sin=sin, unsqueeze_dim=2), key

    def pool(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Make the keys of blocks `[..., N, dim]` from those of their tokens `[..., N, ratio, dim]`."""
        pooled = self.k_layernorm(keys.float().mean(dim=-2).to(keys.dtype))
        return builtin.apply_rotary_pos_emb(pooled.unsqueeze(-2), cos=cos, sin=sin, unsqueeze_dim=-2).squeeze(-2)

    @property
    def sizes(self) -> dict[str, Any]:
        """Tokens of a block, and the most tokens of all chosen blocks."""
        return {"ratio": self.compress_ratio, "budget": self.token_budget}

    @torch.no_grad()
    def index(self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Index:
        """Return what chooses the keys of a packed row. Their choice has no gradient."""
        return Index(*self.project(hidden_states, cos, sin), cos, sin, self.pool, **self.sizes)

    @torch.no_grad()
    @takes_cache(CACHE)
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        cache: Cache | None,
    ) -> torch.Tensor:
        """Return which keys each query attends to, `[B, 1, T, S]`, given those that it may see."""
        rows, length, _ = hidden_states.shape
        query, key = self.project(hidden_states, *(x[:, -length:] for x in position_embeddings))
        if cache is not None:
            key = cache.update_indexer(key, self.layer_idx)
        visible = (attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0)[:, 0]
        # Each query has blocks of its own, because a mask may be of any pattern.
        size = max(1, _GATHERED // (rows * key.shape[1] * key.shape[2]))
        chunks = zip(query.split(size, dim=1), visible.expand(rows, -1, -1).split(size, dim=1), strict=True)
        return torch.cat([self.choose(q, key, position_embeddings, seen) for q, seen in chunks], dim=1)[:, None]

    def choose(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """Return which of the visible keys `[B, T, S]` each of these queries attends to."""
        rows, _, length = visible.shape
        count, ratio = visible.sum(-1), self.sizes["ratio"]
        # The visible keys of each query, in order, and then the others.
        order = visible.logical_not().byte().argsort(dim=-1, stable=True)
        blocks = order[..., : length - length % ratio].unflatten(-1, (-1, ratio))
        row = torch.arange(rows, device=order.device)
        cos, sin = (x.expand(rows, -1, -1)[row[:, None, None], blocks[..., 0]] for x in position_embeddings)
        pooled = self.pool(key[row[:, None, None, None], blocks], cos, sin)
        chosen = choose_blocks(query, pooled, count // ratio, self.block_topk)
        tokens = tokens_of_blocks(chosen, count // ratio, count, ratio, length)
        return torch.zeros_like(tokens).scatter(-1, order, tokens)


@replaces_builtin
class Qwen4ExpTextAttention(builtin.Qwen4ExpTextAttention):
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
        fused = all(is_untouched(norm, Qwen4ExpTextRMSNorm) for norm in norms) and norms[0].eps == norms[1].eps
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
        if gathers_weights(self.indexer):
            raise input_error(*INDEXER_UNDER_ZERO_3)
        length = hidden_states.shape[1]
        options = options_of_layer(self, builtin.eager_attention_forward, kwargs, length)
        boundaries = options["boundaries"]
        # With a cache, these are the positions of its tokens too.
        query, key, value, gate = self.project(hidden_states, *(x[:, -length:] for x in position_embeddings))
        if boundaries is None and attention_mask is not None:
            chosen = self.indexer(hidden_states, position_embeddings, attention_mask, cache)
            # Masks of eager attention are added to the scores.
            blocked = False if attention_mask.dtype == torch.bool else torch.finfo(attention_mask.dtype).min
            attention_mask = attention_mask.masked_fill(~chosen, blocked)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        indexer: Any = self.indexer
        if boundaries is not None and needs_index(boundaries, **indexer.sizes):
            index = indexer.index(hidden_states, *position_embeddings)
            output, weights = indexed_attention(self, query, key, value, index, **options)
        else:
            output, weights = attention(self, query, key, value, attention_mask, **options)
        return self.finish(output, gate), weights


def add(streams: torch.Tensor, hidden_states: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Add `[B, T, hidden]` to each of the streams `[B, T, streams * hidden]`, times its factor."""
    separate = streams.unflatten(-1, (-1, hidden_states.shape[-1]))
    return add_to_streams(separate, hidden_states, factors).flatten(-2)


@fast_path
class Qwen4ExpTextGatedResidual(builtin.Qwen4ExpTextGatedResidual):
    def forward(self, hyper_input: torch.Tensor):
        """Mix the streams `[B, T, streams * hidden]` to one.

        With `block_inject_weight`, also return the streams, and the factors with which a result is added to each.
        """
        inject = [] if self.block_inject_weight is None else [self.block_inject_weight]
        normed, hyper_input = norm_of_stream(self.hc_norm, Qwen4ExpTextRMSNorm, hyper_input)
        low, *projected = project(normed, self.input_mix_weight_down, *inject)
        low, factors = stream_gates(low, projected[0] if projected else None, self.hc_count)
        (gate,) = project(low, self.input_mix_weight_up)
        mixed = mix_streams(*(x.unflatten(-1, (self.hc_count, self.hidden_size)) for x in (gate, normed)))
        return mixed if factors is None else (mixed, hyper_input, factors)


@replaces_builtin
class Qwen4ExpTextNGramEmbedding(builtin.Qwen4ExpTextNGramEmbedding):
    @takes_cache(CACHE)
    def forward(self, input_ids: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        """Embed the n-grams that end at each of the tokens `[B, T]`, after the tokens in the cache.

        The tokens of a packed row come with its boundaries instead. Before a document, they are EOS or those of its prompt.
        """
        boundaries: Any = cache
        if not isinstance(boundaries, SequenceBoundaries):
            return super().forward(input_ids, cache)
        eos: Any = self.eos_token_id
        spaced, places = with_contexts(input_ids.long(), boundaries, self.context_len, eos)
        return super().forward(spaced, None).index_select(1, places)


@replaces_builtin
class Qwen4ExpTextPLELayer(builtin.Qwen4ExpTextPLELayer):
    @takes_cache(CACHE)
    def _short_conv(self, hidden_states: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        boundaries: Any = cache
        if not isinstance(boundaries, SequenceBoundaries):
            return super()._short_conv(hidden_states, cache)
        if not is_untouched(self.conv1d, torch.nn.Conv1d):
            alone = builtin.Qwen4ExpTextPLELayer._short_conv
            once = gathers_weights(self.conv1d)
            output: Any = per_document(lambda x: alone(self, x, None), hidden_states, boundaries=boundaries, once=once)
            return output
        # A filter with zeros between its taps.
        (dilation,), width = self.conv1d.dilation, self.short_conv_state_len + 1
        weight = F.pad(self.conv1d.weight.transpose(1, 2), (0, dilation - 1)).flatten(1)[:, :width]
        return causal_conv1d(hidden_states, weight, None, "silu", boundaries=boundaries)


@replaces_builtin
class Qwen4ExpTextDecoderLayer(builtin.Qwen4ExpTextDecoderLayer):
    @takes_cache(CACHE)
    @reads_host_weights
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        conv_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        ple_input_ids: torch.LongTensor | None = None,
        **kwargs: Unpack[PackingKwargs],
    ) -> torch.Tensor:
        if self.ple is not None:
            boundaries = SequenceBoundaries.from_kwargs(kwargs, hidden_states.shape[1])
            # The stock layer passes what it gets as the cache to the two parts that read earlier tokens.
            earlier: Any = cache if boundaries is None else boundaries
            hidden_states = hidden_states + self.ple(hidden_states, ple_input_ids, earlier, conv_mask=conv_mask)

        hidden_states, streams, factors = self.attn_hyper_connection(hidden_states)
        if self.layer_type == "linear_attention":
            options = {LINEAR_CACHE: cache, **kwargs}
            hidden_states = self.linear_attn(hidden_states, attention_mask=conv_mask, **options)
        else:
            options = {CACHE: cache, **kwargs}
            hidden_states, _ = self.self_attn(
                hidden_states, position_embeddings, attention_mask=attention_mask, **options
            )
        streams = add(streams, hidden_states, factors)

        hidden_states, streams, factors = self.mlp_hyper_connection(streams)
        return add(streams, self.mlp(hidden_states), factors)


@replaces_builtin
class Qwen4ExpTextModel(PackedTextModelMixin, builtin.Qwen4ExpTextModel):
    # Masks of the indexer are tensors.
    _supports_flex_attn = False

    def forward_with_boundaries(self, boundaries: SequenceBoundaries | None, **inputs: Any) -> Any:
        if boundaries is not None:
            boundaries.check_kind("this model", SharedPrompts.kind)
        return super().forward_with_boundaries(boundaries, **inputs)


@replaces_builtin
class Qwen4ExpForCausalLM(LanguageModelMixin, builtin.Qwen4ExpForCausalLM):
    _supports_flex_attn = False


@replaces_builtin
class Qwen4ExpModel(PackedModelMixin, builtin.Qwen4ExpModel):
    @wraps(builtin.Qwen4ExpModel.get_image_features)
    def get_image_features(self, *args, **kwargs):
        outputs = super().get_image_features(*args, **without_packing(kwargs))
        return features_of_tokens("image", outputs, kwargs)

    @wraps(builtin.Qwen4ExpModel.get_video_features)
    def get_video_features(self, *args, **kwargs):
        outputs = super().get_video_features(*args, **without_packing(kwargs))
        return features_of_tokens("video", outputs, kwargs)

    @wraps(builtin.Qwen4ExpModel.compute_3d_position_ids)
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

    _supports_flex_attn = False


@replaces_builtin
class Qwen4ExpForConditionalGeneration(LanguageModelMixin, builtin.Qwen4ExpForConditionalGeneration):
    _supports_flex_attn = False


@fast_path
class Qwen4ExpTextMLP(builtin.Qwen4ExpTextMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = project(x, self.gate_proj, self.up_proj)
        if not is_untouched(self.act_fn, SiLUActivation, torch.nn.SiLU):
            return project(self.act_fn(gate) * up, self.down_proj)[0]
        return glu(gate, up, to_fuse(self.down_proj, gate))


@fast_path
class Qwen4ExpTextTopKRouter(builtin.Qwen4ExpTextTopKRouter):
    # Set by `PackingMetricsCallback`: the counts of the experts in this forward, and the number of real choices.
    expert_counts: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the logits of all experts, and the weights and indices of the chosen ones, for each token."""
        router_logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        # Only Qwen3-Next has the option not to normalize.
        normalize = getattr(self, "norm_topk_prob", True)
        weights, index = choose_experts(router_logits, self.top_k, normalize=normalize)
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
class Qwen4ExpTextSparseMoeBlock(builtin.Qwen4ExpTextSparseMoeBlock):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.flatten(0, 1)
        shared = self.shared_expert(rows)
        _, weights, index = self.gate(rows)
        gate = self.shared_expert_gate(rows)
        return run_experts(self.experts, rows, index, weights, shared, gate).view_as(hidden_states)
