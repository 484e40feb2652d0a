"""RMS norms. test_fused.py has the common tests of fused ops."""

import unittest

import pytest
import torch
from common.fused import relative
from mixins.op import BuiltinTesterMixin
from mixins.triton import InterpretedKernelsTest, bad_input_tests
from parameterized import parameterized
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin

from transformers_packed.ops import gated_rms_norm, rms_norm


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


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
        "norm_linear_gate",
        lambda: gated_rms_norm(ones(2, 3, 4), ones(2, 12), ones(4), linear_weight=ones(5, 12)),
        "expected hidden_states and gate",
    ),
]
UNSERVED = [
    ("norm_width", lambda impl: rms_norm(ones(1, 16400), ones(16400), impl=impl), "widths up to 16384, not 16400"),
    ("norm_float64", lambda impl: rms_norm(HALF, HALF[0, 0], impl=impl), "not torch.float64"),
    (
        "norm_dtypes",
        lambda impl: rms_norm(ones(2, 4), ones(4), residual=ones(2, 4, dtype=torch.float64), impl=impl),
        "not torch.float64",
    ),
    (
        "gated_norm_dtypes",
        lambda impl: gated_rms_norm(ones(2, 4), ones(2, 4, dtype=torch.bfloat16), ones(4), impl=impl),
        "needs one dtype",
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
        module = mamba2.MambaRMSNormGated(40, 40 // groups, eps=1e-5)

        def ours(x, gate, weight):
            x, gate, weight = (z.unflatten(-1, (groups, -1)) for z in (x, gate, weight))
            return (gated_rms_norm(x, gate, weight, 1e-5, gate_first=True, impl="reference").flatten(-2),)

        inputs = [self.normal(9, 40), self.normal(9, 40), self.normal(40)]
        self.assert_same(ours, lambda x, gate, w: (self.call(module, weight=w)(x, gate),), inputs)


class BadInputTest(bad_input_tests(SHAPES, UNSERVED)):
    pass


class InPlaceTest(InterpretedKernelsTest):
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


class AutocastTest(InterpretedKernelsTest):
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


if __name__ == "__main__":
    unittest.main()
