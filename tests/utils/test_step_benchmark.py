"""The benchmark of one training step runs small models on a CPU, and counts what the models compute."""

import json
import sys
import tempfile
import unittest
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from common.commands import run_main
from parameterized import parameterized
from transformers import AutoConfig
from transformers.utils import is_liger_kernel_available

from transformers_packed import PackingCost


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import arms
import experts_layer
import shapes
import step


MIXTURES = ("tiny-moe", "tiny-next")
HAS_QUANTIZERS = bool(find_spec("bitsandbytes") and find_spec("torchao"))


def run(*arguments: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "step.json")
        quick = ["--rounds", "1", "--repeats", "1", "--warmup", "1", "--device", "cpu", "--tokens", "128"]
        printed = run_main(step, *arguments, *quick, "--output", path)
        return json.loads(path.read_text())["runs"][0] | {"printed": printed}


class ExpertsLayerTest(unittest.TestCase):
    @parameterized.expand(MIXTURES)
    def test_both_arms_compute_the_same(self, model):
        config = shapes.MODELS[model]
        layer = experts_layer.make_layer(config, "cpu", torch.float32)
        hidden_states, logits = torch.randn(20, config["hidden_size"]), torch.randn(20, config["num_experts"])
        found = [
            arm(layer, hidden_states, logits, config["num_experts_per_tok"]) for arm in experts_layer.ARMS.values()
        ]
        torch.testing.assert_close(*found)

    @unittest.skipUnless(HAS_QUANTIZERS, "needs bitsandbytes and torchao")
    def test_ways_to_dequantize_compute_the_same(self):
        config = shapes.MODELS["tiny-moe"]
        layer = experts_layer.make_layer(config, "cpu", torch.bfloat16).requires_grad_(False)
        inputs = torch.randn(20, config["hidden_size"]).bfloat16(), torch.randn(20, config["num_experts"]), 2
        for kind in ("nf4", "float8"):
            stored = experts_layer.quantized(layer, kind)
            found = [experts_layer.ours(stored, *inputs, dequantize=how) for how in ("auto", "reference")]
            self.assertTrue(torch.equal(*found), kind)
            with self.assertRaisesRegex(ValueError, "needs CUDA tensors"):
                experts_layer.ours(stored, *inputs, dequantize="triton")

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
    def test_every_arm_has_the_same_loss(self):
        self.check_arms("tiny")

    @pytest.mark.slow
    def test_every_arm_with_experts_has_the_same_loss(self):
        self.check_arms("tiny-moe")

    def check_arms(self, model):
        names = ["padded", "ours"] + ["ours padded", "ours+stock-experts"] * (model != "tiny")
        found = run("--models", model, "--arms", *names)
        losses = [found["arms"][name]["loss"] for name in names]
        self.assertLess(max(losses) - min(losses), 0.02, losses)
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

    @parameterized.expand(MIXTURES)
    def test_adapters_of_rank_16_on_experts_and_none_on_routers(self, model):
        config = shapes.MODELS[model]
        names = dict(arms.make_model(config, "ours+lora", "cpu").named_parameters())
        adapted = {name.partition(".layers.0.")[2]: x for name, x in names.items() if x.requires_grad}
        rows = 16 * config["num_experts"]
        self.assertEqual(adapted["mlp.experts.lora_A.default.weight"].shape[0], rows)
        self.assertEqual(adapted["mlp.experts.base_layer.lora_A.default.weight"].shape[0], rows)
        self.assertTrue(all("lora_" in name for name in adapted if name))
        self.assertFalse([name for name in adapted if "mlp.gate." in name or "shared_expert_gate" in name])
        self.assertEqual(any("shared_expert" in name for name in adapted), model == "tiny-moe")

    @parameterized.expand(["tiny-moe"])
    @unittest.skipUnless(is_liger_kernel_available(), "needs liger-kernel")
    def test_liger_leaves_the_classes_and_the_experts_unless_asked(self, model):
        config = shapes.MODELS[model]
        before = dict(vars(arms.stock_module(config)))
        for name, experts in (("padded+liger", False), ("packed+varlen+liger-experts", True)):
            arms.prepare("cpu")
            layer = arms.make_model(config, name, "cpu").model.layers[0]
            self.assertIn("Liger", layer.input_layernorm.forward.__func__.__qualname__)
            self.assertIn("Liger", layer.mlp.shared_expert.forward.__func__.__qualname__)
            self.assertEqual("Liger" in layer.mlp.experts.forward.__func__.__qualname__, experts)
        self.assertEqual(dict(vars(arms.stock_module(config))), before)

    @pytest.mark.slow
    def test_adapters_train_without_the_head(self):
        found = run("--models", "tiny-moe", "--no-head", "--arms", "ours+lora", "ours+stock-experts+lora")
        self.assertEqual(
            [sorted({"loss", "error"} & entry.keys()) for entry in found["arms"].values()], [["loss"]] * 2
        )

    def test_layers_keep_their_pattern(self):
        config = AutoConfig.for_model(**shapes.with_layers(shapes.MODELS["35B-A3B"], 8))
        self.assertEqual([i for i, kind in enumerate(config.layer_types) if kind == "full_attention"], [3, 7])


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
