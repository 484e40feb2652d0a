import unittest
from unittest import mock

import torch
from common.releases import RELEASE
from mixins.model import (
    PackedModelTesterMixin,
    PackedVariantTesterMixin,
    alone,
    gradients,
    packed_batch,
    relative_error,
    total_relative_error,
)
from mixins.padding import PackedPaddingRouterTesterMixin, PackedPaddingTesterMixin
from mixins.patch import EXPERTS
from mixins.vision import PIXELS, TEXT, PackedVisionTesterMixin, vision_config
from packaging.version import Version
from parameterized import parameterized
from transformers import Qwen4ExpConfig, Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as builtin

from transformers_packed.models.qwen4_exp import modeling_qwen4_exp as packed
from transformers_packed.parallel import shard_batch


OPTIONS = TEXT | {
    "layer_types": ["linear_attention", "indexed_attention"],
    **EXPERTS,
    "hc_lowrank": 8,
    "ple_layer_ids": [1],
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
    # Without an embedding of zeros, for which the scores of all blocks are equal.
    "pad_token_id": None,
    "eos_token_id": 2,
    "initializer_range": 0.15,
}


class SkipsEagerTesterMixin:
    def models(self, attn_implementation: str = "sdpa", **kwargs):
        if attn_implementation == "eager" and RELEASE < Version("5.23"):
            self.skipTest("this release computes NaN for the queries of padding, which attend to nothing")
        return super().models(attn_implementation, **kwargs)


class Qwen4ExpModelTest(
    SkipsEagerTesterMixin, PackedPaddingRouterTesterMixin, PackedModelTesterMixin, unittest.TestCase
):
    """Most documents are longer than the budget of the indexer."""

    builtin_class = builtin.Qwen4ExpForCausalLM
    packed_class = packed.Qwen4ExpForCausalLM
    is_moe = True
    # Three times what the gradients of the decay differ by on processors with AVX2 alone.
    decay_bar = 3e-4
    constants = (*PackedModelTesterMixin.constants, "ple.conv1d")
    attention_kind = "indexed_attention"
    has_flex = False
    # The stock indexer reads the positions of each row.
    has_shared_positions = False

    def get_config(self, **options):
        return Qwen4ExpTextConfig(**OPTIONS | options)

    def leaves(self, model):
        """The layers of n-grams take the tokens beside embeddings."""
        row = torch.cat(self.documents)[None]
        batch, leaves = super().leaves(model)
        return batch | {"ple_input_ids": row}, leaves

    def test_documents_with_and_without_eos(self):
        """N-grams end at EOS, as in the stock class, and at the boundaries of documents."""
        generator = torch.Generator().manual_seed(3)
        documents = [torch.randint(1, 9, (n,), generator=generator) for n in (1, 2, 40, 3, 70)]
        self.assertGreater(sum(int((document == 2).sum()) for document in documents), 5)
        builtin, model = self.models()
        logits, loss = alone(builtin, documents)
        output = model(**packed_batch(documents))
        self.assertLess(relative_error(output.logits[0], torch.cat(logits)), self.logits_bar)
        self.assertLess(relative_error(output.loss, loss), self.logits_bar)

    def test_hooks_run(self):
        """A module with a hook is called in a packed row too. One that changes nothing leaves the result as it is."""
        _, model = self.models()
        batch, calls = packed_batch(self.documents), []
        expected = model(**batch).logits
        ple, attention = model.model.layers[0].ple, model.model.layers[1].self_attn
        hooked = [ple.conv1d, ple.norm_conv, ple.key_proj, ple.ple_embedding.ngram_embedding, ple]
        hooked += [attention.indexer.k_layernorm, attention.indexer.index_qk_proj, attention.q_norm]
        hooked += [model.model.layers[0].attn_hyper_connection.hc_norm, model.model.hyper_connection_mixer]
        for module in hooked:
            module.register_forward_hook(lambda module, *_: calls.append(module))
        self.assertLess(relative_error(model(**batch).logits, expected), 1e-5)
        self.assertEqual(set(calls), set(hooked))
        ple.conv1d.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
        self.assertGreater(relative_error(model(**batch).logits, expected), 1e-3)

    @parameterized.expand([("sigmoid", {"output_gate_type": "sigmoid"}), ("without_ngrams", {"ple_layer_ids": []})])
    def test_other_configurations(self, _, options):
        with mock.patch.dict(OPTIONS, options):
            builtin, model = self.models()
        logits, loss = self.alone(builtin)
        output = model(**packed_batch(self.documents))
        self.assertLess(relative_error(output.logits[0], torch.cat(logits)), self.logits_bar)
        got, want = gradients(model, output.loss), gradients(builtin, loss)
        self.assertEqual(got.keys(), want.keys())
        self.assertLess(total_relative_error(got, want), self.gradient_bar)

    def test_documents_within_the_budget_compute_no_index(self):
        _, model = self.models()
        calls = []
        indexer = model.model.layers[1].self_attn.indexer
        indexer.index_qk_proj.register_forward_hook(lambda *_: calls.append("ran"))
        for lengths, expected in (((27, 5), 0), ((28, 5), 1)):
            model(**packed_batch([torch.arange(1, n + 1) for n in lengths]))
            self.assertEqual(len(calls), expected)

    def test_a_part_of_a_row_is_refused(self):
        _, model = self.models()
        part = shard_batch(packed_batch(self.documents, "cu_seqlens"), 0, 2)
        with self.assertRaisesRegex(
            ValueError, "this model does not support a part of a row. Train without sequence parallelism"
        ):
            model(**part)

    def test_half_precision(self):
        """In bfloat16, the packed row is about as close to float32 as documents alone in the stock class."""
        builtin, model = self.models()
        with torch.no_grad():
            logits = torch.cat(self.alone(builtin)[0])
            stock = torch.cat(self.alone(builtin.bfloat16())[0]).float()
            ours = model.bfloat16()(**packed_batch(self.documents)).logits[0].float()
        self.assertLess(relative_error(ours, logits), 2.4 * relative_error(stock, logits))


class Qwen4ExpVisionTest(
    SkipsEagerTesterMixin,
    PackedPaddingTesterMixin,
    PackedVisionTesterMixin,
    PackedVariantTesterMixin,
    unittest.TestCase,
):
    builtin_class = builtin.Qwen4ExpForConditionalGeneration
    packed_class = packed.Qwen4ExpForConditionalGeneration
    is_moe = True
    constants = Qwen4ExpModelTest.constants
    attention_kind = "indexed_attention"
    has_flex = False
    has_shared_positions = False
    # Rounding: the gradients of random sums of states differ by up to 2e-4, depending on the seed.
    gradient_bar = 5e-4

    def leaves(self, model):
        """The model finds tokens by their embeddings, which therefore cannot change."""
        batch = packed_batch(self.documents, model=model)
        return batch, {name: batch[name] for name in PIXELS}

    def get_config(self):
        return Qwen4ExpConfig(**vision_config(OPTIONS))
