"""Products of experts in float8 with a scale for each block: the casts, the products, and the op in PyTorch and in the interpreter."""

import os
import subprocess
import sys
import unittest
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from common.fused import guarded_buffers, relative
from mixins.triton import InterpretedKernelsTest
from ops.test_moe import AROUND, BFLOAT16, FLOAT32, FLOAT64, Case, bits, choices, each, leaks, normal
from parameterized import parameterized

from transformers_packed import batch_invariant
from transformers_packed.ops import experts, glu, implementations_used
from transformers_packed.ops.dispatch import _used
from transformers_packed.ops.float8_blocks import BLOCK, cast_in_blocks, product_in_blocks, verify
from transformers_packed.ops.linear import shared_input_linears
from transformers_packed.ops.terms import Adapter, BlocksWeight, DequantizedExperts, Float8Experts, Projection


FLOAT8 = torch.float8_e4m3fn
HIDDEN, WIDTH = 256, 128
# The second expert has more rows than a tile, and the first one none.
ROUTING = torch.cat([torch.tensor([[1, 2]] * 130), torch.tensor([[2, 3], [3, 1]])])
IMPLEMENTATIONS = ["reference", "triton"]
# Relative errors against sums in float64 of the same casts. Triton's interpreter rounds to bfloat16 towards zero.
BARS = {FLOAT32: 1e-6, BFLOAT16: 6e-3}


def blocks_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Store weights `[E, out, in]` with the largest number of each block as 448, so that scales are no powers of two."""
    tiles = weight.float().unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scale = tiles.abs().amax((-3, -1)).clamp(min=1e-12) / 448
    return (tiles / scale[..., None, :, None]).view(weight.shape).to(FLOAT8), scale


def in_float8(weight: torch.Tensor) -> Float8Experts:
    stored = blocks_of(weight.detach())
    return Float8Experts(weight.shape, weight.dtype, lambda: stored)


def dequantized(values, scale):
    """The numbers in float64."""
    return values.double() * scale.double().repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)


def cast(x):
    """The numbers of `x` as the products read them, in float64."""
    values, scale = cast_in_blocks(x)
    return values.double() * scale.double().repeat_interleave(BLOCK, 1)


class OfTheSameCasts(torch.autograd.Function):
    """`x W^T` and its gradient, each of the casts of the given rows, with sums in float64."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return cast(x) @ weight.t()

    @staticmethod
    def backward(ctx, dy):
        return cast(dy) @ ctx.weight, None


def oracle(x, index, weights, gate_up, down, adapters=(None, None)):
    """The definition, one token and one expert at a time."""
    matrices, found = [dequantized(*blocks_of(w)) for w in (gate_up, down)], []

    def times(row, k, expert):
        y = OfTheSameCasts.apply(row, matrices[k][expert])
        adapter = adapters[k]
        return y if adapter is None else y + adapter.scale * (row @ adapter.down[expert].T @ adapter.up[expert].T)

    for token, chosen in enumerate(index.tolist()):
        total = 0 * x[token]
        for k, expert in enumerate(chosen):
            gate, up = times(x[token : token + 1], 0, expert).chunk(2, -1)
            total = total + weights[token, k] * times(F.silu(gate) * up, 1, expert)[0]
        found.append(total)
    return torch.stack(found)


def adapters_of(number, ranks, dtype):
    found = []
    for seed, (rank, out, size) in enumerate(zip(ranks, (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH), strict=True)):
        factors = normal(number, rank, size, seed=50 + seed) / 8, normal(number, out, rank, seed=60 + seed) / 4
        found.append(Adapter(*(x.to(dtype).requires_grad_() for x in factors), 0.5) if rank else None)
    return found


class CastTest(InterpretedKernelsTest):
    def rows(self, dtype=FLOAT32):
        x = normal(70, 384, seed=3) * 10.0 ** torch.linspace(-8, 8, 70)[:, None]
        x[0], x[1, :BLOCK], x[2, 5], x[3, 130] = 0, 448 * 2**-20, float("inf"), float("nan")
        return x.to(dtype)

    def test_scales_are_the_least_powers_of_two(self):
        x = self.rows()
        values, scale = cast_in_blocks(x)
        self.assertEqual((values.shape, values.dtype, scale.shape), (x.shape, FLOAT8, (70, 3)))
        for row, block in ((0, 0), (1, 0), (5, 1), (40, 2), (69, 0)):
            part, s = x[row].split(BLOCK)[block], scale[row, block].item()
            largest = part.abs().max().item()
            self.assertEqual(torch.frexp(torch.tensor(s)).mantissa, 0.5)
            self.assertLessEqual(largest / s, 448)
            self.assertTrue(largest / s > 224 or s == 2**-100)
            found = values[row].split(BLOCK)[block].float() * s
            # Half a step of 3 bits, and of the least step.
            self.assertTrue(((found - part).abs() <= part.abs() / 16 + s * 2**-10).all())
        self.assertTrue(scale[2, 0].isnan() and values[2, :BLOCK].float().isnan().all())
        self.assertTrue(scale[2, 1:].isfinite().all())
        self.assertEqual(values[3].float().isnan().nonzero().tolist(), [[130]])

    def test_kernel_has_the_same_bits(self):
        from transformers_packed.ops.backends.triton.float8_blocks import cast_in_blocks as kernel

        # In numpy, a maximum of NaN is NaN.
        x = self.rows(BFLOAT16).nan_to_num(nan=1.0)
        found, (values, scale) = kernel(x), cast_in_blocks(x)
        self.assertIs(found.plain, x)
        finite = scale.isfinite()
        self.assertTrue(torch.equal(found.scale.t().isfinite(), finite))
        self.assertTrue(torch.equal(found.scale.t()[finite], scale[finite]))
        each_number = finite.repeat_interleave(BLOCK, 1)
        self.assertTrue(torch.equal(*(x.view(torch.uint8)[each_number] for x in (found.values, values))))

    def test_transposed_copy(self):
        from transformers_packed.ops.backends.triton.float8_blocks import transposed

        weights = normal(3, 256, 384).to(FLOAT8)
        found = transposed(weights)
        self.assertTrue(found.is_contiguous())
        self.assertTrue(torch.equal(found.view(torch.uint8), weights.view(torch.uint8).mT))


class ProductTest(InterpretedKernelsTest):
    def test_reference(self):
        x, (weight, scale) = normal(9, 384), blocks_of(normal(256, 384, seed=1))
        for values, of_rows in (cast_in_blocks(x), cast_in_blocks(x * 10.0 ** torch.arange(-4, 5.0)[:, None])):
            found = product_in_blocks(values, of_rows, weight, scale)
            rows = values.double() * of_rows.double().repeat_interleave(BLOCK, 1)
            self.assertEqual(found.dtype, FLOAT32)
            self.assertLess(relative(found, rows @ dequantized(weight, scale).T), 1e-6)
            with torch.autocast("cpu", torch.float16):
                self.assertTrue(torch.equal(product_in_blocks(values, of_rows, weight, scale), found))

    @parameterized.expand(
        each([(n, k, transposed) for n, k in ((256, 128), (128, 384), (384, 256)) for transposed in (1, 0)])
    )
    def test_kernel(self, _, n, k, transposed):
        from transformers_packed.ops.backends.triton import float8_blocks as kernels

        weights = normal(4, *((n, k) if transposed else (k, n)), seed=2).to(BFLOAT16)
        stored, plan = in_float8(weights), kernels.Float8Plan.of(ROUTING, 4)
        tokens = (normal(len(ROUTING), k) * 10.0 ** torch.linspace(-3, 3, len(ROUTING))[:, None]).to(BFLOAT16)
        expert = ROUTING.flatten()[plan.order.long()]
        matrices = dequantized(*stored.stored())[expert]
        matrices = matrices if transposed else matrices.mT
        for of_tokens in (True, False):
            rows = tokens[plan.order.long() // 2]
            call = tokens if of_tokens else rows, stored
            options = {"transposed": bool(transposed), "of_tokens": of_tokens}
            found, _ = plan.rows_times_experts(*call, **options)
            expected = torch.einsum("rk,rnk->rn", cast(rows), matrices)
            for a, b in ((found, expected), (found[:5], expected[:5])):
                self.assertLess(relative(a, b), BARS[BFLOAT16])
            # One expert at a time.
            with mock.patch.object(kernels, "_PIECE", 1):
                self.assertTrue(torch.equal(plan.rows_times_experts(*call, **options)[0], found))

    @parameterized.expand(each([(300, 256, 384), (5, 384, 128)]))
    def test_kernel_for_one_weight(self, _, tokens, n, k):
        from transformers_packed.ops.backends.triton import float8_blocks as kernels

        weight, scale = blocks_of(normal(n, k, seed=2))
        # More tiles of rows than a group has, with a rest.
        group = mock.patch.object(kernels, "_GROUP", 2)
        for forward, size in ((True, k), (False, n)):
            x = (normal(tokens, size) * 10.0 ** torch.linspace(-3, 3, tokens)[:, None]).to(BFLOAT16)
            matrix = dequantized(weight, scale)
            expected = cast(x) @ (matrix.T if forward else matrix)
            with group:
                found = kernels.rows_times_weight(kernels.cast_in_blocks(x), weight, scale, forward)
            self.assertEqual((found.shape, found.dtype), (expected.shape, BFLOAT16))
            for a, b in ((found, expected), (found[:5], expected[:5]), (found[-5:], expected[-5:])):
                self.assertLess(relative(a, b), BARS[BFLOAT16])

    def test_the_gated_product_is_cast(self):
        from transformers_packed.ops.backends.triton.float8_blocks import Float8Plan

        x, weights = normal(20, HIDDEN).to(BFLOAT16), normal(3, 2 * WIDTH, HIDDEN).div(16).to(BFLOAT16)
        plan = Float8Plan.of(choices(20, 3, 2), 3)
        h, both, _ = plan.gate_up(x, in_float8(weights), None, True, True)
        gate, up = both.float().chunk(2, -1)
        self.assertLess(relative(h.plain, F.silu(gate) * up), BARS[BFLOAT16])
        values, scale = cast_in_blocks(h.plain)
        self.assertTrue(torch.equal(h.values.float(), values.float()) and torch.equal(h.scale.t(), scale))
        again, kept, _ = plan.gate_up(x, in_float8(weights), None, False, False)
        self.assertEqual((again.plain, kept), (None, None))
        self.assertTrue(torch.equal(again.values.float(), values.float()))

    def test_the_gradients_of_gate_and_up_are_cast(self):
        from transformers_packed.ops.backends.triton.float8_blocks import Float8Plan
        from transformers_packed.ops.backends.triton.grouped_products import Plan

        index, wide = choices(20, 3, 2), 3 * BLOCK
        both, dh, weights = normal(40, 2 * wide), normal(40, wide, seed=1), normal(20, 2, seed=2)
        both, dh, weights = (x.to(BFLOAT16) for x in (both, dh, weights))
        plain, weighted = Plan.of(index, 3), dh.clone()
        expected, d_weights = plain.gate_backward(both, weighted, weights)
        for adapted in ((True, True), (False, False)):
            given = dh.clone()
            found, of_weights = Float8Plan.of(index, 3).gate_backward(both, given, weights, adapted)
            values, scale = cast_in_blocks(expected)
            self.assertTrue(torch.equal(found.values.float(), values.float()))
            self.assertTrue(torch.equal(found.scale.t(), scale))
            torch.testing.assert_close(of_weights, d_weights)
            self.assertEqual(found.plain is not None and torch.equal(found.plain, expected), adapted[0])
            self.assertTrue(torch.equal(given, weighted if adapted[1] else dh))


class LinearTest(unittest.TestCase):
    """Linear layers with weights in blocks, in a sum with other terms."""

    def setUp(self):
        _used.clear()
        self.x, self.dy = normal(9, 256), [normal(9, 384, seed=1), normal(9, 128, seed=2)]
        self.stored = [blocks_of(normal(n, 256, seed=3 + n) / 16) for n in (384, 128)]
        self.bias, self.factors = normal(384, seed=5), [normal(4, 256, seed=6) / 16, normal(384, 4, seed=7)]

    def run_op(self, layers, dtype=FLOAT32):
        x = self.x.to(dtype, copy=True).requires_grad_()
        factors = [factor.to(dtype, copy=True).requires_grad_() for factor in self.factors]
        outputs = layers(x, self.bias.to(dtype), Adapter(*factors, 2.0))
        found = torch.autograd.grad(outputs, [x, *factors], [dy.to(dtype) for dy in self.dy])
        return [y.detach() for y in outputs] + list(found)

    def in_blocks(self, x, bias, adapter):
        first, second = (BlocksWeight(*stored, x.dtype) for stored in self.stored)
        return shared_input_linears(x, Projection(first, bias, (adapter,)), Projection(second))

    def test_equals_the_definition(self):
        def definition(x, bias, adapter):
            first, second = (OfTheSameCasts.apply(x, dequantized(*stored)) for stored in self.stored)
            return first + bias + 2 * x @ adapter.down.T @ adapter.up.T, second

        found, expected = self.run_op(self.in_blocks), self.run_op(definition, FLOAT64)
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            self.assertEqual((a.shape, a.dtype), (b.shape, FLOAT32))
            self.assertLess(relative(a, b), 2e-6, number)
        self.assertEqual(implementations_used(), {"linear_float8_lora": ["fused"]})

    def test_the_same_bits_whatever_the_rows(self):
        """Others may be larger by any factor. Without the mode, PyTorch has other sums for fewer rows on a CPU."""
        size = 10.0 ** torch.linspace(-6, 6, 200)[:, None]
        self.x, self.dy = normal(200, 256) * size, [normal(200, n, seed=n) * size for n in (384, 128)]
        with batch_invariant():
            together = self.run_op(self.in_blocks)[:3]
            for part in (slice(0, 1), slice(5, 68), slice(77, 177)):
                with mock.patch.multiple(self, x=self.x[part], dy=[dy[part] for dy in self.dy]):
                    alone = self.run_op(self.in_blocks)[:3]
                for a, b in zip(together, alone, strict=True):
                    self.assertTrue(torch.equal(a[part], b))

    def test_an_output_that_nothing_reads(self):
        x = self.x.requires_grad_()
        outputs = self.in_blocks(x, self.bias, Adapter(*self.factors, 2.0))
        for number, y in enumerate(outputs):
            (found,) = torch.autograd.grad(y, x, self.dy[number], retain_graph=True)
            both = [dy if k == number else torch.zeros_like(dy) for k, dy in enumerate(self.dy)]
            (expected,) = torch.autograd.grad(outputs, x, both, retain_graph=True)
            self.assertLess(relative(found, expected), 1e-6)

    def test_weights_whose_memory_has_been_given_up(self):
        """As that of copies of a layer in host memory, after the layer."""
        y = self.in_blocks_of(self.x.requires_grad_())
        self.stored[0][0].untyped_storage().resize_(0)
        with self.assertRaisesRegex(ValueError, "Leave the layers on the GPU"):
            y.sum().backward()

    def test_after_a_gate(self):
        gate, x = normal(9, 256, seed=8).requires_grad_(), self.x.requires_grad_()
        weight = BlocksWeight(*self.stored[0], FLOAT32)
        found = glu(gate, x, Projection(weight))
        expected = self.in_blocks_of(F.silu(gate) * x)
        self.assertLess(relative(found, expected), 1e-6)
        gradients = [torch.autograd.grad(y, [gate, x], self.dy[0]) for y in (found, expected)]
        for a, b in zip(*gradients, strict=True):
            self.assertLess(relative(a, b), 1e-5)

    def in_blocks_of(self, x):
        return shared_input_linears(x, Projection(BlocksWeight(*self.stored[0], FLOAT32)))[0]

    def test_gpus_and_dtypes_that_are_refused(self):
        x = mock.Mock(is_cuda=True, device=torch.device("cuda", 0))
        for capability, dtype, message in (
            ((8, 9), BFLOAT16, "capability 9.0 to 11.0"),
            ((12, 0), BFLOAT16, "capability 9.0 to 11.0"),
            ((9, 0), torch.float16, "needs bfloat16 around products"),
            ((9, 0), BFLOAT16, ""),
        ):
            with mock.patch.object(torch.cuda, "get_device_capability", lambda *_, found=capability: found):
                self.assertRegex(verify(x, None, dtype), message or "^$")
                with mock.patch.object(torch.version, "hip", "6.0"):
                    self.assertNotEqual(verify(x, None, dtype), "")
        self.assertEqual(verify(self.x, None, FLOAT32), "")


class ExpertsTest(InterpretedKernelsTest):
    def setUp(self):
        super().setUp()
        _used.clear()

    def run_op(self, case, impl, adapters=(None, None)):
        """The output, and the gradients of the input, the weights of choices, and the factors."""
        x, weights, gate_up, down = case.leaves(("x", "weights"))
        if impl is None:
            y = oracle(x, case.index, weights, gate_up, down, adapters)
        else:
            options = dict(zip(("gate_up_adapter", "down_adapter"), adapters, strict=True))
            y = experts(x, case.index, weights, in_float8(gate_up), in_float8(down), **options, impl=impl)
        leaves = [x, weights, *(factor for a in adapters if a is not None for factor in a[:2])]
        return [y.detach(), *torch.autograd.grad(y, leaves, case.upstream.to(y))]

    @parameterized.expand([((0, 0),), ((3, 5),)])
    def test_reference(self, ranks):
        case = Case(choices(12, 3, 2), 4, HIDDEN, WIDTH)
        found = self.run_op(case, "reference", adapters_of(4, ranks, FLOAT32))
        expected = self.run_op(case.cast(FLOAT64), None, adapters_of(4, ranks, FLOAT64))
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            self.assertEqual((a.shape, a.dtype), (b.shape, FLOAT32))
            # A number between two of float8 may be rounded to the other one.
            self.assertLess(relative(a, b), 2e-3, number)
        name = "experts_float8_lora" if any(ranks) else "experts_float8"
        self.assertEqual(implementations_used(), {name: ["reference"]})

    def test_other_numbers_than_of_dequantized_weights(self):
        """By as much as the casts of rows round."""
        case = Case(choices(12, 3, 2), 4, HIDDEN, WIDTH)
        found = self.run_op(case, "reference")
        case.gate_up, case.down = (dequantized(*blocks_of(x)).float() for x in (case.gate_up, case.down))
        for a, b in zip(found, case.run("reference", ("x", "weights")), strict=True):
            self.assertTrue(0.01 < relative(a, b) < 0.1, relative(a, b))

    @parameterized.expand([((0, 0),), ((16, 5),), ((0, 3),)])
    def test_triton(self, ranks):
        case = Case(ROUTING, 5, HIDDEN, WIDTH, BFLOAT16)
        adapters = adapters_of(5, ranks, FLOAT32)
        found, expected = (self.run_op(case, impl, adapters) for impl in IMPLEMENTATIONS)
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
            # The interpreter rounds the product of gate and up to other numbers of bfloat16, and of float8 then.
            self.assertLess(relative(a, b), 0.06, number)

    def test_experts_on_another_device(self):
        index = choices(20, 6, 2)
        case = Case(index, 3, HIDDEN, WIDTH, BFLOAT16)
        for impl in IMPLEMENTATIONS:
            y, dx, d_weights = self.run_op(case, impl)
            nowhere = (index >= 3).all(-1)
            self.assertTrue(nowhere.any())
            self.assertEqual(y[nowhere].count_nonzero() + dx[nowhere].count_nonzero(), 0)
            self.assertEqual(d_weights[index >= 3].count_nonzero(), 0)

    @parameterized.expand([("reference", FLOAT32), ("triton", BFLOAT16)])
    def test_isolation(self, impl, dtype):
        document = Case(choices(7, 3, 3, 7), 3, HIDDEN, WIDTH, BFLOAT16, dtype, seed=7)

        def function(x, index, weights, gate_up, down):
            return experts(x, index, weights, in_float8(gate_up), in_float8(down), impl=impl)

        self.assertEqual(leaks(document, function, (3, 11), 7, around=AROUND[1:2]), [])

    def test_the_same_bits_twice_and_from_unwritten_buffers(self):
        case, adapters = Case(choices(9, 3, 2), 2, HIDDEN, WIDTH, BFLOAT16), adapters_of(2, (4, 8), BFLOAT16)
        plain = self.run_op(case, "triton", adapters)
        with guarded_buffers():
            for a, b in zip(self.run_op(case, "triton", adapters), plain, strict=True):
                self.assertTrue(torch.equal(bits(a), bits(b)))

    @parameterized.expand(IMPLEMENTATIONS)
    def test_autocast_and_no_tokens(self, impl):
        for tokens in (3, 0):
            case = Case(choices(tokens, 3, 2), 3, HIDDEN, WIDTH, x_dtype=BFLOAT16)
            with torch.autocast("cpu", BFLOAT16):
                y, dx, d_weights = self.run_op(case, impl)
            self.assertEqual((y.dtype, dx.dtype, d_weights.dtype), (BFLOAT16,) * 3)
            self.assertEqual((len(y), len(dx)), (tokens, tokens))

    @parameterized.expand(IMPLEMENTATIONS)
    def test_weights_are_asked_for_in_each_product(self, impl):
        """So copies of weights in host memory need not stay for the backward."""
        case, asked = Case(choices(9, 2, 2), 2, HIDDEN, WIDTH, BFLOAT16), []

        def stored(name, blocks):
            asked.append(name)
            return blocks

        weights = {name: getattr(case, name) for name in ("gate_up", "down")}
        given = [Float8Experts(w.shape, BFLOAT16, partial(stored, name, blocks_of(w))) for name, w in weights.items()]
        y = experts(case.x.requires_grad_(), case.index, case.weights, *given, impl=impl)
        forward = list(asked)
        y.backward(case.upstream)
        self.assertEqual(set(forward), {"gate_up", "down"})
        self.assertEqual(sorted(asked[len(forward) :]), sorted(forward))

    def test_second_order_gradients_are_refused(self):
        case = Case(choices(3, 2, 2), 2, HIDDEN, WIDTH)
        x, weights, gate_up, down = case.leaves(("x",))
        y = experts(x, case.index, weights, in_float8(gate_up), in_float8(down))
        with self.assertRaisesRegex(ValueError, "first-order gradients.*without products in float8"):
            torch.autograd.grad(y.sum(), x, create_graph=True)

    def test_weights_that_are_refused(self):
        case = Case(choices(3, 2, 2), 2, HIDDEN, WIDTH)
        small = Case(choices(3, 2, 2), 2, 192, WIDTH)
        lazy = DequantizedExperts(case.down.shape, FLOAT32, lambda first, last: case.down[first:last])
        for x, gate_up, down in (
            (case.x, in_float8(case.gate_up), case.down),
            (case.x, case.gate_up, in_float8(case.down)),
            (case.x, in_float8(case.gate_up), lazy),
            (small.x, *(Float8Experts(w.shape, FLOAT32, lambda: ()) for w in (small.gate_up, small.down))),
        ):
            with self.assertRaisesRegex(ValueError, "float8 for both weights, in multiples of 128, or for none"):
                experts(x, case.index, case.weights, gate_up, down)


class CompilationTest(unittest.TestCase):
    """Kernels are compiled for GPUs that are not here."""

    def check(self, *ranks):
        script = Path(__file__).parents[1] / "scripts" / "float8_kernels.py"
        environment = os.environ | {"TRITON_INTERPRET": "0"}
        command = [sys.executable, str(script), *map(str, ranks)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        # Of a program on GPUs of compute capability 9.0 and 10.0.
        self.assertLessEqual(int(done.stdout), 227 * 1024)

    def test_products(self):
        self.check(0)

    @pytest.mark.slow
    def test_products_with_an_adapter(self):
        self.check(16, 32, 64)


if __name__ == "__main__":
    unittest.main()
