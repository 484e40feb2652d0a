"""Norm and rotary positions of queries and keys. test_fused.py has the common tests of fused ops."""

import unittest

import torch
from mixins.op import BuiltinTesterMixin
from mixins.triton import bad_input_tests
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin

from transformers_packed.ops import qk_norm_rope


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def rotate(query_gate=(1, 5, 2, 16), key=(1, 5, 1, 8), weights=(8,), cos=(1, 5, 4), sin=None, impl="auto"):
    shapes = (query_gate, key, weights, weights, cos, sin or cos)
    return qk_norm_rope(*(ones(*shape) for shape in shapes), impl=impl)


SHAPES = [
    ("rotary_gate", lambda: rotate(query_gate=(1, 5, 2, 8)), "expected"),
    ("rotary_tokens", lambda: rotate(key=(1, 4, 1, 8)), "expected"),
    ("rotary_ndim", lambda: rotate(query_gate=(5, 2, 16), key=(5, 1, 8)), "expected"),
    ("rotary_weights", lambda: rotate(weights=(4,)), r"weights \[dim\]"),
    ("rotary_cos", lambda: rotate(cos=(1, 4, 4)), "expected"),
    ("rotary_cos_ndim", lambda: rotate(cos=(5, 4)), "expected"),
    ("rotary_sin", lambda: rotate(sin=(1, 5, 2)), "expected"),
    ("rotary_odd", lambda: rotate(cos=(1, 5, 3)), "expected"),
    ("rotary_too_wide", lambda: rotate(cos=(1, 5, 10)), "expected"),
]
UNSERVED = [
    ("rotary_dim", lambda impl: rotate((1, 5, 2, 24), (1, 5, 1, 12), (12,), impl=impl), "power of two"),
    ("rotary_none", lambda impl: rotate(cos=(1, 5, 0), impl=impl), "needs rotary channels"),
]


class ReferenceTest(BuiltinTesterMixin, unittest.TestCase):
    def test_qk_norm_rope(self):
        norm = builtin.Qwen3_5RMSNorm(16)
        config = Qwen3_5TextConfig(
            hidden_size=64,
            num_attention_heads=3,
            head_dim=16,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        )
        cos, sin = builtin.Qwen3_5TextRotaryEmbedding(config)(self.normal(1), torch.arange(7)[None].expand(3, 2, 7))
        self.assertEqual(cos.shape, (2, 7, 8))

        def theirs(query_gate, key, query_weight, key_weight):
            query, gate = query_gate.chunk(2, dim=-1)
            query = self.call(norm, weight=query_weight)(query).transpose(1, 2)
            key = self.call(norm, weight=key_weight)(key).transpose(1, 2)
            query, key = builtin.apply_rotary_pos_emb(query, key, cos, sin)
            return query.transpose(1, 2), key.transpose(1, 2), gate

        inputs = [self.normal(2, 7, 3, 32), self.normal(2, 7, 1, 16), self.normal(16), self.normal(16)]
        self.assert_same(lambda *x: qk_norm_rope(*x, cos, sin, impl="reference"), theirs, inputs)


class BadInputTest(bad_input_tests(SHAPES, UNSERVED)):
    def test_weights_of_the_heads_have_one_dtype(self):
        query_gate, key, weight, _, cos, sin = (
            ones(*x) for x in ((1, 5, 2, 16), (1, 5, 1, 8), (8,), (8,), *2 * [(1, 5, 4)])
        )
        with self.assertRaisesRegex(ValueError, "weights of one dtype"):
            qk_norm_rope(query_gate, key, weight, weight.bfloat16(), cos, sin, impl="triton")
        with self.assertRaisesRegex(ValueError, "does not compute gradients of cos and sin"):
            qk_norm_rope(query_gate, key, weight, weight, cos.requires_grad_(), sin, impl="triton")


if __name__ == "__main__":
    unittest.main()
