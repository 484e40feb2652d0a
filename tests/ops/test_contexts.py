import unittest

import torch

from transformers_packed import SequenceBoundaries
from transformers_packed.ops.contexts import with_contexts
from transformers_packed.shared_prompts import SharedPrompts


class ContextsTest(unittest.TestCase):
    def test_documents(self):
        row, places = with_contexts(torch.arange(1, 7)[None], SequenceBoundaries.from_lengths([1, 3, 2]), 2, 0)
        self.assertEqual(row.tolist(), [[0, 0, 1, 0, 0, 2, 3, 4, 0, 0, 5, 6]])
        self.assertEqual(row[0, places].tolist(), [1, 2, 3, 4, 5, 6])

    def test_answers_follow_their_prompts(self):
        """A prompt may be shorter than the context, and have equal tokens."""
        tokens = torch.tensor([[7, 7, 7, 8, 1, 2, 3]])
        boundaries = SharedPrompts.of(SequenceBoundaries.from_lengths([3, 1, 1, 2]), [-1, -1, 0, 1])
        row, places = with_contexts(tokens, boundaries, 2, 0)
        self.assertEqual(row.tolist(), [[0, 0, 7, 7, 7, 0, 0, 8, 7, 7, 1, 0, 8, 2, 3]])
        self.assertEqual(row[0, places].tolist(), tokens[0].tolist())
        row, _ = with_contexts(tokens, boundaries, 4, 0)
        self.assertEqual(row[0, -6:].tolist(), [0, 0, 0, 8, 2, 3])

    def test_contexts_across_ancestors(self):
        tokens = torch.arange(1, 9)[None]
        boundaries = SharedPrompts.of(SequenceBoundaries.from_lengths([2, 1, 1, 1, 3]), [-1, 0, 0, 2, -1])
        row, places = with_contexts(tokens, boundaries, 3, 0)
        self.assertEqual(row.tolist(), [[0, 0, 0, 1, 2, 3, 0, 1, 2, 4, 5, 0, 0, 0, 6, 7, 8]])
        self.assertEqual(row[0, places].tolist(), tokens[0].tolist())
