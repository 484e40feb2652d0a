"""`--segment-tokens auto`: segments by the memory that is free."""

import os
import sys
import unittest
from argparse import Namespace
from unittest import mock

import torch
from common.sizes import SIZES
from parameterized import parameterized
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from transformers_packed.cli import segments
from transformers_packed.cli.models import with_adapters
from transformers_packed.cli.options import AUTO
from transformers_packed.cli.segments import chosen_segments, longest_row
from transformers_packed.data.planning.memory import plan_sequence_parallel
from transformers_packed.data.planning.segments import SMALLEST
from transformers_packed.data.records.samples import Samples
from transformers_packed.models.optimizers import DEFAULT


GIB = 2**30
CONFIG = Qwen3_5TextConfig(**SIZES["4B"] | {"num_hidden_layers": 8})
CPU = torch.device("cpu")


def settings(**changes):
    off = dict.fromkeys(
        ("mtp", "mtp_only", "experts", "experts_in_host_memory", "layers_in_host_memory", "offload", "keep_attention"),
        False,
    )
    known = {
        "segment_tokens": AUTO,
        "lora": True,
        "lora_rank": 16,
        "row_length": 2**17,
        "batch_size": 1,
        "every_n_layers": None,
    }
    return Namespace(**off | known | {"optim": DEFAULT, "gradient_accumulation_steps": 1} | changes)


class ChosenSegmentsTest(unittest.TestCase):
    def chosen(self, available, dtype=torch.bfloat16, **changes):
        """Segments with so many GiB, and the line that is printed."""
        given, lines = settings(**changes), []
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG)
        model = with_adapters(model, given) if given.lora else model
        memory = available and int(available * GIB)
        with (
            mock.patch.object(segments, "_available", lambda device: memory),
            mock.patch.object(segments, "say", lines.append),
        ):
            found = chosen_segments(model, Samples("text"), given, dtype, CPU)
        self.assertEqual(len(lines), 1)
        return found, lines[0]

    def test_experts_in_host_memory(self):
        """The line has the GiB of the plan for a mixture without its experts."""
        experts = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
        config, options = Qwen3_5MoeTextConfig(num_hidden_layers=4, **experts), {"lora_rank": 16}
        with mock.patch.object(sys.modules[__name__], "CONFIG", config):
            for on_host in (False, True):
                plan = plan_sequence_parallel(config, 2**17, 1, 999, **options, experts_in_host_memory=on_host)
                line = self.chosen(999, experts_in_host_memory=on_host)[1]
                self.assertIn(f"{plan.options[1][1].total / GIB:,.1f} whole", line)

    def test_small_inputs_stay_on_the_gpu_by_default(self):
        on_gpu, on_host = (self.chosen(99, offload=offload)[1] for offload in (False, True))
        self.assertNotEqual(on_gpu, on_host)
        self.assertEqual(self.chosen(99, offload=None)[1], on_host)
        with mock.patch.object(segments, "SMALLEST_UNASKED", 1 << 40):
            self.assertEqual(self.chosen(99, offload=None)[1], on_gpu)

    @parameterized.expand(
        [
            ("adapters", {}, {"lora_rank": 16}),
            ("offload", {"offload": True}, {"lora_rank": 16}),
            ("offload by default", {"offload": None}, {"lora_rank": 16}),
            ("kept", {"keep_attention": True}, {"lora_rank": 16, "keep_attention": True}),
            ("not kept by default", {"keep_attention": None}, {"lora_rank": 16}),
            ("defaults", {"offload": None, "keep_attention": None}, {"lora_rank": 16}),
            ("all", {"lora": False, "optim": "flash_adamw"}, {"optimizer": "flash_adamw"}),
            ("float32", {"lora": False}, {"weights": "float32"}),
            ("rows", {"gradient_accumulation_steps": 2}, {"lora_rank": 16, "gradient_accumulation_steps": 2}),
        ]
    )
    def test_is_the_plan_of_the_command_memory(self, _, changes, options):
        way = 2 if changes.get("offload", False) is not False else 1
        totals = {
            n: plan_sequence_parallel(CONFIG, 2**17, 1, 9999, **options, segment_tokens=n).options[1][way].total
            for n in (None, 2**16, 2**15, 2**14)
        }
        for segment, total in totals.items():
            found, line = self.chosen(1.0001 * total / 0.9 / GIB, **changes)
            self.assertEqual(found, segment)
            chosen, whole = f"segments of {segment:,} tokens" if segment else "whole rows", f"{totals[None] / GIB:.1f}"
            takes = f"{total / GIB:.1f} with them, {whole}" if segment else whole
            expected = f"auto: {chosen}. GiB of a row of 131,072 tokens: {takes} whole, "
            self.assertIn(expected, line)

    def test_none_fits(self):
        found, line = self.chosen(1)
        self.assertGreaterEqual(found, SMALLEST)
        self.assertIn(f"segments of {found:,} tokens, which need least: none from 4,096 tokens on fit. GiB", line)

    def test_several_processes(self):
        """DDP keeps all gradients, and FSDP2 shards weights, gradients and moments."""
        takes = {}
        for name, environment in (("one", {}), ("DDP", {}), ("FSDP2", {"ACCELERATE_USE_FSDP": "true"})):
            size = {"WORLD_SIZE": "1" if name == "one" else "2"}
            with mock.patch.dict(os.environ, environment | size):
                takes[name] = self.chosen(9999, lora=False)[1].partition("tokens: ")[2].partition(" whole")[0]
        needs = [
            plan_sequence_parallel(CONFIG, 2**17, gpus, 9999, weights="float32", gradient_accumulation_steps=rows)
            for gpus, rows in ((1, 1), (1, 2), (2, 1))
        ]
        self.assertEqual(list(takes.values()), [f"{need.options[1][1].total / GIB:.1f}" for need in needs])
        self.assertEqual(len(set(takes.values())), 3)

    def test_an_unknown_memory(self):
        found = self.chosen(None)
        self.assertEqual(
            found, (None, "--segment-tokens auto: the memory of a step on a CPU is not known, so rows are not cut.")
        )
        found, line = self.chosen(1, torch.float32)
        self.assertIsNone(found)
        self.assertIn("the memory of a step for computation in float32 is not known", line)
        self.assertIsNone(segments._available(CPU))

    def test_the_longest_row(self):
        samples = Samples("text", [{"input_ids": torch.arange(n)} for n in (5, 30, 8, 20)])
        self.assertEqual(longest_row(samples, settings()), 2**17)
        self.assertEqual(longest_row(samples, settings(row_length=None, batch_size=2)), 50)
        self.assertEqual(longest_row(samples, settings(row_length=None, batch_size=9)), 63)
