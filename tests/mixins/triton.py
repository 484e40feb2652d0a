"""Run the Triton kernels of this package on a CPU, in Triton's interpreter. conftest.py enables it."""

import unittest
from importlib.util import find_spec
from unittest import mock

import torch
from parameterized import parameterized


@unittest.skipIf(torch.cuda.is_available(), "the kernels run on the GPU here, in tests/gpu")
@unittest.skipUnless(find_spec("triton"), "needs triton")
class InterpretedKernelsTest(unittest.TestCase):
    def setUp(self):
        self.enterContext(mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: True))
        # The convolution works the same for short runs of tokens, which are cheaper to interpret.
        self.enterContext(
            mock.patch.multiple("transformers_packed.ops.backends.triton.convolution", _TOKENS=2, _RUNS=32)
        )

    def assert_same_bits(self, actual, expected, message=None):
        for a, b in zip(actual, expected, strict=True):
            self.assertTrue(torch.equal(a, b), message)

    def check_what_the_kernel_does_not_serve(self, call, message):
        with self.assertRaisesRegex(ValueError, message):
            call("triton")
        # Only the kernel refuses the call.
        call("auto")


def bad_input_tests(shapes: list[tuple], unserved: list[tuple]) -> type[InterpretedKernelsTest]:
    """Build tests of refused calls, and of calls that only the reference supports: (name, call, message) each."""

    class BadInputTests(InterpretedKernelsTest):
        @parameterized.expand(shapes)
        def test_shapes(self, _, call, message):
            with self.assertRaisesRegex(ValueError, message):
                call()

        @parameterized.expand(unserved)
        def test_what_the_kernel_does_not_serve(self, _, call, message):
            self.check_what_the_kernel_does_not_serve(call, message)

    return BadInputTests
