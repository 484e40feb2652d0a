"""Gated linear units. test_fused.py has the common tests of fused ops."""

import unittest

import torch
from common.fused import errors
from mixins.op import BuiltinTesterMixin
from mixins.triton import InterpretedKernelsTest, bad_input_tests
from parameterized import parameterized
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin

from transformers_packed.ops import glu


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


HALF = ones(1, 5, 48, dtype=torch.float64)
SHAPES = [
    (
        "activation",
        lambda: glu(ones(2, 4), ones(2, 4), activation="gelu"),
        r"expected an activation of .*'silu'.*got \"gelu\"",
    ),
    ("swiglu", lambda: glu(ones(2, 4), ones(4)), "expected gate and hidden_states of the same shape"),
    ("sigmoid_gate", lambda: glu(ones(2, 4), ones(2, 1), activation="sigmoid"), "expected gate and hidden_states"),
    ("swiglu_linear", lambda: glu(ones(2, 4), ones(4), ones(3, 4)), "expected gate and hidden_states"),
    ("swiglu_linear_weight", lambda: glu(*(ones(2, 4),) * 2, ones(4, 3)), r"a weight \[out, 4\]"),
    ("gate_linear_ndim", lambda: glu(*(ones(2, 4),) * 2, ones(4), activation="sigmoid"), r"a weight \[out, 4\]"),
]
UNSERVED = [
    ("swiglu_dtypes", lambda impl: glu(ones(4), ones(4, dtype=torch.bfloat16), impl=impl), "needs one dtype"),
    (
        "gate_linear_dtypes",
        lambda impl: glu(ones(2, 4, dtype=torch.bfloat16), ones(2, 4), ones(3, 4), activation="sigmoid", impl=impl),
        "needs one dtype",
    ),
    ("swiglu_float64", lambda impl: glu(HALF, HALF, impl=impl), "not torch.float64"),
    ("sigmoid_gate_float64", lambda impl: glu(HALF, HALF, activation="sigmoid", impl=impl), "not torch.float64"),
]


class ReferenceTest(BuiltinTesterMixin, unittest.TestCase):
    def test_swiglu(self):
        config = Qwen3_5TextConfig(hidden_size=8, intermediate_size=24)
        module = builtin.Qwen3_5MLP(config, 24)
        self.assert_same(
            lambda x: (module.down_proj(glu(module.gate_proj(x), module.up_proj(x), impl="reference")),),
            lambda x: (module(x),),
            [self.normal(2, 7, 8)],
        )

    def test_sigmoid_gate(self):
        self.assert_same(
            lambda gate, x: (glu(gate, x, activation="sigmoid", impl="reference"),),
            lambda gate, x: (x * torch.sigmoid(gate),),
            [self.normal(2, 7, 8), self.normal(2, 7, 8)],
        )


class BadInputTest(bad_input_tests(SHAPES, UNSERVED)):
    pass


class OneTokenTest(InterpretedKernelsTest):
    @parameterized.expand([("silu",), ("sigmoid",)])
    def test_without_a_dimension_of_tokens(self, activation):
        found = []
        for impl in ("triton", "reference"):
            leaves = [x.requires_grad_() for x in torch.linspace(-1, 1, 96).split([16, 16, 64])]
            y = glu(leaves[0], leaves[1], leaves[2].view(4, 16), activation=activation, impl=impl)
            found.append(torch.autograd.grad(y.square().sum(), leaves))
        self.assertLess(max(errors(*found)), 1e-6)


if __name__ == "__main__":
    unittest.main()
