"""The decay and the rate of the gated delta rule. test_fused.py has the common tests of fused ops."""

import unittest

import torch
from mixins.op import BuiltinTesterMixin
from mixins.triton import InterpretedKernelsTest, bad_input_tests

from transformers_packed.ops import gated_delta_gates


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


HALF = ones(1, 5, 48, dtype=torch.float64)
SHAPES = [
    ("decay_b", lambda: gated_delta_gates(ones(2, 4), ones(2, 3), ones(4), ones(4)), "expected"),
    ("decay_a_log", lambda: gated_delta_gates(ones(2, 4), ones(2, 4), ones(1), ones(4)), "value heads"),
    ("decay_dt_bias", lambda: gated_delta_gates(ones(2, 4), ones(2, 4), ones(4), ones(2, 4)), "value heads"),
]
UNSERVED = [
    (
        "decay_float64",
        lambda impl: gated_delta_gates(HALF, HALF, HALF[0, 0], HALF[0, 0], impl=impl),
        "not torch.float64",
    ),
]


class ReferenceTest(BuiltinTesterMixin, unittest.TestCase):
    def test_gated_delta_gates(self):
        def theirs(a, b, a_log, dt_bias):
            return -a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias), b.sigmoid()

        inputs = [self.normal(2, 7, 6), self.normal(2, 7, 6), self.normal(6), self.normal(6)]
        self.assert_same(lambda *x: gated_delta_gates(*x, impl="reference"), theirs, inputs)


class InterpretedTest(InterpretedKernelsTest):
    def test_gradients_of_parameters_add_up_over_all_tokens_of_a_program(self):
        # On a CPU, 4 programs share tiles of 64 tokens.
        generator = torch.Generator().manual_seed(0)
        inputs = [torch.randn(shape, generator=generator) for shape in ((321, 3), (321, 3), (3,), (3,))]
        found = []
        for impl, dtype in (("triton", torch.float32), ("reference", torch.float64)):
            leaves = [x.to(dtype).requires_grad_() for x in inputs]
            g, beta = gated_delta_gates(*leaves, impl=impl)
            found.append(torch.autograd.grad(g.sum() + beta.sum(), leaves))
        for actual, expected in zip(*found, strict=True):
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


class BadInputTest(bad_input_tests(SHAPES, UNSERVED)):
    pass


if __name__ == "__main__":
    unittest.main()
