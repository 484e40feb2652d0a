"""Qwen4-Exp with support for packed rows: the differences from Qwen3.5 and Qwen3-Next."""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache
from transformers.models.qwen4_exp import modeling_qwen4_exp as builtin
from transformers.processing_utils import Unpack

from ...boundaries import SequenceBoundaries
from ...errors import input_error
from ...ops import attention, causal_conv1d, gated_rms_norm, per_document, rms_norm
from ...ops.attention import options_of_layer
from ...ops.contexts import with_contexts
from ...ops.indexed_attention import (
    Index,
    choose_blocks,
    indexed_attention,
    needs_index,
    tokens_of_blocks,
)
from ...ops.streams import add_to_streams, mix_streams, stream_gates
from ...shared_prompts import SharedPrompts
from ..family import INDEXER_UNDER_ZERO_3
from ..host_parameters import reads_host_weights
from ..inputs import PackingKwargs
from ..outputs import LanguageModelMixin
from ..projections import gate_and_project, project
from ..qwen3_5.modular_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5Model
from ..qwen3_next.modular_qwen3_next import Qwen3NextAttention, Qwen3NextRMSNorm
from ..replacements import fast_path, replaces_builtin
from ..text_model import PackedTextModelMixin
from ..untouched import gathers_weights, is_untouched, norm_of_stream
from ..versions import CACHE, LINEAR_CACHE, takes_cache


# Elements of the keys that the indexer gathers for the queries of a chunk.
_GATHERED = 1 << 24


class Qwen4ExpTextGatedDeltaNet(Qwen3_5GatedDeltaNet):
    def finish(self, output: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Apply the norm, the gate z and the output layer to `[B, T, HV, V]`."""
        activation = getattr(self.norm, "activation", "silu")
        return gate_and_project(self.norm, Qwen4ExpTextRMSNormGated, self.out_proj, output, z, activation=activation)


class Qwen4ExpTextRMSNorm(Qwen3NextRMSNorm):
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


class Qwen4ExpTextAttention(Qwen3NextAttention):
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


class Qwen4ExpModel(Qwen3_5Model):
    _supports_flex_attn = False


@replaces_builtin
class Qwen4ExpForConditionalGeneration(LanguageModelMixin, builtin.Qwen4ExpForConditionalGeneration):
    _supports_flex_attn = False


# Those of Qwen3-Next, on the stock classes of this family.
SAME = [("qwen3_next", "Qwen3Next", "Qwen4ExpText", "MLP TopKRouter SparseMoeBlock")]
