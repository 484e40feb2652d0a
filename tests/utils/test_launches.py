"""The runs of the launch lines: what they read from a launch and compare, and a few launches on a CPU."""

import json
import math
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import launch_checks as checks
import launch_lines
import launches
import pytest
from launches import compared, passed, select
from parameterized import parameterized


ROOT = Path(__file__).resolve().parents[2]


class ComparisonTest(unittest.TestCase):
    @parameterized.expand(
        [
            ({5: 2.0, 10: 1.0}, True),
            ({5: 2.01, 10: 0.995}, True),
            ({5: 2.0, 10: 1.02}, False),  # another loss
            ({5: 2.0, 10: math.nan}, False),
            ({5: 2.0}, False),  # the last step is missing
            ({}, False),
        ]
    )
    def test_losses(self, found, expected):
        self.assertEqual(checks.agreement(found, {5: 2.0, 10: 1.0}, 0.01)["passed"], expected)

    @parameterized.expand(
        [({2: ["a", "b"]}, True), ({2: ["b", "a"]}, False), ({1: ["x", "y"], 2: ["a", "b"]}, False), ({}, False)]
    )
    def test_rows(self, found, expected):
        self.assertEqual(checks.same_rows(found, {1: ["c", "d"], 2: ["a", "b"]})["passed"], expected)

    def test_a_loss_that_differs_fails_the_launch(self):
        def saved(loss):
            return {"checks": {"stock class loads it": {"passed": True, "loss": loss}}}

        against = {"name": "trainer/one", "losses": {5: 2.0}, "grad_norms": {5: 1.0}} | saved(1.5)
        worse = {"losses": {5: 2.1}}, {"grad_norms": {5: 0.5}}, saved(1.6)
        for change, good in (({}, True), (saved(1.501), True), *((x, False) for x in worse)):
            entry = {"name": "trainer/ddp", "status": "ok", "losses": {5: 2.0}, "grad_norms": {5: 1.0}} | change
            entry["checks"] = compared(entry, against)
            self.assertEqual(passed(entry), good)
            self.assertEqual("FAILED" in launches.row(entry), not good)


class LinesTest(unittest.TestCase):
    def setUp(self):
        self.launches = {launch.name: launch for launch in launch_lines.launches(vision=True)}

    def test_every_example_runs_on_two_gpus(self):
        two = " ".join(launch.command for launch in self.launches.values() if launch.processes == 2)
        # The tree trains in a loop of its own, in one process.
        for path in (ROOT / "examples").glob("*.py"):
            self.assertEqual(f"examples/{path.name} " in two, path.stem not in ("common", "tree"), path.stem)

    def test_selection_adds_what_it_needs(self):
        names = [launch.name for launch in select(list(self.launches.values()), ["train/resumed", "kill-ddp"])]
        self.assertEqual(
            names,
            ["resume-ddp/whole", "kill-ddp/killed", "kill-ddp/resumed", "train/ddp", "train/resumed", "train/one"],
        )


@pytest.mark.slow
class RunTest(unittest.TestCase):
    def test_a_few_launches_on_a_cpu(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "launches.json")
            command = [sys.executable, str(ROOT / "benchmarks" / "launches.py"), "--shape", "tiny", "--device", "cpu"]
            command += ["--folder", folder, "--output", str(path), "--only", "trainer", "kill-ddp"]
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
            ran = subprocess.run(command, capture_output=True, text=True, env=environment)
            self.assertEqual(ran.returncode, 0, ran.stdout[-3000:] + ran.stderr[-3000:])
            report = json.loads(path.read_text(encoding="utf-8"))
        entries = {entry["name"]: entry for entry in report["launches"]}
        self.assertEqual(entries["trainer/fsdp2"]["status"], "skipped")
        two = entries["trainer/ddp"]["checks"]
        self.assertLess(two["losses of trainer/one"]["largest"], 1e-5)
        self.assertEqual(entries["kill-ddp/resumed"]["checks"]["rows of resume-ddp/whole"]["steps"], [5, 6, 7, 8])
