"""The ops of residuals of several streams. test_fused.py has the common tests of their kernels."""

import torch
from common.fused import assert_near, relative
from mixins.triton import InterpretedKernelsTest, bad_input_tests
from parameterized import parameterized

from transformers_packed.ops.streams import add_to_streams, mix_streams, stream_gates


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


class StreamsTest(InterpretedKernelsTest):
    @parameterized.expand([(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
    def test_mixed_dtypes(self, first, second):
        """As under autocast, where streams are in float32 and the outputs of linear layers are not."""
        streams, x, factors = normal(1, 5, 4, 33, dtype=first), normal(1, 5, 33), normal(1, 5, 4)
        for op, others in ((mix_streams, [streams.neg()]), (add_to_streams, [x, factors])):
            inputs = [streams, *(y.to(second) for y in others)]
            found = []
            for impl in ("triton", "reference"):
                leaves = [y.clone().requires_grad_() for y in inputs]
                output = op(*leaves, impl=impl)
                found.append([output, *torch.autograd.grad(output.sum(), leaves)])
            for a, b in zip(*found, strict=True):
                self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
                self.assertLess(relative(a, b), 1e-2)

    def test_gates_without_factors(self):
        """As before the head, which adds nothing to the streams."""
        found = []
        for impl in ("triton", "reference"):
            low = normal(1, 5, 33).requires_grad_()
            output, factors = stream_gates(low, None, 4, impl=impl)
            self.assertIsNone(factors)
            found.append([output, *torch.autograd.grad(output.sum(), low)])
        assert_near(*found, 1e-5)


class StreamsBadInputTest(
    bad_input_tests(
        [
            ("gates", lambda: stream_gates(normal(2, 8), normal(2, 3), 4), "for S streams, got .*3.* for 4"),
            ("no streams", lambda: stream_gates(normal(2, 8), None, 0), "none for 0"),
            ("mix", lambda: mix_streams(normal(2, 4, 8), normal(2, 3, 8)), "the same shape"),
            ("row", lambda: add_to_streams(normal(2, 4, 8), normal(2, 7), normal(2, 4)), r"streams \[..., S, width\]"),
            ("factors", lambda: add_to_streams(normal(2, 4, 8), normal(2, 8), normal(2, 3)), "got .*3"),
        ],
        [
            ("gates", lambda impl: stream_gates(*[normal(1, 2).double()] * 2, 2, impl=impl), "float64"),
            ("mix", lambda impl: mix_streams(*[normal(1, 2, 4).double()] * 2, impl=impl), "float64"),
            (
                "add",
                lambda impl: add_to_streams(normal(1, 1, 16385), normal(1, 16385), normal(1, 1), impl=impl),
                "16384",
            ),
        ],
    )
):
    pass
