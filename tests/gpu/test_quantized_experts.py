"""Quantized experts on a GPU, against the same op with the weights that they stand for.

`make test-gpu` runs these tests.
"""

import unittest
from unittest import mock

import pytest
import torch
from common.gpu import synchronising_is_an_error
from parameterized import parameterized

from transformers_packed.models.experts import weights_of
from transformers_packed.models.quantized_weights import ExpertsIn4bit, set_weights
from transformers_packed.ops import choose_experts, experts
from transformers_packed.ops.terms import Adapter


SIZES = (12, 256, 128)
KINDS = ("nf4", "nf4-double", "fp4", "float8")


def store(weights: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "float8":
        from torchao.quantization import Float8Tensor, PerRow

        return Float8Tensor.from_hp(weights, granularity=PerRow())
    return ExpertsIn4bit.of(weights, kind[:3], kind.endswith("double"))


def whole(weights: torch.Tensor) -> torch.Tensor:
    return weights.compute() if isinstance(weights, ExpertsIn4bit) else weights.dequantize()


@pytest.mark.gpu
@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class CudaQuantizedExpertsTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        number, hidden, width = SIZES
        self.weights = [torch.randn(number, *size, device="cuda").bfloat16() / 16 for size in self.shapes()]
        self.logits = torch.randn(700, number, device="cuda").bfloat16()
        self.x, self.upstream = (torch.randn(700, hidden, device="cuda").bfloat16() for _ in range(2))

    @staticmethod
    def shapes():
        _, hidden, width = SIZES
        return (2 * width, hidden), (hidden, width)

    def run_op(self, weights, rank: int = 0):
        generator = torch.Generator("cuda").manual_seed(1)
        leaves, adapters = [self.x.detach().requires_grad_(), self.logits.detach().requires_grad_()], []
        for out, size in self.shapes() if rank else ():
            shapes = (SIZES[0], rank, size), (SIZES[0], out, rank)
            factors = [
                torch.randn(shape, generator=generator, device="cuda").mul_(0.1).requires_grad_() for shape in shapes
            ]
            adapters.append(Adapter(*factors, 2.0))
            leaves += factors
        chosen, index = choose_experts(leaves[1], 3)
        names = ("gate_up_adapter", "down_adapter")
        options = dict(zip(names, adapters, strict=False))
        y = experts(leaves[0], index, chosen, *weights, **options, impl="triton")
        return [y.detach(), *torch.autograd.grad(y, leaves, self.upstream)]

    @parameterized.expand([(kind, rank) for kind in KINDS for rank in (0, 16)])
    def test_equals_the_weights_that_they_stand_for(self, kind, rank):
        module = torch.nn.Module()
        stored = [store(x, kind) for x in self.weights]
        for name, x in zip(("gate_up_proj", "down_proj"), stored, strict=True):
            if isinstance(x, ExpertsIn4bit):
                set_weights(module, name, x)
            else:
                setattr(module, name, torch.nn.Parameter(x, requires_grad=False))
        plain = [whole(x) for x in stored]
        expected = self.run_op(plain, rank)
        for piece in (1, 3 * 256 * 256, 2**27):
            with mock.patch("transformers_packed.ops.backends.triton.moe._PIECE", piece):
                actual = self.run_op(weights_of(module), rank)
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), piece)
                torch.cuda.synchronize()
                with synchronising_is_an_error():
                    self.run_op(weights_of(module), rank)
        # The weights are those of the library, and near the given ones.
        for x, given in zip(plain, self.weights, strict=True):
            self.assertLess(float((x - given).norm() / given.norm()), 0.15)


if __name__ == "__main__":
    unittest.main()
