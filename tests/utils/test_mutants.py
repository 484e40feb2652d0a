"""Mutants of the package: each applies, and is killed by a test that passes without it."""

import unittest
from collections import Counter

import mutants


class ListTest(unittest.TestCase):
    def test_each_mutant_applies(self):
        self.assertEqual(mutants.problems(mutants.read()), [])

    def test_names_differ_and_no_file_has_more_than_three(self):
        found = mutants.read()
        self.assertEqual(len({x["name"] for x in found}), len(found))
        self.assertEqual([x for x, n in Counter(x["file"] for x in found).items() if n > 3], [])
