import unittest

import torch
from mixins.model import VOCAB_SIZE, PackedModelTesterMixin
from mixins.padding import PackedPaddingRouterTesterMixin
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as builtin

from transformers_packed.models.qwen4_exp import modeling_qwen4_exp as packed


OPTIONS = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "hc_lowrank": 8,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 32,
    "heads_per_ngram": 4,
    "ngram_vocab_size_base": 256,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 24,
    "indexer_compress_ratio": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "initializer_range": 0.15,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}


class Qwen4ExpModelTest(PackedPaddingRouterTesterMixin, PackedModelTesterMixin, unittest.TestCase):
    """Most documents are longer than the budget of the indexer."""

    builtin_class = builtin.Qwen4ExpForCausalLM
    packed_class = packed.Qwen4ExpForCausalLM
    is_moe = True
    constants = (*PackedModelTesterMixin.constants, "ple.conv1d")

    def get_config(self, **options):
        return Qwen4ExpTextConfig(**OPTIONS | options)

    def leaves(self, model):
        """The layers of n-grams take the tokens beside embeddings."""
        row = torch.cat(self.documents)[None]
        batch, leaves = super().leaves(model)
        return batch | {"ple_input_ids": row}, leaves
