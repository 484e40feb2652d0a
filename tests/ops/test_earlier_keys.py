"""Attention to pieces of a document, each by a call of a kernel, which is computed here by definition."""

import unittest
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
from common import pieces as seam
from mixins.model import relative_error
from parameterized import parameterized

from transformers_packed.ops import dense_attention, earlier_keys
from transformers_packed.ops.attention import attention_after_pieces


HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3


class EarlierKeysTest(unittest.TestCase):
    def setUp(self):
        for patch in seam.on_a_cpu():
            self.enterContext(patch)

    @parameterized.expand(
        [
            ("one piece", 1, 16, 16, 16),
            ("many pieces", 5, 16, 16, 16),
            ("queries with padding", 2, 16, 5, 5),
            ("more keys than queries", 2, 16, 16, 27),
            ("more keys and padding", 3, 8, 3, 9),
            ("no piece before", 0, 0, 7, 12),
        ]
    )
    def test_equals_a_mask(self, name, pieces, length, queries, keys):
        generator, total = torch.Generator().manual_seed(0), pieces * length + keys

        def make(heads, tokens):
            return torch.randn(1, heads, tokens, DIM, generator=generator, dtype=torch.float64).requires_grad_()

        # Sums of exponentials of very different sizes.
        query, key, value = make(HEADS, queries), make(KV_HEADS, total), make(KV_HEADS, total)
        upstream = make(HEADS, queries).detach().transpose(1, 2)
        sizes = [length] * pieces + [keys]
        *earlier, own = zip((key * 9).split(sizes, dim=2), value.split(sizes, dim=2), strict=True)
        actual = earlier_keys.attention_after_pieces(query, *own, earlier, SCALE)
        mask = torch.ones(queries, total, dtype=torch.bool).tril(total - queries)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key * 9, value, mask, scale=SCALE, enable_gqa=True
        ).transpose(1, 2)
        self.assertLess(relative_error(actual, expected), 1e-12)
        leaves = query, key, value
        of_pieces = torch.autograd.grad(actual, leaves, upstream)
        for found, gradient in zip(of_pieces, torch.autograd.grad(expected, leaves, upstream), strict=True):
            self.assertLess(relative_error(found, gradient), 1e-12)

    def test_calls_have_few_shapes(self):
        """Whatever the lengths, cuDNN sees those for which it has plans."""
        shapes = []

        def watched(query, key, *others):
            shapes.append((query.shape[2], key.shape[2]))
            return seam.attend(query, key, *others)

        row = torch.randn(1, 2, 16 * 2 + 13, DIM)
        with mock.patch.object(earlier_keys, "_attend", watched):
            earlier = [(x, x) for x in row[:, :, :32].split(16, dim=2)]
            earlier_keys.attention_after_pieces(row[:, :, -5:], row[:, :, 32:], row[:, :, 32:], earlier, SCALE)
        self.assertEqual(shapes, [(8, 16), (8, 16), (16, 16)])


class ChoiceTest(unittest.TestCase):
    def test_what_others_compute(self):
        """Another implementation, another kernel that was asked for, and dropout, which cuDNN is not given."""
        x, calls = torch.randn(1, 2, 16, DIM), []
        for name, impl, dropout in (
            ("sdpa", "auto", 0.0),
            ("sdpa", "cudnn", 0.0),
            ("eager", "auto", 0.0),
            ("sdpa", "varlen_attn", 0.0),
            ("sdpa", "auto", 0.1),
        ):
            layer = SimpleNamespace(config=SimpleNamespace(_attn_implementation=name))
            options = {"impl": impl, "scaling": SCALE, "dropout": dropout}
            with ExitStack() as stack:
                for patch in (
                    *seam.on_a_cpu(),
                    mock.patch.object(dense_attention, "why_not", lambda *x: str(x[3] or "")),
                ):
                    stack.enter_context(patch)
                calls.append(attention_after_pieces(layer, x, x, x, [(x, x)], **options) is not None)
        self.assertEqual(calls, [True, True, False, False, False])

    def reason(self, queries, keys, pieces, length):
        with mock.patch.object(dense_attention, "why_not", lambda *_: ""):
            query, key = torch.empty(1, 16, queries, 256, device="meta"), torch.empty(1, 4, keys, 256, device="meta")
            earlier = [(torch.empty(1, 4, length, 256, device="meta"),) * 2] * pieces
            return earlier_keys.why_not(query, key, key, earlier, 0.0)

    def test_long_pieces_only(self):
        self.assertEqual(self.reason(16384, 16384, 3, 16384), "")
        self.assertEqual(self.reason(4096, 4096, 8, 4096), "")
        self.assertIn("not faster", self.reason(64, 64, 4, 64))
        # Few queries at the end of a document read padding.
        self.assertIn("not faster", self.reason(10, 16000, 0, 0))
