import unittest
import weakref
from unittest import mock

import torch
import torch.nn.functional as F
from common.fused import LargestTensor, errors, guarded_buffers, relative, saved_in
from common.heads import HIDDEN, TOKENS, VOCAB, head_inputs
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized

from transformers_packed.ops import cross_entropy, linear_logps


# Rows of the hidden states: one for several targets, in any order, and some for none.
ROWS = torch.tensor([7, 0, 7, 7, 3, 22, 9, 3, 11, 12, 13, 7, 1, 2, 20, 21, 5, 0, 7, 9, 16, 17, 7])


def make(dtype=torch.float32, ignored=True):
    hidden, weight, bias, targets = head_inputs(dtype)
    # Equal targets of one row.
    targets[[0, 3, 18]] = int(targets[2])
    if ignored:
        targets[[1, 4, 5, TOKENS - 1]] = -100
    return hidden, weight, bias, targets


def upstream_of(outputs):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(x.shape, generator=generator).to(x.dtype) for x in outputs]


def outputs_of(impl, leaves, targets, **options):
    outputs = linear_logps(*leaves[:2], targets, leaves[2] if len(leaves) > 2 else None, impl=impl, **options)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def run(impl, inputs, upstream=None, **options):
    """Return the outputs, and the gradients for random upstream gradients."""
    *tensors, targets = inputs
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    outputs = outputs_of(impl, leaves, targets, **options)
    gradients = torch.autograd.grad(outputs, leaves, upstream_of(outputs) if upstream is None else upstream)
    return [x.detach() for x in (*outputs, *gradients)]


def oracle(inputs, temperature=1.0, rows=None, entropy=False, **_):
    """Full log-softmax in float64, with autograd."""
    *tensors, targets = inputs
    leaves = [x.detach().double().requires_grad_() for x in tensors]
    full = (F.linear(leaves[0], *leaves[1:]) / temperature).log_softmax(-1)
    if rows is not None:
        full = full[rows]
    kept = targets != -100
    outputs = [torch.where(kept, full.gather(1, targets.clamp_min(0)[:, None])[:, 0], 0)]
    if entropy:
        outputs.append(torch.where(kept, -(full.exp() * full).sum(-1), 0))
    gradients = torch.autograd.grad(outputs, leaves, upstream_of([x.float() for x in outputs]))
    return [x.detach() for x in (*outputs, *gradients)]


CALLS = [
    ("plain", {}),
    ("temperature", {"temperature": 0.7}),
    ("one_chunk", {"chunk_size": 64, "entropy": True}),
    ("rows_entropy_temperature", {"rows": ROWS, "entropy": True, "temperature": 1.9}),
    ("rows_chunks_of_one", {"rows": ROWS, "chunk_size": 1}),
    ("one_row", {"rows": torch.full_like(ROWS, 4), "entropy": True}),
]
BOTH = [("plain", {}), ("rows", {"rows": ROWS})]


class LogpsMixin:
    """Compare every implementation with the full log-softmax in float64."""

    impl: str

    @parameterized.expand(CALLS)
    def test_float32(self, name, options):
        options = {"chunk_size": 5} | options
        inputs = make(ignored=name != "temperature")
        actual, expected = run(self.impl, inputs, **options), oracle(inputs, **options)
        self.assertEqual({x.dtype for x in actual}, {torch.float32})
        self.assertLess(max(errors(actual, expected)), 5e-6)
        for x in actual[: 1 + options.get("entropy", False)]:
            self.assertEqual(x[inputs[-1] == -100].count_nonzero(), 0)

    def test_bfloat16(self):
        inputs = make(torch.bfloat16)
        options = {"temperature": 1.3, "entropy": True, "rows": ROWS, "chunk_size": 5}
        actual, expected = run(self.impl, inputs, **options), oracle(inputs, **options)
        self.assertEqual([x.dtype for x in actual], 2 * [torch.float32] + 3 * [torch.bfloat16])
        self.assertLess(max(errors(actual, expected)), 1.5e-2)

    def test_gradient_of_the_entropy_alone(self):
        *tensors, targets = make()
        leaves = [x.requires_grad_() for x in tensors]
        values = outputs_of(self.impl, leaves, targets, entropy=True, chunk_size=5, rows=ROWS)
        weights = upstream_of(values)[1]
        actual = torch.autograd.grad(values[1], leaves, weights)
        doubles = [x.detach().double().requires_grad_() for x in leaves]
        expected = outputs_of("reference", doubles, targets, entropy=True, rows=ROWS)[1]
        self.assertLess(max(errors(actual, torch.autograd.grad(expected, doubles, weights.double()))), 6e-6)

    @parameterized.expand(BOTH)
    def test_an_ignored_target_uses_nothing(self, _, options):
        """NaN in hidden rows without a target changes nothing, and their gradients are 0."""
        hidden, weight, bias, targets = make()
        used = torch.zeros(TOKENS, dtype=torch.bool)
        used[options.get("rows", torch.arange(TOKENS))[targets != -100]] = True
        poisoned = hidden.clone()
        poisoned[~used] = float("nan")
        options = options | {"chunk_size": 5, "entropy": True}
        before = run(self.impl, (hidden, weight, bias, targets), **options)
        after = run(self.impl, (poisoned, weight, bias, targets), **options)
        self.assertGreater((~used).sum(), 0)
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        self.assertEqual(after[2][~used].count_nonzero(), 0)

    def test_without_targets(self):
        hidden, weight, bias, targets = make()
        for tokens, rows in ((TOKENS, None), (TOKENS, ROWS), (0, ROWS[:0])):
            inputs = (hidden[:tokens], weight, bias, torch.full_like(targets, -100)[:tokens])
            plain = run(self.impl, inputs, rows=rows, same_gradient=True)
            self.assertEqual([int(x.count_nonzero()) for x in plain], 4 * [0])
            actual = run(self.impl, inputs, rows=rows, entropy=True)
            self.assertEqual([x.shape for x in actual[:3]], [(tokens,), (tokens,), (tokens, HIDDEN)])
            self.assertEqual([int(x.count_nonzero()) for x in actual], 5 * [0])

    def test_no_ignored_index(self):
        """-100 is then a target outside of the vocabulary."""
        found = run(self.impl, make(), ignore_index=None, chunk_size=5)[0]
        self.assertEqual(int(found.isnan().sum()), int((make()[-1] == -100).sum()))

    @parameterized.expand(BOTH)
    def test_isolation(self, _, options):
        """Other tokens' hidden states, targets and upstream gradients do not change a token by a bit."""
        hidden, weight, bias, targets = make()
        options = options | {"chunk_size": 5, "entropy": True}
        rows = options.get("rows", torch.arange(TOKENS))
        before = run(self.impl, (hidden, weight, bias, targets), **options)
        row = 7
        mine = rows == row
        self.assertTrue(bool((targets[mine] != -100).any()))
        others = torch.arange(TOKENS) != row
        changed, other_targets = hidden.clone(), targets.clone()
        changed[others] = 3 * hidden[others].flip(0)
        known = ~mine & (targets != -100)
        other_targets[known] = VOCAB - 1 - targets[known]
        upstream = [torch.where(mine, x, 5 * x) for x in upstream_of(before[:2])]
        after = run(self.impl, (changed, weight, bias, other_targets), upstream, **options)
        for a, b in zip(after[:2], before[:2], strict=True):
            self.assertTrue(torch.equal(a[mine], b[mine]))
            self.assertFalse(torch.equal(a, b))
        self.assertTrue(torch.equal(after[2][row], before[2][row]))
        self.assertFalse(torch.equal(after[2], before[2]))

    def test_a_target_outside_of_the_vocabulary(self):
        hidden, weight, bias, targets = make()
        outside = targets.clone()
        outside[[6, 7]] = torch.tensor([VOCAB, -1])
        for rows in (None, ROWS):
            expected = run(self.impl, (hidden, weight, bias, targets), rows=rows, chunk_size=5)
            actual = run(self.impl, (hidden, weight, bias, outside), rows=rows, chunk_size=5)
            self.assertEqual(actual[0].isnan().nonzero().flatten().tolist(), [6, 7])
            kept = torch.tensor([i not in (6, 7) for i in range(TOKENS)])
            self.assertTrue(torch.equal(actual[0][kept], expected[0][kept]))
            for x in actual[1:]:
                self.assertTrue(bool(x.isfinite().all()))
            if self.impl != "reference":
                reference = run("reference", (hidden, weight, bias, outside), rows=rows)
                self.assertLess(max(errors(actual[1:], reference[1:])), 2e-6)

    def test_logits_of_minus_infinity(self):
        """A masked token has no probability and adds nothing to the entropy or a gradient."""
        hidden, weight, bias, targets = make()
        targets = targets.clamp(max=VOCAB - 3)
        masked = bias.clone()
        masked[VOCAB - 2 :] = -float("inf")
        options = {"chunk_size": 5, "entropy": True}
        actual = run(self.impl, (hidden, weight, masked, targets), **options)
        expected = oracle((hidden, weight[:-2], bias[:-2], targets), **options)
        for x in actual[3:]:
            self.assertEqual(x[-2:].count_nonzero(), 0)
        self.assertLess(max(errors([*actual[:3], *(x[:-2] for x in actual[3:])], expected)), 2e-6)

    def test_non_contiguous(self):
        hidden, weight, bias, targets = make()
        expected = run(self.impl, (hidden, weight, bias, targets), rows=ROWS, entropy=True, chunk_size=5)
        leaves = [x.t().contiguous().t().requires_grad_() for x in (hidden, weight)]
        bias = torch.stack([bias, bias], -1)[:, 0].requires_grad_()
        wide = [torch.stack([x, torch.full_like(x, -7)], -1)[..., 0] for x in (targets, ROWS)]
        outputs = outputs_of(self.impl, [*leaves, bias], wide[0], rows=wide[1], entropy=True, chunk_size=5)
        upstream = [torch.stack([x, x * float("nan")], -1)[..., 0] for x in upstream_of(outputs)]
        gradients = torch.autograd.grad(outputs, (*leaves, bias), upstream)
        self.assertLess(max(errors([x.detach() for x in (*outputs, *gradients)], expected)), 1e-6)

    def test_a_frozen_head_and_a_tied_head(self):
        hidden, weight, bias, targets = make()
        options = {"chunk_size": 5, "temperature": 0.9}
        expected = run(self.impl, (hidden, weight, bias, targets), **options)
        for entropy in (False, True):
            leaf = hidden.clone().requires_grad_()
            both = outputs_of(self.impl, (leaf, weight, bias), targets, entropy=entropy, **options)
            self.assertTrue(torch.equal(both[0], expected[0]))
            (gradient,) = torch.autograd.grad(both[0], leaf, upstream_of(both[:1]), retain_graph=True)
            self.assertLess(relative(gradient, expected[1]), 1e-6)
            if entropy:
                (gradient,) = torch.autograd.grad(both, leaf, upstream_of(both))
                with_entropy = run(self.impl, (hidden, weight, bias, targets), entropy=True, **options)
                self.assertTrue(torch.equal(gradient, with_entropy[2]))

        def tied(impl, dtype):
            shared = weight.to(dtype).requires_grad_()
            found = linear_logps(shared[:TOKENS].tanh(), shared, targets, impl=impl, **options)
            return torch.autograd.grad(found, shared, [x.to(dtype) for x in upstream_of([found.float()])])[0]

        self.assertLess(relative(tied(self.impl, torch.float32), tied("reference", torch.float64)), 2e-6)

    @parameterized.expand(BOTH)
    def test_top_targets(self, _, options):
        hidden, weight, bias, targets = make()
        rows = options.get("rows", torch.arange(TOKENS))
        # Every third target is the largest logit of its row. The next one ties with an earlier token.
        weight[50] = weight[49]
        bias[50] = bias[49]
        logits = F.linear(hidden, weight, bias)[rows]
        targets[::3] = logits.argmax(-1)[::3]
        bias[49:51] += 50
        targets[1::3], targets[2::3] = 50, 49
        targets[[4, 5]] = -100
        best = F.linear(hidden, weight, bias)[rows].argmax(-1)
        found = outputs_of(self.impl, (hidden, weight, bias), targets, is_top1=True, chunk_size=5, **options)
        expected = (best == targets) & (targets != -100)
        self.assertTrue(torch.equal(found[-1], expected))
        self.assertTrue(expected.any() and not expected[1::3].any())
        plain = outputs_of(self.impl, (hidden, weight, bias), targets, chunk_size=5, **options)
        torch.testing.assert_close(found[:-1], plain, rtol=0, atol=0)

    def test_same_gradient(self):
        """Equal gradients, others, and gradients of the entropy: all as without the option."""
        *tensors, targets = make()
        leaves = [x.requires_grad_() for x in tensors]
        for upstream in ("equal", "other", "entropy"):
            options = {"temperature": 0.7, "chunk_size": 5, "entropy": upstream == "entropy"}
            gradients = []
            for same in (True, False):
                found = outputs_of(self.impl, leaves, targets, same_gradient=same, is_top1=True, **options)
                loss = (found[0] * (torch.arange(TOKENS) if upstream == "other" else -0.3)).sum()
                loss = loss + found[1].sum() if upstream == "entropy" else loss
                kept = torch.autograd.grad(loss, leaves, retain_graph=True)
                gradients.append(torch.autograd.grad(loss, leaves))
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(kept, gradients[-1], strict=True)))
            self.assertLess(max(errors(*gradients)), 1e-6)


class ChunksMixin(LogpsMixin):
    def test_under_autocast(self):
        with torch.autocast("cpu", torch.bfloat16):
            actual = run(self.impl, make(), chunk_size=5, entropy=True, rows=ROWS)
        self.assertEqual({x.dtype for x in actual}, {torch.float32})
        difference = errors(actual, oracle(make(), entropy=True, rows=ROWS))
        # Triton's interpreter truncates to bfloat16, a GPU rounds.
        self.assertLess(max(difference), 3e-2 if self.impl == "triton" else 2e-2)
        self.assertGreater(min(difference), 1e-5)

    @parameterized.expand(BOTH)
    def test_memory_and_products(self, _, options):
        """No tensor holds the logits of all tokens. Only what needs a gradient gets one."""
        hidden, weight, _, targets = make(torch.bfloat16)
        used = len(set(options.get("rows", torch.arange(TOKENS))[targets != -100].tolist()))
        chunks = [min(4, used - start) for start in range(0, used, 4)]
        for trained in (True, False):
            leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_(trained)
            with LargestTensor() as seen:
                saved = saved_in(
                    lambda leaves=leaves: outputs_of(self.impl, leaves, targets, entropy=True, chunk_size=4, **options)
                )
            # With a frozen head, the forward computes the gradients of the hidden states too.
            early = not trained and not options
            forward = [[(n, VOCAB)] + [(n, HIDDEN)] * early for n in chunks]
            self.assertEqual(seen.products, sum(forward, []))
            self.assertLess(seen.elements, 5 * VOCAB)
            self.assertLess(sum(x.numel() for x in saved if x.shape != weight.shape), TOKENS * (HIDDEN + 8))
            found = outputs_of(self.impl, leaves, targets, entropy=True, chunk_size=4, **options)
            if early:
                with LargestTensor() as seen:
                    torch.autograd.grad(found[0], leaves[:1], upstream_of(found[:1]), retain_graph=True)
                self.assertEqual((seen.products, seen.elements), ([], TOKENS * HIDDEN))
            with LargestTensor() as seen:
                torch.autograd.grad(found, [x for x in leaves if x.requires_grad], upstream_of(found))
            products = [[(n, VOCAB), (n, HIDDEN)] + [(VOCAB, HIDDEN)] * trained for n in chunks]
            self.assertEqual(seen.products, sum(products, []))
            self.assertEqual(seen.elements, VOCAB * HIDDEN if trained else 4 * VOCAB)

    @parameterized.expand([("trained", True, [9, 9]), ("frozen", False, [5, 5, 5, 3])])
    def test_default_chunks(self, _, trained, sizes):
        """Those of the cross-entropy, of as many rows of hidden states as are passed."""
        hidden, weight, bias, targets = make()
        hidden, weight, targets = hidden[:18, :9], weight[:, :9].contiguous(), targets[:18].clamp_min(0)
        sized = mock.patch.multiple(cross_entropy, CHUNK_SIZE=12, FROZEN_CHUNK_SIZE=6, LEAST_CHUNK_SIZE=2)
        leaves = hidden.contiguous().requires_grad_(), weight.requires_grad_(trained)
        with sized, LargestTensor() as seen:
            found = outputs_of(self.impl, leaves, targets)[0]
        rows = [rows for rows, columns in seen.products if columns == VOCAB]
        self.assertEqual(rows, sizes)
        expected = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(found, expected)

    def test_same_gradient_takes_three_products(self):
        hidden, weight, _, targets = make(torch.bfloat16)
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        chunks = [4] * (int((targets != -100).sum()) // 4) + [int((targets != -100).sum()) % 4]
        with LargestTensor() as seen:
            (found,) = outputs_of(self.impl, leaves, targets, same_gradient=True, chunk_size=4)
        self.assertEqual(seen.products, [size for n in chunks for size in ((n, VOCAB), (n, HIDDEN), (VOCAB, HIDDEN))])
        for upstream, products in ((torch.full((TOKENS,), 2.0), 0), (upstream_of([found])[0], len(seen.products))):
            with LargestTensor() as seen:
                torch.autograd.grad(found, leaves, upstream, retain_graph=True)
            self.assertEqual(len(seen.products), products)
        # Without gradients, and for several targets of a row, nothing is computed ahead.
        for options in ({}, {"rows": ROWS}):
            with torch.set_grad_enabled(bool(options)), LargestTensor() as seen:
                outputs_of(self.impl, leaves, targets, same_gradient=True, chunk_size=64, **options)
            self.assertEqual(len(seen.products), 1)

    def test_a_backward_that_keeps_no_graph_frees_the_gradients(self):
        leaves, targets = [x.requires_grad_() for x in make()[:2]], make()[-1]
        (found,) = outputs_of(self.impl, leaves, targets, same_gradient=True)
        loss, nodes = found.sum(), [found.grad_fn]
        for node in nodes:
            nodes += [other for other, _ in node.next_functions if other is not None]
        (weight,) = [weakref.ref(node.ahead.weight) for node in nodes if hasattr(node, "ahead")]
        del node, nodes
        torch.autograd.grad(loss, leaves, retain_graph=True)
        self.assertIsNotNone(weight())
        torch.autograd.grad(loss, leaves)
        self.assertIsNone(weight())


class ReferenceTest(LogpsMixin, unittest.TestCase):
    impl = "reference"


class TorchChunksTest(ChunksMixin, unittest.TestCase):
    impl = "torch"

    @parameterized.expand(
        [
            ("targets", lambda h, w, y: linear_logps(h, w, y[1:]), r"targets \[\.\.\.\].*got .* \(22,\), none"),
            (
                "weight",
                lambda h, w, y: linear_logps(h, w.t(), y),
                r"weight \[vocab, hidden\].*got \(23, 16\), \(16, 211",
            ),
            ("bias", lambda h, w, y: linear_logps(h, w, y, w[0]), r"bias \[vocab\].*, \(16,\)"),
            ("rows", lambda h, w, y: linear_logps(h, w, y, rows=y[1:]), r"rows \[\.\.\.\].*\(22,\)"),
            ("floats", lambda h, w, y: linear_logps(h, w, y.float()), "integer targets, got torch.float32"),
            ("chunk", lambda h, w, y: linear_logps(h, w, y, chunk_size=0), "chunk_size of 1 or more"),
            ("impl", lambda h, w, y: linear_logps(h, w, y, impl="triton"), "needs CUDA tensors"),
        ]
    )
    @unittest.skipIf(torch.cuda.is_available(), "says what is missing without a GPU")
    def test_bad_input(self, _, call, message):
        hidden, weight, _, targets = make()
        with self.assertRaisesRegex(ValueError, message):
            call(hidden, weight.requires_grad_(), targets)


class TritonChunksTest(ChunksMixin, InterpretedKernelsTest):
    impl = "triton"

    def test_in_guarded_buffers(self):
        options = {"rows": ROWS, "temperature": 0.7, "chunk_size": 5, "entropy": True}
        expected = run("triton", make(), **options)
        with guarded_buffers():
            actual = run("triton", make(), **options)
        self.assertLess(max(errors(actual, expected)), 1e-6)

    def test_a_vocabulary_of_several_blocks(self):
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(3, 8, generator=generator)
        weight = torch.randn(8192 + 77, 8, generator=generator)
        targets = torch.tensor([0, 8191, 8192 + 76, 5])
        inputs = (hidden, weight, torch.zeros(len(weight)), targets)
        options = {"rows": torch.tensor([0, 1, 2, 2]), "entropy": True, "temperature": 1.1}
        self.assertLess(max(errors(run("triton", inputs, **options), oracle(inputs, **options))), 1e-5)
        # The first of equal logits in lanes of several blocks, and in both halves of a step.
        for places in ([4095, 2047 + 4096, 8192 + 76], [4096 + 3, 2048 + 3], [8192, 8191]):
            bias = torch.zeros(len(weight)).index_fill(0, torch.tensor(places), 1000.0)
            for place in places:
                targets = torch.full((3,), place)
                _, top = linear_logps(0 * hidden, weight, targets, bias, impl="triton", is_top1=True)
                self.assertEqual(top.tolist(), [place == min(places)] * 3)
