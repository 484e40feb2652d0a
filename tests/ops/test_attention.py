import unittest
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from common.fused import LargestTensor, assert_near
from mixins.op import PackedOpTesterMixin, relative_error
from parameterized import parameterized
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import Qwen3_5TextConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Attention, eager_attention_forward

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import attention
from transformers_packed.ops.attention import IMPLEMENTATIONS, _block_mask, _varlen_attn, _verify_varlen_attn
from transformers_packed.ops.dispatch import Implementation


HEADS, KEY_VALUE_HEADS, HEAD_DIM = 4, 2, 8


def on_gpu(*shape):
    """The attributes of a CUDA tensor that verifiers read."""
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda"), shape=torch.Size(shape), dtype=torch.bfloat16)


def make_module(implementation):
    config = Qwen3_5TextConfig(
        hidden_size=32, num_attention_heads=HEADS, num_key_value_heads=KEY_VALUE_HEADS, head_dim=HEAD_DIM
    )
    config._attn_implementation = implementation
    return Qwen3_5Attention(config, layer_idx=0).eval()


def make_row(length, batch=1):
    """Draw query, key and value `[batch, heads, length, dim]`."""
    return [torch.randn(batch, heads, length, HEAD_DIM) for heads in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)]


def run(module, query, key, value, attention_mask=None, **kwargs):
    return attention(
        module, query, key, value, attention_mask, eager=eager_attention_forward, scaling=module.scaling, **kwargs
    )


def causal_mask(length):
    return torch.full((length, length), float("-inf")).triu(1)[None, None]


class PackedSdpaTest(PackedOpTesterMixin, unittest.TestCase):
    implementation = "sdpa"

    def make_inputs(self, length):
        return [x.transpose(1, 2) for x in make_row(length)]

    def run_op(self, *inputs, boundaries=None):
        mask = None
        if boundaries is None and self.implementation == "eager":
            mask = causal_mask(inputs[0].shape[1])
        rows = (x.transpose(1, 2) for x in inputs)
        output, weights = run(make_module(self.implementation), *rows, mask, boundaries=boundaries)
        if boundaries is not None:
            self.assertIsNone(weights)
        return output

    def test_against_the_definition(self):
        lengths = [5, 1, 70, 7]
        boundaries, inputs, _ = self.make_row(lengths)
        packed = self.run_op(*inputs, boundaries=boundaries)
        self.assertEqual(packed.shape, (1, 83, HEADS, HEAD_DIM))
        documents = torch.tensor(boundaries.seq_idx[0].tolist())
        visible = (documents[:, None] == documents[None]).tril()
        query, key, value = (x[0].double() for x in inputs)
        for head in range(HEADS):
            shared = head // (HEADS // KEY_VALUE_HEADS)
            scores = (query[:, head] @ key[:, shared].T / HEAD_DIM**0.5).masked_fill(~visible, float("-inf"))
            expected = scores.softmax(-1) @ value[:, shared]
            self.assertLess(relative_error(packed[0, :, head], expected), self.tolerance)


class PackedEagerTest(PackedSdpaTest):
    implementation = "eager"


class EagerWeightsTest(unittest.TestCase):
    def test_weights_are_block_diagonal(self):
        torch.manual_seed(0)
        lengths = [5, 1, 70, 7]
        boundaries = SequenceBoundaries.from_lengths(lengths)
        row = make_row(boundaries.total_length)
        output, weights = run(make_module("eager"), *row, boundaries=boundaries, output_attentions=True)
        self.assertEqual(weights.shape, (1, HEADS, 83, 83))
        self.assertTrue(torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-6))
        documents = boundaries.seq_idx[0]
        visible = (documents[:, None] == documents[None]).tril()
        self.assertEqual(int(weights[:, :, ~visible].count_nonzero()), 0)
        self.assertTrue((weights[:, :, visible] > 0).all())
        # These weights produced the output.
        values = row[2].repeat_interleave(HEADS // KEY_VALUE_HEADS, dim=1)
        self.assertLess(relative_error((weights @ values).transpose(1, 2), output), 1e-5)
        self.assertLess(relative_error(run(make_module("eager"), *row, boundaries=boundaries)[0], output), 1e-5)


class AttentionTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    def largest_tensor(self, implementation, **kwargs):
        boundaries = SequenceBoundaries.from_lengths([100 + n for n in range(-10, 10)] + [10])
        row = [x.requires_grad_() for x in make_row(2000)]
        with LargestTensor() as largest:
            run(make_module(implementation), *row, boundaries=boundaries, **kwargs)[0].sum().backward()
        return largest.elements

    @parameterized.expand([("sdpa",), ("eager",)])
    def test_nothing_of_the_rows_length_squared(self, implementation):
        self.assertLess(self.largest_tensor(implementation), 2000 * 2000)
        # A request for the weights creates such a tensor, which shows that the check would detect it.
        self.assertGreaterEqual(self.largest_tensor("eager", output_attentions=True), 2000 * 2000)

    @parameterized.expand([("sdpa", None), ("eager", "mask")])
    def test_without_boundaries_the_interfaces_own_result(self, implementation, mask):
        module = make_module(implementation)
        row = make_row(20, batch=2)
        mask = None if mask is None else causal_mask(20)
        # Extra keywords are passed on, so that custom interfaces receive theirs.
        kwargs = {"output_attentions": implementation == "eager", "dropout": 0.0}
        output, weights = run(module, *row, mask, **kwargs)
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        expected, expected_weights = interface(module, *row, mask, scaling=module.scaling, **kwargs)
        self.assertTrue(torch.equal(output, expected))
        if implementation == "eager":
            self.assertTrue(torch.equal(weights, expected_weights))
        else:
            self.assertIsNone(weights)

    @parameterized.expand([("sdpa",), ("eager",)])
    def test_dropout_is_applied(self, implementation):
        module = make_module(implementation).train()
        row = make_row(20)
        boundaries = SequenceBoundaries.from_lengths([8, 12])
        without = run(module, *row, boundaries=boundaries)[0]
        with_dropout = run(module, *row, boundaries=boundaries, dropout=0.5)[0]
        self.assertFalse(torch.allclose(without, with_dropout))

    def test_flash_attention_gets_the_boundaries(self):
        calls = []

        def flash(module, query, key, value, attention_mask, **kwargs):
            calls.append((attention_mask, kwargs))
            return query.transpose(1, 2), None

        self.addCleanup(ALL_ATTENTION_FUNCTIONS.__delitem__, "flash_attention_2")
        ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = flash
        boundaries = SequenceBoundaries.from_lengths([8, 12])
        row = make_row(20)
        # Stale metadata in the keywords must not override the boundaries.
        output, _ = run(
            make_module("flash_attention_2"), *row, boundaries=boundaries, max_length_q=99, sliding_window=4
        )
        self.assertTrue(torch.equal(output, row[0].transpose(1, 2)))
        ((mask, kwargs),) = calls
        self.assertIsNone(mask)
        self.assertIs(kwargs["cu_seq_lens_q"], boundaries.cu_seqlens)
        self.assertIs(kwargs["cu_seq_lens_k"], boundaries.cu_seqlens)
        self.assertEqual((kwargs["max_length_q"], kwargs["max_length_k"]), (12, 12))
        self.assertEqual(kwargs["sliding_window"], 4)

    def test_varlen_attn_gets_values_of_the_size_of_the_keys(self):
        """As in multi-head latent attention. The kernel here is a stand-in that takes no other values."""

        def varlen_attn(query, key, value, starts, *others, scale, **options):
            self.assertEqual(query.shape[-1], value.shape[-1])
            lengths = starts.diff().tolist()
            rows = zip(*(x.transpose(0, 1)[None].split(lengths, 2) for x in (query, key, value)), strict=True)
            call = partial(F.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=True)
            return torch.cat([call(*row)[0].transpose(0, 1) for row in rows])

        module, boundaries = make_module("sdpa"), SequenceBoundaries.from_lengths([5, 1, 9])
        query, key, value = make_row(15)
        rows = [x.requires_grad_() for x in (query, key, value[..., :6].clone())]
        found = []
        always = Implementation(_varlen_attn, lambda *args, **kwargs: "")
        with (
            mock.patch("torch.nn.attention.varlen.varlen_attn", varlen_attn),
            mock.patch.dict(IMPLEMENTATIONS["sdpa"], {"varlen_attn": always}),
        ):
            for impl in ("varlen_attn", "per_document(sdpa)"):
                output, _ = run(module, *rows, boundaries=boundaries, impl=impl)
                weight = torch.linspace(-1, 1, output.numel()).view_as(output)
                found.append([output, *torch.autograd.grad((output * weight).sum(), rows)])
        self.assertEqual(found[0][0].shape, (1, 15, HEADS, 6))
        assert_near(*found, 1e-5)
        wide = [on_gpu(1, 4, 9, 64), on_gpu(1, 4, 9, 64), on_gpu(1, 4, 9, 128)]
        with mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)):
            reason = _verify_varlen_attn(module, *wide)
        self.assertEqual(reason, "needs values of at most the size of the keys, 64, not 128")

    def test_refuses_what_would_attend_across_documents(self):
        def anything(*args, **kwargs):
            raise AssertionError("must not run")

        self.addCleanup(ALL_ATTENTION_FUNCTIONS.__delitem__, "somebody_elses")
        ALL_ATTENTION_FUNCTIONS["somebody_elses"] = anything
        pattern = r'^expected .*packed documents apart.*, got "somebody_elses"\. .*="sdpa"'
        with self.assertRaisesRegex(ValueError, pattern):
            run(make_module("somebody_elses"), *make_row(20), boundaries=SequenceBoundaries.from_lengths([8, 12]))

    @parameterized.expand(
        [("flex_attention", "auto", "needs CUDA tensors"), ("sdpa", "varlen_attn", "needs tensors on an NVIDIA GPU")]
    )
    def test_says_what_a_kernel_lacks(self, implementation, impl, reason):
        with self.assertRaisesRegex(ValueError, reason):
            boundaries = SequenceBoundaries.from_lengths([8, 12])
            run(make_module(implementation), *make_row(20), boundaries=boundaries, impl=impl)

    @parameterized.expand([([129],), ([130, 128, 1],)])
    def test_the_block_mask_of_flex_attention(self, lengths):
        boundaries = SequenceBoundaries.from_lengths(lengths)
        ours = _block_mask(boundaries)
        seq_idx, length = boundaries.seq_idx[0], boundaries.total_length

        def visible(batch, head, query, key):
            return (seq_idx[query] == seq_idx[key]) & (query >= key)

        theirs = create_block_mask(visible, None, None, length, length, device="cpu")
        self.assertTrue(torch.equal(ours.to_dense(), theirs.to_dense()))
        # Blocks marked as full are not masked again, so the marks must be exact.
        for mask in (ours, theirs):
            full = BlockMask.from_kv_blocks(
                mask.full_kv_num_blocks, mask.full_kv_indices, seq_lengths=(length, length)
            )
            mask.full = full.to_dense()
        self.assertTrue(torch.equal(ours.full, theirs.full))
        rows = make_row(length)
        expected = run(make_module("eager"), *rows, boundaries=boundaries)[0]
        output = flex_attention(*rows, block_mask=ours, scale=HEAD_DIM**-0.5, enable_gqa=True)
        self.assertLess(relative_error(output.transpose(1, 2), expected), 1e-5)

    def test_refuses_another_row(self):
        with self.assertRaisesRegex(ValueError, r"^expected .*\[1, 20, \.\.\.\]"):
            run(make_module("sdpa"), *make_row(21), boundaries=SequenceBoundaries.from_lengths([8, 12]))
