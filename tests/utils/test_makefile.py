"""What the Makefile installs, and the required Python version, which is the same wherever it is stated."""

import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path


ROOT = Path(__file__).parents[2]
# Runs the code of `python -c CODE` with a different reported version.
OTHER_PYTHON = """#!/bin/sh
exec {python} -c 'import sys; sys.version_info = ({version}, 0, "final", 0); exec(sys.argv[1])' "$2"
"""


class StagesTest(unittest.TestCase):
    """The demo needs little of what the other targets need, and installs nothing else."""

    def test_each_target_installs_what_it_needs(self):
        with tempfile.TemporaryDirectory() as directory:
            for name in ("Makefile", "setup.py"):
                shutil.copy(ROOT / name, directory)
            for target, expected in (("demo", ["demo"]), ("test", ["demo", "dev"]), ("docs", ["demo", "dev"])):
                command = ["make", "-n", target, f"PYTHON={sys.executable}"]
                planned = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout
                self.assertEqual(re.findall(r'-e "\.\[(\w+)\]"', planned), expected, target)


class PythonVersionTest(unittest.TestCase):
    def make(self, version, target):
        """Run `make` with this Python and return its stderr. `pip` and `venv` are not reached."""
        with tempfile.TemporaryDirectory() as directory:
            for name in ("Makefile", "setup.py"):
                shutil.copy(ROOT / name, directory)
            python = Path(directory, "other_python")
            python.write_text(OTHER_PYTHON.format(python=sys.executable, version=version))
            python.chmod(0o755)
            command = ["make", target, f"PYTHON={python}"]
            result = subprocess.run(command, cwd=directory, capture_output=True, text=True)
            self.assertFalse(Path(directory, ".venv").exists())
        self.assertNotEqual(result.returncode, 0)
        return result.stderr.splitlines()

    def test_make_says_that_a_python_is_too_old(self):
        for environment in (".venv", ".venv-lowest", ".venv-axolotl", ".venv-swift"):
            target = f"{environment}/.installed"
            lines = self.make("3, 10", target)
            self.assertEqual(lines[0], "Python 3.10 is too old: make PYTHON=python3.11 (or newer; rm -rf .venv first)")
            self.assertEqual(len(lines), 2, lines)  # the other one is make's own
            self.assertNotIn("too old", "".join(self.make("3, 11", target)))

    def test_all_say_the_same(self):
        for name, pattern in (
            ("setup.py", r'python_requires=">=([0-9.]+)"'),
            ("pyproject.toml", r'target-version = "py(3)([0-9]+)"'),
            ("README.md", r"Python >= ([0-9.]+)"),
        ):
            found = re.findall(pattern, (ROOT / name).read_text(encoding="utf-8"))
            self.assertEqual([".".join(x) if isinstance(x, tuple) else x for x in found], ["3.11"], name)
