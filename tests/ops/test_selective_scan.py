"""The scan of Mamba. The oracle is the recurrence, token by token in float64, on each document alone."""

import unittest
from unittest import mock

import torch
import torch.nn.functional as F
from common.fused import errors, saved_in
from mixins.scan import (
    LENGTHS,
    SHORT,
    PackedScanTesterMixin,
    ScanReferenceTesterMixin,
    ScanTesterMixin,
    against_documents_alone,
)
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized

from transformers_packed.ops import selective_scan, torch_selective_scan
from transformers_packed.ops.selective_scan import _verify_triton


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
BARS = {FLOAT32: 1e-5, BFLOAT16: 1e-2}
# Channels, groups and states: several blocks of channels, groups, and numbers that are no powers of two.
SIZES = [(36, 1, 16), (12, 2, 5), (10, 1, 72)]


def make_inputs(length, channels, groups, states, dtype=FLOAT32):
    """Return x, dt, B and C, then A, D and dt_bias, with numbers that are exact in bfloat16."""
    generator = torch.Generator().manual_seed(length)
    normal = lambda *shape: torch.randn(shape, generator=generator).bfloat16().to(dtype)  # noqa: E731
    row = [normal(1, length, channels) for _ in range(2)] + [normal(1, length, groups, states) for _ in range(2)]
    return [*row, -normal(channels, states).abs() - 0.125, normal(channels), normal(channels)]


def call(x, dt, B, C, A, D, dt_bias=None, **options):
    return selective_scan(x, dt, A, B, C, D, dt_bias=dt_bias, **options)


def token_by_token(x, dt, B, C, A, D, dt_bias):
    """The formula."""
    channels = x.shape[2] // B.shape[2]
    step = F.softplus(dt + dt_bias)[..., None]
    B, C = (z.repeat_interleave(channels, 2) for z in (B, C))
    state, outputs = 0, []
    for t in range(x.shape[1]):
        state = (step[:, t] * (A[t] if A.ndim == 3 else A)).exp() * state + step[:, t] * x[:, t, :, None] * B[:, t]
        outputs.append((C[:, t] * state).sum(-1) + D * x[:, t])
    return torch.stack(outputs, 1)


class PackedSelectiveScanTest(PackedScanTesterMixin, unittest.TestCase):
    call, make, sizes = staticmethod(call), staticmethod(make_inputs), (8, 2, 4)


class ReferenceTest(ScanReferenceTesterMixin, unittest.TestCase):
    call, make_inputs = staticmethod(call), staticmethod(make_inputs)
    reference, formula, sizes = staticmethod(torch_selective_scan), staticmethod(token_by_token), (8, 2, 4)

    @parameterized.expand([(sizes,) for sizes in SIZES])
    def test_against_the_formula(self, sizes):
        actual, expected = against_documents_alone(
            call, token_by_token, LENGTHS, make_inputs(sum(LENGTHS), *sizes), "reference"
        )
        self.assertLess(max(errors(actual, expected)), BARS[FLOAT32], errors(actual, expected))

    def test_against_the_builtin(self):
        from transformers.models.mamba.modeling_mamba import mamba_selective_scan

        x, dt, B, C, A, D, bias = make_inputs(70, 8, 1, 4)
        columns = (z.mT for z in (x, dt, B[:, :, 0], C[:, :, 0]))
        x_columns, dt_columns, b_columns, c_columns = columns
        expected = mamba_selective_scan(
            x_columns, dt_columns, A, b_columns, c_columns, D=D, delta_bias=bias, delta_softplus=True
        )
        actual = call(x, dt, B[:, :, 0], C[:, :, 0], A, D, bias)
        self.assertLess(max(errors([actual], [expected.mT])), 1e-6)

    def test_a_step_without_a_bias(self):
        inputs = make_inputs(9, 8, 2, 4)
        self.assertTrue(torch.equal(call(*inputs[:6]), call(*inputs[:6], torch.zeros(8))))

    def test_saves_less_than_four_numbers_of_each_state(self):
        """The decays, and the states from zero and from those before the chunks, but not what each token adds."""
        length, channels, states = 512, 8, 16
        inputs = [x.requires_grad_() for x in make_inputs(length, channels, 1, states)]
        saved = [x.untyped_storage() for x in saved_in(lambda: call(*inputs, impl="reference"))]
        sizes = {x.data_ptr(): x.nbytes() for x in saved}
        self.assertLess(sum(sizes.values()), 4 * 4 * length * channels * states)

    @parameterized.expand(
        [
            ("dt", 1, (1, 9, 4)),
            ("b", 2, (1, 8, 2, 4)),
            ("groups", 2, (1, 9, 3, 4)),
            ("a", 4, (8,)),
            ("states", 4, (8, 5)),
            ("d", 5, (1,)),
            ("bias", 6, (8, 1)),
        ]
    )
    def test_refuses_shapes_that_do_not_fit(self, name, place, shape):
        inputs = make_inputs(9, 8, 2, 4)
        inputs[place] = torch.zeros(shape)
        if name == "groups":
            inputs[3] = torch.zeros(shape)
        with self.assertRaisesRegex(
            ValueError, r"^expected x and dt \[batch, T, channels\].*A \[channels, N\], .*got"
        ):
            call(*inputs)


class InterpretedTest(ScanTesterMixin, InterpretedKernelsTest):
    call, make_inputs = staticmethod(call), staticmethod(make_inputs)
    # Each group of channels is a program. Those of several groups are tested with inputs of several dtypes.
    sizes = buffer_sizes = (6, 1, 5)

    # What is tested with other sizes does not depend on the dtype.
    @parameterized.expand([(SIZES[0],), (SIZES[2],)])
    def test_against_the_formula(self, sizes):
        inputs = make_inputs(34, *sizes)
        actual, expected = against_documents_alone(call, token_by_token, (1, 33), inputs, "triton")
        self.assertLess(max(errors(actual, expected)), BARS[FLOAT32], errors(actual, expected))

    def test_states_that_forget_at_once_and_states_that_never_do(self):
        """The gradient of a decay is a difference of sums, and exact also where it is small."""
        inputs = make_inputs(sum(LENGTHS), 12, 1, 4)
        inputs[4] = -torch.tensor([1e-3, 1.0, 16.0, 64.0]).expand(12, 4).contiguous()
        inputs[6] = torch.linspace(-12.0, 12.0, 12)
        actual, expected = against_documents_alone(call, token_by_token, LENGTHS, inputs, "triton")
        self.assertLess(max(errors(actual, expected)), 1e-6)
        for channel in range(12):
            pair = [results[2][..., channel] for results in (actual, expected)]
            self.assertLess(errors(pair[:1], pair[1:])[0], 1e-6, channel)
        # It is a sum over tokens, whose terms cancel. The kernel adds 1 to the exponential of a small step, so the exponent of
        # a decay is off by as many roundings of 1 as `A` is large. 3 times more than what was seen are allowed.
        terms = self.decay_gradient_terms(inputs)
        rounding = terms * (1 + inputs[4].abs()) * torch.finfo(torch.float32).eps
        found = terms > 1e-30
        self.assertLess(float(((actual[5] - expected[5]).abs() / rounding)[found].max()), 16)

    @staticmethod
    def decay_gradient_terms(inputs):
        """The sum of the magnitudes of what each token adds to the gradient of `A`, in float64."""
        upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0)).bfloat16().double()
        *row, A, D, bias = (x.double() for x in inputs)
        total = torch.zeros_like(A)
        for *document, d_y in zip(*(x.split(LENGTHS, 1) for x in (*row, upstream)), strict=True):
            decays = A.expand(document[0].shape[1], *A.shape).clone().requires_grad_()
            token_by_token(*document, decays, D, bias).backward(d_y)
            total += decays.grad.abs().sum(0)
        return total

    def test_inputs_of_several_dtypes(self):
        """As under autocast: parameters stay in float32."""
        inputs = make_inputs(sum(SHORT), *SIZES[1], BFLOAT16)
        inputs[4:] = (x.float() for x in inputs[4:])
        actual, expected = against_documents_alone(call, token_by_token, SHORT, inputs, "triton")
        self.assertEqual([x.dtype for x in actual], [BFLOAT16] * 5 + [FLOAT32] * 3)
        self.assertLess(max(errors(actual, expected)), BARS[BFLOAT16])
        self.assertLess(max(errors(actual[5:], expected[5:])), BARS[FLOAT32])

    def test_what_the_kernel_does_not_serve(self):
        for inputs, message in (
            (make_inputs(9, *SIZES[1], torch.float64), "not torch.float64"),
            ([*make_inputs(9, *SIZES[1])[:6], torch.zeros(12, dtype=torch.float64)], "not torch.float64"),
            (make_inputs(9, 2, 1, 260), "up to 256 numbers, not 260"),
        ):
            self.check_what_the_kernel_does_not_serve(lambda impl: call(*inputs, impl=impl), message)  # noqa: B023


class VerifyTest(unittest.TestCase):
    @parameterized.expand([(8192, 1, 16), (1536, 1, 16), (7424, 2, 16)])
    def test_released_models(self, channels, groups, states):
        x, dt, B, C, A, D, bias = make_inputs(1, channels, groups, states)
        with mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: True):
            self.assertEqual(_verify_triton(x, dt, A, B, C, D, bias), "")
