"""Quantized experts on a GPU, against the same op with the weights that they stand for.

`make test-gpu` runs these tests.
"""

import unittest
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from unittest import mock

import torch
from common.gpu import needs_gpu, synchronising_is_an_error
from gpu.test_grouped_dequantization import on_the_gpu
from ops.test_grouped_dequantization import random_groups
from parameterized import parameterized
from transformers.integrations.finegrained_fp8 import FP8Experts

from transformers_packed.models.checkpoint_formats import PackedWeight
from transformers_packed.models.experts import weights_of
from transformers_packed.models.quantized_weights import ExpertsIn4bit, set_weights
from transformers_packed.ops import choose_experts, experts
from transformers_packed.ops.dequantization import dequantize_4bit, dequantize_blocks, dequantize_rows
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


class ExpertsTestCase(unittest.TestCase):
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


@needs_gpu
class CudaPackedExpertsTest(ExpertsTestCase):
    @parameterized.expand(product(("int4", "nvfp4"), (0, 16)))
    def test_equals_the_weights_that_they_stand_for(self, code, rank):
        options = {"divided": True, "parts": 2} if code == "nvfp4" else {"zero": True}
        module = torch.nn.Module()
        for name, x in zip(("gate_up_proj", "down_proj"), self.weights, strict=True):
            groups = on_the_gpu(random_groups(code, x.shape, 16, **options))
            setattr(module, name, torch.nn.Parameter(PackedWeight(groups, torch.bfloat16), requires_grad=False))
        expected = self.run_op([module.gate_up_proj.compute(), module.down_proj.compute()], rank)
        for piece in (1, 3 * 256 * 256, 2**28):
            with mock.patch("transformers_packed.ops.backends.triton.grouped_products._PIECE", piece):
                actual = self.run_op(weights_of(module, self.x), rank)
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), piece)


@needs_gpu
@unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
class CudaQuantizedExpertsTest(ExpertsTestCase):
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
        for piece in (1, 3 * 256 * 256, 2**28):
            with mock.patch("transformers_packed.ops.backends.triton.grouped_products._PIECE", piece):
                actual = self.run_op(weights_of(module, self.x), rank)
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), piece)
                torch.cuda.synchronize()
                with synchronising_is_an_error():
                    self.run_op(weights_of(module, self.x), rank)
        # The weights are those of the library, and near the given ones.
        for x, given in zip(plain, self.weights, strict=True):
            self.assertLess(float((x - given).norm() / given.norm()), 0.15)

    @parameterized.expand(
        (f"{kind}_{str(dtype)[6:]}", kind, dtype)
        for kind in ("nf4", "nf4-double", "fp4", "fp4-double")
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    )
    def test_kernel_has_the_bits_of_bitsandbytes(self, _, kind, dtype):
        from bitsandbytes.functional import dequantize_4bit as theirs
        from bitsandbytes.functional import quantize_4bit

        options = {"quant_type": kind[:3], "compress_statistics": kind.endswith("double")}
        for size, blocksize in ((1, 64), (2**20 + 2**14 + 77, 64), (2**26, 64), (300001, 256), (300000, 4096)):
            packed, state = quantize_4bit(torch.randn(size, device="cuda").to(dtype), blocksize=blocksize, **options)
            expected = theirs(packed, state).flatten()
            for first, number in ((0, size), (size // 3, size // 3), (size // 128 * 64, size // 4), (size - 1, 1)):
                found = dequantize_4bit(packed, state, first, number, impl="triton")
                self.assertTrue(torch.equal(found, expected[first : first + number]), (size, blocksize, first))

    @parameterized.expand([(torch.bfloat16,), (torch.float16,), (torch.float32,)])
    def test_kernel_has_the_bits_of_torchao(self, dtype):
        for shape in ((1, 1), (5, 3, 77), (4, 512, 2048), (3, 5000)):
            stored = store(torch.randn(shape, device="cuda").to(dtype), "float8")
            for piece in (slice(None), slice(1, 3)):
                found = dequantize_rows(stored.qdata[piece], stored.scale[piece], dtype, impl="triton")
                self.assertTrue(torch.equal(found, stored.dequantize()[piece]), (shape, piece))
        values = torch.arange(256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)[None]
        scale = torch.tensor([[3e-5]], device="cuda")
        found, expected = (dequantize_rows(values, scale, dtype, impl=impl) for impl in ("triton", "reference"))
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@needs_gpu
class CudaBlocksTest(ExpertsTestCase):
    @parameterized.expand([(torch.bfloat16,), (torch.float16,), (torch.float32,)])
    def test_kernel_for_blocks(self, dtype):
        for shape in ((1, 1), (200, 300), (3, 77, 129), (4, 512, 2048), (2, 17408, 5120)):
            values = torch.randn(shape, device="cuda").to(torch.float8_e4m3fn)
            scale = torch.rand(*shape[:-2], *(-(-n // 128) for n in shape[-2:]), device="cuda") + 0.01
            for kind in (torch.float32, torch.float8_e8m0fnu):
                stored = values, scale.to(kind), (128, 128), dtype
                found, expected = (dequantize_blocks(*stored, impl=impl) for impl in ("triton", "reference"))
                self.assertTrue(torch.equal(found, expected), (shape, kind))

    @parameterized.expand([(0,), (16,)])
    def test_experts_in_blocks(self, rank):
        sizes = dict(zip(("num_experts", "hidden_size", "moe_intermediate_size"), SIZES, strict=True))
        module = FP8Experts(SimpleNamespace(**sizes, hidden_act="silu"), (128, 128)).cuda().requires_grad_(False)
        plain = []
        for name, weights in zip(("gate_up_proj", "down_proj"), self.weights, strict=True):
            scale = getattr(module, f"{name}_scale_inv").copy_(torch.rand_like(getattr(module, f"{name}_scale_inv")))
            getattr(module, name).copy_(weights)
            plain.append(dequantize_blocks(getattr(module, name), scale, (128, 128), torch.bfloat16, impl="reference"))
        expected = self.run_op(plain, rank)
        for piece in (1, 3 * 256 * 256, 2**28):
            with mock.patch("transformers_packed.ops.backends.triton.grouped_products._PIECE", piece):
                actual = self.run_op(weights_of(module, self.x), rank)
                self.assertTrue(all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True)), piece)
