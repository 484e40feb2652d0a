"""The fuzzer is reproducible, silent without errors, and able to detect errors."""

import contextlib
import io
import unittest
from dataclasses import replace
from unittest import mock

import fuzz
import fuzz_arms
import fuzz_data
import torch
from fuzz import Outcome, Setup, check, draw, errors, run
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.errors import input_error
from transformers_packed.models import inputs
from transformers_packed.models.qwen3_5 import modeling_qwen3_5 as packed
from transformers_packed.training import restore
from transformers_packed.training.state import State


PLAIN = Setup(3, collator={"return_cu_seqlens": True}, batch_size=2)
HOOKED = replace(PLAIN, changes=(("forward", "model.layers.0.mlp.gate_proj"),))
# One packed row that ends with padding, from the user's own collator.
MASKED = Setup(3, mask_options={"padding": 5}, batch_size=3, steps=1)
PADDING_FREE = Setup(3, way="configure", mode="padding_free", steps=1)
KEPT = replace(PADDING_FREE, kept="list")
# Eight samples to evaluate, or fewer rows, so that the last batch is not full.
EVALUATED = replace(PADDING_FREE, way="packed_trainer", batch_size=8, evaluation="predictions")


def without_q_norm(query_gate, key, q_weight, *args):
    return qk_norm_rope(query_gate, key, torch.zeros_like(q_weight), *args)


def shifted(arguments):
    boundaries = resolve_boundaries(arguments)
    if arguments.get("input_ids") is None or boundaries is None:
        return boundaries
    first, second, *rest = boundaries.lengths
    return SequenceBoundaries.from_lengths([first + 1, second - 1, *rest])


def calls_no_module(self, x):
    gate, up = (torch.nn.functional.linear(x, layer.weight) for layer in (self.gate_proj, self.up_proj))
    return self.down_proj(torch.nn.functional.silu(gate) * up)


def without_mask(*args, **kwargs):
    return {name: x for name, x in collate_rows(*args, **kwargs).items() if name != "attention_mask"}


def losing_a_sample(setup, data, ours):
    return evaluation_set(setup, data, ours)[ours:]


qk_norm_rope, resolve_boundaries = packed.qk_norm_rope, inputs.resolve_boundaries
collate_rows, evaluation_set = fuzz_data.collate_rows, fuzz_arms.evaluation_set
STOCK = replace(MASKED, way="stock", family="llama", mask="additive")
DEFECTS = [
    ("module_left_out", PLAIN, packed, "qk_norm_rope", without_q_norm, "gradient"),
    ("documents_shifted", PLAIN, inputs, "resolve_boundaries", shifted, "gradient"),
    ("hook_not_called", HOOKED, packed.Qwen3_5MLP, "forward", calls_no_module, r"gate_proj: 0 for 2"),
    ("exception", PLAIN, packed, "glu", mock.Mock(side_effect=IndexError("planted")), "IndexError .*planted"),
    ("trace_of_the_check", KEPT, restore, "same_state", lambda *_, **__: contextlib.nullcontext(State()), "loss"),
    ("mask_that_leaks", STOCK, fuzz_data, "collate_rows", without_mask, "gradient"),
    ("lost_sample", replace(EVALUATED, evaluation="predict"), fuzz_arms, "evaluation_set", losing_a_sample, "6 for 7"),
]


class FuzzTest(unittest.TestCase):
    def test_set_ups_come_from_their_seeds(self):
        self.assertEqual([draw(seed) for seed in range(60)], [draw(seed) for seed in range(60)])
        drawn = [draw(seed) for seed in range(200)]
        self.assertEqual({setup.family for setup in drawn}, set(fuzz.FAMILIES))
        self.assertEqual({setup.way for setup in drawn}, {"register", "patch", "configure", "packed_trainer", "stock"})

    def test_runs_come_from_their_seeds(self):
        setup = replace(HOOKED, peft="lora_all", evaluation="loss")
        once, twice = run(setup, ours=True), run(setup, ours=True)
        compared = errors(once, twice)
        self.assertGreater(len(compared), 100)
        self.assertEqual(set(compared.values()), {0.0})

    def test_masks_that_are_refused(self):
        for changes in ({"mask": "numbered"}, {"mask": "boolean", "mask_options": {"rows": 2}}):
            self.assertEqual(check(replace(MASKED, **changes)).kind, "refused")

    @parameterized.expand(
        [
            ("method_per_token", replace(PADDING_FREE, own="loss", padding="left", empty=True)),
            ("method_per_sample", Setup(3, mode="padded", steps=1, own="sample_loss", evaluation="loss")),
            ("evaluation", replace(EVALUATED, eval_rows="packed", arguments={"remove_unused_columns": False})),
            ("mask_of_padded_batches", replace(HOOKED, collator={}, mode="padded", mask=[*fuzz_data.PADDED][0])),
            ("what_the_check_would_change", KEPT),
            ("mask_of_rows", replace(MASKED, family="qwen3_5_vl", mask=[*fuzz_data.BLOCKS][1])),
        ]
    )
    def test_what_users_bring_is_equal(self, _, setup):
        self.assertEqual(check(setup), Outcome("equal"))

    @parameterized.expand(DEFECTS)
    def test_planted_defects_are_found(self, _, setup, owner, name, defect, message):
        with mock.patch.object(owner, name, defect):
            outcome = check(setup)
        self.assertEqual(outcome.kind, "failed")
        self.assertRegex(outcome.why, message)

    def test_losses_that_are_not_finite_are_refused(self):
        outcome = check(replace(PADDING_FREE, own="spread_loss"))
        self.assertEqual(outcome.kind, "refused")
        self.assertRegex(outcome.why, "expected a finite loss of the row")

    def test_refusals(self):
        def refuse(*args, **kwargs):
            # The fuzzer attributes errors raised in this file to the package.
            raise input_error("this", "that", "Change it.")

        with (
            mock.patch.object(fuzz.transformers_packed, "__file__", __file__),
            mock.patch.object(packed, "glu", refuse),
        ):
            self.assertEqual(check(PLAIN), Outcome("refused", "expected this, got that. Change it."))
            # The check before the first step stops, so automatic packing is off.
            outcome = check(replace(PLAIN, way="configure", mode="auto", collator={}))
        self.assertEqual(outcome.kind, "off")

    def test_shrinks_to_what_fails(self):
        setup = replace(Setup(3), peft="lora", changes=(("frozen", "lm_head"), *HOOKED.changes))
        with mock.patch.object(packed.Qwen3_5MLP, "forward", calls_no_module):
            self.assertEqual(fuzz.shrink(setup), Setup(3, changes=HOOKED.changes))


class CommandTest(unittest.TestCase):
    def main(self, *arguments, outcomes=lambda setup: Outcome("equal")):
        with contextlib.redirect_stdout(io.StringIO()) as output, mock.patch.object(fuzz, "check", outcomes):
            code = fuzz.main(list(arguments))
        return code, output.getvalue()

    def test_failures_are_printed_with_their_seeds(self):
        code, output = self.main(
            *("--seed", "5", "--count", "4"),
            outcomes=lambda setup: Outcome("failed", "planted") if setup.seed == 7 else Outcome("equal"),
        )
        self.assertEqual(code, 1)
        self.assertRegex(output, r"^seed 7: failed: planted \[.*\]\n")
        self.assertIn("seeds 5 to 8", output)
        self.assertIn("3 equal, 0 refused, 0 off, 0 skipped, 1 failed", output)
