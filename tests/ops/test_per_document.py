import unittest

import torch
from mixins.op import LENGTHS, PackedOpTesterMixin
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import per_document
from transformers_packed.ops.per_document import _layout


def running_mix(x, y):
    """A causal function of two tensors whose output depends on all earlier tokens."""
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

    def test_all_documents_in_one_call(self):
        row, boundaries, seen = torch.randn(1, 303), SequenceBoundaries.from_lengths([2, 300, 1]), []

        def function(x):
            seen.append(tuple(x.shape))
            return x.cumsum(1)

        output = per_document(function, row, boundaries=boundaries, once=True)
        self.assertEqual(seen, [(3, 300)])
        # The layout of a row is cached, apart from that of several calls.
        torch.testing.assert_close(output, per_document(function, row, boundaries=boundaries))
        self.assertEqual(len(seen), 3)

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

        def function(x):
            return per_document(lambda y: y.cumsum(1).sin(), x, boundaries=boundaries)

        self.assertTrue(torch.autograd.gradcheck(function, [row], check_forward_ad=True))
        self.assertTrue(torch.autograd.gradgradcheck(function, [row]))

    @parameterized.expand(
        [
            ("length", (1, 7, 2), r"\(1, 7, 2\)"),
            ("rows", (2, 8, 2), r"\(2, 8, 2\)"),
            ("dimensions", (8,), r"\(8,\)"),
        ]
    )
    def test_refuses_what_is_not_the_row(self, _, shape, got):
        boundaries = SequenceBoundaries.from_lengths([3, 5])
        with self.assertRaisesRegex(ValueError, rf"^expected .*\[1, 8, \.\.\.\].*, got {got}\. Make"):
            per_document(lambda x, y: x, torch.zeros(1, 8), torch.zeros(shape), boundaries=boundaries)


def layout_for(lengths, device="cpu"):
    boundaries = SequenceBoundaries.from_lengths(lengths, device=device)
    return _layout(boundaries.lengths, boundaries.cu_seqlens.device, once=False, alone=False)


class BucketLayoutTest(unittest.TestCase):
    @parameterized.expand([*LENGTHS, ("steps", [1000, 790, 800, 64, 65, 2, 799, 63])])
    def test_every_token_once(self, _, lengths):
        boundaries = SequenceBoundaries.from_lengths(lengths)
        layout = layout_for(lengths)
        tokens = torch.arange(sum(lengths))
        if layout.order is None:
            self.assertIsNone(layout.inverse)
            ordered = tokens
        else:
            ordered = tokens[layout.order]
            self.assertTrue(torch.equal(ordered[layout.inverse], tokens))

        documents = set()
        for bucket, piece in zip(
            layout.buckets, ordered.split([bucket.tokens for bucket in layout.buckets]), strict=True
        ):
            batch = torch.full((bucket.num_documents * bucket.length,), -1)
            slots = torch.arange(batch.numel()) if bucket.slots is None else bucket.slots
            self.assertEqual(len(slots.unique()), bucket.tokens)
            batch[slots] = piece
            for row in batch.view(bucket.num_documents, bucket.length).tolist():
                # Each row is one document from its first token, followed by padding.
                document = int(boundaries.seq_idx[0, row[0]])
                start, length = int(boundaries.cu_seqlens[document]), lengths[document]
                self.assertEqual(row, [*range(start, start + length), *[-1] * (bucket.length - length)])
                documents.add(document)
        self.assertEqual(documents, set(range(len(lengths))))

    def test_many_documents(self):
        """Grouping many documents works on their few distinct lengths."""
        lengths = torch.randint(1, 300, (20_000,), generator=torch.Generator().manual_seed(0))
        buckets = layout_for(lengths).buckets
        self.assertEqual([bucket.length for bucket in buckets], [299, 256, 192, 128, 64])

    def test_equal_documents_are_a_view(self):
        layout = layout_for([100] * 10)
        self.assertEqual(len(layout.buckets), 1)
        self.assertIsNone(layout.buckets[0].slots)
        self.assertIsNone(layout.order)

    def test_never_reads_the_device(self):
        # A meta tensor has no contents, so any read of values fails, including a host sync.
        layout = layout_for([2, 70, 3], "meta")
        self.assertEqual(sum(bucket.tokens for bucket in layout.buckets), 75)
