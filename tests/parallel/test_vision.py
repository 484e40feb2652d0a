"""Rows with images and videos on several ranks: losses and gradients, also of the vision tower, equal the row's."""

import unittest

import pytest
import torch
from common.processes import EXPERTS, errors_of, run_once, run_processes
from common.sharded import targets_of
from mixins.model import total_relative_error
from mixins.vision import TEXT, document, vision_config
from parameterized import parameterized
from transformers import Qwen3_5Config, Qwen3_5MoeConfig, set_seed

from transformers_packed import DataCollatorWithFlattening, SequenceBoundaries
from transformers_packed.models.qwen3_5 import modeling_qwen3_5
from transformers_packed.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers_packed.parallel import RowShard, SequenceParallel, shard_batch


# Documents: text tokens, images, videos.
ROWS = {
    "one image, cut": [(6, ((1, 8, 8),), ()), (3, (), ())],
    "images on the first rank": [(4, ((1, 4, 4), (1, 4, 8)), ()), (40, (), ())],
    "images on the last rank": [(40, (), ()), (4, ((1, 4, 4), (1, 4, 8), (1, 2, 2)), ())],
    "a video": [(3, (), ((6, 4, 4),)), (2, (), ())],
    "both": [(9, ((1, 4, 4),), ()), (8, ((1, 4, 8),), ((2, 4, 4), (3, 2, 4))), (1, (), ()), (7, (), ((1, 4, 4),))],
    "text": [(7, (), ()), (12, (), ())],
}
CASES = {
    "dense": ("dense", {}, None),
    "dense by gather, checkpoints": ("dense", {"attention": "gather"}, {"use_reentrant": False}),
    "experts": ("experts", {}, None),
}


def make_model(name):
    set_seed(0)
    if name == "dense":
        model = modeling_qwen3_5.Qwen3_5ForConditionalGeneration(Qwen3_5Config(**vision_config(TEXT)))
    else:
        config = Qwen3_5MoeConfig(**vision_config({**TEXT, **EXPERTS}))
        model = modeling_qwen3_5_moe.Qwen3_5MoeForConditionalGeneration(config)
        # The grouped product does not support float64.
        model.set_experts_implementation("eager")
    return model.double().train()


def make_batch(row, config):
    documents = [document(length, seed, images, videos) for seed, (length, images, videos) in enumerate(ROWS[row])]
    return DataCollatorWithFlattening(return_cu_seqlens=True, model=config, on_leak="ignore")(documents)


def compute(model, inputs, targets, checkpointing=None):
    """Return loss, gradients, and the number of patches in the vision tower."""
    patches = []
    model.model.visual.register_forward_pre_hook(lambda _, args: patches.append(len(args[0])))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    loss = model(**inputs, num_items_in_batch=targets).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, patches


def run_all(size):
    results = {}
    for case, (name, methods, checkpointing) in CASES.items():
        parallel = SequenceParallel(size, **methods)
        for row in ROWS:
            model = make_model(name)
            batch = make_batch(row, model.config)
            inputs = shard_batch(batch, parallel.rank, size, parallel=parallel)
            results[case, row] = compute(model, inputs, targets_of(batch), checkpointing)
    return results


def run_errors():
    parallel = SequenceParallel(2)
    model = make_model("dense")
    batch = make_batch("one image, cut", model.config)
    flat = {**batch, "position_ids": batch["position_ids"][0]}
    missing = {name: value for name, value in batch.items() if name != "mm_token_type_ids"}
    fewer = {**batch, "pixel_values": batch["pixel_values"][:-4]}
    part = shard_batch(batch, parallel.rank, 2, parallel=parallel)
    row = part["boundaries"].row
    calls = [
        lambda: shard_batch(flat, 0, 2),
        lambda: shard_batch(missing, 0, 2),
        lambda: shard_batch(fewer, 0, 2),
        lambda: model(**{**part, "position_ids": None}),
        lambda: model(**{**part, "boundaries": RowShard.cut(row, parallel.rank, 2, parallel)}),
        lambda: model(**{**part, "boundaries": shard_batch(batch, parallel.rank, 2)["boundaries"]}),
    ]
    return errors_of(calls)


class ParallelVisionTest(unittest.TestCase):
    @parameterized.expand([(f"{case}, {row}", case, row) for case in CASES for row in ROWS])
    def test_equals_the_whole_row(self, _, case, row):
        self.check(case, row, 2)

    @parameterized.expand([(f"{case}, {row}", case, row) for case in CASES for row in ROWS])
    @pytest.mark.slow
    def test_four_parts_equal_the_whole_row(self, _, case, row):
        self.check(case, row, 4)

    def check(self, case, row, size):
        model = make_model(CASES[case][0])
        batch = make_batch(row, model.config)
        loss, expected, whole = compute(model, batch, targets_of(batch))
        parts = [results[case, row] for results in run_once(run_all, size, size)]
        self.assertAlmostEqual(sum(part[0] for part in parts), loss, delta=2e-6 * loss)
        self.assertEqual(any("visual" in name for name in expected), row != "text")
        for _, found, _ in parts:
            # A parameter without a gradient on one rank would block the others.
            self.assertEqual(set(found), set(expected))
        actual = {name: sum(part[1][name] for part in parts) for name in expected}
        self.assertLess(total_relative_error(actual, expected), 1e-6)
        for name in expected:
            error = (actual[name] - expected[name]).norm() / (expected[name].norm() + 1e-6)
            self.assertLess(error.item(), 1e-6, name)
        # Each patch runs once. A rank without patches runs the four of a blank token.
        computed = torch.tensor([part[2] for part in parts])
        self.assertEqual(computed.shape, (size, len(whole)))
        for kind in range(len(whole)):
            blank = int(computed[:, kind].sum()) - whole[kind]
            self.assertTrue(0 <= blank <= 4 * (size - 1) and blank % 4 == 0)
            self.assertTrue(size > 2 or row == "one image, cut" or blank == 0)

    def test_what_cannot_be_is_refused(self):
        reasons = ("model= to", "mm_token_type_ids together", "64 patches", "model= to", "together with", "parallel=")
        for messages in run_processes(run_errors, 2):
            self.assertEqual(len(messages), len(reasons), messages)
            for message, reason in zip(messages, reasons, strict=True):
                self.assertIn(reason, message)

    def test_a_part_moves_with_what_it_knows_of_images(self):
        model = make_model("dense")
        shard = shard_batch(make_batch("both", model.config), 1, 2)["boundaries"]
        self.assertEqual(shard.to("meta").vision, shard.vision)
        self.assertEqual(set(shard.vision), {"image", "video"})
        self.assertEqual(RowShard.cut(SequenceBoundaries.from_lengths([4]), 0, 2).vision, {})
