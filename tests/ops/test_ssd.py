"""The scan of Mamba-2. The oracle is the recurrence, token by token in float64, on each document alone."""

import math
import sys
import unittest
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from common.fused import errors
from mixins.scan import (
    LENGTHS,
    PackedScanTesterMixin,
    ScanReferenceTesterMixin,
    ScanTesterMixin,
    against_documents_alone,
)
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import ssd, torch_ssd
from transformers_packed.ops.backends import mamba_ssm
from transformers_packed.ops.backends.triton import ssd as kernels
from transformers_packed.ops.ssd import _verify_triton


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
BARS = {FLOAT32: 1e-4, BFLOAT16: 1e-2}
# Heads, their size, groups and states: several heads in a tile, groups, parts of a head, two tiles of states.
SIZES = [(4, 8, 1, 8), (4, 16, 2, 72), (2, 80, 2, 16), (2, 128, 1, 16), (4, 12, 1, 8)]


def make_inputs(length, heads, dim, groups, states, dtype=FLOAT32):
    """Return x, dt, B and C, then A, D and dt_bias, with numbers that are exact in bfloat16."""
    generator = torch.Generator().manual_seed(length)
    normal = lambda *shape: torch.randn(shape, generator=generator).bfloat16().to(dtype)  # noqa: E731
    row = [normal(1, length, heads, dim), normal(1, length, heads)]
    row += [normal(1, length, groups, states) for _ in range(2)]
    return [*row, -normal(heads).abs() - 0.125, normal(heads), normal(heads)]


def call(x, dt, B, C, A, D, dt_bias, **options):
    return ssd(x, dt, A, B, C, D, dt_bias=dt_bias, **options)


def token_by_token(x, dt, B, C, A, D, dt_bias, dt_limit=(0.0, math.inf)):
    """The formula."""
    heads = x.shape[2] // B.shape[2]
    step = F.softplus(dt + dt_bias).clamp(*dt_limit)
    B, C = (z.repeat_interleave(heads, 2)[..., None] for z in (B, C))
    state, outputs = 0, []
    for t in range(x.shape[1]):
        decay = (step[:, t] * A).exp()[..., None, None]
        state = decay * state + step[:, t, :, None, None] * B[:, t] * x[:, t, :, None]
        outputs.append((C[:, t] * state).sum(2) + D[:, None] * x[:, t])
    return torch.stack(outputs, 1)


class PackedSSDTest(PackedScanTesterMixin, unittest.TestCase):
    call, make, sizes = staticmethod(call), staticmethod(make_inputs), (2, 8, 1, 8)


class ReferenceTest(ScanReferenceTesterMixin, unittest.TestCase):
    call, make_inputs = staticmethod(call), staticmethod(make_inputs)
    reference, formula, sizes = staticmethod(torch_ssd), staticmethod(token_by_token), (4, 8, 2, 8)

    @parameterized.expand([(sizes, (0.0, math.inf)) for sizes in SIZES] + [(SIZES[1], (0.25, 1.0))])
    def test_against_the_formula(self, sizes, limit):
        inputs = make_inputs(sum(LENGTHS), *sizes)
        actual, expected = against_documents_alone(call, token_by_token, LENGTHS, inputs, "reference", dt_limit=limit)
        self.assertLess(max(errors(actual, expected)), BARS[FLOAT32], errors(actual, expected))

    def test_against_the_builtin(self):
        from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

        x, dt, B, C, A, D, bias = make_inputs(70, 4, 8, 2, 8)
        limit = 0.01, 2.0
        expected = mamba2_chunk_scan(x, dt, A, B, C, 16, D=D, dt_bias=bias, dt_softplus=True, dt_limit=limit)
        actual = call(x, dt, B, C, A, D, bias, dt_limit=limit)
        self.assertLess(max(errors([actual], [expected])), 2e-6)

    @parameterized.expand(
        [
            ("dt", 1, (1, 9, 4, 1)),
            ("b", 2, (1, 8, 2, 8)),
            ("groups", 2, (1, 9, 3, 8)),
            ("a", 4, (2,)),
            ("bias", 6, (4, 1)),
        ]
    )
    def test_refuses_shapes_that_do_not_fit(self, _, place, shape):
        inputs = make_inputs(9, 4, 8, 2, 8)
        inputs[place] = torch.zeros(shape)
        if place == 2:
            inputs[3] = torch.zeros(shape)
        with self.assertRaisesRegex(ValueError, r"^expected x \[batch, T, H, P\].*A, D and dt_bias \[H\], got"):
            call(*inputs)


class InterpretedTest(ScanTesterMixin, InterpretedKernelsTest):
    call, make_inputs = staticmethod(call), staticmethod(make_inputs)
    sizes, buffer_sizes = SIZES[0], SIZES[1]

    @parameterized.expand(
        [(sizes, (0.0, math.inf), FLOAT32) for sizes in SIZES[1:]]
        + [(SIZES[0], (0.0, math.inf), BFLOAT16), (SIZES[0], (0.25, 1.0), FLOAT32)]
    )
    def test_against_the_formula(self, sizes, limit, dtype):
        inputs = make_inputs(sum(LENGTHS), *sizes, dtype)
        actual, expected = against_documents_alone(call, token_by_token, LENGTHS, inputs, "triton", dt_limit=limit)
        self.assertEqual([x.dtype for x in actual], [dtype] * 8)
        self.assertLess(max(errors(actual, expected)), BARS[dtype], errors(actual, expected))

    def test_what_the_kernel_does_not_serve(self):
        for inputs, message in (
            (make_inputs(9, *SIZES[0], torch.float64), "not torch.float64"),
            (make_inputs(9, *SIZES[0], torch.float16), "overflow in float16"),
            ([*make_inputs(9, *SIZES[0])[:3], *make_inputs(9, *SIZES[0], BFLOAT16)[3:]], "one dtype"),
        ):
            self.check_what_the_kernel_does_not_serve(lambda impl: call(*inputs, impl=impl), message)  # noqa: B023


class MambaSsmTest(unittest.TestCase):
    def test_the_call(self):
        """Every argument is one of the package's function, with the names of its release 2.2."""
        x, dt, B, C, A, D, bias = inputs = make_inputs(9, *SIZES[0])
        boundaries = SequenceBoundaries.from_lengths([4, 5])

        def scan(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
                 cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, math.inf), return_final_states=False):  # fmt: skip
            self.assertEqual((seq_idx.dtype, seq_idx.shape, dt_softplus), (torch.int32, (1, 9), True))
            found = SequenceBoundaries.from_seq_idx(seq_idx)
            return ssd(x, dt, A, B, C, D, dt_bias=dt_bias, dt_limit=dt_limit, boundaries=found, impl="reference")

        module = ModuleType("mamba_ssm.ops.triton.ssd_combined")
        module.mamba_chunk_scan_combined = scan
        with mock.patch.dict(sys.modules, {module.__name__: module}):
            options = {"dt_bias": bias, "dt_limit": (0.1, 1.0), "boundaries": boundaries}
            actual = mamba_ssm.ssd(x, dt, A, B, C, D, **options)
        self.assertTrue(torch.equal(actual, call(*inputs, dt_limit=(0.1, 1.0), boundaries=boundaries)))

    def test_verifier(self):
        on_gpu = SimpleNamespace(is_cuda=True, dtype=BFLOAT16)
        self.assertEqual(mamba_ssm.verify_ssd(torch.zeros(1)), "needs CUDA tensors")
        self.assertRegex(mamba_ssm.verify_ssd(SimpleNamespace(is_cuda=True, dtype=torch.float64)), "float64")
        with mock.patch.object(mamba_ssm, "importable", lambda *names: f"no {names[1]}"):
            self.assertEqual(mamba_ssm.verify_ssd(on_gpu), "no mamba-ssm")


class VerifyTest(unittest.TestCase):
    @parameterized.expand([(128, 64, 1, 64), (8, 640, 1, 640), (128, 80, 8, 128), (3, 16, 3, 64), (2, 4, 1, 32)])
    def test_any_size_of_heads(self, heads, dim, groups, expected):
        x, dt, B, C, A, D, _ = make_inputs(1, heads, dim, groups, 16)
        with mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: True):
            self.assertEqual(_verify_triton(x, dt, A, B, C, D), "")
        self.assertEqual(kernels.size_of_heads(heads, dim, groups), expected)
