"""`utils/margins.py`: how near tests are to their bars."""

import subprocess
import sys
import tempfile
import unittest
from pathlib import Path


SCRIPT = Path(__file__).parents[2] / "utils" / "margins.py"
TESTS = """
import os
import unittest

class NumbersTest(unittest.TestCase):
    def test_near(self):
        difference = 5e-7 if os.environ["ATEN_CPU_CAPABILITY"] == "avx2" else 1e-9
        self.assertLess(difference, 1e-6)
        self.assertAlmostEqual(1.0, 1.0 + 1e-6 * difference, delta=1e-6)

    def test_bound(self):
        self.assertLessEqual(0.0099, 0.01)

    def test_no_bars(self):
        self.assertLess(0, 1)
        self.assertLess(3.1, 3.2)
        self.assertLess("a", "b")
        self.assertAlmostEqual(0.5, 0.5)
"""


class MarginsTest(unittest.TestCase):
    def run_script(self, *options):
        command = [sys.executable, str(SCRIPT), str(self.path), "--threads", "1", *options]
        result = subprocess.run(command, capture_output=True, text=True, cwd=self.path.parent)
        return result.returncode, result.stdout.partition(" comparisons, ")[2]

    def setUp(self):
        self.path = Path(self.enterContext(tempfile.TemporaryDirectory())) / "test_numbers.py"
        self.path.write_text(TESTS)

    def test_comparisons_that_vary(self):
        status, printed = self.run_script("--capabilities", "default", "avx2")
        self.assertEqual(status, 1)
        self.assertTrue(printed.startswith("2 of them vary, 1 with a margin below 3:\n"), printed)
        self.assertIn("    2.00  test_numbers.py:8 in test_near (avx2, 1 threads)", printed)
        self.assertNotIn("test_bound", printed)
        self.assertEqual(self.run_script("--capabilities", "default", "avx2", "--least", "1.5")[0], 0)

    def test_a_test_that_fails(self):
        self.path.write_text(TESTS.replace("0.0099", "0.02"))
        status, printed = self.run_script("--capabilities", "avx2", "--least", "0.1")
        self.assertEqual(status, 1)
        self.assertIn("test_bound", printed)


if __name__ == "__main__":
    unittest.main()
