"""The benchmark of the check before the first step trains a small model on a CPU, and times the check."""

import io
import json
import tempfile
import unittest
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import verify


QUICK = ["--models", "tiny", "--device", "cpu", "--samples", "10", "--longest", "60", "--batch", "4"]


def main(*arguments: str) -> tuple[int, str]:
    with (
        mock.patch("sys.argv", ["verify.py", *QUICK, *arguments]),
        redirect_stdout(io.StringIO()) as printed,
    ):
        return verify.main(), printed.getvalue()


class VerifyBenchmarkTest(unittest.TestCase):
    def test_one_arm(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run.json")
            self.assertEqual(main("--arms", "warm", "--alone", str(path), "--evaluate")[0], 0)
            found = json.loads(path.read_text())
        self.assertTrue(found["padding_free"])
        (said,) = [line for line in found["said"] if line.startswith("Verified")]
        self.assertIn("evaluation of", said)
        self.assertTrue(0 < found["verify_seconds"] < found["seconds_until_first_step"])

    def test_arms_share_the_caches_of_the_last_cold_one(self):
        folders, arms = [], ["cold", "warm", "warm unchecked", "cold unchecked"]

        def alone(model, arm, caches, args):
            self.assertEqual(list(caches.iterdir()), [caches / "kernel"] if arm.startswith("warm") else [])
            (caches / "kernel").touch()
            folders.append(caches)
            return {"model": model, "arm": arm, "error": "planted"}

        with tempfile.TemporaryDirectory() as folder, mock.patch.object(verify, "alone", alone):
            path = Path(folder, "verify.json")
            code, printed = main("--arms", *arms, "--output", str(path))
            runs = json.loads(path.read_text())["runs"]
        self.assertEqual(code, 1)
        self.assertIn("planted", printed)
        self.assertEqual([run["arm"] for run in runs], arms)
        self.assertEqual(len(set(folders)), 2)
