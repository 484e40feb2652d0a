"""Fused ops against the stock modules that they replace, and calls that they refuse. test_fused.py has their kernels."""

import unittest

import pytest
import torch
from common.fused import errors, relative
from mixins.op import BuiltinTesterMixin
from mixins.triton import InterpretedKernelsTest, bad_input_tests
from parameterized import parameterized
from transformers import Qwen3_5TextConfig
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron_h
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin

from transformers_packed.ops import gated_delta_gates, gated_rms_norm, glu, qk_norm_rope, rms_norm


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def rotate(query_gate=(1, 5, 2, 16), key=(1, 5, 1, 8), weights=(8,), cos=(1, 5, 4), sin=None, impl="auto"):
    shapes = (query_gate, key, weights, weights, cos, sin or cos)
    return qk_norm_rope(*(ones(*shape) for shape in shapes), impl=impl)


HALF = ones(1, 5, 48, dtype=torch.float64)
SHAPES = [
    ("norm_weight", lambda: rms_norm(ones(2, 4), ones(3)), r"expected .*\(3,\)"),
    ("norm_residual", lambda: rms_norm(ones(2, 4), ones(4), residual=ones(1, 4)), "residual"),
    ("gated_norm_weight", lambda: gated_rms_norm(ones(2, 4), ones(2, 4), ones(1)), "expected"),
    ("gated_norm_gate", lambda: gated_rms_norm(ones(2, 4), ones(4), ones(4)), "gate"),
    (
        "norm_linear_weight",
        lambda: gated_rms_norm(*(ones(2, 3, 4),) * 2, ones(4), linear_weight=ones(5, 4)),
        r"expected a weight \[out, 12\]",
    ),
    (
        "activation",
        lambda: glu(ones(2, 4), ones(2, 4), activation="gelu"),
        r"expected an activation of .*'silu'.*got \"gelu\"",
    ),
    ("swiglu", lambda: glu(ones(2, 4), ones(4)), "expected gate and hidden_states of the same shape"),
    ("swiglu_linear_weight", lambda: glu(*(ones(2, 4),) * 2, ones(4, 3)), r"a weight \[out, 4\]"),
    ("rotary_tokens", lambda: rotate(key=(1, 4, 1, 8)), "expected"),
    ("rotary_weights", lambda: rotate(weights=(4,)), r"weights \[dim\]"),
    ("rotary_cos", lambda: rotate(cos=(1, 4, 4)), "expected"),
    ("rotary_odd", lambda: rotate(cos=(1, 5, 3)), "expected"),
    ("decay_b", lambda: gated_delta_gates(ones(2, 4), ones(2, 3), ones(4), ones(4)), "expected"),
    ("decay_a_log", lambda: gated_delta_gates(ones(2, 4), ones(2, 4), ones(1), ones(4)), "value heads"),
]
UNSERVED = [
    ("norm_width", lambda impl: rms_norm(ones(1, 16400), ones(16400), impl=impl), "widths up to 16384, not 16400"),
    ("norm_float64", lambda impl: rms_norm(HALF, HALF[0, 0], impl=impl), "not torch.float64"),
    ("swiglu_dtypes", lambda impl: glu(ones(4), ones(4, dtype=torch.bfloat16), impl=impl), "needs one dtype"),
    (
        "gate_linear_dtypes",
        lambda impl: glu(ones(2, 4, dtype=torch.bfloat16), ones(2, 4), ones(3, 4), activation="sigmoid", impl=impl),
        "needs one dtype",
    ),
    ("rotary_dim", lambda impl: rotate((1, 5, 2, 24), (1, 5, 1, 12), (12,), impl=impl), "power of two"),
    ("rotary_none", lambda impl: rotate(cos=(1, 5, 0), impl=impl), "needs rotary channels"),
    (
        "decay_float64",
        lambda impl: gated_delta_gates(HALF, HALF, HALF[0, 0], HALF[0, 0], impl=impl),
        "not torch.float64",
    ),
]


class ReferenceTest(BuiltinTesterMixin, unittest.TestCase):
    def test_rms_norm(self):
        module = builtin.Qwen3_5RMSNorm(40, eps=1e-5)
        x, residual, weight = self.normal(2, 7, 40), self.normal(2, 7, 40), self.normal(40)
        self.assert_same(
            lambda x, w: (rms_norm(x, w, 1e-5, impl="reference"),),
            lambda x, w: (self.call(module, weight=w)(x),),
            [x, weight],
        )

        def added(x, residual, w):
            stream = residual + x
            return self.call(module, weight=w)(stream), stream

        self.assert_same(
            lambda x, r, w: rms_norm(x, w, 1e-5, residual=r, impl="reference"), added, [x, residual, weight]
        )

    def test_gated_rms_norm(self):
        module = builtin.Qwen3_5RMSNormGated(40, eps=1e-5)
        self.assert_same(
            lambda x, gate, w: (gated_rms_norm(x, gate, w, 1e-5, impl="reference"),),
            lambda x, gate, w: (self.call(module, weight=w)(x, gate),),
            [self.normal(9, 40), self.normal(9, 40), self.normal(40)],
        )

    def test_sigmoid(self):
        """As in Kimi Linear, also in bfloat16: only the result is rounded."""
        stock = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
        module = stock.KimiLinearRMSNormGated(40, eps=1e-5)
        inputs = [self.normal(9, 40), self.normal(9, 40), self.normal(40)]

        def ours(x, gate, weight):
            return (gated_rms_norm(x, gate, weight, 1e-5, activation="sigmoid", impl="reference"),)

        self.assert_same(ours, lambda x, gate, w: (self.call(module, weight=w)(x, gate),), inputs)
        x, gate, weight = (x.bfloat16() for x in inputs)
        self.assertTrue(torch.equal(ours(x, gate, weight)[0], self.call(module, weight=weight)(x, gate)))
        for options in ({"activation": "gelu"}, {"activation": "sigmoid", "gate_first": True}):
            with self.assertRaisesRegex(ValueError, 'the activation "silu", or "sigmoid" without gate_first'):
                gated_rms_norm(*inputs, **options)

    @parameterized.expand([(1,), (4,)])
    def test_gate_first(self, groups):
        module = nemotron_h.NemotronHRMSNormGated(40, 40 // groups, eps=1e-5)

        def ours(x, gate, weight):
            x, gate, weight = (z.unflatten(-1, (groups, -1)) for z in (x, gate, weight))
            return (gated_rms_norm(x, gate, weight, 1e-5, gate_first=True, impl="reference").flatten(-2),)

        inputs = [self.normal(9, 40), self.normal(9, 40), self.normal(40)]
        self.assert_same(ours, lambda x, gate, w: (self.call(module, weight=w)(x, gate),), inputs)

    def test_swiglu(self):
        config = Qwen3_5TextConfig(hidden_size=8, intermediate_size=24)
        module = builtin.Qwen3_5MLP(config, 24)
        self.assert_same(
            lambda x: (module.down_proj(glu(module.gate_proj(x), module.up_proj(x), impl="reference")),),
            lambda x: (module(x),),
            [self.normal(2, 7, 8)],
        )

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

    def test_gated_delta_gates(self):
        def theirs(a, b, a_log, dt_bias):
            return -a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias), b.sigmoid()

        inputs = [self.normal(2, 7, 6), self.normal(2, 7, 6), self.normal(6), self.normal(6)]
        self.assert_same(lambda *x: gated_delta_gates(*x, impl="reference"), theirs, inputs)


class BadInputTest(bad_input_tests(SHAPES, UNSERVED)):
    def test_weights_of_the_heads_have_one_dtype(self):
        query_gate, key, weight, _, cos, sin = (
            ones(*x) for x in ((1, 5, 2, 16), (1, 5, 1, 8), (8,), (8,), *2 * [(1, 5, 4)])
        )
        with self.assertRaisesRegex(ValueError, "weights of one dtype"):
            qk_norm_rope(query_gate, key, weight, weight.bfloat16(), cos, sin, impl="triton")
        with self.assertRaisesRegex(ValueError, "does not compute gradients of cos and sin"):
            qk_norm_rope(query_gate, key, weight, weight, cos.requires_grad_(), sin, impl="triton")


class KernelsTest(InterpretedKernelsTest):
    def test_gradients_of_gates_add_up_over_all_tokens_of_a_program(self):
        # On a CPU, 4 programs share tiles of 64 tokens.
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(shape, generator=generator) for shape in ((321, 3), (321, 3), (3,), (3,))]
        found = []
        for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
            leaves = [x.to(dtype).requires_grad_() for x in inputs]
            g, beta = gated_delta_gates(*leaves, impl=impl)
            found.append(torch.autograd.grad(g.sum() + beta.sum(), leaves))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5, check_dtype=False)

    def test_results_may_be_changed_in_place(self):
        """As with a hook on a norm: the gradients are those of the changed result."""
        for name, residual in (("alone", None), ("residual", torch.randn(2, 3, 8))):
            x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
            found = {}
            for impl in ("triton", "reference"):
                result = rms_norm(x, weight, residual=residual, impl=impl)
                normed = result if residual is None else result[0]
                found[impl] = torch.autograd.grad(normed.mul_(2).sin().sum(), (x, weight))
            for got, expected in zip(found["triton"], found["reference"], strict=True):
                with self.subTest(name):
                    self.assertLess((got - expected).abs().max(), 1e-4)

    def test_a_stream_in_another_precision(self):
        """Under autocast, the result of a layer is bfloat16 and the residual stream float32."""
        generator = torch.Generator().manual_seed(0)
        x, residual = (torch.randn(3, 7, 48, generator=generator) for _ in range(2))
        weight, x = torch.randn(48, generator=generator), x.bfloat16()
        results = {}
        for impl in ("reference", "triton"):
            leaves = [y.detach().clone().requires_grad_() for y in (x, residual, weight)]
            normed, stream = rms_norm(leaves[0], leaves[2], residual=leaves[1], impl=impl)
            (normed.square().sum() + stream.sin().sum()).backward()
            results[impl] = [normed.detach(), stream.detach(), *(y.grad for y in leaves)]
        for actual, expected in zip(results["triton"], results["reference"], strict=True):
            self.assertEqual(actual.dtype, expected.dtype)
            self.assertLess(relative(actual, expected), 1e-6 if actual.dtype == torch.float32 else 1e-2)

    @parameterized.expand([("silu",), ("sigmoid",)])
    def test_without_a_dimension_of_tokens(self, activation):
        found = []
        for impl in ("triton", "reference"):
            leaves = [x.requires_grad_() for x in torch.linspace(-1, 1, 96).split([16, 16, 64])]
            y = glu(leaves[0], leaves[1], leaves[2].view(4, 16), activation=activation, impl=impl)
            found.append(torch.autograd.grad(y.square().sum(), leaves))
        self.assertLess(max(errors(*found)), 1e-6)
