"""Mutants of the package: each applies, and is killed by a test that passes without it."""

import sys
import tempfile
import unittest
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "utils"))
import mutants


MUTANT = {"name": "one", "file": "ops/one.py", "old": "1 + 1", "new": "1 + 2", "tests": ["tests/test_one.py"]}


class ListTest(unittest.TestCase):
    def test_each_mutant_applies(self):
        self.assertEqual(mutants.problems(mutants.read()), [])

    def test_names_differ_and_no_file_has_more_than_three(self):
        found = mutants.read()
        self.assertEqual(len({x["name"] for x in found}), len(found))
        self.assertEqual([x for x, n in Counter(x["file"] for x in found).items() if n > 3], [])


class MutantsTest(unittest.TestCase):
    def setUp(self):
        self.copy = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.path = self.copy / mutants.SOURCE / MUTANT["file"]
        self.path.parent.mkdir(parents=True)
        self.path.write_text("x = 1 + 1\n", encoding="utf-8")
        (self.copy / "tests").mkdir()
        (self.copy / "tests" / "test_one.py").touch()

    def test_texts_that_do_not_apply(self):
        self.assertEqual(mutants.mutated(MUTANT, self.copy), "x = 1 + 2\n")
        for change, message in (
            ({"old": "2 + 2"}, "got 0 times"),
            ({"old": "1"}, "got 2 times"),
            ({"new": "("}, "expected code"),
            ({"file": "ops/two.py"}, "no such file"),
        ):
            with self.subTest(message), self.assertRaisesRegex(ValueError, message):
                mutants.mutated(MUTANT | change, self.copy)

    def kill(self, tests, *results):
        """Kill a mutant whose runs of pytest have these results. Returns it, and the arguments and text of each run."""
        runs, results = [], iter(results)

        def run(copy, arguments):
            runs.append(((*arguments,), self.path.read_text(encoding="utf-8")))
            return next(results)

        with mock.patch.object(mutants, "run_tests", run), redirect_stdout(StringIO()):
            found = mutants.kill(MUTANT | {"tests": tests}, self.copy)
        self.assertEqual(self.path.read_text(encoding="utf-8"), "x = 1 + 1\n")
        return found["killed_by"], runs

    def test_all_tests_of_the_files_run_if_the_chosen_ones_do_not_fail(self):
        failed = mutants.FAILED, ["tests/test_one.py::test"], ""
        chosen, every = ("tests/test_one.py", "-k", "few"), ("tests/test_one.py",)
        tests = ["tests/test_one.py", "tests/gone.py", "-k few"]
        for first in (mutants.PASSED, mutants.NONE):
            killed_by, runs = self.kill(tests, (first, [], ""), failed)
            self.assertEqual(killed_by, "tests/test_one.py::test")
            self.assertEqual(runs, [(chosen, "x = 1 + 2\n"), (every, "x = 1 + 2\n")])
        self.assertEqual(len(self.kill(tests, failed)[1]), 1)
        self.assertIsNone(self.kill(tests, (mutants.NONE, [], ""), (mutants.PASSED, [], ""))[0])

    def test_a_test_that_fails_without_the_mutant_kills_none(self):
        broken, sound = "tests/test_one.py::broken", "tests/test_one.py::sound"
        results = [{"name": x, "killed_by": x} for x in (broken, sound)]
        with (
            mock.patch.object(mutants, "copy_repository", lambda target: target),
            mock.patch.object(mutants, "kill", lambda mutant, copy: mutant),
            mock.patch.object(mutants, "run_tests", return_value=(mutants.FAILED, [broken], "")),
            redirect_stdout(StringIO()),
        ):
            found = mutants.kill_all(results, 1)
        self.assertEqual([x["killed_by"] for x in found], [None, sound])
