"""Second-order gradients of every autograd function of the package: correct, or an error."""

import importlib
import re
import unittest
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
from common.processes import run_processes
from torch.autograd import gradcheck, gradgradcheck

import transformers_packed
from transformers_packed.ops.autograd import first_order
from transformers_packed.ops.linear import shared_input_linears
from transformers_packed.ops.moe import _FrozenLinear
from transformers_packed.ops.terms import Adapter, DequantizedExperts, Projection
from transformers_packed.parallel import SequenceParallel
from transformers_packed.parallel.collectives import all_gather, all_to_all, redistribute, tie
from transformers_packed.parallel.mixers import _AddToStart, _WithEnds


ROOT = Path(transformers_packed.__file__).parent
# Their backwards are differentiable, and tests below check that.
TWICE = {
    "_Take",
    "_AddToStart",
    "_Collective",
    "_FrozenLinear",
    "_Tie",
    "_WithEnds",
}


def random(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def _penalty(x, group, *collectives):
    """Return the first-order gradient of a function of each rank's input, and the gradient of its square."""
    found = []
    for collective in collectives:
        y = collective(x, group)
        weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).view_as(y) / y.numel()
        (gradient,) = torch.autograd.grad((y.pow(3) * weights).sum(), x, create_graph=True)
        found += [gradient.detach(), torch.autograd.grad(gradient.square().sum(), x)[0]]
    return found


def _collectives(size):
    return (
        lambda x, group: all_to_all(x, 1, 0, group),
        lambda x, group: all_gather(x, 1, group),
        lambda x, group: redistribute(x, [3] * size, [3 * size] + [0] * (size - 1), group),
    )


def _run_collectives(size):
    parallel = SequenceParallel(size)
    x = random(size, 3, 4)[parallel.rank].detach().requires_grad_()
    return _penalty(x, parallel.group, *_collectives(size))


class SecondOrderTest(unittest.TestCase):
    @unittest.skipUnless(find_spec("triton"), "needs triton")
    def test_every_function_is_one_or_the_other(self):
        written, found = [], {}
        for path in sorted(ROOT.rglob("*.py")):
            names = re.findall(r"class (?!KernelFunction)(\w+)\(.*\b(?:Kernel)?Function\)", path.read_text())
            if names:
                module = importlib.import_module(
                    ".".join(["transformers_packed", *path.relative_to(ROOT).with_suffix("").parts])
                )
                written += names
                found |= {name: getattr(module, name) for name in names}
        self.assertEqual(len(written), len(found))
        self.assertGreater(len(found), 10)
        for name, function in found.items():
            with self.subTest(name):
                self.assertTrue(issubclass(function, torch.autograd.Function))
                self.assertEqual(name in TWICE, not hasattr(function.backward, "first_order"))
        self.assertLessEqual(TWICE, set(found))

    def check(self, function, *inputs):
        self.assertTrue(gradcheck(function, inputs))
        self.assertTrue(gradgradcheck(function, inputs))

    def test_linear_layers_with_one_input(self):
        layers = random(5, 4), Projection(random(1, 4), random(1), (Adapter(random(2, 4), random(1, 2), 3.0),))

        def cubes(impl, x):
            return tuple(y.pow(3) for y in shared_input_linears(x, *layers, impl=impl))

        self.check(partial(cubes, "reference"), random(2, 3, 4))
        with mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: True):
            self.assertTrue(gradcheck(partial(cubes, "fused"), random(2, 3, 4)))
            x = random(2, 3, 4)
            for y in cubes("fused", x):
                with self.assertRaisesRegex(ValueError, "expected first-order .* Call the layers one by one"):
                    torch.autograd.grad(y.sum(), x, create_graph=True, retain_graph=True)

    def test_ends_of_a_part(self):
        self.check(lambda x: tuple(y.pow(3) for y in _WithEnds.apply(x, 2, 3)), random(1, 6, 2))
        self.check(lambda x, y: _AddToStart.apply(x.pow(2), y).pow(3), random(1, 6, 2), random(1, 2, 2))
        self.check(lambda x, y: tie(x, y).pow(3), random(4), random(3))

    def test_frozen_experts(self):
        weights = random(2, 3, 4).detach()
        stored = DequantizedExperts(weights.shape, weights.dtype, lambda first, last: weights[first:last])
        self.check(lambda x: _FrozenLinear.apply(x, weights[1], stored, 1).pow(3), random(5, 4))

    def test_exchanges(self):
        size = 2
        results = run_processes(_run_collectives, size, size)
        x = random(size, 3, 4)
        ranks = x.unbind(0)
        whole = torch.cat(ranks), torch.cat(ranks, dim=1)
        outputs = [
            [torch.cat([rank.chunk(size, 1)[i] for rank in ranks]) for i in range(size)],
            [whole[1]] * size,
            [whole[0], whole[0][:0]],
        ]
        for number, ys in enumerate(outputs):
            loss = 0
            for y in ys:
                weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).view_as(y) / max(y.numel(), 1)
                loss = loss + (y.pow(3) * weights).sum()
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            (second,) = torch.autograd.grad(gradient.square().sum(), x, retain_graph=True)
            for rank in range(size):
                torch.testing.assert_close(results[rank][2 * number], gradient[rank].detach())
                torch.testing.assert_close(results[rank][2 * number + 1], second[rank])

    def test_what_has_none_says_so(self):
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * x

            @staticmethod
            @first_order("Do something else.")
            def backward(ctx, gradient):
                return 2 * ctx.saved_tensors[0] * gradient

        x = torch.tensor(3.0, requires_grad=True)
        self.assertEqual(float(torch.autograd.grad(Square.apply(x) + x**3, x)[0]), 33.0)
        with self.assertRaisesRegex(ValueError, "expected first-order .* Do something else."):
            # The gradient is a constant, which torch's own decorator would return without an error.
            torch.autograd.grad(Square.apply(x) + x**3, x, create_graph=True)
