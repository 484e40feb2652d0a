import itertools
import unittest
from unittest import mock

import torch
from common.fused import errors
from common.heads import TOKENS, head_inputs
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized

from transformers_packed.ops import cross_entropy, linear_cross_entropy
from transformers_packed.ops.cross_entropy import TargetCount, _torch_softmax_step, by_chunks, rows_of_chunk


def make(dtype=torch.float32, ignored=True):
    hidden, weight, bias, labels = head_inputs(dtype)
    if ignored:
        labels[[0, 4, 5, TOKENS - 1]] = -100
    return hidden, weight, bias, labels


def run(impl, inputs, factor=1.0, **options):
    hidden, weight, bias, labels = inputs
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    loss = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], impl=impl, **options)
    (loss * factor).backward()
    return loss.detach(), *(x.grad for x in leaves)


def oracle(inputs, **options):
    """Run in float64. In float32, the sum over the vocabulary in torch's smoothed loss has only five exact digits."""
    return run("reference", [x.double() if x.is_floating_point() else x for x in inputs], **options)


class ChunksMixin:
    """Compare every chunked version with all logits at once."""

    impl: str

    @parameterized.expand(
        [
            ("mean", {}),
            ("tensor", {"num_items_in_batch": torch.tensor(13)}),
            ("smoothed_number", {"label_smoothing": 0.3, "num_items_in_batch": 5}),
            ("weights", {"token_weights": torch.linspace(0.1, 3, TOKENS)}),
            ("weights_number", {"token_weights": torch.linspace(3, 0, TOKENS), "num_items_in_batch": 7}),
        ]
    )
    def test_float32(self, _, options):
        options = {"chunk_size": 5} | options
        expected = oracle(make(), factor=1.7, **options)
        self.assertLess(max(errors(run(self.impl, make(), factor=1.7, **options), expected)), 3e-6)

    def test_weights_are_those_of_separate_losses(self):
        """Two losses of one weight, each with its own divisor."""
        hidden, weight, bias, labels = make()
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        at = TOKENS // 2
        parts = [
            linear_cross_entropy(leaves[0][some], leaves[1], labels[some], leaves[2], num_items_in_batch=number)
            for some, number in ((slice(at), 5), (slice(at, None), 3))
        ]
        (parts[0] + 0.1 * parts[1]).backward()
        factors = torch.cat([torch.ones(at), torch.full((TOKENS - at,), 0.1 * 5 / 3)])
        options = {"num_items_in_batch": 5, "token_weights": factors, "chunk_size": 5}
        found = run(self.impl, make(), **options)
        expected = (parts[0] + 0.1 * parts[1]).detach(), *(x.grad for x in leaves)
        self.assertLess(max(errors(found, expected)), 1e-6)
        loss, losses = linear_cross_entropy(
            hidden, weight, labels, bias, impl=self.impl, return_losses=True, **options
        )
        self.assertLess(abs(losses[at:].sum() / 3 / parts[1] - 1), 1e-5)
        self.assertEqual((losses.shape, losses.requires_grad), (labels.shape, False))
        self.assertTrue((losses[labels == -100] == 0).all())

    def test_bfloat16(self):
        expected = oracle(make(torch.bfloat16))
        actual = run(self.impl, make(torch.bfloat16), chunk_size=5)
        self.assertEqual([x.dtype for x in actual], [torch.float32] + 3 * [torch.bfloat16])
        # Triton's interpreter truncates to bfloat16, a GPU rounds.
        self.assertLess(max(errors(actual, expected)), 1.5e-2 if self.impl == "triton" else 1e-2)

    def test_float16_gradients_do_not_vanish(self):
        # A gradient of 1e-8 is 0 in float16. A scaled loss, as with a gradient scaler, must preserve it.
        inputs = make(torch.float16)
        actual = run(self.impl, inputs, factor=2.0**15, num_items_in_batch=2**24, chunk_size=5)
        expected = [x * 2.0**-9 for x in oracle(inputs, num_items_in_batch=1)]
        self.assertLess(max(errors(actual[1:], expected[1:])), 1e-2)

    def test_a_token_without_target_gets_no_gradient_and_gives_none(self):
        hidden, weight, bias, labels = make()
        ignored = labels == -100
        poisoned = hidden.clone()
        poisoned[ignored] = float("nan")
        before = run(self.impl, (hidden, weight, bias, labels), chunk_size=5)
        after = run(self.impl, (poisoned, weight, bias, labels), chunk_size=5)
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        self.assertEqual(int(after[1][ignored].count_nonzero()), 0)

    def test_nothing_for_backward_without_gradients(self):
        with torch.no_grad(), mock.patch("transformers_packed.ops.cross_entropy.add_product") as products:
            loss = linear_cross_entropy(*make()[:2], make()[3], make()[2], impl=self.impl, chunk_size=5)
        self.assertEqual(products.call_count, 0)
        self.assertLess(abs(loss - oracle(make())[0]), 1e-5)

    def test_number_of_targets(self):
        """Given, it changes nothing. A wrong one is an error, also by one."""
        hidden, weight, bias, some = make()
        for labels in (some, torch.zeros_like(some), torch.full_like(some, -100)):
            inputs, number = (hidden, weight, bias, labels), int((labels != -100).sum())
            self.assertEqual(int(TargetCount(labels, -100)), number)
            options = {"chunk_size": 5, "num_items_in_batch": 4}
            known = run(self.impl, inputs, num_targets=number, **options)
            torch.testing.assert_close(known, run(self.impl, inputs, **options), rtol=0, atol=0)
        for impl, wrong in itertools.product((self.impl, "reference"), (-1, 1, 3)):
            with self.assertRaisesRegex(ValueError, "expected num_targets as in labels, got"):
                run(impl, make(), num_targets=int((make()[-1] != -100).sum()) + wrong)

    def test_without_targets(self):
        hidden, weight, bias, labels = make()
        labels = torch.full_like(labels, -100)
        self.assertTrue(linear_cross_entropy(hidden, weight, labels, impl=self.impl).isnan())
        loss, *gradients = run(self.impl, (hidden, weight, bias, labels), num_items_in_batch=3)
        self.assertEqual(float(loss), 0.0)
        self.assertEqual([int(x.count_nonzero()) for x in gradients], [0, 0, 0])

    def leaves_and_loss(self):
        *tensors, labels = make()
        leaves = [x.requires_grad_() for x in tensors]
        return leaves, linear_cross_entropy(*leaves[:2], labels, leaves[2], impl=self.impl, chunk_size=5)

    def test_retain_graph(self):
        expected = run(self.impl, make(), chunk_size=5)[1:]
        leaves, loss = self.leaves_and_loss()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        copies = [x.clone() for x in first]
        second = torch.autograd.grad(2 * loss, leaves[0], retain_graph=True) + torch.autograd.grad(loss, leaves[1:])
        for a, b, c, factor in zip(copies, second, expected, (2, 1, 1), strict=True):
            self.assertTrue(torch.equal(a, c))
            self.assertTrue(torch.equal(b, factor * c))
        torch.testing.assert_close(first, copies, rtol=0, atol=0)
        with self.assertRaisesRegex(RuntimeError, "pass retain_graph=True to the first backward"):
            torch.autograd.grad(loss, leaves)

    def test_a_backward_that_keeps_no_graph_frees_the_gradients_and_makes_no_others(self):
        # The gradient of the weight is as large as the weight, so it must be scaled in place.
        leaves, loss = self.leaves_and_loss()
        address = loss.grad_fn.gradients.weight.data_ptr()
        loss.backward()
        self.assertEqual(leaves[1].grad.data_ptr(), address)
        self.assertIsNone(loss.grad_fn.gradients)


class DefaultChunksTest(unittest.TestCase):
    """Chunks whose size no caller says."""

    @parameterized.expand(
        [
            # Four chunks of a short row, of a multiple of 512 rows, but not fewer than 1,024 or than columns of a trained weight.
            (1, 1024, 1024, 1024),
            (4096, 1024, 1024, 1024),
            (4097, 1024, 1536, 1536),
            (5000, 2560, 2560, 1536),
            (8192, 1024, 2048, 1536),
            # At most as many rows as in chunks of a long row.
            (4096, 4096, 3072, 1024),
            (16384, 1024, 3072, 1536),
        ]
    )
    def test_rows(self, rows, hidden, trained, frozen):
        found = [rows_of_chunk(rows, hidden, is_frozen) for is_frozen in (False, True)]
        self.assertEqual(found, [trained, frozen])

    @parameterized.expand(
        [
            ("long", 23, 1, [5, 5, 5, 5, 3], [4, 4, 4, 4, 4, 3]),
            ("short", 9, 1, [3, 3, 3], [3, 3, 3]),
            ("shorter", 3, 1, [2, 1], [2, 1]),
            ("one", 1, 1, [1], [1]),
            ("wide", 9, 5, [5, 4], [3, 3, 3]),
        ]
    )
    def test_an_op_takes_them(self, _, tokens, columns, trained, frozen):
        hidden, weight, bias, labels = make(ignored=False)
        hidden, weight, labels = hidden[:tokens, :columns], weight[:, :columns].contiguous(), labels[:tokens]
        for needed, sizes in ((True, trained), (False, frozen)):
            leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
            leaves[1].requires_grad_(needed)
            rows = []

            def step(logits, labels, *args, rows=rows):
                rows.append(len(labels))
                return _torch_softmax_step(logits, labels, *args)

            with (
                mock.patch.multiple(cross_entropy, CHUNK_SIZE=5, FROZEN_CHUNK_SIZE=4, LEAST_CHUNK_SIZE=2),
                mock.patch.dict(cross_entropy.IMPLEMENTATIONS, by_chunks(cross_entropy._chunked, {}, (step,), None)),
            ):
                loss = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], impl="torch")
                self.assertEqual(rows, sizes)
                with torch.no_grad():
                    again = linear_cross_entropy(leaves[0], leaves[1], labels, leaves[2], impl="torch")
            self.assertTrue(torch.equal(loss, again))
            used = [x for x in leaves if x.requires_grad]
            first, second = (torch.autograd.grad(loss, used, retain_graph=again) for again in (True, False))
            exact = [x.detach().double().requires_grad_(x.requires_grad) for x in leaves]
            expected = linear_cross_entropy(exact[0], exact[1], labels, exact[2], impl="reference")
            wanted = torch.autograd.grad(expected, [x for x in exact if x.requires_grad])
            for found in (first, second):
                self.assertLess(max(errors((loss, *found), (expected, *wanted))), 3e-6)

    def test_tokens_without_a_target_count_as_tokens(self):
        """Their layers keep as much, and the host need not know the number of the others."""
        hidden, weight, _, labels = make()
        with (
            mock.patch.object(cross_entropy, "rows_of_chunk", side_effect=rows_of_chunk) as asked,
            torch.no_grad(),
        ):
            linear_cross_entropy(hidden[None], weight, labels[None])
        asked.assert_called_once_with(TOKENS, weight.shape[1], True)


class TorchChunksTest(ChunksMixin, unittest.TestCase):
    impl = "torch"

    def test_under_autocast(self):
        hidden, weight, bias, labels = make()
        with torch.autocast("cpu", torch.bfloat16):
            actual = run("torch", (hidden, weight, bias, labels), chunk_size=5)
        self.assertEqual([x.dtype for x in actual], 4 * [torch.float32])
        difference = errors(actual, oracle(make()))
        self.assertLess(max(difference), 2e-2)
        self.assertGreater(max(difference), 1e-5)

    @parameterized.expand(
        [
            (
                "labels",
                lambda h, w, y: linear_cross_entropy(h, w, y[1:]),
                r"labels \[\.\.\.\], got \(23, 16\), .* and \(22,\)",
            ),
            (
                "weight",
                lambda h, w, y: linear_cross_entropy(h, w.t(), y),
                r"weight \[vocab, hidden\].*got \(23, 16\), \(16, 211\)",
            ),
            ("chunk", lambda h, w, y: linear_cross_entropy(h, w, y, chunk_size=0), "chunk_size of 1 or more"),
            ("smoothing", lambda h, w, y: linear_cross_entropy(h, w, y, label_smoothing=2), "label_smoothing"),
            ("impl", lambda h, w, y: linear_cross_entropy(h, w, y, impl="triton"), "needs CUDA tensors"),
        ]
    )
    @unittest.skipIf(torch.cuda.is_available(), "says what is missing without a GPU")
    def test_bad_input(self, _, call, message):
        hidden, weight, _, labels = make()
        with self.assertRaisesRegex(ValueError, message):
            call(hidden, weight, labels)


class TritonChunksTest(ChunksMixin, InterpretedKernelsTest):
    impl = "triton"

    def test_a_vocabulary_of_several_blocks(self):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(3, 8, generator=generator)
        weight = torch.randn(8192 + 77, 8, generator=generator)
        labels = torch.tensor([0, 8191, 8192 + 76])
        for smoothing in (0.0, 0.1):
            inputs = (hidden, weight, torch.zeros(len(weight)), labels)
            actual = run("triton", inputs, label_smoothing=smoothing)
            self.assertLess(max(errors(actual, oracle(inputs, label_smoothing=smoothing))), 1e-5)
