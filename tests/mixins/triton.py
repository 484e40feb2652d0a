"""Runs this package's Triton kernels on a CPU, in Triton's interpreter, which conftest.py turns on."""

import unittest
from importlib.util import find_spec
from unittest import mock

import torch


@unittest.skipIf(torch.cuda.is_available(), "the kernels run on the GPU here, in tests/gpu")
@unittest.skipUnless(find_spec("triton"), "needs triton")
class InterpretedKernelsTest(unittest.TestCase):
    def setUp(self):
        self.enterContext(mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: True))

    def check_what_the_kernel_does_not_serve(self, call, message):
        with self.assertRaisesRegex(ValueError, message):
            call("triton")
        # It is the kernel alone that does not.
        call("auto")
