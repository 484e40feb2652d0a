"""Weights in 4 bit and in float8 have the bits that bitsandbytes and torchao give them, on a CPU.

tests/gpu/test_quantized_experts.py compares them on a GPU.
"""

import copy
import unittest
from importlib.util import find_spec
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from common.fused import guarded_buffers
from common.shown import shows
from mixins.triton import InterpretedKernelsTest, bad_input_tests
from parameterized import parameterized
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from transformers_packed.ops.dequantization import dequantize_4bit, dequantize_blocks, dequantize_rows


if find_spec("bitsandbytes"):
    from bitsandbytes import functional
if find_spec("torchao"):
    from torchao.quantization import Float8Tensor, PerRow

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BLOCK, WHOLE = 64, 64 * 256


def quantize(size, dtype=torch.bfloat16, kind="nf4", double=True, blocksize=BLOCK):
    weights = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    return functional.quantize_4bit(weights, quant_type=kind, compress_statistics=double, blocksize=blocksize)


def as_a_gpu_rounds():
    """Make Triton's interpreter round to bfloat16, which it truncates to."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values, input_dtype, output_dtype, mode):
        if (input_dtype, output_dtype) != (tl.float32, tl.bfloat16):
            return convert(values, input_dtype, output_dtype, mode)
        return torch.from_numpy(np.array(values)).bfloat16().view(torch.uint16).numpy()

    return mock.patch.object(interpreter, "_convert_float", rounded)


class DequantizationTestCase(InterpretedKernelsTest):
    def setUp(self):
        super().setUp()
        self.enterContext(as_a_gpu_rounds())

    def check_bits(self, found, expected, message=None):
        self.assertEqual((found.dtype, found.shape), (expected.dtype, expected.shape), message)
        self.assertTrue(torch.equal(found, expected), message)


@unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
class FourBitTest(DequantizationTestCase):
    def setUp(self):
        super().setUp()
        # bitsandbytes compiles its code for odd sizes, for each of them.
        self.enterContext(torch.compiler.set_stance("force_eager"))

    def check(self, packed, state, *pieces):
        expected = functional.dequantize_4bit(packed, state).flatten()
        for first, number in ((0, len(expected)), *pieces):
            for impl in ("auto", "reference", "bitsandbytes", "triton"):
                found = dequantize_4bit(packed, state, first, number, impl=impl)
                self.check_bits(found, expected[first : first + number], (impl, first, number))

    # Sizes of one block and of several, and parts of a block.
    @parameterized.expand(
        [("nf4", True, torch.bfloat16, size) for size in (1, 63, BLOCK, 2 * WHOLE, 2 * WHOLE + 5 * BLOCK + 7)]
        + [("fp4", False, torch.float16, 2 * WHOLE + 5 * BLOCK + 7), ("nf4", False, torch.float32, 2 * BLOCK + 7)]
        + [("fp4", True, torch.float32, 2 * BLOCK + 7)]
    )
    def test_bits_of_bitsandbytes(self, kind, double, dtype, size):
        pieces = (size // 3, size // 3), (size - 1, 1), (size // 2, 0), (size // 2, min(size // 2, 33))
        self.check(*quantize(size, dtype, kind, double), *pieces)

    @parameterized.expand([(32, True), (128, False), (4096, True)])
    def test_other_blocks(self, blocksize, double):
        self.check(*quantize(9001, blocksize=blocksize, double=double), (4097, 4095), (4096, 4096))

    def test_all_elements_from_one_on_by_default(self):
        packed, state = quantize(300)
        everything = dequantize_4bit(packed, state)
        for impl in ("bitsandbytes", "triton", "reference"):
            self.check_bits(dequantize_4bit(packed, state, 77, impl=impl), everything[77:], impl)

    def test_bytes_beyond_32_bits(self):
        small, size, before = quantize(2 * WHOLE), 2 * WHOLE, 2**32 - WHOLE
        # The system gives memory to the pages that are written.
        packed, state = torch.empty((before + size) // 2, 1, dtype=torch.uint8), copy.deepcopy(small[1])
        state.shape = torch.Size([before + size])
        state.absmax = torch.empty((before + size) // BLOCK, dtype=torch.uint8)
        state.state2.absmax = torch.empty((before + size) // WHOLE)
        for large, some in (
            (packed, small[0]),
            (state.absmax, small[1].absmax),
            (state.state2.absmax, small[1].state2.absmax),
        ):
            large[-len(some) :] = some
        for first, number in ((0, size), (WHOLE - 99, 555), (size - 77, 77)):
            expected = dequantize_4bit(*small, first, number, impl="bitsandbytes")
            for impl in ("triton", "reference"):
                self.check_bits(dequantize_4bit(packed, state, before + first, number, impl=impl), expected, impl)

    def test_more_elements_than_bitsandbytes_counts(self):
        large = state(shape=torch.Size([2, 2**30]))
        with self.assertRaisesRegex(ValueError, "bitsandbytes: supports fewer than 2,147,483,648 elements at a time"):
            dequantize_4bit(torch.zeros(1, 1, dtype=torch.uint8), large, impl="bitsandbytes")

    def test_from_unwritten_buffers(self):
        for double in (False, True):
            packed, state = quantize(2 * WHOLE + 7, double=double)
            with guarded_buffers():
                found = dequantize_4bit(packed, state, 5, WHOLE, impl="triton")
            self.check_bits(found, dequantize_4bit(packed, state, 5, WHOLE, impl="reference"))


@unittest.skipUnless(find_spec("torchao"), "needs torchao")
class RowsTest(DequantizationTestCase):
    @parameterized.expand(
        [((1, 1), torch.float32), ((3, 7), torch.float16), ((5, 2, 48), torch.bfloat16)]
        + [((4, 3, 2500), torch.bfloat16), ((2, 4096), torch.float16), ((0, 5, 16), torch.float32)]
    )
    @shows("torchao", "dequantized to the bits of the library")
    def test_bits_of_torchao(self, shape, dtype):
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        stored = Float8Tensor.from_hp(weights, granularity=PerRow())
        for impl in ("auto", "reference", "triton"):
            for piece in (slice(None), slice(1, 3)):
                values, scale = stored.qdata[piece], stored.scale[piece]
                found = dequantize_rows(values, scale, dtype, impl=impl)
                self.check_bits(found, stored.dequantize()[piece], (impl, piece))

    def test_all_numbers(self):
        # Triton's interpreter reads NaN as 480.
        values = [x for x in range(256) if x not in (0x7F, 0xFF)]
        values = torch.tensor([values] * 3, dtype=torch.uint8).view(torch.float8_e4m3fn)
        scale = torch.tensor([[1.0], [3e-5], [7e3]])
        for dtype in DTYPES:
            with guarded_buffers():
                found = dequantize_rows(values, scale, dtype, impl="triton")
            self.check_bits(found, dequantize_rows(values, scale, dtype, impl="reference"))


class BlocksTest(DequantizationTestCase):
    @parameterized.expand(
        [((256, 384), (128, 128)), ((64, 96), (32, 32)), ((3, 8), (1, 8)), ((5, 5000), (5, 1000)), ((2, 4), (2, 4))]
        + [((3, 64, 96), (32, 32)), ((2, 3, 4, 8), (2, 8))]
    )
    def test_bits_of_transformers(self, shape, block):
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        number = [n // size for n, size in zip(shape[-2:], block, strict=True)]
        scale = torch.rand(*shape[:-2], *number, generator=generator) + 0.01
        for of_blocks in (scale, scale.to(torch.float8_e8m0fnu)):
            for dtype in DTYPES:
                expected = Fp8Dequantize(None)._dequantize_one(values, of_blocks, dtype)
                found = dequantize_blocks(values, of_blocks, block, dtype)
                self.check_bits(found, expected, dtype)
                with guarded_buffers():
                    found = dequantize_blocks(values, of_blocks, block, dtype, impl="triton")
                self.check_bits(found, expected, dtype)

    def test_all_powers_of_two(self):
        scale = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu)[None]
        values = torch.full((1, 510), 2.0).to(torch.float8_e4m3fn)
        for dtype in DTYPES:
            found, expected = (
                dequantize_blocks(values, scale, (1, 2), dtype, impl=x) for x in ("triton", "reference")
            )
            self.check_bits(found, expected, dtype)

    @parameterized.expand([(200, 300), (128, 129), (1, 1)])
    def test_last_blocks_have_fewer_rows_and_columns(self, rows, columns):
        values = torch.randn(2, rows, columns).to(torch.float8_e4m3fn)
        scale = torch.rand(2, -(-rows // 128), -(-columns // 128))
        expected = torch.empty(2, rows, columns)
        for i in range(rows):
            for j in range(columns):
                expected[:, i, j] = values[:, i, j].float() * scale[:, i // 128, j // 128]
        for impl in ("reference", "triton"):
            self.check_bits(dequantize_blocks(values, scale, (128, 128), torch.float32, impl=impl), expected, impl)


def state(**changes):
    values = {"absmax": torch.ones(2), "code": torch.arange(16.0), "blocksize": 64, "state2": None}
    values |= {"shape": torch.Size([2, 64]), "dtype": torch.float32}
    return SimpleNamespace(**(values | changes))


def four_bit(first=0, number=None, impl="reference", **changes):
    return dequantize_4bit(torch.zeros(64, 1, dtype=torch.uint8), state(**changes), first, number, impl=impl)


def rows(values=torch.float8_e4m3fn, scale=(3, 1), impl="reference"):
    return dequantize_rows(torch.zeros(3, 8).to(values), torch.ones(scale), torch.float32, impl=impl)


def blocks(values=torch.float8_e4m3fn, scale=(1, 2), impl="reference"):
    return dequantize_blocks(torch.zeros(3, 8).to(values), torch.ones(scale), (4, 4), torch.float32, impl=impl)


class BadInputTest(
    bad_input_tests(
        [
            (
                "blocks",
                lambda: blocks(scale=(1, 3)),
                r"\(1, 2\) scales of blocks of \(4, 4\), got \(3, 8\) and \(1, 3\)",
            ),
            ("start", lambda: four_bit(-1), "from 0 to before 128, got 129 from -1 on"),
            ("end", lambda: four_bit(100, 29), "from 0 to before 128, got 29 from 100 on"),
            ("number", lambda: four_bit(100, -1), "got -1 from 100 on"),
            ("scale", lambda: rows(scale=(3,)), r"\[..., C\] and scales \[..., 1\], got \(3, 8\) and \(3,\)"),
        ],
        [
            ("float8", lambda impl: rows(torch.float8_e5m2, impl=impl), "e4m3 .*, not torch.float8_e5m2"),
            ("float8_blocks", lambda impl: blocks(torch.float8_e5m2, impl=impl), "e4m3 .*, not torch.float8_e5m2"),
        ],
    )
):
    @parameterized.expand(
        [
            ("blocks", {"blocksize": 48, "absmax": torch.ones(3)}, "powers of two up to 4096, not 48"),
            ("scales", {"absmax": torch.ones(2).half()}, "torch.float16"),
            ("layout", {"absmax": torch.ones(4)[::2]}, "contiguous tensors on one device"),
            ("device", {"code": torch.ones(16, device="meta")}, "contiguous tensors on one device"),
        ]
    )
    def test_4bit_that_the_kernel_does_not_serve(self, _, changes, message):
        with self.assertRaisesRegex(ValueError, message):
            four_bit(impl="triton", **changes)
