"""Trees of documents: the paths that they form. `ops/test_prompts.py` has the ops on such rows."""

import unittest

from hypothesis import given, settings
from hypothesis import strategies as st
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.shared_prompts import SharedPrompts, level_order, paths_of, to_level_order


@st.composite
def trees(draw):
    return [draw(st.integers(-1, document - 1)) for document in range(draw(st.integers(1, 12)))]


def binary(levels):
    return [-1, *((document - 1) // 2 for document in range(1, 2**levels - 1))]


def conversation(turns):
    """Each turn is continued by the next one, and by a branch."""
    return [-1, *range(turns - 1), *range(turns)]


class PathsTest(unittest.TestCase):
    @given(trees())
    @settings(deadline=None, max_examples=200)
    def test_any_tree(self, parent_of):
        levels = paths_of(parent_of)
        level_of = {path[-1]: number for number, paths in enumerate(levels) for path in paths}
        path_of = {document: path for paths in levels for path in paths for document in path}
        self.assertEqual(sorted(path_of), list(range(len(parent_of))))
        for document, path in path_of.items():
            at, parent = path.index(document), parent_of[document]
            if at:
                self.assertEqual(path[at - 1], parent)
            elif parent < 0:
                self.assertEqual(level_of[path[-1]], 0)
            else:
                self.assertEqual(level_of[path[-1]], level_of[path_of[parent][-1]] + 1)
            if parent >= 0 and parent_of.count(parent) == 1:
                self.assertIs(path_of[parent], path)
        order, moved = to_level_order(parent_of)
        self.assertEqual([order[parent] if parent >= 0 else -1 for parent in moved], [parent_of[d] for d in order])
        self.assertEqual(level_order(moved), list(range(len(order))))

    @parameterized.expand(
        [
            ("one_level", [-1, 0, 0, 0], 2),
            ("chain", [-1, *range(19)], 1),
            ("binary", binary(4), 4),
            ("conversation", conversation(12), 2),
            ("both", [*conversation(12), -1, 24, 24], 2),
            ("short_conversation", conversation(2), 2),
        ]
    )
    def test_number_of_levels(self, _, parent_of, levels):
        self.assertEqual(len(paths_of(parent_of)), levels)

    def test_a_row_in_this_order_is_not_moved(self):
        lengths = SequenceBoundaries.from_lengths([3, 2, 1, 4, 2, 2])
        for parent_of, moves in (([-1, -1, 0, 0, 1, 1], False), ([-1, 0, 0, -1, 3, 3], True)):
            levels = SharedPrompts.of(lengths, parent_of).layout.levels(8)
            self.assertEqual((levels.sources is not None, levels.places is not None), (moves, moves))

    def test_tokens_that_read_states(self):
        """Only a state inside a path is read, once for all documents that start from it."""
        row = SharedPrompts.of(SequenceBoundaries.from_lengths([1] * 24), conversation(12))
        first, second = row.layout.levels(8).levels
        self.assertEqual(first.boundaries.lengths[0] - 8 * 11, 12 + 1)
        self.assertEqual((len(first.places[1]), first.continued, second.places), (8 * 11, True, None))
        self.assertEqual(len(second.states.rows), 11)


class RunsTest(unittest.TestCase):
    def test_documents_that_follow_their_parents(self):
        row = SharedPrompts.of(SequenceBoundaries.from_lengths([3, 2, 1, 4, 2]), [-1, 0, 0, 2, -1])
        self.assertEqual(row.layout.runs.lengths, [5, 5, 2])
        self.assertEqual(row.layout.continued, [1])
        boundaries, copies = row.layout.keys
        self.assertEqual(boundaries.lengths, [5, 8, 2])
        self.assertEqual(copies.rows.tolist(), [0, 1, 2, 3, 4, 0, 1, 2, *range(5, 10), 10, 11])
        self.assertEqual(row.layout.alone.lengths, [5])
        runs, boundaries, copies = row.layout.rest
        self.assertEqual((runs.lengths, boundaries.lengths), ([5, 2], [8, 2]))
        self.assertEqual(copies.rows.tolist(), [0, 1, 2, *range(5, 10), 10, 11])
        self.assertEqual(row.position_ids.tolist(), [[0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 0, 1]])

    def test_tails_across_short_ancestors(self):
        row = SharedPrompts.of(SequenceBoundaries.from_lengths([2, 9, 1, 9, 1, 1]), [-1, -1, 0, -1, 2, 4])
        self.assertEqual(row.layout.tails(3).rows.tolist(), [0, 0, 1, 0, 1, 11])
        self.assertEqual(row.layout.tails(1).rows.tolist(), [1, 11])
