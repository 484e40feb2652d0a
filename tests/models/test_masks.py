"""Masks as Transformers and other libraries create them, and what they say about a row."""

import unittest
from unittest import mock

import torch
from mixins.model import block_mask, other_masks
from parameterized import parameterized
from transformers import Qwen3Config
from transformers.masking_utils import create_causal_mask

from transformers_packed.models import masks
from transformers_packed.models.masks import read_documents, read_padding
from transformers_packed.models.versions import CACHE


def stock_mask(numbers: list[int], implementation: str, side: str = "right") -> torch.Tensor:
    """Let Transformers create the 4-D mask of a row whose documents have these numbers. 0 is padding."""
    row = torch.tensor([numbers])
    lengths = torch.unique_consecutive(row[row > 0], return_counts=True)[1].tolist()
    positions = torch.zeros_like(row)
    positions[row > 0] = torch.cat([torch.arange(n) for n in lengths])
    config = Qwen3Config(attn_implementation=implementation)
    described = {"position_ids": positions} if len(lengths) > 1 else {"attention_mask": (row > 0).long()}
    described = {"position_ids": None, "attention_mask": None} | described
    return create_causal_mask(config, torch.zeros(*row.shape, 8), **described, **{CACHE: None})


class DocumentsTest(unittest.TestCase):
    @parameterized.expand(
        [
            (f"{dtype}_{pads}_{padding}", dtype, pads, padding)
            for dtype in (torch.bool, torch.float32, torch.float16, torch.bfloat16)
            for pads in ("none", "all")
            for padding in (0, 1, 4)
        ]
    )
    def test_blocks(self, _, dtype, pads, padding):
        for lengths in ((3, 1, 5), (1, 1, 1), (1, 8)):
            total = sum(lengths) + padding
            real, boundaries = read_documents(block_mask(lengths, padding, dtype, pads), 1, total)
            self.assertEqual(real[0].tolist(), [True] * sum(lengths) + [False] * padding)
            self.assertEqual(boundaries.lengths, [*lengths, *([padding] if padding else [])])
            self.assertEqual(boundaries.padding_tokens, padding)

    @parameterized.expand(["sdpa", "eager"])
    def test_masks_of_transformers(self, implementation):
        real, boundaries = read_documents(stock_mask([1, 1, 1, 2, 3, 3], implementation), 1, 6)
        self.assertEqual((real.all().item(), boundaries.lengths), (True, [3, 1, 2]))
        for numbers in ([0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1]):
            real, boundaries = read_documents(stock_mask(numbers, implementation), 1, len(numbers))
            self.assertEqual((real[0].long().tolist(), boundaries), (numbers, None))

    def test_padding_anywhere(self):
        """Each run of padding is a document of its own."""
        numbers = torch.tensor([0, 0, 1, 1, 0, 2, 2, 2])
        attends = ((numbers[:, None] == numbers) & (numbers > 0)).tril()[None, None]
        real, boundaries = read_documents(attends, 1, 8)
        self.assertEqual(real[0].tolist(), (numbers > 0).tolist())
        self.assertEqual((boundaries.lengths, boundaries.padding_tokens), ([2, 2, 1, 3], 0))

    def test_one_document_in_each_row(self):
        causal = torch.ones(4, 4, dtype=torch.bool).tril()
        lengths = torch.tensor([4, 2])
        mask = causal & (torch.arange(4) < lengths[:, None])[:, None, None]
        real, boundaries = read_documents(mask, 2, 4)
        self.assertEqual((real.sum(1).tolist(), boundaries), ([4, 2], None))
        # One mask for all rows.
        real, _ = read_documents(mask[1:], 2, 4)
        self.assertEqual(real.sum(1).tolist(), [2, 2])
        self.assertTrue(read_documents(torch.ones(1, 1, 1, 1, dtype=torch.bool), 1, 1)[0].all())

    @parameterized.expand(other_masks(12))
    def test_other_patterns(self, name):
        masks = other_masks(12)
        with self.assertRaisesRegex(ValueError, "another pattern .*Only attention would apply"):
            read_documents(masks[name], 1, 12)
        self.assertIsNone(read_documents(masks[name], 1, 12, mixes=False))

    def test_exported_graphs_refuse_masks(self):
        """Their values are unknown, and a graph is the same for all."""
        with mock.patch.object(masks, "is_exporting", return_value=True):
            with self.assertRaisesRegex(ValueError, "another pattern"):
                read_documents(block_mask((3, 9)), 1, 12)

    def test_every_wrong_bit_is_seen(self):
        """A block mask with any one element changed is another pattern, or one of other documents."""
        lengths = (3, 1, 4)
        mask = block_mask(lengths)
        expected = read_documents(mask, 1, 8)[1].lengths
        # A document of one token that does not attend to itself is padding.
        alone = (3, 3)
        for row in range(8):
            for column in range(8):
                changed = mask.clone()
                changed[0, 0, row, column] ^= True
                found = read_documents(changed, 1, 8, mixes=False)
                same = found is not None and found[1] is not None and found[1].lengths == expected
                self.assertEqual(same, (row, column) == alone, (row, column))
                self.assertFalse(same and found[0].all())


class PaddingTest(unittest.TestCase):
    def test_a_mask_is_read_once(self):
        """On a GPU, each time would be a host sync."""
        mask, copies, to = torch.tensor([[1, 1, 0]]), [], torch.Tensor.to

        def counted(tensor, *args):
            copies.append(args)
            return to(tensor, *args)

        with mock.patch.object(torch.Tensor, "to", counted):
            for _ in range(3):
                self.assertEqual(read_padding(mask).tolist(), [[True, True, False]])
            self.assertEqual(copies, [("cpu",)])
            mask[0, 2] = 1
            self.assertTrue(read_padding(mask).all())
            self.assertTrue(read_padding(mask.clone()).all())
            self.assertEqual(len(copies), 3)
        with torch.inference_mode():
            self.assertEqual(read_padding(torch.tensor([[0, 1]])).tolist(), [[False, True]])

    @parameterized.expand([([1, 1, 2, 2],), ([1, 2, 3, 0],), ([0, -1, 1, 1],), ([1.0, 2.0, 0.0, 0.0],), ([0.5, 1.0],)])
    def test_numbers(self, numbers):
        for _ in range(2):
            with self.assertRaisesRegex(ValueError, "attention_mask of 0 and 1, got"):
                read_padding(torch.tensor([numbers]))

    def test_values_that_cannot_be_read(self):
        self.assertIsNone(read_padding(torch.tensor([[0.0, float("-inf")]])))
        self.assertIsNone(read_padding(torch.ones(2, 3, device="meta")))
        seen = torch.func.vmap(lambda mask: mask * (read_padding(mask) is None))(torch.ones(2, 1, 3))
        self.assertTrue(seen.all())
