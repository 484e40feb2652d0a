"""The pages of measurements and the figures match their scripts and the committed results."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from shutil import copytree

from parameterized import parameterized


ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "docs" / "figures"
PICTURES = [path.stem for path in FIGURES.glob("*.svg")]


class CardsTest(unittest.TestCase):
    def check(self, results: Path) -> subprocess.CompletedProcess:
        command = [sys.executable, "utils/cards/write.py", "--check", "--results", str(results)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    def test_the_pages_have_the_numbers_of_the_results(self):
        result = self.check(ROOT / "benchmarks" / "results")
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_another_number_is_noticed(self):
        with tempfile.TemporaryDirectory() as folder:
            copytree(ROOT / "benchmarks" / "results", folder, dirs_exist_ok=True)
            path = Path(folder, "cpu_step.json")
            results = json.loads(path.read_text(encoding="utf-8"))
            results["results"]["median_seconds"]["packed"] += 1
            path.write_text(json.dumps(results), encoding="utf-8")
            result = self.check(Path(folder))
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("cpu_step.md: differs from benchmarks/results", result.stderr)

    @parameterized.expand(PICTURES)
    def test_pictures_are_up_to_date(self, name):
        with tempfile.TemporaryDirectory() as folder:
            copytree(ROOT / "docs" / "figures", Path(folder, "docs", "figures"))
            copytree(ROOT / "benchmarks" / "results", Path(folder, "benchmarks", "results"))
            copytree(ROOT / "utils" / "cards", Path(folder, "utils", "cards"))
            picture = Path(folder, "docs", "figures", f"{name}.svg")
            picture.unlink()
            subprocess.run([sys.executable, str(picture.with_suffix(".py"))], check=True)
            self.assertEqual(picture.read_bytes(), (FIGURES / f"{name}.svg").read_bytes())


if __name__ == "__main__":
    unittest.main()
