"""The segments that fit the memory of a GPU."""

import unittest

from parameterized import parameterized

from transformers_packed.data.planning.segments import choose_segment


class SegmentTest(unittest.TestCase):
    @parameterized.expand(
        [
            # The longest ones that fit, and no cut if a whole row does.
            (100_000, 100_000, None, True),
            (100_000, 99_999, 65_536, True),
            (65_536, 65_535, 32_768, True),
            (100_000, 5_000, 4_096, True),
            (4_097, 4_096, 4_096, True),
            # Shorter ones are not chosen.
            (100_000, 4_095, 4_096, False),
            (4_096, 4_095, None, False),
            (64, 1, None, False),
        ]
    )
    def test_chooses(self, length, available, segment, fits):
        self.assertEqual(choose_segment(lambda n: n or length, length, available), (segment, fits))

    def test_those_that_need_least_if_none_fit(self):
        """Cuts need memory, too."""
        self.assertEqual(choose_segment(lambda n: abs((n or 65_536) - 9_000), 65_536, 100), (8_192, False))
