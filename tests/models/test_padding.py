"""The tokens of a padded batch as a row, and its results in the batch again. Models are tested in `mixins/padding.py`."""

import unittest

import torch

from transformers_packed.models.padding import PaddedBatch


MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
POSITIONS = torch.tensor([[0, 0, 7, 9], [2, 3, 5, 0]])
ROW = [7, 9, 2, 3, 5]


class PaddedBatchTest(unittest.TestCase):
    def setUp(self):
        self.batch = PaddedBatch.from_attention_mask(MASK, MASK.device)

    def test_given_position_ids_stay(self):
        for positions, expected in (
            (POSITIONS, [ROW]),
            (POSITIONS[None].expand(3, -1, -1), [[ROW]] * 3),
            (torch.tensor([[4, 5, 6, 8]]), [[6, 8, 4, 5, 6]]),
            (None, [[0, 1, 0, 1, 2]]),
        ):
            packed = self.batch.packed({"input_ids": POSITIONS, "position_ids": positions})
            self.assertEqual(packed["position_ids"].tolist(), expected)
            self.assertEqual(packed["input_ids"].tolist(), [ROW])

    def test_results_are_zero_at_padding(self):
        row = torch.tensor(ROW)[:, None]
        self.assertEqual(self.batch.unpack(row).view(2, 4).tolist(), [[0, 0, 7, 9], [2, 3, 5, 0]])
