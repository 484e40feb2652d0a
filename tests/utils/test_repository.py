"""The files for contributors and continuous integration agree with the Makefile and `setup.py`."""

import re
import unittest
from pathlib import Path

import yaml


ROOT = Path(__file__).resolve().parents[2]
SETUP = (ROOT / "setup.py").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def read(path: str):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


class RepositoryTest(unittest.TestCase):
    def test_all_files_can_be_read(self):
        paths = [".pre-commit-config.yaml", *(str(x.relative_to(ROOT)) for x in ROOT.glob(".github/**/*.yml"))]
        self.assertEqual(len(paths), 6)
        for path in paths:
            self.assertIsInstance(read(path), dict, path)

    def test_the_supported_pythons_are_tested(self):
        tested = read(".github/workflows/tests.yml")["jobs"]["python"]["strategy"]["matrix"]["python"]
        self.assertEqual(tested, re.findall(r"Python :: (3\.\d+)", SETUP))

    def test_workflows_and_hooks_run_what_exists(self):
        for target in read(".github/workflows/releases.yml")["jobs"]["suite"]["strategy"]["matrix"]["target"]:
            self.assertRegex(MAKEFILE, rf"(?m)^{target}:")
        self.assertTrue((ROOT / ".ci" / "run").is_file())
        ruff, local = read(".pre-commit-config.yaml")["repos"]
        self.assertIn(f"ruff=={ruff['rev'].removeprefix('v')}", SETUP)
        for hook in local["hooks"]:
            self.assertTrue((ROOT / hook["entry"].split()[1]).is_file(), hook["entry"])
