"""The ops on parts of a row against the same ops on the whole row in one process: outputs and gradients."""

import functools
import unittest
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from common.processes import ROWS, errors_of, run_once, run_processes
from parameterized import parameterized
from transformers.models.qwen3_next.modeling_qwen3_next import eager_attention_forward

from transformers_packed import SequenceBoundaries, ops
from transformers_packed.ops import dispatch, implementations_used
from transformers_packed.parallel import RowShard, SequenceParallel
from transformers_packed.parallel import mixers as rules
from transformers_packed.parallel.groups import attention_method


WIDTH = 4
# On a GPU machine Triton's interpreter is off, and tests/gpu run the kernel.
INTERPRETED = find_spec("triton") is not None and not torch.cuda.is_available()


def _conv_inputs(generator):
    return [torch.randn(1, 24, 6, dtype=torch.float64, generator=generator)], [
        torch.randn(6, WIDTH, dtype=torch.float64, generator=generator),
        torch.randn(6, dtype=torch.float64, generator=generator),
    ]


def _conv(tensors, weights, boundaries):
    return [ops.causal_conv1d(*tensors, *weights, "silu", boundaries=boundaries)]


def _projections_inputs(generator):
    draw = {"dtype": torch.float64, "generator": generator}
    return [torch.randn(1, 24, 2 * 2 * 3 + 4 * 2, **draw)], [torch.randn(20, WIDTH, **draw)]


def _projections(tensors, weights, boundaries):
    heads = {"key_heads": 2, "key_dim": 3, "value_dim": 2}
    return ops.causal_conv1d_qkv(*tensors, *weights, **heads, boundaries=boundaries)


def _triton_inputs(generator):
    return [torch.randn(1, 24, 4 * 16, generator=generator)], [torch.randn(4 * 16, WIDTH, generator=generator)]


def _triton(tensors, weights, boundaries):
    """The interpreted kernel, with such short runs of tokens that a part has several."""
    dispatch._used.clear()
    with (
        mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: True),
        mock.patch("transformers_packed.ops.backends.triton.convolution._TOKENS", 5),
    ):
        heads = {"key_heads": 1, "key_dim": 16, "value_dim": 16}
        outputs = ops.causal_conv1d_qkv(*tensors, *weights, **heads, boundaries=boundaries)
    assert implementations_used() == {"causal_conv1d_qkv": ["triton"]}
    return outputs


def _rule_inputs(generator):
    draw = {"dtype": torch.float64, "generator": generator}
    return [
        torch.randn(1, 24, 4, 5, **draw),
        F.normalize(torch.randn(1, 24, 4, 5, **draw), dim=-1),
        torch.randn(1, 24, 8, 3, **draw),
        -0.2 * torch.rand(1, 24, 8, **draw),
        torch.rand(1, 24, 8, **draw),
    ], []


def _rule(tensors, weights, boundaries):
    return [ops.gated_delta_rule(*tensors, boundaries=boundaries)[0]]


def _attention_inputs(kv_heads):
    def make(generator):
        draw = {"dtype": torch.float64, "generator": generator}
        return [torch.randn(1, 24, heads, 6, **draw) for heads in (4, kv_heads, kv_heads)], []

    return make


def _attention(implementation):
    def run(tensors, weights, boundaries):
        query, key, value = (x.transpose(1, 2) for x in tensors)
        module = torch.nn.Module()
        module.config = SimpleNamespace(_attn_implementation=implementation)
        module.num_key_value_groups = query.shape[1] // key.shape[1]
        module.is_causal = True
        options = {"eager": eager_attention_forward, "scaling": 0.3, "boundaries": boundaries}
        return [ops.attention(module, query, key, value, None, **options)[0]]

    return run


# By name: methods, inputs and op.
CASES = {
    "conv": ({}, _conv_inputs, _conv),
    "projections": ({}, _projections_inputs, _projections),
    **({"projections in Triton": ({}, _triton_inputs, _triton)} if INTERPRETED else {}),
    "rule by states": ({"gated_delta_rule": "state"}, _rule_inputs, _rule),
    "rule by heads": ({"gated_delta_rule": "heads"}, _rule_inputs, _rule),
    **{
        f"{implementation} attention over {kv_heads} by {method}": (
            {"attention": method},
            _attention_inputs(kv_heads),
            _attention(implementation),
        )
        for implementation, kv_heads in (("sdpa", 1), ("sdpa", 2), ("sdpa", 4), ("eager", 2))
        for method in ("heads", "gather")
    },
}
# Triton's interpreter is slow.
FEW_ROWS = ("cut", "many short", "shorter than the halo around the cuts")
ARMS = [(case, row) for case in CASES for row in (FEW_ROWS if case.endswith("Triton") else ROWS)]


def _compute(case, boundaries, part):
    """Return the outputs, and the gradients of tokens and weights, of the part of the row that `part` selects."""
    _, make, op = CASES[case]
    tensors, weights = make(torch.Generator().manual_seed(0))
    tensors = [part(x).contiguous().requires_grad_() for x in tensors]
    weights = [x.requires_grad_() for x in weights]
    outputs = op(tensors, weights, boundaries)
    generator = torch.Generator().manual_seed(1)
    # Weight each output differently, so that misplaced gradients show.
    loss = sum((y * part(torch.randn(1, 24, *y.shape[2:], dtype=y.dtype, generator=generator))).sum() for y in outputs)
    gradients = torch.autograd.grad(loss, tensors + weights)
    return [y.detach() for y in outputs], gradients[: len(tensors)], gradients[len(tensors) :]


@functools.cache
def _whole(case, row):
    return _compute(case, SequenceBoundaries.from_lengths(ROWS[row]), lambda x: x)


def _run_all(size):
    """Return the results of all cases on this rank's part of all rows."""
    results = {}
    for case, name in ARMS:
        parallel = SequenceParallel(size, **CASES[case][0])
        shard = RowShard.cut(SequenceBoundaries.from_lengths(ROWS[name]), parallel.rank, size, parallel)
        piece = slice(shard.start, shard.start + shard.total_length)
        results[case, name] = _compute(case, shard, lambda x, piece=piece: x[:, piece])
    return results


def _trained_alone(shard=None):
    """Return the gradient of each input of the rule if the others need none, for one document with a cut."""
    found = []
    for number in range(5):
        tensors, _ = _rule_inputs(torch.Generator().manual_seed(0))
        if shard is not None:
            tensors = [x[:, shard.start : shard.start + shard.total_length].contiguous() for x in tensors]
        tensors[number].requires_grad_()
        output = _rule(tensors, [], shard or SequenceBoundaries.from_lengths([24]))[0]
        found.append(torch.autograd.grad(output.square().sum(), tensors[number])[0])
    return found


def _run_rest():
    """Return the gradients of single inputs, the names of the rule, and the messages of what is refused."""

    def shard_of(lengths, **methods):
        parallel = SequenceParallel(2, **methods)
        return RowShard.cut(SequenceBoundaries.from_lengths(lengths), parallel.rank, 2, parallel)

    alone = _trained_alone(shard_of([24]))
    dispatch._used.clear()
    shard = shard_of(ROWS["cut"])
    tensors, _ = _rule_inputs(torch.Generator().manual_seed(0))
    _rule([x[:, shard.start : shard.start + 12] for x in tensors], [], shard)
    names = implementations_used()["gated_delta_rule"]
    calls = [lambda: ops.causal_conv1d(torch.ones(1, 2, 1), torch.ones(1, 4), boundaries=shard_of([4]))]
    for case in ("rule by heads", "sdpa attention over 1 by heads"):
        methods, make, op = CASES[case]
        # Three heads for two ranks.
        tensors = [torch.cat([x[:, :12, :1]] * 3, dim=2) for x in make(torch.Generator().manual_seed(0))[0]]
        calls.append(functools.partial(op, tensors, [], shard_of([24], **methods)))
    return alone, names, errors_of(calls)


class WayOfTheStatesTest(unittest.TestCase):
    """Test the choice between pieces of cut documents and whole parts in flash-linear-attention's kernels."""

    @parameterized.expand(
        [
            # The cut is at 12. A quarter of each neighbouring part is 3 tokens.
            ([12, 12], 2, False),
            ([9, 6, 9], 2, False),
            ([8, 5, 11], 2, True),
            ([11, 5, 8], 2, True),
            ([24], 2, True),
            # Cuts at 8, 16 and 24. Only the last document is too long.
            ([6, 4, 4, 4, 4, 10], 4, True),
            ([6, 4, 4, 4, 4, 4, 6], 4, False),
            # From the first part to the last one.
            ([7, 18, 7], 4, True),
            ([32], 4, True),
            ([8, 24], 4, True),
        ]
    )
    def test_all_ranks_choose_alike(self, lengths, size, whole_parts):
        row = SequenceBoundaries.from_lengths(lengths)
        inputs = [torch.ones(1, 1, 1, 1)] * 5
        for rank in range(size):
            shard = RowShard.cut(row, rank, size, SimpleNamespace(gated_delta_rule="state"))
            ways = {}
            for kernels in (True, False):
                with (
                    mock.patch.object(
                        rules.fla,
                        "verify_gated_delta_rule",
                        lambda *_, found=kernels, **__: "" if found else "missing",
                    ),
                    mock.patch.object(rules, "_by_fla", lambda *_, **__: "whole parts"),
                    mock.patch.object(rules, "_by_states", lambda *_, **__: "pieces"),
                ):
                    ways[kernels] = rules.gated_delta_rule(*inputs, boundaries=shard)[0]
            self.assertEqual(ways, {True: "whole parts" if whole_parts else "pieces", False: "pieces"})

    @parameterized.expand([(name, size) for name in ROWS for size in (2, 4)])
    def test_longest_cut_piece(self, name, size):
        row = SequenceBoundaries.from_lengths(ROWS[name])
        shards = [RowShard.cut(row, rank, size) for rank in range(size)]
        pieces = [shard.lengths[0] for shard in shards if shard.tokens_before]
        pieces += [shard.lengths[-1] for shard in shards if shard.goes_on]
        self.assertEqual({shard.longest_cut_piece for shard in shards}, {max(pieces, default=0)})

    @parameterized.expand(
        [
            # Up to some number of ranks, all keys and values of another rank are smaller than own queries and outputs.
            ("few ranks", 2, 16, 4, True, "gather"),
            ("four ranks", 4, 16, 4, True, "gather"),
            ("many ranks", 8, 16, 4, True, "heads"),
            ("one key head", 16, 16, 1, True, "gather"),
            ("no grouping", 4, 8, 8, True, "heads"),
            ("uneven", 2, 16, 4, False, "heads"),
            ("uneven, and heads that do not fit", 3, 16, 4, False, "gather"),
        ]
    )
    def test_attention_by_default(self, _, size, heads, kv_heads, gather_is_even, expected):
        self.assertEqual(attention_method(size, heads, kv_heads, None, gather_is_even), expected)
        for wanted in ("heads", "gather"):
            self.assertEqual(attention_method(size, heads, kv_heads, wanted, gather_is_even), wanted)

    @parameterized.expand([(name, size) for name in ROWS for size in (2, 4)])
    def test_attention_follows_the_row(self, name, size):
        row = SequenceBoundaries.from_lengths(ROWS[name])
        query, key, value = (torch.ones(1, heads, 1, 1) for heads in (16, 2, 2))
        module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
        for rank in range(size):
            parallel = SimpleNamespace(attention=None)
            shard = RowShard.cut(row, rank, size, parallel)
            for kernel in ("varlen_attn", None):
                with (
                    mock.patch.object(rules, "_attention_by_gather", lambda *_, **__: "gather"),
                    mock.patch.object(rules, "_attention_by_heads", lambda *_, **__: "heads"),
                    mock.patch.object(rules, "kernel_for_earlier_keys", lambda *_, found=kernel, **__: found),
                ):
                    found = rules.attention(module, query, key, value, boundaries=shard)[0]
                uneven = 4 * shard.longest_cut_piece > shard.total_length or kernel is None
                self.assertEqual(found, "heads" if uneven else "gather")


class ParallelLayersTest(unittest.TestCase):
    """All cases of one size share their processes, because starting processes takes longer than the computation."""

    @parameterized.expand([(f"{case}, {row}, {size}", case, row, size) for size in (2, 4) for case, row in ARMS])
    def test_equals_the_whole_row(self, _, case, row, size):
        outputs, token_gradients, weight_gradients = _whole(case, row)
        parts = [results[case, row] for results in run_once(_run_all, size, size)]
        found = [
            *(torch.cat([part[0][number] for part in parts], dim=1) for number in range(len(outputs))),
            *(torch.cat([part[1][number] for part in parts], dim=1) for number in range(len(token_gradients))),
            *(sum(part[2][number] for part in parts) for number in range(len(weight_gradients))),
        ]
        # Eager attention computes its softmax in float32 for all dtypes, and Triton's kernel everything.
        tolerance = 1e-6 if case.startswith("eager") else 1e-5 if case.endswith("Triton") else 1e-10
        expected = [*outputs, *token_gradients, *weight_gradients]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

    def test_single_inputs_names_and_refusals(self):
        parts = run_processes(_run_rest, 2)
        actual = [torch.cat(pair, dim=1) for pair in zip(*(alone for alone, _, _ in parts), strict=True)]
        torch.testing.assert_close(actual, _trained_alone(), rtol=1e-10, atol=1e-10)
        for _, names, messages in parts:
            self.assertEqual(names, ["states of cut documents", "reference"])
            reasons = "at least 3 tokens on each rank", 'gated_delta_rule="state"', 'attention="gather"'
            for message, reason in zip(messages, reasons, strict=True):
                self.assertIn(reason, message)
