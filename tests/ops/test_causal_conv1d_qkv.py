"""The convolution of a gated-delta-rule layer, to queries, keys and values by heads.

test_fused.py has the common tests of fused ops.
"""

import unittest
from unittest import mock

import torch
import torch.nn.functional as F
from common.fused import boundaries_of, errors, guarded_buffers
from mixins.op import BuiltinTesterMixin
from mixins.triton import InterpretedKernelsTest, bad_input_tests
from parameterized import parameterized
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import causal_conv1d_qkv
from transformers_packed.ops.convolution import slots_of


class HaloTest(InterpretedKernelsTest):
    """A part of a row with the tokens before it, which the positions limit to the same document."""

    def compute(self, x, weight, position, upstream, halo=None):
        from transformers_packed.ops.backends.triton.convolution import CausalConv1dQKV

        # The longest part takes two programs.
        module = "transformers_packed.ops.backends.triton.convolution"
        self.enterContext(mock.patch.multiple(module, _TOKENS=3, _RUNS=4))
        inputs = [tensor.detach().requires_grad_() for tensor in (x, weight, halo) if tensor is not None]
        halo = inputs[2:]
        if halo:
            part = SequenceBoundaries.from_lengths([len(x) - 2, 2])
            halo.append(slots_of(part, range(1), weight.shape[1] - 1))
        outputs = CausalConv1dQKV.apply(*inputs[:2], position, 1, 1, len(weight) // 3, 1e-6, *halo)
        return list(outputs), list(torch.autograd.grad(outputs, inputs, upstream))

    # Fewer, as many and more tokens before the part than the window reaches; parts within a program and of two.
    @parameterized.expand([(0, 3, 4, 16), (2, 4, 4, 24), (1, 13, 4, 16), (5, 4, 3, 16), (1, 4, 2, 16)])
    def test_equals_the_whole_row(self, before, length, width, dim):
        generator = torch.Generator().manual_seed(0)
        # A document with `before` tokens before the part follows another one. Two tokens start a third.
        first = 4
        total, start = first + before + length, first + before
        x, weight = (torch.randn(*shape, generator=generator) for shape in ((total, 3 * dim), (3 * dim, width)))
        lengths = [first, before + length - 2, 2]
        position = torch.cat([torch.arange(n) for n in lengths]).to(torch.int32)
        upstream = [torch.randn(total, 1, dim, generator=generator) for _ in range(3)]
        # For the outputs of the part alone, like its gradients.
        alone = [F.pad(y[start:], (0, 0, 0, 0, start, 0)) for y in upstream]
        outputs, (dx, dweight) = self.compute(x, weight, position, alone)
        halo = x[start - (width - 1) : start].clone()
        halo[: max(0, width - 1 - before)] = float("nan")
        with guarded_buffers():
            found, gradients = self.compute(x[start:], weight, position[start:], [y[start:] for y in upstream], halo)
        self.assert_same_bits(found, [y[start:] for y in outputs])
        self.assert_same_bits(gradients[:1], [dx[start:]])
        torch.testing.assert_close(gradients[1], dweight, rtol=1e-5, atol=1e-5)
        self.assert_same_bits(gradients[2:], [dx[start - (width - 1) : start]])


class DocumentsTest(InterpretedKernelsTest):
    """Documents in `causal_conv1d_qkv`. Its reference calls `causal_conv1d`, which has such tests of its own."""

    lengths = (3, 1, 9, 2)

    def run_row(self, x, upstream, boundaries):
        """Return q, k, v and the gradient of x, `[T, ...]`, and the gradient of the weight."""
        x = x.detach().requires_grad_()
        weight = torch.randn(48, 4, generator=torch.Generator().manual_seed(2)).requires_grad_()
        options = {"key_heads": 1, "key_dim": 16, "value_dim": 16, "boundaries": boundaries, "impl": "triton"}
        outputs = causal_conv1d_qkv(x, weight, **options)
        gradients = torch.autograd.grad(outputs, (x, weight), upstream)
        return [*(y[0].detach() for y in (*outputs, gradients[0])), gradients[1]]

    def row(self):
        generator = torch.Generator().manual_seed(0)
        total = sum(self.lengths)
        x = torch.randn(1, total, 48, generator=generator)
        upstream = [torch.randn(1, total, 1, 16, generator=generator) for _ in range(3)]
        return x, upstream, SequenceBoundaries.from_lengths(self.lengths)

    def cut(self, results):
        """Split per-token tensors into one list per document."""
        return list(zip(*(x.split(self.lengths) for x in results[:4]), strict=True))

    def spans(self, boundaries):
        cumulative = boundaries.cu_seqlens_cpu.tolist()
        return [slice(*span) for span in zip(cumulative, cumulative[1:], strict=False)]

    def test_each_document_equals_itself_alone(self):
        x, upstream, boundaries = self.row()
        alone = [self.run_row(x[:, s], [u[:, s] for u in upstream], None) for s in self.spans(boundaries)]
        expected = [*(torch.cat(column) for column in zip(*(y[:4] for y in alone), strict=True))]
        expected.append(sum(y[4] for y in alone))
        self.assertLess(max(errors(self.run_row(x, upstream, boundaries), expected)), 1e-6)
        # The comparison can fail.
        self.assertGreater(min(errors(self.run_row(x, upstream, None), expected)), 1e-2)

    def test_no_document_sees_another(self):
        """A change in one changes no bit in others, and gradients across documents are exactly zero."""
        x, upstream, boundaries = self.row()
        before = self.cut(self.run_row(x, upstream, boundaries))
        for changed, span in [*enumerate(self.spans(boundaries))][1:3]:
            # This includes the last token, which the next document could see, and the first, which could see the
            # previous one.
            other = x.clone()
            other[:, span] *= 0.5 if changed == 1 else float("nan")
            after = self.cut(self.run_row(other, upstream, boundaries))
            for document in range(len(self.lengths)):
                same = [torch.equal(a, b) for a, b in zip(after[document], before[document], strict=True)]
                self.assertEqual(same, [document != changed] * 4, f"document {document}, changed {changed}")
            one = [torch.zeros_like(u) for u in upstream]
            for a, b in zip(one, upstream, strict=True):
                a[:, span] = b[:, span]
            gradient = self.run_row(x, one, boundaries)[3]
            self.assertGreater(int(gradient[span].count_nonzero()), 0)
            gradient[span] = 0
            self.assertEqual(int(gradient.count_nonzero()), 0)


class ReferenceTest(BuiltinTesterMixin, unittest.TestCase):
    def test_causal_conv1d_qkv(self):
        def theirs(x, weight):
            convolved = builtin.causal_conv1d_fn(x.transpose(1, 2), weight, None, activation="silu").transpose(1, 2)
            query, key, value = (y.unflatten(-1, (-1, 8)) for y in convolved.split([16, 16, 32], dim=-1))
            return builtin.l2norm(query), builtin.l2norm(key), value

        self.assert_same(
            lambda x, w: causal_conv1d_qkv(x, w, key_heads=2, key_dim=8, value_dim=8, impl="reference"),
            theirs,
            [self.normal(2, 7, 64), self.normal(64, 4)],
            summed=(0, 1, 2),
        )


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


def convolve(x, weight, *options, key_dim=16, value_dim=16, **more):
    return causal_conv1d_qkv(x, weight, *options, key_heads=1, key_dim=key_dim, value_dim=value_dim, **more)


SHAPES = [
    ("conv_channels", lambda: convolve(ones(1, 5, 48), ones(40, 4)), "expected"),
    ("conv_no_values", lambda: convolve(ones(1, 5, 32), ones(32, 4)), "number of heads"),
    ("conv_part_of_a_head", lambda: convolve(ones(1, 5, 56), ones(56, 4)), "number of heads"),
    ("conv_ndim", lambda: convolve(ones(5, 48), ones(48, 4)), r"\[B, T, D\]"),
    ("conv_weight_ndim", lambda: convolve(ones(1, 5, 48), ones(48, 1, 4)), r"weight \[D, W\]"),
]
UNSERVED = [
    ("conv_bias", lambda impl: convolve(ones(1, 5, 48), ones(48, 4), ones(48), impl=impl), "without a bias"),
    ("conv_activation", lambda impl: convolve(ones(1, 5, 48), ones(48, 4), None, "gelu", impl=impl), "SiLU"),
    ("conv_width", lambda impl: convolve(ones(1, 5, 48), ones(48, 5), impl=impl), "up to 4 tokens, not 5"),
    (
        "conv_heads",
        lambda impl: convolve(ones(1, 5, 24), ones(24, 4), key_dim=8, value_dim=8, impl=impl),
        "keys of 16 to 256 channels .* not 8 and 8",
    ),
    (
        "conv_two_dims",
        lambda impl: convolve(ones(1, 5, 80), ones(80, 4), key_dim=32, value_dim=16, impl=impl),
        "a multiple of them, not 32 and 16",
    ),
]


class BadInputTest(bad_input_tests(SHAPES, UNSERVED)):
    @parameterized.expand(["triton", "reference"])
    def test_a_row_that_its_boundaries_do_not_describe(self, impl):
        boundaries = boundaries_of(5, torch.device("cpu"))
        for shape in ((1, 4, 48), (1, 6, 48), (2, 5, 48)):
            with self.assertRaisesRegex(ValueError, r"expected hidden_states \[1, 5, D\]"):
                convolve(ones(*shape), ones(48, 4), boundaries=boundaries, impl=impl)
