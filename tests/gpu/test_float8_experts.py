"""Experts and linear layers that are stored in float8 and whose products run in it, on a GPU: `make test-gpu`."""

import unittest
from types import SimpleNamespace

import torch
from common.gpu import needs_gpu, report, synchronising_is_an_error
from ops.test_float8_blocks import blocks_of
from parameterized import parameterized
from transformers.integrations.finegrained_fp8 import FP8Experts

from transformers_packed.models.experts import weights_of
from transformers_packed.models.float8_marks import MARK
from transformers_packed.ops import choose_experts, experts
from transformers_packed.ops.float8_blocks import BLOCK, cast_in_blocks
from transformers_packed.ops.linear import shared_input_linears
from transformers_packed.ops.terms import Adapter, BlocksWeight, Float8Experts, Projection


# Those of 35B-A3B.
NUMBER, TOP, HIDDEN, WIDTH, TOKENS = 256, 8, 2048, 512, 2048


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").bfloat16()


def cast(x):
    """The numbers of `x` as the products read them."""
    values, scale = cast_in_blocks(x)
    return values.float() * scale.repeat_interleave(BLOCK, 1)


@needs_gpu
class CudaFloat8ExpertsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.stored = {}
        for name, out, size in (("gate_up", 2 * WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
            weight = random(NUMBER, out, size) / size**0.5
            # Some at a time, for blocks in float32.
            parts = [blocks_of(part) for part in weight.split(32)]
            cls.stored[name] = [torch.cat(x) for x in zip(*parts, strict=True)]
        cls.logits = random(TOKENS, NUMBER, seed=1) + random(NUMBER, seed=2) / 2
        cls.x, cls.upstream = random(TOKENS, HIDDEN, seed=3), random(TOKENS, HIDDEN, seed=4)

    @classmethod
    def tearDownClass(cls):
        del cls.stored

    def weights(self):
        return [
            Float8Experts(values.shape, torch.bfloat16, lambda both=(values, scale): both)
            for values, scale in self.stored.values()
        ]

    def adapters(self, rank):
        found = {}
        for seed, (name, out, size) in enumerate((("gate_up", 2 * WIDTH, HIDDEN), ("down", HIDDEN, WIDTH))):
            factors = random(NUMBER, rank, size, seed=5 + seed) / 20, random(NUMBER, out, rank, seed=7 + seed) / 10
            found[f"{name}_adapter"] = Adapter(*(x.float().requires_grad_() for x in factors), 2.0)
        return found if rank else {}

    def run_op(self, impl="triton", adapters=None, part=slice(None), weights=None):
        """The output, and the gradients of the input, the logits and the factors."""
        adapters = adapters or {}
        leaves = [x[part].detach().requires_grad_() for x in (self.x, self.logits)]
        leaves += [x for adapter in adapters.values() for x in adapter[:2]]
        chosen, index = choose_experts(leaves[1], TOP)
        y = experts(leaves[0], index, chosen, *(weights or self.weights()), **adapters, impl=impl)
        return [y.detach(), *torch.autograd.grad(y, leaves, self.upstream[part])]

    def assert_same_bits(self, found, expected):
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            self.assertTrue(torch.equal(a, b), number)

    def test_casts(self):
        from transformers_packed.ops.backends.triton.float8_blocks import cast_in_blocks as kernel
        from transformers_packed.ops.backends.triton.float8_blocks import transposed

        x = random(1000, HIDDEN) * 10.0 ** torch.linspace(-30, 30, 1000, device="cuda")[:, None].bfloat16()
        x[5, 3], x[6, 7], x[7] = float("nan"), float("inf"), 0
        found, (values, scale) = kernel(x), cast_in_blocks(x)
        torch.testing.assert_close(found.scale.t(), scale, rtol=0, atol=0, equal_nan=True)
        # With a scale of NaN, the numbers of a block do not matter.
        finite = scale.isfinite().repeat_interleave(BLOCK, 1)
        found = [x.float()[finite] for x in (found.values, values)]
        torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
        weights = self.stored["gate_up"][0]
        self.assertTrue(torch.equal(transposed(weights).view(torch.uint8), weights.view(torch.uint8).mT))

    @parameterized.expand([("gate_up", True), ("gate_up", False), ("down", True), ("down", False)])
    def test_products(self, name, forward):
        """Each of the four products, with sums in float32 of the same casts."""
        from transformers_packed.ops.backends.triton.float8_blocks import Float8Plan

        plan = Float8Plan.of(choose_experts(self.logits, TOP)[1], NUMBER)
        weight = dict(zip(("gate_up", "down"), self.weights(), strict=True))[name]
        values, scale = weight.stored()
        tokens = random(TOKENS, weight.shape[2 if forward else 1], seed=9)
        order = plan.order.long() // TOP
        for of_tokens in (True, False):
            rows = tokens if of_tokens else tokens[order]
            found, _ = plan.rows_times_experts(rows, weight, transposed=forward, of_tokens=of_tokens)
            start, errors = 0, []
            for expert, end in enumerate(plan.ends.tolist()):
                matrix = values[expert].float() * scale[expert].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
                expected = cast(tokens[order[start:end]]) @ (matrix.T if forward else matrix)
                if start < end:
                    errors.append((found[start:end].float() - expected).norm() / expected.norm())
                    start = end
            # Of tensors, because Python's maximum may not be NaN.
            worst = float(torch.stack(errors).max())
            report("products of experts in float8", product=name, forward=forward, of_tokens=of_tokens, error=worst)
            # One rounding to bfloat16, and the sums of tensor cores over a block.
            self.assertLess(worst, 4e-3)

    @parameterized.expand([(0,), (16,), (64,)])
    def test_equals_the_reference(self, rank):
        adapters = self.adapters(rank)
        found, expected = (self.run_op(impl, adapters) for impl in ("triton", "reference"))
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            error = float((a.float() - b.float()).norm() / b.float().norm())
            report("experts in float8", rank=rank, number=number, error=error)
            # The product of gate and up, and then its cast, may be rounded to another number.
            self.assertLess(error, 0.06, number)

    @parameterized.expand([(0,), (16,)])
    def test_tokens_alone(self, rank):
        part = slice(300, 700)
        adapters = self.adapters(rank)
        together, alone = self.run_op(adapters=adapters), self.run_op(adapters=adapters, part=part)
        self.assert_same_bits([x[part] for x in together[:3]], alone[:3])

    def test_the_host_does_not_wait(self):
        expected = self.run_op()
        with synchronising_is_an_error():
            found = self.run_op()
        self.assert_same_bits(found, expected)

    def test_in_a_graph(self):
        # No random numbers while a graph is captured.
        adapters = self.adapters(16)
        expected = self.run_op(adapters=adapters)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run_op(adapters=adapters)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self.run_op(adapters=adapters)
        graph.replay()
        self.assert_same_bits(found, expected)

    @parameterized.expand([(torch.float32,), (torch.float8_e8m0fnu,)])
    def test_the_experts_of_transformers(self, dtype):
        sizes = {"num_experts": NUMBER, "hidden_size": HIDDEN, "moe_intermediate_size": WIDTH}
        with torch.device("cuda"):
            module = FP8Experts(SimpleNamespace(**sizes, hidden_act="silu"), (BLOCK, BLOCK)).requires_grad_(False)
        weights = []
        for name, (values, scale) in self.stored.items():
            scale = scale.to(dtype)
            getattr(module, f"{name}_proj").data = values
            getattr(module, f"{name}_proj_scale_inv").data = scale
            both = values, scale.float()
            weights.append(Float8Experts(values.shape, torch.bfloat16, lambda both=both: both))
        vars(module)[MARK] = 0.0
        self.assert_same_bits(self.run_op(weights=weights_of(module, self.x)), self.run_op(weights=weights))


@needs_gpu
class CudaFloat8LinearTest(unittest.TestCase):
    def run_layers(self, layers, x, gradients, dtype):
        x = x.to(dtype, copy=True).requires_grad_()
        outputs = layers(x)
        return [y.detach() for y in outputs] + [*torch.autograd.grad(outputs, x, [dy.to(dtype) for dy in gradients])]

    def test_layers_with_one_input(self):
        """Sizes of 27B, numbers of rows that are no multiples of tiles, and an odd number of blocks."""
        stored = [blocks_of(random(out, 5120, seed=out)[None] / 70) for out in (2048, 1152)]
        stored = [tuple(x[0] for x in both) for both in stored]
        down, up = random(16, 5120, seed=1).float() / 70, random(2048, 16, seed=2).float() / 4

        def layers(x):
            adapter = Adapter(down.to(x.dtype), up.to(x.dtype), 2.0)
            first, second = (Projection(BlocksWeight(*both, x.dtype)) for both in stored)
            return shared_input_linears(x, first._replace(adapters=(adapter,)), second)

        x, gradients = random(3000, 5120, seed=3), [random(3000, out, seed=4 + out) for out in (2048, 1152)]
        found = self.run_layers(layers, x, gradients, torch.bfloat16)
        # On a CPU, where the products are those of PyTorch in float32.
        stored, down, up = [tuple(x.cpu() for x in both) for both in stored], down.cpu(), up.cpu()
        expected = self.run_layers(layers, x[:500].cpu(), [dy[:500].cpu() for dy in gradients], torch.float32)
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            error = float((a[:500].float().cpu() - b).norm() / b.norm())
            report("linear layers in float8 in blocks", number=number, error=error)
            self.assertLess(error, 5e-3, number)
        self.assertTrue(all(y.isfinite().all() for y in found))

    def test_rows_alone(self):
        both = tuple(x[0] for x in blocks_of(random(1, 2048, 2048, seed=5) / 45))
        layers = lambda x: shared_input_linears(x, Projection(BlocksWeight(*both, x.dtype)))  # noqa: E731
        x, dy = random(1500, 2048), random(1500, 2048, seed=6)
        together = self.run_layers(layers, x, [dy], torch.bfloat16)
        for part in (slice(0, 1), slice(700, 1333)):
            alone = self.run_layers(layers, x[part], [dy[part]], torch.bfloat16)
            for a, b in zip(together, alone, strict=True):
                self.assertTrue(torch.equal(a[part], b))

    def test_the_host_does_not_wait(self):
        both = tuple(x[0] for x in blocks_of(random(1, 256, 256, seed=5)))
        layers = lambda x: shared_input_linears(x, Projection(BlocksWeight(*both, x.dtype)))  # noqa: E731
        x = random(300, 256)
        self.run_layers(layers, x, [x], torch.bfloat16)
        with synchronising_is_an_error():
            self.run_layers(layers, x, [x], torch.bfloat16)


if __name__ == "__main__":
    unittest.main()
