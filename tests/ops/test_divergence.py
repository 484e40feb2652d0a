"""The divergence from a teacher without logits, against its definition on the logits."""

import itertools
import unittest

import torch
from common.fused import guarded_buffers
from hypothesis import given, settings
from hypothesis import strategies as st
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized

from transformers_packed.ops import linear_divergence, linear_topk_divergence
from transformers_packed.ops.backends.triton import divergence as kernel


BETAS = (0.0, 0.3, 1.0)
SHAPED = {"logit_scale": 1.5, "teacher_logit_scale": 0.5, "softcap": 3.0, "teacher_softcap": 2.0}


def make(dtype=torch.float64, tokens=7, vocab=11, seed=0):
    """Hidden states, weights and biases of a student and of a wider teacher, and the tokens that count."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (tokens, 3), (vocab, 3), (tokens, 5), (vocab, 5), (vocab,), (vocab,)
    made = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    return made, torch.rand(tokens, generator=generator) < 0.6


def definition(inputs, is_target, beta, temperature=1.0, **options):
    """The sum over targets, from all logits and by PyTorch's divergence of two distributions, and the entropies."""
    hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias = inputs

    def logps(logits, prefix):
        logits, cap = logits * options.get(f"{prefix}logit_scale", 1.0), options.get(f"{prefix}softcap")
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return (logits / temperature)[is_target].log_softmax(-1)

    q = logps(hidden @ weight.T + bias, "")
    p = logps(teacher_hidden @ teacher_weight.T + teacher_bias, "teacher_")
    entropies = torch.zeros(len(is_target), dtype=q.dtype)
    entropies[is_target] = -(q.exp() * q).sum(-1).detach()

    def kl(one, other):
        return torch.nn.functional.kl_div(other, one, reduction="sum", log_target=True)

    if beta in (0, 1):
        return (kl(q, p) if beta else kl(p, q)), entropies
    m = (beta * p.exp() + (1 - beta) * q.exp()).log()
    return beta * kl(p, m) + (1 - beta) * kl(q, m), entropies


def call(inputs, is_target, **options):
    return linear_divergence(*inputs[:4], is_target, *inputs[4:], **options)


def compare(inputs, is_target, rtol, atol, **options):
    """Compare the loss, the entropies and the gradients of the student with those of the definition in float64."""
    exact = [x.double().clone().requires_grad_() for x in inputs]
    shape = {name: x for name, x in options.items() if name not in ("impl", "chunk_size", "num_targets")}
    expected, entropies = definition(exact, is_target, **shape)
    trained = 0, 1, 4
    want = torch.autograd.grad(expected, [exact[i] for i in trained])
    leaves = [x.clone().requires_grad_() for x in inputs]
    loss, found = call(leaves, is_target, num_items_in_batch=4, return_entropies=True, **options)
    (3 * loss).backward()
    same = {"rtol": rtol, "atol": atol, "check_dtype": False}
    torch.testing.assert_close(loss, expected / 4, **same)
    torch.testing.assert_close(found, entropies, **same)
    for i, one in zip(trained, want, strict=True):
        torch.testing.assert_close(leaves[i].grad, 0.75 * one, **same)
    # The teacher does not train.
    assert all(leaves[i].grad is None for i in (2, 3, 5))


def check_words_that_cannot_be(beta, impl):
    """Logits of -inf of both heads change nothing but their own gradient, which is 0."""
    inputs, is_target = make(torch.float32, vocab=37)
    without = [x[:-1] if i in (1, 3, 4, 5) else x for i, x in enumerate(inputs)]
    for i in (4, 5):
        inputs[i][-1] = -torch.inf
    got, want = ([x.clone().requires_grad_() for x in some] for some in (inputs, without))
    losses = [call(leaves, is_target, beta=beta, impl=impl) for leaves in (got, want)]
    sum(losses).backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(got[0].grad, want[0].grad)
    torch.testing.assert_close(got[1].grad[:-1], want[1].grad)
    assert got[1].grad[-1].abs().max() == 0


class DivergenceTest(unittest.TestCase):
    @parameterized.expand(itertools.product(BETAS, (1, 5, 100), ("torch", "reference")))
    def test_definition(self, beta, chunk_size, impl):
        for options in ({}, {"temperature": 0.7, **SHAPED}):
            compare(*make(), 1e-10, 1e-13, beta=beta, chunk_size=chunk_size, impl=impl, **options)

    @settings(max_examples=30, deadline=None)
    @given(
        seed=st.integers(0, 1000),
        tokens=st.integers(1, 9),
        chunk_size=st.integers(1, 10),
        beta=st.floats(0, 1).filter(lambda x: x in (0, 1) or 1e-6 < x < 1 - 1e-6),
        temperature=st.floats(0.2, 5),
    )
    def test_any_call(self, seed, tokens, chunk_size, beta, temperature):
        inputs, is_target = make(tokens=tokens, seed=seed)
        options = {"beta": beta, "temperature": temperature, "chunk_size": chunk_size, "impl": "torch"}
        compare(inputs, is_target, 1e-7, 1e-9, num_targets=int(is_target.sum()), **options)

    @parameterized.expand(itertools.product(BETAS, ("torch", "reference")))
    def test_words_that_cannot_be(self, beta, impl):
        check_words_that_cannot_be(beta, impl)

    @parameterized.expand([(0.0, 1e-7), (1.0, 1 - 1e-7)])
    def test_the_ends_are_limits(self, beta, near):
        """The divergence over `beta` at 0, and over `1 - beta` at 1."""
        inputs, is_target = make()
        limit = call(inputs, is_target, beta=near) / 1e-7
        self.assertLess(abs(call(inputs, is_target, beta=beta) - limit) / limit, 1e-4)

    @parameterized.expand(BETAS)
    def test_equal_heads(self, beta):
        inputs, is_target = make(torch.bfloat16)
        inputs = [inputs[0].requires_grad_(), inputs[1], inputs[0].detach(), inputs[1], inputs[4], inputs[4]]
        loss = call(inputs, is_target, beta=beta)
        loss.backward()
        self.assertEqual(loss.dtype, torch.float32)
        self.assertLess(abs(loss), 1e-6)
        self.assertLess(inputs[0].grad.abs().max(), 1e-6)

    @parameterized.expand(["torch", "reference"])
    def test_without_targets(self, impl):
        inputs, is_target = make()
        inputs[0].requires_grad_()
        none = torch.zeros_like(is_target)
        loss = call(inputs, none, num_items_in_batch=0, impl=impl)
        loss.backward()
        self.assertEqual((loss.item(), inputs[0].grad.abs().max().item()), (0, 0))
        self.assertTrue(call(inputs, none, impl=impl).isnan())

    @parameterized.expand(
        [
            ("beta from 0 to 1", {"beta": 1.1}),
            ("temperature=0.0", {"temperature": 0.0}),
            ("temperature=nan", {"temperature": float("nan")}),
            ("teacher_softcap=-1", {"teacher_softcap": -1}),
            ("chunk_size of 1", {"chunk_size": 0}),
            ("num_targets as in labels", {"num_targets": 3}),
        ]
    )
    def test_values_that_are_refused(self, words, options):
        self.assertRaisesRegex(ValueError, words, call, *make(), **options)

    @parameterized.expand([(1, 10), (3, 10), (2, 6), (4, 10), (5, 1)])
    def test_shapes_that_are_refused(self, which, size):
        inputs, is_target = make()
        inputs[which] = inputs[which][:size]
        self.assertRaisesRegex(ValueError, "of one vocabulary, got", call, inputs, is_target)


class TopWordsTest(unittest.TestCase):
    """Some words of the teacher, and all others as one class."""

    def inputs(self, count=4, tokens=7):
        inputs, is_target = make(tokens=tokens)
        logps, ids = (inputs[2] @ inputs[3].T).log_softmax(-1).topk(count)
        return inputs, ids, logps, is_target

    def by_hand(self, leaves, ids, logps, is_target, beta, temperature):
        """The divergence of the two distributions over classes, from probabilities."""
        total = 0
        for row in is_target.nonzero()[:, 0].tolist():
            q = ((leaves[0][row] @ leaves[1].T + leaves[2]) / temperature).softmax(-1)
            words = ids[row][logps[row] > -torch.inf]
            one, other = q[words], logps[row].exp()[logps[row] > -torch.inf]
            one, other = (torch.cat([x, 1 - x.sum(0, keepdim=True)]) for x in (one, other))
            p, m = other, beta * other + (1 - beta) * one
            if beta in (0, 1):
                total = total + (p * (p / one).log() if beta == 0 else one * (one / p).log()).sum()
            else:
                total = total + (beta * p * (p / m).log() + (1 - beta) * one * (one / m).log()).sum()
        return total

    @parameterized.expand(itertools.product(BETAS, ("torch", "reference")))
    def test_definition(self, beta, impl):
        inputs, ids, logps, is_target = self.inputs()
        # A server may know fewer words of a token.
        logps[is_target.nonzero()[0, 0], 2:] = -torch.inf
        leaves = [inputs[i].requires_grad_() for i in (0, 1, 4)]
        want = self.by_hand(leaves, ids, logps, is_target, beta, 0.7) / 4
        got = linear_topk_divergence(
            *leaves[:2], ids, logps, is_target, leaves[2], beta=beta, temperature=0.7, num_items_in_batch=4, impl=impl
        )
        torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
        gradients = (torch.autograd.grad(x, leaves) for x in (got, want))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)

    @parameterized.expand(BETAS)
    def test_all_words(self, beta):
        """All words but one, and this one as the tail, are the whole divergence; with all, the tail is empty."""
        for count, bar in ((10, 1e-10), (11, 1e-5)):
            inputs, ids, logps, is_target = self.inputs(count)
            want = linear_divergence(*inputs[:4], is_target, beta=beta)
            got = linear_topk_divergence(*inputs[:2], ids, logps, is_target, beta=beta)
            torch.testing.assert_close(got, want, rtol=bar, atol=0)

    def test_refused_and_empty(self):
        inputs, ids, logps, is_target = self.inputs()
        for words, some in (
            ("K", (ids[:, :3], logps)),
            ("K", (ids[:, :0], logps[:, :0])),
            ("K", (ids[:3], logps[:3])),
        ):
            self.assertRaisesRegex(ValueError, words, linear_topk_divergence, *inputs[:2], *some, is_target)
        self.assertRaisesRegex(ValueError, "beta", linear_topk_divergence, *inputs[:2], ids, logps, is_target, beta=-1)
        none = torch.zeros_like(is_target)
        self.assertTrue(linear_topk_divergence(*inputs[:2], ids, logps, none).isnan())
        self.assertEqual(linear_topk_divergence(*inputs[:2], ids, logps, none, num_items_in_batch=3), 0)


class TritonTest(InterpretedKernelsTest):
    def setUp(self):
        super().setUp()
        # Several blocks of a small vocabulary, the last of which is not full.
        self.enterContext(unittest.mock.patch.object(kernel, "next_power_of_2", lambda n: 16))

    @parameterized.expand(itertools.product(BETAS, ({}, {"temperature": 0.7, **SHAPED})))
    def test_definition(self, beta, options):
        inputs, is_target = make(torch.float32, vocab=37)
        with guarded_buffers():
            compare(inputs, is_target, 2e-5, 2e-6, beta=beta, chunk_size=6, impl="triton", **options)

    @parameterized.expand(BETAS)
    def test_words_that_cannot_be(self, beta):
        check_words_that_cannot_be(beta, "triton")
