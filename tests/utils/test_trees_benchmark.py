"""The benchmark of trees: its rows, its losses and gradients, and its bars."""

import json
import tempfile
import unittest
from pathlib import Path

import arms
import shapes
import trees
from common.commands import run_main
from parameterized import parameterized


# Computed tokens of each arm.
TOKENS = {
    "branching": {"separate": 65_536, "prompt shared": 36_864, "first turn shared": 29_696, "tree": 19_456},
    "conversation": {"separate": 58_200, "tree": 13_100},
    "chain": {"separate": 16_000, "tree": 16_000},
}


class RowsTest(unittest.TestCase):
    @parameterized.expand(trees.SCENES)
    def test_tokens(self, name):
        scene = trees.SCENES[name](1)
        rows = {arm: trees.rows_of(scene, shared) for arm, shared in trees.ARMS[name].items()}
        tokens = {arm: [row.tokens(scene) for row in of_arm] for arm, of_arm in rows.items()}
        self.assertEqual({arm: sum(x) for arm, x in tokens.items()}, TOKENS[name])
        self.assertEqual(max(max(x) for x in tokens.values()), TOKENS[name]["tree"])

    @parameterized.expand([("branching", 28), ("conversation", 11), ("chain", 0)])
    def test_turns_that_several_others_continue(self, name, branches):
        self.assertEqual(trees.SCENES[name](1).branches(), branches)


class StepTest(unittest.TestCase):
    @parameterized.expand(["conversation", "chain"])
    def test_every_arm_has_the_same_loss_and_gradients(self, name):
        model, scene = arms.make_model(shapes.MODELS["tiny"], "ours+lora", "cpu").float(), trees.SCENES[name](64)
        results = []
        for shared in trees.ARMS[name].values():
            batches = [trees.batch_of(scene, row, 2048, "cpu") for row in trees.rows_of(scene, shared)]
            results.append((float(trees.step(model, batches, scene.targets())), trees.gradient_of(model)))
        (loss, gradient), *others = results
        for other_loss, other in others:
            self.assertAlmostEqual(other_loss / loss, 1, places=5)
            self.assertLess(((other - gradient).norm() / gradient.norm()).item(), 1e-5)

    def test_runs_and_prints_the_bars(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trees.json")
            options = ["--model", "tiny", "--scenes", "conversation", "chain", "--shorter", "64", "--device", "cpu"]
            printed = run_main(trees, *options, "--repeats", "1", "--rounds", "1", "--output", path)
            runs = json.loads(path.read_text())["runs"]
        self.assertEqual([run["scene"] for run in runs], ["conversation", "chain"])
        self.assertEqual([len(run["arms"]["tree"]["seconds"]) for run in runs], [1, 1])
        self.assertLess(runs[0]["arms"]["tree"]["gradient_error"], 0.05)
        self.assertRegex(printed, r"time, separate over tree: [\d.]+, at least 3.0: (met|missed)")
        self.assertRegex(printed, r"time, tree over separate: [\d.]+, at most 1.02: (met|missed)")


class BarsTest(unittest.TestCase):
    def test_memory_of_computed_tokens_and_states(self):
        """Half a GiB per 1,000 tokens and 15 % more, and 2 MiB for each of 11 turns and 24 layers."""
        entries = {
            "separate": {"tokens": 58_200, "rows": [12_000, 13_000], "peak_above_GiB": 6.5, "median_ms": 310.0},
            "tree": {"tokens": 13_100, "rows": [13_100], "peak_above_GiB": 8.0, "median_ms": 100.0},
        }
        config = shapes.MODELS["4B"]
        times, memory = trees.bars("conversation", trees.conversation(1), entries, config)
        self.assertEqual((times["is"], times["met"]), (3.1, True))
        self.assertEqual((memory["at_most"], memory["met"]), (round(1.15 * 6.55 + 11 * 24 * 2 / 1024, 2), True))
        entries["tree"] |= {"peak_above_GiB": 8.1, "median_ms": 110.0}
        found = trees.bars("conversation", trees.conversation(1), entries, config)
        self.assertEqual([bar["met"] for bar in found], [False, False])
