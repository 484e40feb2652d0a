"""The comparison of whole training steps: the same samples for every tool, losses that agree, and its page."""

import argparse
import io
import json
import tempfile
import unittest
from contextlib import nullcontext, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import groups
import other_tools
import pytest
import shapes
import torch
import train
from common.commands import run_main
from parameterized import parameterized
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening, set_seed

from transformers_packed import patch_model


SMALL = ["--tokens", "48", "--documents", "3", "--warmup", "1", "--steps", "1", "--device", "cpu"]


class SamplesTest(unittest.TestCase):
    @parameterized.expand([(16384, 34), (100, 7), (256, 64)])
    def test_the_samples_of_each_step_add_up(self, tokens, documents):
        args = argparse.Namespace(tokens=tokens, documents=documents, warmup=2, steps=3)
        samples = train.make_samples(args, vocab_size=2048)
        self.assertEqual(len(samples), 5 * documents)
        steps = [samples[i : i + documents] for i in range(0, len(samples), documents)]
        self.assertEqual([sum(map(len, step)) for step in steps], [tokens] * 5)
        self.assertGreaterEqual(min(map(len, samples)), 2)
        self.assertEqual(samples, train.make_samples(args, vocab_size=2048))

    def test_the_groups_of_each_step_add_up(self):
        args = argparse.Namespace(tokens=1600, documents=16, prompt=80, answers=8, warmup=1, steps=2)
        made = groups.make_groups(args)
        self.assertEqual({(len(prompt), len(answers)) for prompt, answers in made}, {(80, 8)})
        lengths = [sum(80 + len(answer) for answer in answers) for _, answers in made]
        self.assertEqual([sum(lengths[i : i + 2]) for i in range(0, 6, 2)], [1600] * 3)
        self.assertEqual({answer[-1] for _, answers in made for answer in answers}, {groups.END})


class TrainTest(unittest.TestCase):
    def test_packed_and_padded_losses_agree(self):
        ours, padded = self.runs([[*SMALL, "--tool", tool] for tool in ("ours", "padded")])
        self.assertAlmostEqual(ours["losses"]["1"], padded["losses"]["1"], delta=2e-3)
        self.assertEqual((ours["shapes"], ours["forwards_per_step"]), ([[1, 48]], 1))
        self.assertTrue(ours["padding_free"] and other_tools.isolated(ours))
        self.assertFalse(padded["padding_free"])
        self.assertEqual(len(ours["steps_ms"]), 1)
        self.assertGreater(ours["first_step_seconds"], 0)

    def test_steps_of_dpo_agree(self):
        """Log-probabilities of whole answers agree as well."""
        pairs = ["--task", "dpo", "--tokens", "320", "--documents", "4", "--prompt", "70", "--lora"]
        short = [*pairs, "--warmup", "1", "--steps", "1", "--device", "cpu"]
        shared, padded = self.runs([[*short, "--tool", tool] for tool in ("ours+shared", "padded")])
        self.assertEqual((shared["shapes"], shared["forwards_per_step"]), ([[1, 180]], 1))
        self.assertTrue(shared["padding_free"])
        self.assertAlmostEqual(shared["losses"]["1"], padded["losses"]["1"], delta=1e-4)
        for got, want in zip(shared["logps"]["1"], padded["logps"]["1"], strict=True):
            self.assertAlmostEqual(got, want, delta=2e-4 * abs(want))
        self.assertEqual(padded["shapes"][0][0], 4)
        self.assertEqual(shared["adapters"], ["default"])
        self.assertFalse(padded["padding_free"])
        # The model has not learned.
        self.assertAlmostEqual(padded["losses"]["1"], 0.6931, delta=1e-4)

    @pytest.mark.slow
    def test_steps_of_grpo_agree(self):
        """The loss, the norm of its gradient, and the log-probabilities of answers. Prompts of groups count once."""
        sizes = ["--task", "grpo", "--tokens", "320", "--documents", "16", "--prompt", "12"]
        short = [*sizes, "--lora", "--checkpointing", "--warmup", "1", "--steps", "1", "--device", "cpu"]
        tools = ("ours", "ours+shared", "padded")
        ours, shared, padded = self.runs([[*short, "--tool", tool] for tool in tools])
        for entry, row in ((ours, 320), (shared, 152)):
            self.assertEqual((entry["shapes"], entry["forwards_per_step"]), ([[1, row]], 1))
            self.assertTrue(entry["padding_free"])
            self.assertAlmostEqual(entry["losses"]["1"], padded["losses"]["1"], delta=1e-4)
            self.assertAlmostEqual(entry["grad_norms"]["1"] / padded["grad_norms"]["1"], 1, delta=0.01)
            self.assertEqual(len(entry["logps"]["2"]), 8)
            for got, want in zip(entry["logps"]["2"], padded["logps"]["2"], strict=True):
                self.assertAlmostEqual(got, want, delta=2e-3)
        self.assertGreater(len(set(padded["logps"]["2"])), 1)
        self.assertEqual(padded["shapes"][0][0], 16)
        self.assertTrue(all(other_tools.isolated(entry) for entry in (ours, shared, padded)))

    @unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
    def test_a_checkpoint_in_4_bit(self):
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
            run_main(train, "--checkpoint", folder, "--make", "tiny", "--load-in-4bit")
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        layers = {name.rsplit(".", 1)[-1]: type(x).__name__ for name, x in model.named_modules()}
        self.assertEqual({layers[x] for x in ("gate_proj", "q_proj", "in_proj_qkv", "out_proj")}, {"Linear4bit"})
        self.assertEqual({layers[x] for x in ("lm_head", "in_proj_a", "in_proj_b")}, {"Linear"})
        self.assertTrue(model.model.layers[0].mlp.gate_proj.weight.quant_state.nested)

    def runs(self, commands: list[list[str]]) -> list[dict]:
        with tempfile.TemporaryDirectory() as folder, redirect_stderr(io.StringIO()):
            checkpoint, output = Path(folder, "tiny"), Path(folder, "peers.json")
            run_main(train, "--checkpoint", str(checkpoint), "--make", "tiny")
            for command in commands:
                run_main(
                    train, "--checkpoint", str(checkpoint), "--output", str(output), "--scratch", folder, *command
                )
            return json.loads(output.read_text())["runs"]


class IsolationTest(unittest.TestCase):
    def check(self, collator, model) -> dict:
        trainer = SimpleNamespace(
            model=model,
            data_collator=collator,
            _prepare_inputs=lambda batch: batch,
            compute_loss_context_manager=nullcontext,
            compute_loss=lambda model, inputs, num_items_in_batch: model(**inputs).loss,
        )
        documents = torch.randint(3, 2000, (3, 12), generator=torch.Generator().manual_seed(0)).tolist()
        return train.isolation(trainer, documents)

    def test_a_leak_is_noticed(self):
        config = AutoConfig.for_model(**shapes.MODELS["tiny"])
        set_seed(0)
        stock = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # Only `position_ids` mark the boundaries, which the stock delta rule and convolution do not read.
        leaking = self.check(DataCollatorWithFlattening(), stock)
        self.assertGreater(leaking["changed"], 1e-3)
        self.assertEqual(leaking["repeated"], 0)
        ours = self.check(DataCollatorWithFlattening(), patch_model(stock))
        self.assertEqual(ours["changed"], 0)
