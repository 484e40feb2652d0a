"""The divergence from a teacher without logits, against its definition on the logits."""

import itertools
import unittest

import torch
from common.fused import guarded_buffers
from hypothesis import given, settings
from hypothesis import strategies as st
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized

from transformers_packed.ops import linear_divergence
from transformers_packed.ops.backends.triton import linear_divergence as kernel


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
