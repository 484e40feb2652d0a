"""The benchmark of the loss with each optimizer: two steps on a CPU, and its lines."""

import json
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np
import optimizer_loss
import torch
from common.commands import run_main
from common.optimizers import flashoptim


class OptimizerLossTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        lengths = np.full(60, 50, dtype=np.int32)
        ids = np.random.default_rng(0).integers(1, 64, lengths.sum()).astype(np.uint16)
        np.savez(self.folder / "corpus.npz", ids=ids, lengths=lengths, vocab_size=64)
        self.enterContext(mock.patch.dict(sys.modules, {"flashoptim": flashoptim()}))
        self.enterContext(mock.patch.object(torch, "compile", lambda function, **kwargs: function))

    def run_benchmark(self, *arguments):
        files = ["--corpus", str(self.folder / "corpus.npz"), "--output", str(self.folder / "out.json")]
        options = [*files, "--model", "tiny", "--steps", "2", "--tokens", "64"]
        said = run_main(optimizer_loss, *options, "--scratch", self.folder / "scratch", *arguments)
        return json.loads((self.folder / "out.json").read_text())["runs"], said

    def test_runs_of_optimizers_share_rows_and_weights(self):
        runs, _ = self.run_benchmark("--seeds", "0", "1", "--clip", "0")
        self.assertNotEqual(runs[0]["loss"], runs[1]["loss"])
        for run in runs:
            self.assertLess(abs(run["held_out_loss"] - np.log(64)), 0.3)
        runs, said = self.run_benchmark("--optim", "flash_adamw_release", "--clip", "0")
        self.assertEqual(len(runs), 3)
        # Before the first update, in another dtype.
        self.assertAlmostEqual(runs[2]["loss"][0], runs[0]["loss"][0], delta=1e-2)
        self.assertRegex(said, "flash_adamw_release, bfloat16, .* from AdamW in float32, whose 2 seeds span 0.0")
