"""Mixture of experts: the router and the experts, as PyTorch references and as Triton kernels in the interpreter."""

import unittest
from importlib.util import find_spec
from unittest import mock

import torch
from common.fused import guarded_buffers, relative, saved_in
from mixins.triton import InterpretedKernelsTest, bad_input_tests
from parameterized import parameterized
from torch.autograd import gradcheck, gradgradcheck
from transformers import Qwen3_5MoeTextConfig, Qwen3NextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts, Qwen3_5MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

from transformers_packed.ops import choose_experts, experts


BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
IMPLEMENTATIONS = ["reference", "triton"]
# Relative errors against float64. Triton's interpreter rounds to bfloat16 towards zero, which doubles them.
BARS = {FLOAT64: 1e-13, FLOAT32: 2e-6, FLOAT16: 2e-3, BFLOAT16: 2e-2}


def bits(x):
    """The numbers as integers, so that a comparison tells -0 from 0 and NaN equals NaN."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def normal(*shape, dtype=FLOAT32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT64).to(dtype)


def off_grid(x):
    """The same numbers between NaN."""
    return torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]


def bfloat16_products():
    """Triton's interpreter would multiply the bits of bfloat16 as integers."""
    from triton import language as tl
    from triton.runtime import interpreter

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        data = interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None).view("float32")
        return interpreter.TensorHandle(data, tl.float32)

    def dot(self, a, b, *others):
        return multiply(self, widened(a), widened(b), *others)

    multiply = interpreter.InterpreterBuilder.create_dot
    return mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot)


class Assertions:
    def assert_same_bits(self, actual, expected, message=None):
        for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
            self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
            self.assertTrue(torch.equal(bits(a), bits(b)), f"result {number}, {message}")


def route(impl, logits, top_k, normalize=True, upstream=None):
    """Weights, experts and the gradient of the logits."""
    logits = logits.detach().requires_grad_()
    weights, index = choose_experts(logits, top_k, normalize=normalize, impl=impl)
    upstream = normal(*weights.shape, seed=9).to(weights) if upstream is None else upstream
    return weights.detach(), index, *torch.autograd.grad(weights, logits, upstream)


def stock_route(cls, config, logits, normalize=True):
    """The router of Transformers, whose product with an identity matrix returns its input as logits."""
    number = logits.shape[1]
    sizes = {"num_experts": number, "num_experts_per_tok": config.pop("top_k"), "hidden_size": number}
    config = (Qwen3NextConfig if cls is Qwen3NextTopKRouter else Qwen3_5MoeTextConfig)(**sizes, **config)
    if cls is Qwen3NextTopKRouter:
        config.norm_topk_prob = normalize
    router = cls(config).to(logits.dtype)
    torch.nn.init.eye_(router.weight)
    logits = logits.detach().requires_grad_()
    found, weights, index = router(logits)
    assert torch.equal(found, logits)
    return weights.detach(), index, *torch.autograd.grad(weights, logits, normal(*weights.shape, seed=9).to(weights))


ROUTERS = [
    (
        f"{impl}_{cls.__name__}_{str(dtype)[6:]}_{number}_{top_k}_{normalize}",
        impl,
        cls,
        dtype,
        number,
        top_k,
        normalize,
    )
    for impl in IMPLEMENTATIONS
    for cls, normalize in ((Qwen3NextTopKRouter, True), (Qwen3NextTopKRouter, False), (Qwen3_5MoeTopKRouter, True))
    for dtype in (FLOAT32, BFLOAT16)
    for number, top_k in ((8, 2), (60, 8), (5, 1), (5, 5))
    if normalize or impl == "reference"
]


class RouterTest(Assertions, InterpretedKernelsTest):
    @parameterized.expand(ROUTERS)
    def test_equals_the_router_of_transformers(self, _, impl, cls, dtype, number, top_k, normalize):
        # Distinct numbers that are exact in bfloat16: no ties.
        logits = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(i)) for i in range(33)])
        logits = (logits[:, :number] / 8 - 4).to(dtype)
        actual = route(impl, logits, top_k, normalize)
        expected = stock_route(cls, {"top_k": top_k}, logits, normalize)
        self.assertTrue(torch.equal(actual[1], expected[1]))
        self.assertEqual(actual[1].dtype, torch.int64)
        for a, b in ((actual[0], expected[0]), (actual[2], expected[2])):
            self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
            # One rounding of bfloat16 is at most 2**-8 of the number.
            bar = 2e-6 if dtype == FLOAT32 else 2**-7
            self.assertLess(float((a - b).abs().max()), bar * float(b.abs().max()) + 1e-6)

    @parameterized.expand(IMPLEMENTATIONS)
    def test_weights_in_float64(self, impl):
        logits = normal(20, 9)
        _, index, gradient = found = route(impl, logits, 3)
        exact = logits.double().requires_grad_()
        weights = torch.softmax(exact.gather(1, index), -1)
        expected = torch.autograd.grad(weights, exact, normal(20, 3, seed=9).float().double())[0]
        self.assertLess(relative(found[0], weights.detach()), 1e-6)
        self.assertLess(relative(gradient, expected), 1e-6)

    @parameterized.expand([(f"{impl}_{str(d)[6:]}", impl, d) for impl in IMPLEMENTATIONS for d in (FLOAT32, BFLOAT16)])
    def test_among_equal_logits_the_lowest_index_comes_first(self, _, impl, dtype):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randint(0, 3, (200, 70), generator=generator).to(dtype)
        logits[0] = 1.0
        weights, index, gradient = route(impl, logits, 6)
        for row, found in zip(logits.tolist(), index.tolist(), strict=True):
            self.assertEqual(found, sorted(range(70), key=lambda e: (-row[e], e))[:6])
        self.assertEqual(index[0].tolist(), [0, 1, 2, 3, 4, 5])
        # Triton's interpreter rounds to bfloat16 towards zero.
        torch.testing.assert_close(weights[0], torch.full((6,), 1 / 6).to(dtype), atol=0, rtol=2**-7)
        others = gradient.scatter(1, index, 0.0)
        self.assertLess(float(others.abs().max()), 1e-7)

    def test_among_bfloat16_logits_that_round_to_the_same_number(self):
        logits = torch.tensor([[1.0, 1.0001, 0.5, 1.0002]])
        for impl in IMPLEMENTATIONS:
            self.assertEqual(route(impl, logits, 2)[1].tolist(), [[3, 1]])
            self.assertEqual(route(impl, logits.bfloat16(), 2)[1].tolist(), [[0, 1]])

    @parameterized.expand(IMPLEMENTATIONS)
    def test_logits_of_minus_infinity_and_nan(self, impl):
        off, nan = float("-inf"), float("nan")
        logits = torch.tensor(
            [[off, 1.0, off, 0.0], [off, off, 2.0, off], [off] * 4, [0.0, nan, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]]
        )
        weights, index, _ = route(impl, logits, 2)
        clean = [0, 1, 4]
        self.assertEqual(index[clean].tolist(), [[1, 3], [2, 0], [3, 2]])
        probabilities = torch.tensor([1.0, 0.0]).softmax(-1).tolist()
        expected = torch.tensor([probabilities, [1.0, 0.0], probabilities])
        torch.testing.assert_close(weights[clean], expected)
        # As in Transformers, such a row has NaN as weights, and experts that exist.
        self.assertTrue(weights[2:4].isnan().all())
        self.assertTrue(((index >= 0) & (index < 4)).all())
        self.assertTrue(all(len(set(row)) == 2 for row in index.tolist()))

    @parameterized.expand(IMPLEMENTATIONS)
    def test_numbers_of_tokens_and_isolation(self, impl):
        for dtype, number, top_k, seed in ((FLOAT32, 9, 3, 0), (BFLOAT16, 64, 8, 1), (FLOAT32, 33, 33, 2)):
            logits, upstream = normal(70, number, dtype=dtype, seed=seed), normal(70, top_k, dtype=dtype, seed=seed)
            together = route(impl, logits, top_k, upstream=upstream)
            for start, stop in ((0, 0), (0, 1), (13, 14), (5, 37), (69, 70)):
                alone = route(impl, logits[start:stop], top_k, upstream=upstream[start:stop])
                self.assert_same_bits(alone, [x[start:stop] for x in together], (start, stop))

    @parameterized.expand(IMPLEMENTATIONS)
    def test_tensors_that_are_not_contiguous(self, impl):
        logits, upstream = normal(20, 9), normal(20, 3)
        expected = route(impl, logits, 3, upstream=upstream)
        for layout in (off_grid, lambda x: x.t().contiguous().t()):
            self.assert_same_bits(route(impl, layout(logits), 3, upstream=layout(upstream)), expected)

    def test_second_order_gradients(self):
        logits = normal(4, 6, dtype=FLOAT64).requires_grad_()
        for normalize in (True, False):
            call = lambda x, normalize=normalize: choose_experts(x, 3, normalize=normalize)[0]  # noqa: E731
            self.assertTrue(gradcheck(call, logits))
            self.assertTrue(gradgradcheck(call, logits))
        logits = logits.detach().float().requires_grad_()
        weights = choose_experts(logits, 3, impl="triton")[0]
        with self.assertRaisesRegex(ValueError, "expected first-order gradients"):
            torch.autograd.grad(weights.square().sum(), logits, create_graph=True)

    def test_transforms_use_the_reference(self):
        logits = normal(7, 6)
        loss = lambda x, impl="auto": choose_experts(x, 2, impl=impl)[0].square().sum()  # noqa: E731
        expected = torch.autograd.grad(loss(x := logits.clone().requires_grad_(), "reference"), x)[0]
        self.assertTrue(torch.equal(torch.func.grad(loss)(logits), expected))
        rows = torch.func.vmap(torch.func.grad(loss))(logits[:, None])
        torch.testing.assert_close(rows[:, 0], expected)
        with self.assertRaisesRegex(ValueError, "does not support torch.func transforms"):
            torch.func.grad(loss)(logits, "triton")


LOGITS = torch.zeros(3, 4)


class RouterBadInputTest(
    bad_input_tests(
        [
            ("top_k_0", lambda: choose_experts(LOGITS, 0), r"top_k of 1 to experts, got \(3, 4\), 0"),
            ("top_k_5", lambda: choose_experts(LOGITS, 5), r"top_k of 1 to experts, got \(3, 4\), 5"),
            ("three_dimensions", lambda: choose_experts(LOGITS[None], 2), r"router_logits \[T, experts\]"),
            ("one_dimension", lambda: choose_experts(LOGITS[0], 2), r"router_logits \[T, experts\]"),
            ("impl", lambda: choose_experts(LOGITS, 2, impl="fast"), 'one of .*got "fast"'),
        ],
        [
            (
                "normalize",
                lambda impl: choose_experts(LOGITS, 2, normalize=False, impl=impl),
                "supports normalized weights only",
            ),
            ("float64", lambda impl: choose_experts(LOGITS.double(), 2, impl=impl), "not torch.float64"),
        ],
    )
):
    pass


def oracle(x, index, weights, gate_up, down):
    """The definition, one token and one expert at a time."""
    # A zero of all inputs, so that each has a gradient.
    rows, zero = [], 0 * sum(x.sum() for x in (weights, gate_up, down))
    for token, (chosen, row) in enumerate(zip(index.tolist(), x, strict=True)):
        total = 0 * row + zero
        for k, expert in enumerate(chosen):
            if expert < len(gate_up):
                gate, up = (gate_up[expert] @ row).chunk(2)
                total = total + weights[token, k] * (down[expert] @ (gate * torch.sigmoid(gate) * up))
        rows.append(total)
    return torch.stack(rows) if rows else 0 * x + zero


NAMES = ("x", "weights", "gate_up", "down")


class Case:
    """Inputs of the experts, and the gradient of their output."""

    def __init__(self, index, number, hidden=64, width=64, dtype=FLOAT32, x_dtype=None, seed=0):
        tokens, self.index = len(index), index
        self.x = normal(tokens, hidden, dtype=x_dtype or dtype, seed=seed)
        self.weights = normal(*index.shape, dtype=x_dtype or dtype, seed=seed + 1)
        self.gate_up = normal(number, 2 * width, hidden, seed=seed + 2).div(hidden**0.5).to(dtype)
        self.down = normal(number, hidden, width, seed=seed + 3).div(width**0.5).to(dtype)
        self.upstream = normal(tokens, hidden, dtype=x_dtype or dtype, seed=seed + 4)

    def cast(self, dtype):
        other = object.__new__(Case)
        other.__dict__ = {name: x if name == "index" else x.to(dtype) for name, x in vars(self).items()}
        return other

    def leaves(self, trained=NAMES):
        return [getattr(self, name).detach().requires_grad_(name in trained) for name in NAMES]

    def run(self, function, trained=NAMES):
        """The output, and the gradients of the tensors `trained`. `function` is an implementation or a function."""
        if isinstance(function, str):
            impl, function = function, lambda *args: experts(*args, impl=impl)
        x, weights, gate_up, down = leaves = self.leaves(trained)
        y = function(x, self.index, weights, gate_up, down)
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        return [y.detach(), *(torch.autograd.grad(y, leaves, self.upstream.to(y)) if leaves else ())]


def choices(tokens, number, top_k, seed=0):
    """Different random experts for each token, in random order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, number, generator=generator).argsort(-1)[:, :top_k]


ELSEWHERE = choices(37, 9, 3)
ROUTINGS = {
    "random": (choices(37, 5, 3), 5),
    "many_experts": (choices(37, 40, 4), 40),
    "top_k_1": (choices(37, 5, 1), 5),
    "top_k_of_all": (choices(37, 5, 5), 5),
    "one_expert": (choices(19, 1, 1), 1),
    "all_tokens_to_one_expert": (torch.full((150, 1), 2), 4),
    "more_than_a_tile": (torch.cat([choices(140, 2, 2), choices(3, 3, 2)]), 3),
    "a_tile": (torch.full((128, 1), 1), 2),
    "one_token": (choices(1, 5, 3), 5),
    "no_tokens": (choices(0, 5, 3), 5),
    "experts_without_tokens": (torch.tensor([[1, 3], [3, 1], [1, 3]] * 6), 5),
    "on_another_device": (ELSEWHERE, 5),
    "far_on_another_device": (torch.where(ELSEWHERE < 5, ELSEWHERE, ELSEWHERE + 500), 5),
    "all_on_another_device": (torch.full((20, 2), 5), 5),
    "twice_the_same_expert": (torch.tensor([[1, 1, 0], [2, 2, 2], [0, 1, 0]] * 6), 3),
}
DTYPES = [("reference", d) for d in (FLOAT64, FLOAT32, BFLOAT16)] + [("triton", FLOAT16), ("triton", BFLOAT16)]


def each(cases, *others):
    """Name parametrised cases by their parts."""
    return [("_".join(str(part).removeprefix("torch.") for part in case), *case) for case in cases]


class ExpertsTest(Assertions, InterpretedKernelsTest):
    def setUp(self):
        super().setUp()
        if find_spec("triton"):
            self.enterContext(bfloat16_products())

    def check(self, case, function, expected=oracle, bar=None, trained=NAMES):
        actual = case.run(function, trained)
        expected = case.cast(FLOAT64).run(expected, trained)
        dtypes = [case.x.dtype, *(getattr(case, name).dtype for name in NAMES if name in trained)]
        self.assertEqual([x.dtype for x in actual], dtypes)
        for name, a, b in zip(("y", *(n for n in NAMES if n in trained)), actual, expected, strict=True):
            self.assertEqual(a.shape, b.shape)
            self.assertLessEqual(relative(a, b), BARS[case.down.dtype] if bar is None else bar, name)
        return actual

    @parameterized.expand(each((*pair, name) for pair in DTYPES for name in ROUTINGS))
    def test_equals_the_definition(self, _, impl, dtype, name):
        index, number = ROUTINGS[name]
        found = dict(zip(("y", *NAMES), self.check(Case(index, number, dtype=dtype), impl), strict=True))
        for expert in set(range(number)) - set(index.flatten().tolist()):
            self.assertEqual(found["gate_up"][expert].count_nonzero() + found["down"][expert].count_nonzero(), 0)
        # Experts on other devices: zeros, not small numbers.
        self.assertEqual(found["weights"][index >= number].count_nonzero(), 0)
        nowhere = (index >= number).all(-1)
        self.assertEqual(found["y"][nowhere].count_nonzero() + found["x"][nowhere].count_nonzero(), 0)

    @parameterized.expand(each((h, w) for h, w in ((1, 1), (7, 3), (33, 16), (130, 65))))
    def test_reference_in_odd_sizes(self, _, hidden, width):
        for dtype in (FLOAT64, FLOAT32):
            self.check(Case(choices(37, 5, 3), 5, hidden, width, dtype), "reference")

    @parameterized.expand(each([(64, 192), (192, 64), (320, 128), (512, 64)]))
    def test_triton_in_other_sizes(self, _, hidden, width):
        self.check(Case(choices(37, 5, 3), 5, hidden, width, BFLOAT16), "triton")


if __name__ == "__main__":
    unittest.main()
