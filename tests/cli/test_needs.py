"""`--every-n-layers auto` and `--segment-tokens auto`: checkpointed layers and segments by the memory that is free."""

import os
import sys
import unittest
from argparse import Namespace
from unittest import mock

import torch
from common.processes import run_processes
from common.sizes import SIZES
from parameterized import parameterized
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from transformers_packed.cli import needs
from transformers_packed.cli.models import with_adapters
from transformers_packed.cli.needs import chosen_checkpoints, longest_row
from transformers_packed.cli.options import AUTO
from transformers_packed.data.planning.memory import plan_sequence_parallel
from transformers_packed.data.planning.segments import SMALLEST
from transformers_packed.data.records.samples import Samples
from transformers_packed.models.optimizers import DEFAULT


GIB = 2**30
CONFIG = Qwen3_5TextConfig(**SIZES["4B"] | {"num_hidden_layers": 8})
CPU = torch.device("cpu")
OPTIONS = "every-n-layers", "segment-tokens"
BOTH = {"every_n_layers": AUTO, "segment_tokens": AUTO}


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
        "sequence_parallel_size": 1,
        "output": "unused",
    }
    return Namespace(**off | known | {"optim": DEFAULT, "gradient_accumulation_steps": 1} | changes)


def choose(available, dtype=torch.bfloat16, **changes):
    """What is chosen with so many GiB, and the lines that are printed."""
    given, lines = settings(**changes), []
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    model = with_adapters(model, given) if given.lora else model
    memory = available and int(available * GIB)
    with (
        mock.patch.object(needs, "_available", lambda device: memory),
        mock.patch.object(needs, "say", lines.append),
    ):
        return chosen_checkpoints(model, Samples("text"), given, dtype, CPU), lines


def choices_of_process():
    """What is chosen if the second process has little memory, and if both have much."""
    little = 1 if os.environ["RANK"] == "1" else 9999
    return choose(little, **BOTH)[0], choose(9999, **BOTH)[0]


class ChosenSegmentsTest(unittest.TestCase):
    def chosen(self, available, dtype=torch.bfloat16, **changes):
        """Segments with so many GiB, and the line that is printed."""
        (every, segment), (line,) = choose(available, dtype, **changes)
        self.assertIsNone(every)
        return segment, line

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
        with mock.patch.object(needs, "SMALLEST_UNASKED", 1 << 40):
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
            joined = mock.patch.object(needs, "form_group")
            with joined as form_group, mock.patch.dict(os.environ, environment | size):
                takes[name] = self.chosen(9999, lora=False)[1].partition("tokens: ")[2].partition(" whole")[0]
            form_group.assert_called_once()
        plans = [
            plan_sequence_parallel(CONFIG, 2**17, gpus, 9999, weights="float32", gradient_accumulation_steps=rows)
            for gpus, rows in ((1, 1), (1, 2), (2, 1))
        ]
        self.assertEqual(list(takes.values()), [f"{plan.options[1][1].total / GIB:.1f}" for plan in plans])
        self.assertEqual(len(set(takes.values())), 3)

    def test_an_unknown_memory(self):
        found = self.chosen(None)
        self.assertEqual(
            found, (None, "--segment-tokens auto: the memory of a step on a CPU is not known, so rows are not cut.")
        )
        found, line = self.chosen(1, torch.float32)
        self.assertIsNone(found)
        self.assertIn("the memory of a step for computation in float32 is not known", line)
        self.assertIsNone(needs._available(CPU))

    def test_the_longest_row(self):
        samples = Samples("text", [{"input_ids": torch.arange(n)} for n in (5, 30, 8, 20)])
        self.assertEqual(longest_row(samples, settings()), 2**17)
        self.assertEqual(longest_row(samples, settings(row_length=None, batch_size=2)), 50)
        self.assertEqual(longest_row(samples, settings(row_length=None, batch_size=9)), 63)


class ChosenLayersTest(unittest.TestCase):
    """Without `--segment-tokens auto` unless a test says so."""

    def chosen(self, available, **changes):
        (every, segment), (line,) = choose(available, **{"every_n_layers": AUTO, "segment_tokens": None} | changes)
        self.assertEqual(segment, changes.get("segment_tokens"))
        return every, line

    @parameterized.expand(
        [
            ("adapters", {}, {"lora_rank": 16}),
            ("offload", {"offload": None}, {"lora_rank": 16}),
            ("kept", {"keep_attention": True}, {"lora_rank": 16, "keep_attention": True}),
            ("segments", {"segment_tokens": 2**14}, {"lora_rank": 16, "segment_tokens": 2**14}),
            ("head", {"mtp": True}, {"lora_rank": 16, "mtp": True}),
            ("all", {"lora": False}, {"weights": "float32"}),
        ]
    )
    def test_is_the_plan_of_the_command_memory(self, _, changes, options):
        """At the edge of each option. Eight layers have options with as many checkpoints."""
        way = 2 if "offload" in changes else 1

        def plan(gib):
            return plan_sequence_parallel(CONFIG, 2**17, 1, gib, **options)

        without, every_layer = (plan(9999).options[1][n].total / 0.9 / GIB for n in (0, way))
        self.assertEqual(self.chosen(1.0001 * without, **changes)[0], 0)
        found = set()
        for part in (0.0001, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9999):
            gib = every_layer + part * (without - every_layer)
            every, line = self.chosen(gib, **changes)
            self.assertEqual(every, plan(gib).every_n_layers[way])
            found.add(every)
        self.assertGreater(len(found), 2)
        self.assertIn(1, found)
        every, line = self.chosen(0.9999 * every_layer, **changes)
        self.assertEqual(every, 1)
        self.assertIn("auto: all layers are checkpointed, which does not suffice. GiB", line)

    def test_the_lines(self):
        without, _, with_all = (
            x.total / GIB for x in plan_sequence_parallel(CONFIG, 2**17, 1, 9999, lora_rank=16).options[1]
        )
        row = "GiB of a row of 131,072 tokens:"
        free = f"{without / 0.9 + 1:,.1f} that are free may be used."
        self.assertEqual(
            self.chosen(without / 0.9 + 1)[1],
            f"--every-n-layers auto: no layer is checkpointed. {row} {without:,.1f} without checkpoints, "
            f"{without + 0.9:,.1f} of {free}",
        )
        every, line = self.chosen((0.4 * with_all + 0.6 * without) / 0.9, offload=True)
        self.assertGreater(every, 1)
        needs = float(line.partition("tokens: ")[2].partition(" with them")[0].replace(",", ""))
        self.assertTrue(with_all < needs < 0.4 * with_all + 0.6 * without)
        self.assertIn(
            f"auto: one layer in {every} is checkpointed. {row} {needs:,.1f} with them, {without:,.1f}", line
        )

    def test_segments_come_after_all_layers(self):
        """As many layers as whole rows need, and segments only where all of them do not suffice."""
        plan = plan_sequence_parallel(CONFIG, 2**17, 1, 9999, lora_rank=16).options[1]
        without, every_layer = (plan[n].total / 0.9 / GIB for n in (0, 1))
        for gib, expected in (
            (1.001 * without, (0, None)),
            (0.999 * without, (8, None)),
            (1.001 * every_layer, (1, None)),
            (0.999 * every_layer, (1, 2**16)),
        ):
            found, lines = choose(gib, **BOTH)
            self.assertEqual(found, expected)
            self.assertEqual([line.partition(":")[0] for line in lines], [f"--{x} auto" for x in OPTIONS])
        self.assertIn("all layers are checkpointed, which does not suffice.", lines[0])
        self.assertIn("segments of 65,536 tokens. GiB", lines[1])
        found, lines = choose(None, **BOTH)
        self.assertEqual((found, len(lines)), ((1, None), 2))

    def test_an_option_that_is_given_stays(self):
        self.assertEqual(choose(1, every_n_layers=3, segment_tokens=64), ((3, 64), []))
        self.assertEqual(choose(9999, every_n_layers=3)[0], (3, None))
        # Rows that fit with all layers do not with every second one.
        gib = 1.01 * plan_sequence_parallel(CONFIG, 2**17, 1, 9999, lora_rank=16).options[1][1].total / 0.9 / GIB
        self.assertEqual(choose(gib)[0], (None, None))
        every, segment = choose(gib, every_n_layers=2)[0]
        self.assertEqual(every, 2)
        self.assertIsNotNone(segment)

    def test_parts_of_a_row(self):
        """Two processes that share a row need what the plan says of `P = 2`."""
        plan = plan_sequence_parallel(CONFIG, 2**17, 2, 9999, lora_rank=16).options[2]
        sharded = {"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "2"}
        alone = mock.patch.object(needs, "form_group", lambda settings: None)
        with alone, mock.patch.dict(os.environ, sharded):
            line = self.chosen(9999, sequence_parallel_size=2)[1]
        self.assertIn(f"tokens: {plan[0].total / GIB:,.1f} without", line)

    def test_an_unknown_memory(self):
        for given, why in (((None,), "on a CPU"), ((1, torch.float32), "for computation in float32")):
            found, lines = choose(*given, every_n_layers=AUTO, segment_tokens=None)
            self.assertEqual(found, (1, None))
            expected = f"the memory of a step {why} is not known, so all layers are checkpointed."
            self.assertEqual(lines, [f"--every-n-layers auto: {expected}"])

    def test_all_processes_choose_the_same(self):
        """That of the process with the least memory."""
        found = run_processes(choices_of_process, 2)
        self.assertEqual(found[0], found[1])
        ((every, segment), rich), _ = found
        self.assertEqual((every, rich), (1, (0, None)))
        self.assertIsNotNone(segment)
