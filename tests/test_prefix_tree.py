"""The pieces of documents with common beginnings. Rows and whole models are tested in models/ and mixins/padding.py."""

import unittest
from functools import cache
from unittest import mock

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transformers_packed import prefix_tree
from transformers_packed.prefix_tree import prefix_pieces
from transformers_packed.shared_prompts import level_order


def partitions(items):
    if not items:
        yield []
        return
    first, *rest = items
    for parts in partitions(rest):
        yield [[first], *parts]
        for k in range(len(parts)):
            yield [*parts[:k], [first, *parts[k]], *parts[k + 1 :]]


def common(documents):
    """The number of tokens that all documents start with, of which each keeps one at least."""
    n = min(map(len, documents)) - 1
    return next((k for k in range(n) if len({document[k] for document in documents}) > 1), n)


def least_cost(documents, least_saved):
    """The lowest cost of any tree: groups of documents share any number of tokens, and then groups of these do."""

    @cache
    def cost(members, depth):
        return min(sum(part_cost(tuple(part), depth) for part in parts) for parts in partitions(list(members)))

    def part_cost(part, depth):
        if len(part) == 1:
            return len(documents[part[0]]) - depth
        ends = range(depth + 1, common([documents[i] for i in part]) + 1)
        return min((end - depth + least_saved + cost(part, end) for end in ends), default=10**6)

    return cost(tuple(range(len(documents))), 0)


def pieces_of(documents, least_saved=None):
    arrays = [np.array(document) for document in documents]
    with mock.patch.object(prefix_tree, "_LEAST_SAVED", least_saved or prefix_tree._LEAST_SAVED):
        return prefix_pieces(arrays)


documents = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=7).map(tuple), min_size=1, max_size=5)


class PiecesTest(unittest.TestCase):
    @given(documents, st.integers(1, 5))
    @example([(1, 1, 1, 1)] * 5, 1)
    @example([(1, 1), (1, 1, 2), (1, 1, 2, 2), (1, 1, 2, 2, 1), (2, 1)], 1)
    @settings(deadline=None, max_examples=300)
    def test_no_tree_costs_less(self, documents, least_saved):
        pieces = pieces_of(documents, least_saved)
        shared = len(pieces) - len(documents)
        cost = sum(piece.end - piece.begin for piece in pieces) + least_saved * shared
        self.assertEqual(cost, least_cost(documents, least_saved), pieces)

    @given(documents, st.integers(1, 5))
    @settings(deadline=None, max_examples=300)
    def test_pieces_make_up_the_documents(self, documents, least_saved):
        pieces = pieces_of(documents, least_saved)
        parents = [piece.parent for piece in pieces]
        self.assertEqual(level_order(parents), list(range(len(pieces))))
        paths, ends = [], []
        for number, (document, begin, end, parent) in enumerate(pieces):
            self.assertLess(parent, number)
            self.assertLess(begin, end)
            path = (paths[parent] if parent >= 0 else ()) + documents[document][begin:end]
            self.assertEqual(path, documents[document][:end])
            paths.append(path)
            if parents.count(number) == 0:
                self.assertEqual(end, len(documents[document]))
                ends.append(document)
            else:
                self.assertGreater(parents.count(number), 1)
                self.assertLess(end, len(documents[document]))
        self.assertEqual(sorted(ends), list(range(len(documents))))

    def test_a_short_beginning_is_not_worth_it(self):
        """Neither at the beginning of a document nor after another one."""
        for tokens, shared in ((63, 0), (64, 1)):
            first = [[*range(tokens), 100 + k] for k in range(2)]
            self.assertEqual(len(pieces_of(first)) - 2, shared)
            second = [[*range(100), *document] for document in first] + [[*range(100), 99]]
            self.assertEqual(len(pieces_of(second)) - 3, 1 + shared)

    def test_a_conversation_with_branches(self):
        """The turns follow each other, and then all branches."""
        turns = [*range(3000)]
        documents = [[*turns[: 2 * n], 10**6] for n in range(1, 1501)]
        pieces = pieces_of(documents, 1)
        self.assertEqual([piece.end for piece in pieces[:1499]], [*range(2, 3000, 2)])
        self.assertEqual([piece.parent for piece in pieces[:1499]], [*range(-1, 1498)])
        self.assertEqual(sum(piece.end - piece.begin for piece in pieces), 3000 + 1500)
