"""`utils/audit_all.py`: its processes, and the support matrix of the package."""

import contextlib
import io
import json
import os
import sys
import unittest
from pathlib import Path
from unittest import mock

import audit_all
import pytest
import transformers
from audit_all import audit_type, causal_types, run_types

from transformers_packed.models import families
from transformers_packed.models.families import families_of
from transformers_packed.models.family import Family, Unpacked
from transformers_packed.models.verdict import SUPPORT_MATRIX


ROOT = Path(__file__).parents[2]
# Answers like a worker, and dies in every possible way.
FAKE = """
import json, os, signal, sys, time
for line in sys.stdin:
    name = line.strip()
    if name == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "exit":
        sys.exit(3)
    if name == "half":
        print('{"class":', end="", flush=True)
        sys.exit(0)
    if name == "hang":
        time.sleep(600)
    print(json.dumps({"name": name, "process": os.getpid()}), flush=True)
"""
COMMAND = (sys.executable, "-c", FAKE)


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def audit(*arguments: str) -> tuple[int, str, str]:
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            status = audit_all.main([*arguments])
        except SystemExit as exit:
            status = exit.code
    return status, stdout.getvalue(), stderr.getvalue()


class WorkersTest(unittest.TestCase):
    def test_what_ends_a_process_is_the_verdict_of_its_type(self):
        names = ["a", "crash", "b", "hang", "exit", "half", "c"]
        found = dict(run_types(names, 3, time_limit=3.0, command=COMMAND))
        self.assertEqual(set(found), set(names))
        for name in "abc":
            self.assertEqual(found[name]["name"], name)
            self.assertFalse(is_running(found[name]["process"]))
        self.assertEqual(found["crash"], {"not_built": "the process ended with SIGSEGV"})
        self.assertEqual(found["exit"], {"not_built": "the process ended with exit status 3"})
        self.assertIn("the process ended", found["half"]["not_built"])
        self.assertEqual(found["hang"], {"not_built": "no answer within 3 s"})

    def test_stopping_early_ends_them(self):
        results = run_types(["a", "hang", "hang", "hang"], 1, command=COMMAND)
        _, entry = next(results)
        self.assertTrue(is_running(entry["process"]))
        results.close()
        self.assertFalse(is_running(entry["process"]))


class CommandTest(unittest.TestCase):
    def test_status_when_ours_leaks(self):
        leaks = {"position_ids": {"verdict": "leaks", "module": "M", "kind": "state"}, "all": {"verdict": "isolated"}}
        isolated = dict.fromkeys(leaks, {"verdict": "isolated"})
        for builtin, ours, expected in ((leaks, isolated, 0), (isolated, leaks, 1)):
            entry = {"class": "C", "attention": "sdpa", "builtin": builtin, "ours": ours}
            with mock.patch.object(audit_all, "run_types", return_value=[("llama", entry)]):
                self.assertEqual(audit("--types", "llama")[0], expected)


class SupportMatrixTest(unittest.TestCase):
    """The packaged data match this code and the installed Transformers."""

    def setUp(self):
        self.matrix = json.loads(SUPPORT_MATRIX.read_text(encoding="utf-8"))

    def of_this_version(self):
        if self.matrix["transformers"] != transformers.__version__:
            self.skipTest(f"measured with {self.matrix['transformers']}, installed is {transformers.__version__}")

    def check(self, name: str, entry: dict):
        want = self.matrix["types"][name]
        self.assertEqual("not_built" in entry, "not_built" in want, name)
        for model in ("builtin", "ours"):
            for source, found in entry.get(model, {}).items():
                keys = ("verdict", "module", "kind")
                self.assertEqual(
                    [found.get(key) for key in keys],
                    [want[model][source].get(key) for key in keys],
                    f"{name}, {model}, {source}; run make support-matrix",
                )

    def test_all_types_are_there(self):
        self.of_this_version()
        self.assertEqual(sorted(self.matrix["types"]), sorted(causal_types()), "run make support-matrix")

    def test_audited_again(self):
        self.of_this_version()
        self.check("llama", audit_type("llama"))

    @pytest.mark.slow
    def test_all_audited_again(self):
        self.of_this_version()
        for name, entry in run_types(causal_types(), 2):
            with self.subTest(name):
                self.check(name, entry)

    def test_the_page_is_made_of_them(self):
        page = ROOT / "docs" / "reference" / "support_matrix.md"
        self.assertEqual(
            page.read_text(encoding="utf-8"), audit_all.to_markdown(self.matrix), "run make support-matrix"
        )
        self.assertEqual(SUPPORT_MATRIX.read_text(encoding="utf-8"), audit_all.to_json(self.matrix))

    @pytest.mark.slow
    def test_unpacking_is_told_apart(self):
        """For an isolated model whose family runs document by document, the matrix has this and the cause."""
        unpacked = Family("qwen3_5", Unpacked("Qwen3_5TextModel", "no kernel takes boundaries"))
        told = lambda model, *apart: {unpacked for family in families_of(model) if family.name == unpacked.name}  # noqa: E731
        with mock.patch.object(families, "families_of", told):
            entry = audit_type("qwen3_5_text")
            self.assertEqual(audit_type("qwen3_next")["ours"]["all"], {"verdict": "isolated"})
        for found in entry["ours"].values():
            self.assertEqual(found, {"verdict": "isolated by unpacking", "reason": "no kernel takes boundaries"})
        self.assertEqual(entry["builtin"]["position_ids"]["verdict"], "leaks")
        entry["ours"]["all"] = {"verdict": "leaks", "module": "A|B", "kind": "state"}
        page = audit_all.to_markdown({"transformers": "1", "torch": "2", "types": {"qwen3_5_text": entry}})
        self.assertIn("| isolated by unpacking |  |  | 1 |  |", page)
        cell = "isolated by unpacking: no kernel takes boundaries; with all: leaks: `A\\|B` (state)"
        self.assertIn(f"| {cell} |", page)
