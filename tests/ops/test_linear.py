import copy
import unittest
from unittest import mock

import torch
from parameterized import parameterized

from transformers_packed.models import untouched
from transformers_packed.models.untouched import project
from transformers_packed.ops import linear


def make(dtype=torch.float64, bias=False):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, n, bias=bias, dtype=dtype) for n in (5, 1, 8)]
    return layers, torch.randn(2, 3, 6, dtype=dtype, requires_grad=True)


def results(function, layers, x, used=(0, 1, 2)):
    """Return outputs, and the gradients of the input and of all parameters (`None` if there is none)."""
    layers, x = copy.deepcopy(layers), x.detach().requires_grad_(x.requires_grad)
    outputs = function(x, *layers)
    sum(i * outputs[i].sin().sum() for i in used if outputs[i].requires_grad).backward()
    return [*(y.detach() for y in outputs), x.grad, *(p.grad for layer in layers for p in layer.parameters())]


def each_alone(x, *layers):
    return tuple(layer(x) for layer in layers)


class ProjectTest(unittest.TestCase):
    def setUp(self):
        self.calls = []
        shared = linear.shared_input_linears

        def count(*args):
            self.calls.append(len(args) - 1)
            return shared(*args)

        self.enterContext(mock.patch.object(untouched, "shared_input_linears", count))
        self.enterContext(mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: True))

    def check(self, layers, x, shared, used=(0, 1, 2), function=project):
        got, expected = results(function, layers, x, used), results(each_alone, layers, x, used)
        for a, b in zip(got, expected, strict=True):
            self.assertEqual(a is None, b is None)
            if a is not None:
                self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
                self.assertLess((a - b).abs().max(), 1e-12)
        self.assertEqual(self.calls, [3] if shared else [])

    def test_equals_each_layer_alone(self):
        self.check(*make(), shared=True)

    @parameterized.expand([("one", (1,)), ("two", (0, 2))])
    def test_with_outputs_that_nobody_uses(self, _, used):
        self.check(*make(), shared=True, used=used)

    def test_not_on_a_cpu(self):
        with mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: False):
            self.check(*make(), shared=False)

    def test_with_a_frozen_weight(self):
        layers, x = make()
        layers[1].weight.requires_grad_(False)
        self.check(layers, x, shared=True)

    def test_with_a_frozen_input(self):
        layers, x = make()
        self.check(layers, x.detach(), shared=True)

    def test_without_any_token(self):
        layers, x = make()
        outputs = project(x[:, :0], *layers)
        self.assertEqual([y.shape for y in outputs], [(2, 0, 5), (2, 0, 1), (2, 0, 8)])

    def test_what_hangs_on_a_layer_still_runs(self):
        changes = {
            "forward_hook": lambda layer: layer.register_forward_hook(lambda module, args, output: 2 * output),
            "pre_hook": lambda layer: layer.register_forward_pre_hook(lambda module, args: (3 * args[0],)),
            "backward_hook": lambda layer: layer.register_full_backward_hook(lambda module, dx, dy: (5 * dx[0],)),
            "own_forward": lambda layer: setattr(layer, "forward", lambda x: x[..., :1] * 7),
        }
        for name, change in changes.items():
            with self.subTest(name):
                layers, x = make()
                change(layers[1])
                self.check(layers, x, shared=False)

    def test_other_classes_and_biases_run_by_themselves(self):
        class Doubled(torch.nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        layers, x = make()
        self.check([layers[0], Doubled(6, 2, bias=False, dtype=x.dtype), layers[2]], x, shared=False)
        self.check(*make(bias=True), shared=False)

    def test_other_dtypes_run_by_themselves(self):
        layers, x = make(torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            outputs = project(x, *layers)
        self.assertEqual([y.dtype for y in outputs], [torch.bfloat16] * 3)
        self.assertEqual(self.calls, [])
        with self.assertRaisesRegex(RuntimeError, "same dtype"):
            project(x.double(), *layers)


if __name__ == "__main__":
    unittest.main()
