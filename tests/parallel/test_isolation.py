"""Documents of a row on several ranks stay apart, bit for bit, including those that a cut divides."""

import unittest
from unittest import mock

import pytest
from common.isolation import find_leaks
from common.processes import ROWS, run_processes
from mixins.vision import TEXT
from parameterized import parameterized
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig, set_seed

from transformers_packed.models.qwen3_5 import modeling_qwen3_5
from transformers_packed.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers_packed.models.qwen3_next import modeling_qwen3_next
from transformers_packed.parallel import RowShard, SequenceParallel


SHORT = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
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
FEW = ("aligned", "cut", "long before short")


def make_model(name):
    set_seed(0)
    text = {**TEXT, **SHORT, "initializer_range": 0.1}
    if name == "experts":
        model = modeling_qwen3_5_moe.Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**text, **EXPERTS))
    elif name == "next":
        model = modeling_qwen3_next.Qwen3NextForCausalLM(Qwen3NextConfig(**text, **EXPERTS))
    else:
        model = modeling_qwen3_5.Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text))
    if name in ("experts", "next"):
        # The grouped product does not support float64.
        model.set_experts_implementation("eager")
    elif name == "eager":
        model.set_attn_implementation("eager")
    elif name == "checkpoints":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.double().train()


def run_all(size, cases, rows):
    results = {}
    for case in cases:
        name, methods, sizes, tolerance = (CASES | MORE_CASES)[case]
        if size in sizes:
            parallel, model = SequenceParallel(size, **methods), make_model(name)
            for row in rows:
                results[case, row] = find_leaks(model, parallel, LENGTHS[row], tolerance)
    return results


def run_with_a_fault(methods):
    # Pretend that the first document of each part starts with the row.
    with mock.patch.object(RowShard, "tokens_before", property(lambda shard: shard.start)):
        return find_leaks(make_model("dense"), SequenceParallel(2, **methods), [12, 6, 6])


class ParallelIsolationTest(unittest.TestCase):
    def check(self, size, cases, rows):
        for results in run_processes(run_all, size, size, cases, rows):
            self.assertTrue(results)
            for (case, row), leaks in results.items():
                with self.subTest(case=case, row=row):
                    self.assertEqual(leaks, [])

    @parameterized.expand([(2, tuple(CASES), FEW), (4, ("states and heads",), ("cut",))])
    def test_documents_stay_apart(self, size, cases, rows):
        # Elsewhere: state crosses documents, or the convolution restarts, at the cuts between processes.
        self.check(size, cases, rows)

    @parameterized.expand([2, 4])
    @pytest.mark.slow
    def test_documents_stay_apart_everywhere(self, size):
        self.check(size, (*CASES, *MORE_CASES), tuple(LENGTHS))

    @parameterized.expand([("by states", {}), ("by gather", GATHER)])
    def test_a_fault_is_found(self, _, methods):
        for leaks in run_processes(run_with_a_fault, 2, methods):
            ways = {(how, origin, other) for how, origin, other in leaks}
            for how in ("replaced, forward", "NaN, forward", "replaced, backward"):
                self.assertIn((how, 0, 1), ways)
            self.assertIn(("alone, backward", 1, 0), ways)
            self.assertNotIn("alone, forward", {how for how, *_ in leaks})
