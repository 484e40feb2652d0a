"""The divergence from a teacher without logits, against its definition on the logits."""

import itertools
import unittest

import torch
from parameterized import parameterized

from transformers_packed.ops.linear_divergence import linear_divergence


BETAS = (0.0, 0.3, 1.0)


def make(dtype=torch.float64):
    """Hidden states, weights and biases of a student and of a wider teacher, and the tokens that count."""
    generator = torch.Generator().manual_seed(0)
    sizes = (7, 3), (11, 3), (7, 5), (11, 5), (11,), (11,)
    made = [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]
    return made, torch.tensor([True, False, True, True, False, True, True])


def definition(inputs, is_target, beta, temperature):
    """The sum over targets, from all logits and by PyTorch's divergence of two distributions."""
    hidden, weight, teacher_hidden, teacher_weight, bias, teacher_bias = inputs
    q = ((hidden @ weight.T + bias) / temperature)[is_target].log_softmax(-1)
    p = ((teacher_hidden @ teacher_weight.T + teacher_bias) / temperature)[is_target].log_softmax(-1)

    def kl(one, other):
        return torch.nn.functional.kl_div(other, one, reduction="sum", log_target=True)

    if beta in (0, 1):
        return kl(q, p) if beta else kl(p, q)
    m = (beta * p.exp() + (1 - beta) * q.exp()).log()
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def call(inputs, is_target, **options):
    return linear_divergence(*inputs[:4], is_target, *inputs[4:], **options)


class DivergenceTest(unittest.TestCase):
    @parameterized.expand(itertools.product(BETAS, (1, 2, 100), (1.0, 0.7)))
    def test_definition(self, beta, chunk_size, temperature):
        inputs, is_target = make()
        leaves = [x.requires_grad_() for x in inputs]
        expected = definition(leaves, is_target, beta, temperature)
        want = torch.autograd.grad(expected, [leaves[0], leaves[1], leaves[4]])
        options = {"beta": beta, "temperature": temperature, "chunk_size": chunk_size}
        loss = call(leaves, is_target, num_items_in_batch=4, **options)
        loss.backward()
        torch.testing.assert_close(loss, expected / 4, rtol=1e-12, atol=0)
        for got, one in zip((leaves[0], leaves[1], leaves[4]), want, strict=True):
            torch.testing.assert_close(got.grad, one / 4, rtol=1e-10, atol=1e-14)
        # The teacher does not train.
        self.assertTrue(all(x.grad is None for x in (leaves[2], leaves[3], leaves[5])))
        mean = call(inputs, is_target, **options)
        torch.testing.assert_close(mean, expected / is_target.sum(), rtol=1e-12, atol=0)

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

    def test_without_targets(self):
        inputs, is_target = make()
        inputs[0].requires_grad_()
        none = torch.zeros_like(is_target)
        loss = call(inputs, none, num_items_in_batch=0)
        loss.backward()
        self.assertEqual((loss.item(), inputs[0].grad.abs().max().item()), (0, 0))
        self.assertTrue(call(inputs, none).isnan())

    @parameterized.expand(
        [
            ("beta from 0 to 1", {"beta": 1.1}),
            ("temperature above 0", {"temperature": 0.0}),
            ("chunk_size of 1", {"chunk_size": 0}),
        ]
    )
    def test_values_that_are_refused(self, words, options):
        self.assertRaisesRegex(ValueError, words, call, *make(), **options)

    @parameterized.expand([(1, 10), (3, 10), (2, 6)])
    def test_shapes_that_are_refused(self, which, size):
        inputs, is_target = make()
        inputs[which] = inputs[which][:size]
        self.assertRaisesRegex(ValueError, "of one vocabulary, got", call, inputs, is_target)
