"""The rows of the benchmark of long documents, and what it fits to their times."""

import unittest

from row_cost import fit, rows_of

from transformers_packed import PackingCost


class RowCostTest(unittest.TestCase):
    def test_all_rows_have_the_same_number_of_tokens(self):
        rows = rows_of(16384)
        self.assertEqual({sum(lengths) for lengths in rows.values()}, {16384})
        self.assertGreater(min(min(lengths) for lengths in rows.values()), 0)
        self.assertEqual(max(rows["1/4 in one"]), 4096)

    def test_the_weight_of_a_square(self):
        """100 ms, and 0.2 ms per million squares where the operations say 0.1 ms."""
        rows = [{"squares": millions * 1_000_000, "ms": 100 + 0.2 * millions} for millions in (1, 5, 9)]
        found = fit(rows, PackingCost(linear=1.0, quadratic=1e-6), tokens=1000)
        self.assertEqual(found, {"base_ms": 100.0, "ms_per_million": 0.2, "weight": 2.0})
