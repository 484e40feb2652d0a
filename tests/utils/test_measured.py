"""The pages of measurements and the figures match their scripts and the committed results."""

import json
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from shutil import copytree

from parameterized import parameterized


ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "figures"
PICTURES = [path.stem for path in FIGURES.glob("*.svg")]


class MeasuredPagesTest(unittest.TestCase):
    def check(self, results: Path, *options: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "utils/measured/write.py", "--check", "--results", str(results), *options]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    def test_the_pages_have_the_numbers_of_the_results(self):
        result = self.check(ROOT / "benchmarks" / "results")
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_the_readme_has_the_numbers_of_the_page(self):
        readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("### What fits")[2].partition("\n### ")[0]
        page = (ROOT / "docs" / "measured" / "what_fits.md").read_text(encoding="utf-8").splitlines()
        steps = [
            (re.search(r"[0-9.]+B", line)[0], *step)
            for line in readme.splitlines()
            for step in re.findall(r"([0-9.]+ GiB), ([0-9,]+ ms)", line)
        ]
        self.assertEqual(len(steps), 11)
        for model, memory, time in steps:
            start, end = f"| {model} |", f"| {memory} | {time}"
            self.assertTrue(any(line.startswith(start) and end in line for line in page), (model, memory, time))

    def test_another_number_is_noticed(self):
        with tempfile.TemporaryDirectory() as folder:
            copytree(ROOT / "benchmarks" / "results", folder, dirs_exist_ok=True)
            path = Path(folder, "cpu_step.json")
            results = json.loads(path.read_text(encoding="utf-8"))
            results["results"]["median_seconds"]["packed"] += 1
            path.write_text(json.dumps(results), encoding="utf-8")
            result = self.check(Path(folder))
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("planning.md: differs from benchmarks/", result.stderr)

    def test_a_figure_that_no_result_has(self):
        with tempfile.TemporaryDirectory() as folder:
            copytree(ROOT / "benchmarks" / "pages", folder, dirs_exist_ok=True)
            with Path(folder, "planning.md").open("a", encoding="utf-8") as page:
                page.write("{{ cpu_step.results.ration }}")
            result = self.check(ROOT / "benchmarks" / "results", "--templates", folder)
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("planning.md", result.stderr)
        self.assertRegex(result.stderr, "UndefinedError: .*ration")

    @parameterized.expand(PICTURES)
    def test_pictures_are_up_to_date(self, name):
        with tempfile.TemporaryDirectory() as folder:
            copytree(ROOT / "docs" / "figures", Path(folder, "docs", "figures"))
            copytree(ROOT / "benchmarks" / "results", Path(folder, "benchmarks", "results"))
            copytree(ROOT / "utils" / "measured", Path(folder, "utils", "measured"))
            picture = Path(folder, "docs", "figures", f"{name}.svg")
            picture.unlink()
            subprocess.run([sys.executable, str(picture.with_suffix(".py"))], check=True)
            self.assertEqual(picture.read_bytes(), (FIGURES / f"{name}.svg").read_bytes())
