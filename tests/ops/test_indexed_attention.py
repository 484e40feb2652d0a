"""Attention to the blocks of keys that an index chooses, against the stock indexer on each document alone."""

import unittest
from types import SimpleNamespace
from unittest import mock

import torch
from common.fused import LargestTensor
from parameterized import parameterized
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as builtin

from transformers_packed import SequenceBoundaries
from transformers_packed.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer
from transformers_packed.models.replacements import become
from transformers_packed.ops import implementations_used
from transformers_packed.ops import indexed_attention as module_of_op
from transformers_packed.ops.indexed_attention import Index, choose_blocks, indexed_attention, needs_index
from transformers_packed.shared_prompts import SharedPrompts


HEADS, KV_HEADS, DIM, HIDDEN, RATIO, BUDGET = 4, 2, 16, 32, 4, 12
LENGTHS = (1, 15, 16, 3, 40, 97, 14, 2, 33)


def make_layer(attention: str = "sdpa") -> SimpleNamespace:
    config = SimpleNamespace(_attn_implementation=attention)
    groups = HEADS // KV_HEADS
    return SimpleNamespace(config=config, num_key_value_groups=groups, is_causal=True, training=True)


def make_indexer(ratio: int = RATIO, budget: int = BUDGET) -> tuple:
    """Return a stock indexer, and one with our class and the same weights."""
    config = Qwen4ExpTextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["indexed_attention"],
        head_dim=8,
        indexer_n_heads=16,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=budget,
        indexer_compress_ratio=ratio,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    )
    torch.manual_seed(0)
    stock, ours = (builtin.Qwen4ExpTextQSAIndexer(config, 0) for _ in range(2))
    for layer in (stock.q_layernorm, stock.k_layernorm):
        torch.nn.init.normal_(layer.weight, std=0.2)
    ours.load_state_dict(stock.state_dict())
    become(ours, Qwen4ExpTextQSAIndexer)
    return stock, ours


def rotary(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(length)[:, None] * 0.3 ** torch.arange(4)
    return angles.cos().repeat(1, 2)[None], angles.sin().repeat(1, 2)[None]


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def make_row(lengths=LENGTHS, dtype=torch.float32) -> tuple:
    """Return states, the rotary embedding, and queries, keys and values of a row."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    total = sum(lengths)
    cos, sin = (torch.cat(x, dim=1) for x in zip(*map(rotary, lengths), strict=True))
    qkv = [normal(1, heads, total, DIM).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return normal(1, total, HIDDEN), cos.to(dtype), sin.to(dtype), qkv, normal(1, total, HEADS, DIM)


def alone(stock, states, cos, sin, qkv, lengths=LENGTHS) -> torch.Tensor:
    """Attention of each document alone, under the mask of the stock indexer."""
    outputs, places = [], torch.tensor([0, *lengths]).cumsum(0).tolist()
    for start, end in zip(places, places[1:], strict=False):
        rows = slice(start, end)
        mask = causal(end - start)[None, None]
        with torch.no_grad():
            chosen = stock(states[:, rows], (cos[:, rows], sin[:, rows]), mask, None)
        q, k, v = (x[:, :, rows] for x in qkv)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        options = {"attn_mask": mask & chosen, "scale": 0.3}
        outputs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2))
    return torch.cat(outputs, dim=1)


def packed(ours, states, cos, sin, qkv, lengths=LENGTHS, attention="sdpa", **options):
    index = ours.index(states, cos, sin)
    options = {"eager": builtin.eager_attention_forward, "scaling": 0.3, **options}
    boundaries = options.pop("boundaries", None) or SequenceBoundaries.from_lengths(lengths)
    return indexed_attention(make_layer(attention), *qkv, index, boundaries=boundaries, **options)


class IndexedAttentionTest(unittest.TestCase):
    @parameterized.expand([("sdpa", 5), ("eager", 512), ("sdpa", 512)])
    def test_equals_the_stock_class_on_documents_alone(self, attention, size):
        stock, ours = make_indexer()
        *row, qkv, upstream = make_row()
        expected = alone(stock, *row, qkv)
        want = torch.autograd.grad(expected, qkv, upstream)
        with mock.patch.object(module_of_op, "_QUERIES", size):
            actual, weights = packed(ours, *row, qkv, attention=attention)
            got = torch.autograd.grad(actual, qkv, upstream)
        self.assertIsNone(weights)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        self.assertIn(f"chunks({attention})", implementations_used()["indexed_attention"])

    def test_the_choice_matters(self):
        """Without an index, or with that of other states, the result differs."""
        _, ours = make_indexer()
        states, *row, qkv, _ = make_row()
        first = packed(ours, states, *row, qkv)[0]
        other = packed(ours, states.roll(1, 1), *row, qkv)[0]
        self.assertGreater((first - other).abs().max(), 0.1)

    def test_half_precision_chooses_the_same_blocks(self):
        """Keys are averaged in float32, rounded, normalized and rotated, and scores are in float32."""
        stock, ours = (each.bfloat16() for each in make_indexer())
        *row, qkv, _ = make_row(dtype=torch.bfloat16)
        _, weights = packed(ours, *row, qkv, attention="eager", output_attentions=True)
        places = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
        for start, end in zip(places, places[1:], strict=False):
            rows = slice(start, end)
            mask = causal(end - start)[None, None]
            expected = mask & stock(row[0][:, rows], tuple(x[:, rows] for x in row[1:]), mask, None)
            self.assertTrue(torch.equal(weights[:, :1, rows, rows] > 0, expected))
        self.assertEqual(weights.shape, (1, HEADS, sum(LENGTHS), sum(LENGTHS)))

    @parameterized.expand([("sdpa", (-1, -1, 0, 0, 1)), ("eager", (-1, 0, 1, 0, 2))])
    def test_documents_that_continue_others(self, attention, parent_of):
        """Each one attends as the end of its ancestors and itself does."""
        stock, ours = make_indexer()
        lengths, paths = (21, 3, 9, 30, 13), []
        for own, parent in zip(torch.arange(sum(lengths)).split(lengths), parent_of, strict=True):
            paths.append(torch.cat([paths[parent], own]) if parent >= 0 else own)
        states, _, _, qkv, upstream = make_row(lengths)
        boundaries = SharedPrompts.of(SequenceBoundaries.from_lengths(lengths), parent_of)
        cos, sin = (x[:, boundaries.position_ids[0]] for x in rotary(128))
        output, _ = packed(ours, states, cos, sin, qkv, boundaries=boundaries, attention=attention)
        whole, of_paths = torch.cat(paths), [*map(len, paths)]
        row = [x[:, whole] for x in (states, cos, sin)], [x[:, :, whole] for x in qkv]
        parts = alone(stock, *row[0], row[1], of_paths).split(of_paths, dim=1)
        expected = torch.cat([part[:, -n:] for part, n in zip(parts, lengths, strict=True)], dim=1)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        got, want = (torch.autograd.grad(x, qkv, upstream) for x in (output, expected))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        with self.assertRaisesRegex(
            ValueError, "attention with output_attentions does not support a row with shared prompts"
        ):
            packed(ours, states, cos, sin, qkv, boundaries=boundaries, output_attentions=True)

    def test_when_an_index_is_needed(self):
        sizes = {"budget": BUDGET, "ratio": RATIO}
        for lengths, needed in (((15, 3), False), ((16, 3), True)):
            self.assertEqual(needs_index(SequenceBoundaries.from_lengths(lengths), **sizes), needed)
        for answer, needed in ((6, False), (7, True)):
            row = SharedPrompts.of(SequenceBoundaries.from_lengths([9, answer]), [-1, 0])
            self.assertEqual(needs_index(row, **sizes), needed)

    def test_memory(self):
        """No tensor grows with the square of the row or of a document."""
        _, ours = make_indexer()
        lengths = (2000, 50, 2000)
        *row, qkv, upstream = make_row(lengths)
        with mock.patch.object(module_of_op, "_QUERIES", 16), LargestTensor() as sizes:
            output, _ = packed(ours, *row, qkv, lengths)
            torch.autograd.grad(output, qkv, upstream)
        self.assertLess(sizes.elements, 2000 * 1000)

    def test_other_implementations_are_refused(self):
        _, ours = make_indexer()
        *row, qkv, _ = make_row()
        with self.assertRaisesRegex(ValueError, '"sdpa" or "eager", got "flash_attention_2"'):
            packed(ours, *row, qkv, attention="flash_attention_2")

    def test_choose_blocks(self):
        query = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]])
        blocks = torch.tensor([[1.0, 0.0], [3.0, -1.0], [2.0, 5.0]])
        chosen = choose_blocks(query, blocks, torch.tensor([3, 1, 3]), 1)
        self.assertEqual(chosen.tolist(), [[1], [0], [2]])
        self.assertEqual(choose_blocks(query, blocks, torch.tensor([3, 3, 3]), 9).shape, (3, 3))
        self.assertIsInstance(Index(*[query] * 4, len, 4, 12).limit, int)


class IndexerTest(unittest.TestCase):
    """The module, for masks of any pattern."""

    @parameterized.expand(
        [("causal", 3), ("left", 4), ("right", 3), ("sliding", 4), ("gap", 3), ("random", 4), ("additive", 3)]
    )
    def test_equals_the_stock_class(self, kind, ratio):
        stock, ours = make_indexer(ratio, 4 * ratio)
        states, length = torch.randn(2, 50, HIDDEN, generator=torch.Generator().manual_seed(2)), 50
        mask = causal(length).expand(2, 1, length, length).clone()
        if kind == "left":
            mask[1, :, :, :17] = False
        elif kind == "right":
            mask[0, :, :, 31:] = False
        elif kind == "sliding":
            mask = mask.triu(-30)
        elif kind == "gap":
            mask[0, :, 20:, 5:11] = False
        elif kind in ("random", "additive"):
            mask = torch.rand(mask.shape, generator=torch.Generator().manual_seed(3)) < 0.7
        if kind == "additive":
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo().min)
        embedding = tuple(x.expand(2, -1, -1) for x in rotary(length))
        expected = stock(states, embedding, mask, None)
        visible = mask if mask.dtype == torch.bool else mask == 0
        # Before 5.23, the mask was added to the other one.
        expected = expected if expected.dtype == torch.bool else expected == 0
        for gathered in (1, 1 << 24):
            with mock.patch("transformers_packed.models.qwen4_exp.modeling_qwen4_exp._GATHERED", gathered):
                actual = ours(states, embedding, mask, None)
            self.assertEqual(actual.shape, expected.shape)
            self.assertTrue(torch.equal(actual & visible, expected & visible))
