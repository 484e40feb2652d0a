"""Documents of a row on several ranks stay apart, bit for bit, including those that a cut divides."""

import unittest

import pytest
from common.isolation import find_leaks
from common.processes import ROWS, run_processes
from parallel import test_models
from parameterized import parameterized

from transformers_packed.parallel import SequenceParallel


# A single document has no others to leak to.
LENGTHS = {name: lengths for name, lengths in ROWS.items() if len(lengths) > 1}
HEADS = {"gated_delta_rule": "heads", "attention": "heads"}
GATHER = {"attention": "gather"}
# Model, methods, sizes, tolerance.
CASES = {
    "states and heads": ("dense", {}, (2, 4), 0.0),
    "heads": ("dense", HEADS, (2,), 0.0),
    "gather": ("dense", GATHER, (2, 4), 0.0),
    "experts": ("experts", {}, (2, 4), 1e-10),
}
MORE_CASES = {
    "checkpoints": ("checkpoints", {}, (2, 4), 0.0),
    "eager gather": ("eager", GATHER, (2, 4), 0.0),
    "next by gather": ("next", GATHER, (2, 4), 1e-10),
}


def make_model(name):
    model = test_models.make_model(name if name in ("experts", "next") else "dense")
    if name == "eager":
        model.set_attn_implementation("eager")
    elif name == "checkpoints":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def run_all(size, cases, rows):
    results = {}
    for case in cases:
        name, methods, sizes, tolerance = (CASES | MORE_CASES)[case]
        if size in sizes:
            parallel, model = SequenceParallel(size, **methods), make_model(name)
            for row in rows:
                results[case, row] = find_leaks(model, parallel, LENGTHS[row], tolerance)
    return results


class ParallelIsolationTest(unittest.TestCase):
    def check(self, size, cases, rows):
        for results in run_processes(run_all, size, size, cases, rows):
            self.assertTrue(results)
            for (case, row), leaks in results.items():
                with self.subTest(case=case, row=row):
                    self.assertEqual(leaks, [])

    @parameterized.expand([(2, tuple(CASES)), (4, ("states and heads",))])
    def test_documents_stay_apart(self, size, cases):
        # Elsewhere: state crosses documents, or the convolution restarts, at the cuts between processes.
        self.check(size, cases, ("cut",))

    @parameterized.expand([2, 4])
    @pytest.mark.slow
    def test_documents_stay_apart_everywhere(self, size):
        self.check(size, (*CASES, *MORE_CASES), tuple(LENGTHS))
