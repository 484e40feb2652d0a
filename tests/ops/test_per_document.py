import unittest

import torch
from packed_op_tester import PackedOpTesterMixin
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import per_document


def running_mix(x, y):
    """A causal function of two tensors that remembers everything it has seen."""
    return (x[..., None] * y).cumsum(dim=1)


class PerDocumentTest(PackedOpTesterMixin, unittest.TestCase):
    def make_inputs(self, length):
        return [torch.randn(1, length, 3), torch.randn(1, length, 3, 2)]

    def run_op(self, x, y, boundaries=None):
        return running_mix(x, y) if boundaries is None else per_document(running_mix, x, y, boundaries=boundaries)

    @parameterized.expand(
        [
            ("equal", [100] * 5, [(5, 100)]),
            ("similar", [100, 81, 90], [(3, 100)]),
            ("short_ones_share", [1, 64, 30, 2], [(4, 64)]),
            ("apart", [2000, 100, 1990, 79], [(2, 2000), (2, 100)]),
            ("worth_the_padding", [300, 129], [(2, 300)]),
        ]
    )
    def test_documents_of_similar_length_share_a_call(self, _, lengths, shapes):
        seen = []

        def function(x):
            seen.append(tuple(x.shape))
            return x

        row = torch.randn(1, sum(lengths), 2)
        output = per_document(function, row, boundaries=SequenceBoundaries.from_lengths(lengths))
        self.assertTrue(torch.equal(output, row))
        self.assertEqual(seen, [(*shape, 2) for shape in shapes])

    def test_padding_is_zero_and_stands_behind(self):
        batches = []

        def function(x):
            batches.append(x.detach())
            return x

        row = torch.full((1, 8), float("nan"))
        per_document(function, row, boundaries=SequenceBoundaries.from_lengths([3, 5]))
        (batch,) = batches
        self.assertEqual(batch.isnan().tolist(), [[True] * 3 + [False] * 2, [True] * 5])
        self.assertEqual(batch[0, 3:].tolist(), [0, 0])

    def test_the_function_may_change_shape_and_dtype(self):
        row = torch.randn(1, 8)
        boundaries = SequenceBoundaries.from_lengths([3, 5])
        output = per_document(lambda x: x.double()[..., None].expand(-1, -1, 4), row, boundaries=boundaries)
        self.assertTrue(torch.equal(output, row.double()[..., None].expand(-1, -1, 4)))

    def test_gradcheck(self):
        boundaries = SequenceBoundaries.from_lengths([2, 70, 1])
        row = torch.randn(1, 73, dtype=torch.float64, requires_grad=True)
        self.assertTrue(
            torch.autograd.gradcheck(
                lambda x: per_document(lambda y: y.cumsum(1).sin(), x, boundaries=boundaries), [row]
            )
        )

    @parameterized.expand(
        [
            ("length", (1, 7, 2), r"\(1, 7, 2\)"),
            ("rows", (2, 8, 2), r"\(2, 8, 2\)"),
            ("dimensions", (8,), r"\(8,\)"),
        ]
    )
    def test_refuses_what_is_not_the_row(self, _, shape, got):
        boundaries = SequenceBoundaries.from_lengths([3, 5])
        with self.assertRaisesRegex(ValueError, rf"^per_document: expected .*\[1, 8, \.\.\.\].*, got {got}\. Pass"):
            per_document(lambda x, y: x, torch.zeros(1, 8), torch.zeros(shape), boundaries=boundaries)
