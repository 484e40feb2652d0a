"""Whole models on parts of a row: losses and gradients, summed over ranks, are those of the row in one process."""

import unittest

import pytest
import torch
from common.families import tiny_config
from common.processes import EXPERTS, ROWS, errors_of, run_once, run_processes
from common.sharded import targets_of
from mixins.model import VOCAB_SIZE, gradients, total_relative_error
from mixins.patch import OTHERS
from mixins.vision import TEXT
from parameterized import parameterized
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig, set_seed

from transformers_packed import DataCollatorWithFlattening, SequenceBoundaries, registered
from transformers_packed.models.qwen3_5 import modeling_qwen3_5
from transformers_packed.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers_packed.models.qwen3_next import modeling_qwen3_next
from transformers_packed.parallel import RowShard, SequenceParallel, shard_batch


LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def make_model(name):
    set_seed(0)
    text = {**TEXT, **LAYERS, "initializer_range": 0.1}
    if name == "dense":
        model = modeling_qwen3_5.Qwen3_5ForCausalLM(Qwen3_5TextConfig(**text))
    elif name in OTHERS:
        with registered():
            model = AutoModelForCausalLM.from_config(tiny_config(name, initializer_range=0.1))
    elif name == "experts":
        model = modeling_qwen3_5_moe.Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**text, **EXPERTS))
    else:
        model = modeling_qwen3_next.Qwen3NextForCausalLM(Qwen3NextConfig(**text, **EXPERTS))
    if name != "dense":
        # The grouped product does not support float64.
        model.set_experts_implementation("eager")
    return model.double().train()


def make_batch(lengths, padding=0):
    set_seed(1)
    samples = [{"input_ids": torch.randint(1, VOCAB_SIZE, (length,)).tolist()} for length in lengths]
    options = {"pad_to_multiple_of": 24, "pad_token_id": 0} if padding else {}
    return DataCollatorWithFlattening(return_cu_seqlens=True, on_leak="ignore", **options)(samples)


# By name: model, methods, sizes, and options of gradient checkpointing.
CASES = {
    "dense by states and heads": ("dense", {}, (2, 4), None),
    "dense by heads": ("dense", {"gated_delta_rule": "heads", "attention": "heads"}, (2,), None),
    "dense by states and gather": ("dense", {"attention": "gather"}, (2, 4), None),
    "dense, reentrant checkpoints": ("dense", {}, (2,), {"use_reentrant": True}),
    "dense, checkpoints": ("dense", {"attention": "gather"}, (2, 4), {"use_reentrant": False}),
    "experts": ("experts", {}, (2, 4), None),
    "experts by heads, checkpoints": ("experts", {"gated_delta_rule": "heads"}, (2,), {"use_reentrant": False}),
    "next": ("next", {"attention": "gather"}, (2, 4), None),
    "olmo_hybrid": ("olmo_hybrid", {}, (2, 4), None),
    "olmo_hybrid by heads": ("olmo_hybrid", {"gated_delta_rule": "heads", "attention": "gather"}, (2,), None),
    "kimi_linear": ("kimi_linear", {}, (2, 4), None),
    "kimi_linear by heads": ("kimi_linear", {"gated_delta_rule": "heads", "attention": "gather"}, (2,), None),
    "bailing_hybrid": ("bailing_hybrid", {}, (2,), {"use_reentrant": False}),
    "bailing_hybrid by heads": ("bailing_hybrid", {"gated_delta_rule": "heads", "attention": "heads"}, (2,), None),
}
CASES = {name: case for name, case in CASES.items() if case[0] in ("dense", "experts", "next", *OTHERS)}
# All rows run in the first case.
FEW_ROWS = ("cut", "a rank with padding alone")
# Here the last document is padding.
PADDED = {"tail padding": 5, "a rank with padding alone": 13}
LENGTHS = {**ROWS, "a rank with padding alone": [4, 7, 13]}


def _batch(row):
    lengths = LENGTHS[row]
    return make_batch(lengths[:-1], padding=True) if row in PADDED else make_batch(lengths)


def rows_of(case):
    return FEW_ROWS if case != next(iter(CASES)) else LENGTHS


def _loss(model, checkpointing, inputs, targets):
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    return model(**inputs, num_items_in_batch=targets).loss


def _run_all(size):
    results = {}
    for case, (name, methods, sizes, checkpointing) in CASES.items():
        if size not in sizes:
            continue
        parallel = SequenceParallel(size, **methods)
        for row in rows_of(case):
            batch, model = _batch(row), make_model(name)
            inputs = shard_batch(batch, parallel.rank, size, parallel=parallel)
            loss = _loss(model, checkpointing, inputs, targets_of(batch))
            results[case, row] = loss.item(), gradients(model, loss)
    return results


def _run_errors():
    parallel = SequenceParallel(2)
    shard = RowShard.cut(SequenceBoundaries.from_lengths([8]), parallel.rank, 2, parallel)
    tokens = torch.ones(1, 4, dtype=torch.long)
    dense = make_model("dense")
    experts = make_model("experts")
    experts.lm_head = torch.nn.Sequential(experts.lm_head)
    calls = [
        lambda: dense(input_ids=tokens, labels=tokens, boundaries=shard),
        lambda: dense(input_ids=tokens, output_attentions=True, boundaries=shard),
        lambda: experts(input_ids=tokens, labels=tokens, shift_labels=tokens, boundaries=shard),
    ]
    dense.set_attn_implementation("eager")
    return errors_of(calls)


def arms(size):
    return [
        (f"{case}, {row}", case, row)
        for case, (_, _, sizes, _) in CASES.items()
        if size in sizes
        for row in rows_of(case)
    ]


class ParallelModelTest(unittest.TestCase):
    @parameterized.expand(arms(2))
    def test_equals_the_whole_row(self, _, case, row):
        # Elsewhere: state crosses documents, or the convolution restarts, at the cuts between processes.
        self.check(case, row, 2)

    @parameterized.expand(arms(4))
    @pytest.mark.slow
    def test_four_parts_equal_the_whole_row(self, _, case, row):
        self.check(case, row, 4)

    def check(self, case, row, size):
        batch, model = _batch(row), make_model(CASES[case][0])
        loss = _loss(model, None, batch, targets_of(batch))
        expected = gradients(model, loss)
        parts = [results[case, row] for results in run_once(_run_all, size, size)]
        self.assertAlmostEqual(sum(part[0] for part in parts), loss.item(), delta=2e-6 * loss.item())
        actual = {name: sum(part[1][name] for part in parts) for name in expected}
        # The loss is computed in float32, everything else in float64.
        self.assertLess(total_relative_error(actual, expected), 1e-6)
        for name in expected:
            error = (actual[name] - expected[name]).norm() / (expected[name].norm() + 1e-9)
            self.assertLess(error.item(), 1e-6, name)

    def test_what_cannot_be_is_refused(self):
        for messages in run_processes(_run_errors, 2):
            self.assertEqual(len(messages), 3)
            for message, part in zip(messages, ("shift_labels", "output_attentions", "lm_head"), strict=True):
                self.assertIn(part, message)
