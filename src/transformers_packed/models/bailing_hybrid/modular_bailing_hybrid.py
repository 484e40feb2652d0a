"""Bailing-Hybrid with support for packed rows: the differences from Kimi Linear."""

from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as builtin
from transformers.processing_utils import Unpack

from ...ops import kimi_delta_rule
from ..inputs import PackingKwargs
from ..kimi_linear.modular_kimi_linear import KimiLinearAttention, KimiLinearDeltaAttention
from ..projections import project
from ..versions import CACHE, takes_cache


class BailingHybridDeltaAttention(KimiLinearDeltaAttention):
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

    def rule(self, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        gate = self.forget_gate
        if self.fuses_gate:
            # The decay stays in float32, which the stock class rounds to the dtype of the layer.
            options |= {"a_log": gate.A_log, "dt_bias": gate.dt_bias}
            options |= {"lower_bound": gate.lower_bound if gate.safe_gate else None}
        return kimi_delta_rule(*tensors, **options)


class BailingHybridAttention(KimiLinearAttention):
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


# Those of Kimi Linear, on the stock classes of this family.
SAME = [
    (
        "kimi_linear",
        "KimiLinear",
        "BailingHybrid",
        "RMSNorm RMSNormGated MLP TopkRouter MoE DecoderLayer Model ForCausalLM",
    )
]
