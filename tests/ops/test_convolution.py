import unittest

import torch
import torch.nn.functional as F
from common.fused import assert_near
from mixins.op import PackedOpTesterMixin, relative_error
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import causal_conv1d, torch_causal_conv1d


ACTIVATIONS = {None: lambda x: x, "silu": F.silu, "gelu": F.gelu}
VARIANTS = [
    (1, True, None),
    (2, False, "silu"),
    (3, True, "gelu"),
    (4, True, "silu"),
    (4, False, None),
    (7, False, "gelu"),
]


def builtin_math(hidden_states, weight, bias, activation):
    """As in Transformers' `causal_conv1d_fn`: pad both sides, keep the first outputs."""
    output = F.conv1d(
        hidden_states.transpose(1, 2), weight[:, None], bias, padding=weight.shape[1] - 1, groups=weight.shape[0]
    )
    return ACTIVATIONS[activation](output[:, :, : hidden_states.shape[1]].transpose(1, 2))


def token_by_token(hidden_states, weight, bias, activation):
    """The formula without a convolution."""
    width = weight.shape[1]
    outputs = []
    for t in range(hidden_states.shape[1]):
        window = hidden_states[:, max(0, t - width + 1) : t + 1]
        outputs.append((window * weight.T[width - window.shape[1] :]).sum(1))
    output = torch.stack(outputs, dim=1)
    return ACTIVATIONS[activation](output if bias is None else output + bias)


class PackedCausalConv1dTest(PackedOpTesterMixin, unittest.TestCase):
    width, bias, activation = 4, True, "silu"

    def make_inputs(self, length):
        generator = torch.Generator().manual_seed(1)
        self.weight = torch.randn(6, self.width, generator=generator)
        self.bias_values = torch.randn(6, generator=generator) if self.bias else None
        return [torch.randn(1, length, 6)]

    def run_op(self, hidden_states, boundaries=None):
        return causal_conv1d(hidden_states, self.weight, self.bias_values, self.activation, boundaries=boundaries)

    def test_parameters_get_the_gradients_of_all_documents(self):
        lengths = [5, 1, 70, 7]
        boundaries, (row,), upstream = self.make_row(lengths)
        parameters = [x for x in (self.weight, self.bias_values) if x is not None]
        for parameter in parameters:
            parameter.requires_grad_()
        packed = torch.autograd.grad((self.run_op(row, boundaries) * upstream).sum(), parameters)
        alone = [
            torch.autograd.grad((self.run_op(x) * w).sum(), parameters) for x, w in self.cut([row, upstream], lengths)
        ]
        assert_near(packed, [sum(pieces) for pieces in zip(*alone, strict=True)], self.tolerance)


class WidePackedCausalConv1dTest(PackedCausalConv1dTest):
    width, bias, activation = 7, False, "gelu"


class CausalConv1dTest(unittest.TestCase):
    def make(self, width, bias, length=20, dtype=torch.float32):
        torch.manual_seed(0)
        return [
            torch.randn(2, length, 6, dtype=dtype, requires_grad=True),
            torch.randn(6, width, dtype=dtype, requires_grad=True),
            torch.randn(6, dtype=dtype, requires_grad=True) if bias else None,
        ]

    @parameterized.expand(VARIANTS)
    def test_against_the_builtin_math(self, width, bias, activation):
        for length in (1, 2, 20):
            inputs = self.make(width, bias, length)
            leaves = [x for x in inputs if x is not None]
            upstream = torch.randn(2, length, 6)
            ours = torch_causal_conv1d(*inputs, activation)
            self.assertTrue(torch.equal(causal_conv1d(*inputs, activation), ours))
            gradients = torch.autograd.grad((ours * upstream).sum(), leaves)
            for oracle in (builtin_math, token_by_token):
                expected = oracle(*inputs, activation)
                self.assertLess(relative_error(ours, expected), 1e-5)
                assert_near(gradients, torch.autograd.grad((expected * upstream).sum(), leaves), 1e-5)

    def test_packing_keywords_are_ignored(self):
        inputs = self.make(4, True)
        packing = SequenceBoundaries.from_lengths([7, 13]).kernel_kwargs()
        plain = torch_causal_conv1d(*inputs, "silu")
        self.assertTrue(torch.equal(torch_causal_conv1d(*inputs, "silu", **packing), plain))

    @parameterized.expand([(torch.bfloat16,), (torch.float16,)])
    def test_output_has_the_dtype_of_the_input(self, dtype):
        hidden_states, weight, bias = self.make(4, True)
        output = causal_conv1d(hidden_states.to(dtype), weight, bias, "silu")
        self.assertEqual(output.dtype, dtype)
        # Computed in the float32 of the weight, and rounded once.
        expected = builtin_math(hidden_states.to(dtype).float(), weight, bias, "silu")
        self.assertLess(relative_error(output, expected), 2**-8)

    @parameterized.expand(
        [
            ("conv1d_weight", (1, 5, 6), (6, 1, 4), r"\(1, 5, 6\) and \(6, 1, 4\)"),
            ("channels_first", (1, 6, 5), (6, 4), r"\(1, 6, 5\) and \(6, 4\)"),
            ("no_batch", (5, 6), (6, 4), r"\(5, 6\) and \(6, 4\)"),
        ]
    )
    def test_refuses_shapes_that_do_not_fit(self, _, shape, weight_shape, got):
        with self.assertRaisesRegex(ValueError, rf"^expected .*\[B, T, D\].*, got {got}\. Squeeze"):
            causal_conv1d(torch.zeros(shape), torch.zeros(weight_shape))
