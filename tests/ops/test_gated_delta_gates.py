"""The decay and the rate of the gated delta rule. test_fused.py has the common tests of fused ops."""

import unittest

import torch
from mixins.op import BuiltinTesterMixin
from mixins.triton import bad_input_tests

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


class BadInputTest(bad_input_tests(SHAPES, UNSERVED)):
    pass


if __name__ == "__main__":
    unittest.main()
