"""Rows with shared prompts: each answer equals the document "prompt and answer", in outputs and gradients."""

import unittest
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from common.trees import ROWS, documents_of, make_row
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3_5.modeling_qwen3_5 import eager_attention_forward

from transformers_packed import SequenceBoundaries, ops
from transformers_packed.ops import prompts
from transformers_packed.ops.prompts import repeat_rows
from transformers_packed.shared_prompts import Copies, SharedPrompts


def tensors(row, *shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, row.total_length, *shape, generator=generator, dtype=dtype) for shape in shapes]


def descendants_of(row, document):
    """Which tokens depend on the document."""
    depends = [False] * row.num_documents
    for other, parent in enumerate(row.parent_of):
        depends[other] = other == document or (parent >= 0 and depends[parent])
    return torch.tensor(depends)[row.seq_idx[0].long()]


def one_by_one(row, function, *inputs):
    """Run `function` on each document with its prompt, and return the outputs of the row's tokens."""
    results = []
    for tokens, own in documents_of(row):
        found = function(*(x[:, tokens] for x in inputs))
        results.append([y[:, -own:] for y in found])
    return [torch.cat(pieces, dim=1) for pieces in zip(*results, strict=True)]


def with_gradients(function, inputs, *others):
    leaves = [x.detach().clone().requires_grad_() for x in (*inputs, *others)]
    outputs = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(y.shape, generator=generator, dtype=y.dtype) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, upstream)]


def attention_layer(name):
    function = {"sdpa": sdpa_attention_forward, "eager": eager_attention_forward}[name]
    layer = torch.nn.Module()
    layer.config, layer.num_key_value_groups = SimpleNamespace(_attn_implementation=name), 2
    layer.is_causal = True
    return layer, function


class Case:
    """An op on a row with shared prompts, and on one document. Weights come after the rows."""

    def conv(activation):
        def call(boundaries, x, weight, bias):
            function = prompts.causal_conv1d if boundaries is not None else prompts.convolve
            options = {} if boundaries is None else {"boundaries": boundaries}
            return (function(x, weight, bias, activation, **options),)

        return [(12,)], [(12, 4), (12,)], call

    def qkv(width, impl="auto"):
        def call(boundaries, x, weight):
            function = prompts.causal_conv1d_qkv if boundaries is not None else prompts.convolve_qkv
            options = {"impl": "reference"} if boundaries is None else {"boundaries": boundaries, "impl": impl}
            return function(x, weight, key_heads=1, key_dim=16, value_dim=16, **options)

        return [(64,)], [(64, width)], call

    def rule(by_channel=False):
        names = ("kimi_delta_rule", "rule_by_channel") if by_channel else ("gated_delta_rule", "rule")

        def call(boundaries, q, k, v, a, b):
            function = getattr(prompts, names[boundaries is None])
            options = {} if boundaries is None else {"boundaries": boundaries}
            gates = -a.exp(), b.sigmoid()
            return (function(q, k, v, *gates, use_qk_l2norm_in_kernel=True, **options)[0],)

        return [(2, 8), (2, 8), (4, 6), (4, 8) if by_channel else (4,), (4,)], [], call

    def attention(name):
        layer, eager = attention_layer(name)

        def call(boundaries, q, k, v):
            if boundaries is None:
                boundaries = SequenceBoundaries.from_lengths([q.shape[1]])
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            options = {"eager": eager, "scaling": 0.3, "boundaries": boundaries}
            return (ops.attention(layer, *heads_first, None, **options)[0],)

        return [(4, 8), (2, 8), (2, 8)], [], call


CASES = {
    "conv": Case.conv("silu"),
    "conv_without_activation": Case.conv(None),
    "qkv": Case.qkv(4),
    "qkv_window_of_two": Case.qkv(2),
    "qkv_window_of_one": Case.qkv(1),
    "rule": Case.rule(),
    "rule_by_channel": Case.rule(by_channel=True),
    "sdpa": Case.attention("sdpa"),
    "eager": Case.attention("eager"),
}


def every(*cases, rows=ROWS):
    return parameterized.expand([(f"{case}_{row}", case, row) for case in cases for row in rows])


def compare(test, case, name, bar, dtype=torch.float64):
    row, (shapes, weights, call) = make_row(name), case
    inputs = tensors(row, *shapes, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(*shape, generator=generator, dtype=dtype) for shape in weights]
    found = with_gradients(lambda *x: call(row, *x), inputs, *weights)
    rows = len(shapes)
    expected = with_gradients(
        lambda *x: one_by_one(row, lambda *y: call(None, *y, *x[rows:]), *x[:rows]), inputs, *weights
    )
    for a, b in zip(found, expected, strict=True):
        test.assertEqual(a.shape, b.shape)
        test.assertLess((a - b).abs().max().item(), bar * b.abs().max().item())


# Levels apart, prompts in any order, and answers to turns.
SOME_ROWS = ["groups_in_any_order", "depth_first", "conversation_depth_first"]
OPS = ["conv", "qkv", "rule", "rule_by_channel", "sdpa"]


class OpsTest(unittest.TestCase):
    @every("qkv", "rule", "sdpa")
    def test_equals_documents_with_their_prompts(self, _, case, name):
        compare(self, CASES[case], name, 1e-12)

    @every(*(case for case in CASES if case not in ("qkv", "rule", "sdpa")), rows=SOME_ROWS)
    def test_others_on_some_rows(self, _, case, name):
        # Eager attention computes its softmax in float32.
        compare(self, CASES[case], name, 1e-6 if case == "eager" else 1e-12)

    @every(*OPS, rows=SOME_ROWS[2:])
    def test_a_document_depends_on_its_ancestors_alone(self, _, case, name):
        """Neither in outputs nor in gradients, to the bit."""
        row, (shapes, weights, call) = make_row(name), CASES[case]
        inputs = tensors(row, *shapes, dtype=torch.float32)
        weights = [torch.randn(*shape) for shape in weights]
        starts = row.cu_seqlens_cpu.tolist()
        for document, (start, end) in enumerate(pairwise(starts)):
            others = ~descendants_of(row, document)
            if not others.any():
                continue
            changed = [x.clone() for x in inputs]
            for x in changed:
                x[:, start:end] += 1
            leaves = [[x.requires_grad_() for x in some] for some in (inputs, changed)]
            before, after = (call(row, *some, *weights) for some in leaves)
            for a, b in zip(before, after, strict=True):
                self.assertTrue(torch.equal(a[:, others], b[:, others]), document)
                self.assertFalse(torch.equal(a[:, start:end], b[:, start:end]))
            torch.testing.assert_close(before, call(row, *inputs, *weights), rtol=0, atol=0)
            gradients = torch.autograd.grad([y[:, others].sum() for y in after], leaves[1])
            for gradient in gradients:
                self.assertEqual(gradient[:, start:end].abs().max().item(), 0)


class RefusalsTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("a_parent_after_its_child", [2, 2, 2], [-1, 2, -1]),
            ("too_few", [2, 2, 2], [-1, 0]),
            ("no_parent", [2, 2], [-1, -1]),
        ]
    )
    def test_prompts_that_do_not_fit(self, _, lengths, parent_of):
        pattern = f"expected parent_of for {len(lengths)} documents .*, got .*{parent_of[-1]}"
        with self.assertRaisesRegex(ValueError, pattern):
            SharedPrompts.of(SequenceBoundaries.from_lengths(lengths), parent_of)

    @parameterized.expand([("nested", torch.tensor([[-1, 0]])), ("floats", [-1, 0.5]), ("names", ["a", "b"])])
    def test_prompts_that_are_not_integers(self, _, parent_of):
        with self.assertRaisesRegex(ValueError, "expected parent_of as one integer for each document, got "):
            SharedPrompts.of(SequenceBoundaries.from_lengths([2, 2]), parent_of)

    def test_states(self):
        row = make_row("one_group")
        inputs = tensors(row, (2, 8), (2, 8), (4, 6), (4,), (4,))
        pattern = "a delta rule with initial or final states does not support a row with shared prompts"
        with self.assertRaisesRegex(ValueError, pattern):
            ops.gated_delta_rule(*inputs, boundaries=row, output_final_state=True)

    @parameterized.expand([("weights", "eager", {"output_attentions": True}), ("flex", "flex_attention", {})])
    def test_attention_without_support(self, _, name, options):
        row = make_row("one_group")
        layer, eager = attention_layer("eager")
        layer.config._attn_implementation = name
        heads = [x.transpose(1, 2) for x in tensors(row, (4, 8), (2, 8), (2, 8))]
        pattern = (
            "output_attentions does not support a row with shared prompts|prompts does not support flex_attention"
        )
        with self.assertRaisesRegex(ValueError, pattern):
            ops.attention(layer, *heads, None, boundaries=row, eager=eager, scaling=1.0, **options)

    def test_the_ops_take_such_rows(self):
        row = make_row("one_group")
        inputs = tensors(row, (2, 8), (2, 8), (4, 6), (4,), (4,))
        outputs = [call(*inputs, boundaries=row)[0] for call in (ops.gated_delta_rule, prompts.gated_delta_rule)]
        self.assertTrue(torch.equal(*outputs))
        pattern = "function of each document does not support a row with shared prompts. Train without shared prompts"
        with self.assertRaisesRegex(ValueError, pattern):
            ops.per_document(lambda x: x, inputs[0], boundaries=row)


class CopiesTest(unittest.TestCase):
    def test_gradients_are_added_in_float32(self):
        index = [3, 0, 3, 1, 3, 3, 1]
        x = torch.randn(5, 2, dtype=torch.bfloat16, requires_grad=True)
        upstream = torch.randn(7, 2, dtype=torch.bfloat16)
        copies = repeat_rows(x, Copies.of(index, x.device))
        self.assertTrue(torch.equal(copies, x[index]))
        (gradient,) = torch.autograd.grad(copies, x, upstream)
        expected = torch.zeros(5, 2).index_add_(0, torch.tensor(index), upstream.float())
        self.assertTrue(torch.equal(gradient, expected.bfloat16()))

    def test_position_ids_continue(self):
        row = make_row("groups_in_any_order")
        expected = [0, 1, 0, 1, 2, 3, 4, 5, 6, 2, 3, 3, 4, 5, 6, 7, 2, 3, 4, 3]
        self.assertEqual(row.position_ids.tolist(), [expected])


class InterpretedConvolutionTest(InterpretedKernelsTest):
    def test_equals_documents_with_their_prompts(self):
        self.check("groups_in_any_order", 4)

    @parameterized.expand([(f"{name}_{width}", name, width) for name in ROWS for width in (4, 3, 2)])
    @pytest.mark.slow
    def test_other_widths(self, _, name, width):
        self.check(name, width)

    def check(self, name, width):
        module = "transformers_packed.ops.backends.triton.convolution"
        with mock.patch.multiple(module, _TOKENS=5, _RUNS=4):
            compare(self, Case.qkv(width, "triton"), name, 1e-5, torch.float32)
