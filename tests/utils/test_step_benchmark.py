"""The benchmark of one training step runs small models on a CPU, and counts what the models compute."""

import json
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import arms
import experts_layer
import shapes
import step
import torch
from common.commands import run_main
from graph_memory import free_in_pools, memory_of_graphs
from parameterized import parameterized
from transformers import AutoConfig

from transformers_packed import PackingCost


HAS_QUANTIZERS = bool(find_spec("bitsandbytes") and find_spec("torchao"))


def run(*arguments: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.json")
        quick = ["--rounds", "1", "--repeats", "1", "--warmup", "1", "--device", "cpu", "--tokens", "128"]
        printed = run_main(step, *arguments, *quick, "--output", path)
        return json.loads(path.read_text())["runs"][0] | {"printed": printed}


class ExpertsLayerTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("trained", [], 3, ["ours", "grouped_mm"]),
            ("lora", ["--lora"], 2, ["ours", "nf4", "nf4+bitsandbytes", "float8", "float8+reference"]),
        ]
    )
    def test_measures(self, _, options, products, arms):
        if options and not HAS_QUANTIZERS:
            self.skipTest("needs bitsandbytes and torchao")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "experts.json")
            quick = ["--models", "tiny-moe", "--tokens", "8", "--repeats", "1", "--rounds", "1", "--device", "cpu"]
            run_main(experts_layer, *quick, *options, "--output", path)
            (found,) = json.loads(path.read_text())["runs"]
        self.assertEqual(found["flops"], products * 2 * 8 * 2 * 3 * 64 * 32)
        self.assertEqual(list(found["arms"]), arms)


class StepTest(unittest.TestCase):
    def test_arms_have_the_same_loss(self):
        found = run("--models", "tiny", "--arms", "padded", "ours")
        self.assertAlmostEqual(*(found["arms"][name]["loss"] for name in ("padded", "ours")), delta=0.02)
        self.assertIn("above", found["printed"])

    def test_without_the_head_no_gradient_reaches_it(self):
        config = shapes.MODELS["tiny-moe"]
        args = mock.Mock(device="cpu", batch=8, checkpointing=False, no_head=True, labelled=1.0)
        arm = arms.Arm("ours", config, [40, 24], args)
        weights = sum(x.numel() for x in arm.model.parameters())
        arm.run()
        self.assertIsNone(arm.model.lm_head.weight.grad)
        gradients = weights - arm.model.lm_head.weight.numel()
        self.assertEqual(arm.bytes_of_weights_and_gradients(), 2 * (weights + gradients))

    def test_a_token_has_the_same_gradient_in_padded_and_packed_batches(self):
        lengths = [40, 24]
        packed, padded = (
            arms.upstream_gradients(arms.make_batches(lengths, 100, name, 8, "cpu"), 16, 64)[0]
            for name in ("ours", "padded")
        )
        self.assertTrue(packed[0, 40:].equal(padded[1, :24]))
        self.assertTrue(packed[0, :40].equal(padded[0]))
        self.assertFalse(padded[1, 24:].any())


class GraphMemoryTest(unittest.TestCase):
    def test_gaps_of_other_segments_are_not_of_graphs(self):
        sizes = [((0, 0), 100, 60), ((0, 1), 50, 20), ((0, 2), 8, 8), ([0, 1], 5, 0)]
        names = "segment_pool_id", "total_size", "allocated_size"
        self.assertEqual(free_in_pools(dict(zip(names, one, strict=True)) for one in sizes), 35)

    def test_a_model_without_graphs(self):
        self.assertIsNone(memory_of_graphs(torch.nn.Linear(1, 1)))


class ShapesTest(unittest.TestCase):
    @parameterized.expand(["35B-A3B", "Next-80B"])
    def test_shapes_of_mixtures_are_the_defaults_of_their_configurations(self, model):
        shape = shapes.MODELS[model]
        default = AutoConfig.for_model(shape["model_type"])
        ours = {k: v for k, v in shape.items() if k not in ("use_cache", "pad_token_id")}
        self.assertEqual(ours, {name: getattr(default, name) for name in ours})

    @parameterized.expand([("4B", None), ("27B", None), ("35B-A3B", None), ("35B-A3B", 6), ("Next-80B", None)])
    def test_flops_agree_with_the_cost_of_the_planner(self, model, layers):
        # The planner adds the convolution, and counts the delta rule of a chunked kernel instead of the recurrence.
        config = shapes.with_layers(shapes.MODELS[model], layers)
        cost = PackingCost.from_config(AutoConfig.for_model(**config), quadratic_weight=1)
        found = shapes.model_flops(config, [512] * 4) / 3
        linear = cost.linear * 2048 + cost.quadratic * 4 * 512**2
        self.assertLess(abs(found / linear - 1), 0.05)
