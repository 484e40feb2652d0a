"""Mixture of experts: the router and the experts, as PyTorch references and as Triton kernels in the interpreter."""

import copy
import gc
import os
import subprocess
import sys
import unittest
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from common.fused import assert_near, beside, guarded_buffers, relative, saved_in
from mixins.triton import InterpretedKernelsTest, bad_input_tests
from parameterized import parameterized
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3_5MoeTextConfig, Qwen3NextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

from transformers_packed.ops import choose_experts, experts
from transformers_packed.ops.moe import verify_triton
from transformers_packed.ops.terms import Adapter, DequantizedExperts


BFLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float32, torch.float64
IMPLEMENTATIONS = ["reference", "triton"]
# Relative errors against float64. Triton's interpreter rounds to bfloat16 towards zero, which doubles them.
BARS = {FLOAT64: 1e-13, FLOAT32: 2e-6, BFLOAT16: 2e-2}


def bits(x):
    """The numbers as integers, so that a comparison tells -0 from 0 and NaN equals NaN."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def normal(*shape, dtype=FLOAT32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FLOAT64).to(dtype)


def off_grid(x):
    """The same numbers between NaN."""
    return torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]


def unaligned(x):
    """The same numbers one element after the start of their memory."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


LAYOUTS = {
    "off_grid": off_grid,
    "unaligned": unaligned,
}


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


# Implementations, the stock class, the dtype, the number of experts, `top_k` and whether weights are normalized.
ROUTERS = [
    *((impl, Qwen3NextTopKRouter, FLOAT32, 60, 8, True) for impl in IMPLEMENTATIONS),
    *((impl, Qwen3_5MoeTopKRouter, BFLOAT16, 8, 2, True) for impl in IMPLEMENTATIONS),
    *((impl, Qwen3NextTopKRouter, BFLOAT16, 5, 1, True) for impl in IMPLEMENTATIONS),
    ("reference", Qwen3NextTopKRouter, BFLOAT16, 60, 8, False),
]


class RouterTest(Assertions, InterpretedKernelsTest):
    @parameterized.expand(ROUTERS)
    def test_equals_the_router_of_transformers(self, impl, cls, dtype, number, top_k, normalize):
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

    @parameterized.expand([("reference", FLOAT32), ("triton", FLOAT32), ("triton", BFLOAT16)])
    def test_among_equal_logits_the_lowest_index_comes_first(self, impl, dtype):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randint(0, 3, (50, 70), generator=generator).to(dtype)
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
        for dtype, number, top_k, seed in ((FLOAT32, 7, 7, 0), (BFLOAT16, 64, 8, 1)):
            logits, upstream = normal(40, number, dtype=dtype, seed=seed), normal(40, top_k, dtype=dtype, seed=seed)
            together = route(impl, logits, top_k, upstream=upstream)
            for start, stop in ((0, 0), (0, 1), (5, 37)):
                alone = route(impl, logits[start:stop], top_k, upstream=upstream[start:stop])
                self.assert_same_bits(alone, [x[start:stop] for x in together], (start, stop))

    @parameterized.expand(IMPLEMENTATIONS)
    def test_tensors_that_are_not_contiguous(self, impl):
        logits, upstream = normal(20, 9), normal(20, 3)
        expected = route(impl, logits, 3, upstream=upstream)
        for layout in (off_grid, lambda x: x.t().contiguous().t()):
            self.assert_same_bits(route(impl, layout(logits), 3, upstream=layout(upstream)), expected)


LOGITS = torch.zeros(3, 4)


class RouterBadInputTest(
    bad_input_tests(
        [
            ("top_k_0", lambda: choose_experts(LOGITS, 0), r"top_k of 1 to experts, got \(3, 4\), 0"),
            ("top_k_5", lambda: choose_experts(LOGITS, 5), r"top_k of 1 to experts, got \(3, 4\), 5"),
            ("one_dimension", lambda: choose_experts(LOGITS[0], 2), r"router_logits \[T, experts\]"),
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
    "many_experts": (choices(5, 20, 2), 20),
    "top_k_of_all": (choices(37, 4, 4), 4),
    "all_tokens_to_one_expert": (torch.full((150, 1), 2), 4),
    "more_than_a_tile": (torch.tensor([[1]] * 129 + [[0]]), 2),
    "one_token": (choices(1, 5, 3), 5),
    "no_tokens": (choices(0, 5, 3), 5),
    "experts_without_tokens": (torch.tensor([[1, 3], [3, 1], [1, 3]] * 6), 5),
    "on_another_device": (ELSEWHERE, 5),
    "far_on_another_device": (torch.where(ELSEWHERE < 5, ELSEWHERE, ELSEWHERE + 500), 5),
    "all_on_another_device": (torch.full((20, 2), 5), 5),
    "twice_the_same_expert": (torch.tensor([[1, 1, 0], [2, 2, 2], [0, 1, 0]] * 6), 3),
}
CASES = [("reference", FLOAT64, name) for name in ROUTINGS]
CASES += [("reference", dtype, "on_another_device") for dtype in (FLOAT32, BFLOAT16)]
# For the kernels, these differ from others in numbers of rows alone.
ALIKE = ("random", "many_experts", "top_k_of_all", "all_tokens_to_one_expert", "on_another_device")
CASES += [("triton", BFLOAT16, x) for x in ROUTINGS if x not in ALIKE]
# The interpreter takes as long for an expert with few tokens as for one with many.
FEW = (choices(9, 2, 2), 2)


def each(cases, *others):
    """Name parametrised cases by their parts."""
    return [("_".join(str(part).removeprefix("torch.") for part in case), *case) for case in cases]


class ExpertsTest(Assertions, InterpretedKernelsTest):
    def check(self, case, function, expected=oracle, bar=None, trained=NAMES):
        actual = case.run(function, trained)
        expected = case.cast(FLOAT64).run(expected, trained)
        dtypes = [case.x.dtype, *(getattr(case, name).dtype for name in NAMES if name in trained)]
        self.assertEqual([x.dtype for x in actual], dtypes)
        for name, a, b in zip(("y", *(n for n in NAMES if n in trained)), actual, expected, strict=True):
            self.assertEqual(a.shape, b.shape)
            self.assertLessEqual(relative(a, b), BARS[case.down.dtype] if bar is None else bar, name)
        return actual

    @parameterized.expand(each(CASES))
    def test_equals_the_definition(self, _, impl, dtype, name):
        index, number = ROUTINGS[name]
        found = dict(zip(("y", *NAMES), self.check(Case(index, number, dtype=dtype), impl), strict=True))
        for expert in set(range(number)) - set(index.flatten().tolist()):
            self.assertEqual(found["gate_up"][expert].count_nonzero() + found["down"][expert].count_nonzero(), 0)
        # Experts on other devices: zeros, not small numbers.
        self.assertEqual(found["weights"][index >= number].count_nonzero(), 0)
        nowhere = (index >= number).all(-1)
        self.assertEqual(found["y"][nowhere].count_nonzero() + found["x"][nowhere].count_nonzero(), 0)

    def test_reference_in_odd_sizes(self):
        for hidden, width in ((1, 1), (7, 3), (33, 16), (130, 65)):
            self.check(Case(choices(37, 5, 3), 5, hidden, width, FLOAT64), "reference")

    @parameterized.expand(["gate_up", "down"])
    def test_reference_with_weights_of_two_dtypes(self, name):
        """As with Transformers' `grouped_mm`, each product has the dtype of its weight."""
        case = Case(choices(37, 5, 3), 5)
        setattr(case, name, getattr(case, name).bfloat16())
        self.check(case, "reference", bar=BARS[BFLOAT16])

    def test_triton_in_other_sizes(self):
        self.check(Case(*FEW, 192, 128, BFLOAT16), "triton")

    @parameterized.expand(IMPLEMENTATIONS)
    def test_computes_no_gradients_of_frozen_weights(self, impl):
        case = Case(choices(20, 3, 2), 3, 192, 64, BFLOAT16)
        shapes = {(128, 192), (192, 128), (64, 192), (192, 64)}
        found = []

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                result = function(*args, **(kwargs or {}))
                if "mm" in str(function) and tuple(result.shape[-2:]) in shapes:
                    found.append(str(function))
                return result

        for trained, products in ((NAMES[:2], 0), (NAMES, 2 if impl == "triton" else 6)):
            x, *weights = leaves = case.leaves(trained)
            y = experts(x, case.index, *weights, impl=impl)
            with Record():
                y.backward(case.upstream)
            self.assertGreaterEqual(len(found), products)
            if not products:
                self.assertEqual(found, [])
            self.assertEqual([leaf.grad is not None for leaf in leaves], [name in trained for name in NAMES])

    @parameterized.expand(IMPLEMENTATIONS)
    def test_tensors_that_are_not_contiguous(self, impl):
        plain = Case(*FEW, dtype=BFLOAT16)
        expected = plain.run(impl)
        for layout, change in LAYOUTS.items():
            case = copy.copy(plain)
            for name in (*NAMES, "index", "upstream"):
                if name != "index" or layout != "off_grid":
                    setattr(case, name, change(getattr(case, name)))
            if layout != "unaligned":
                self.assertFalse(case.x.is_contiguous() or case.down.is_contiguous() or case.upstream.is_contiguous())
            actual = case.run(impl)
            if impl == "triton":
                self.assert_same_bits(actual, expected, layout)
            else:
                # Products of matrices in another layout may round differently.
                self.assertLess(max(map(relative, actual, expected)), 1e-2)
        plain.upstream = plain.upstream[:1, :1].expand_as(plain.x)
        actual = plain.run(impl)
        plain.upstream = plain.upstream.contiguous()
        self.assert_same_bits(actual, plain.run(impl), "an expanded gradient")

    @parameterized.expand(each([("reference", FLOAT32), ("triton", BFLOAT16)]))
    def test_autocast(self, _, impl, x_dtype):
        case = Case(*FEW, dtype=FLOAT32, x_dtype=x_dtype)

        def call(x, index, *weights):
            with torch.autocast("cpu", BFLOAT16):
                return experts(x, index, *weights, impl=impl)

        self.check(case, call, bar=BARS[BFLOAT16])

    @parameterized.expand(IMPLEMENTATIONS)
    def test_adds_the_outputs_in_the_order_of_the_choices(self, impl):
        index = torch.tensor([[2, 1, 0, 2], [0, 2, 1, 1], [1, 0, 2, 0]] * 5)
        case = Case(index, 3, dtype=BFLOAT16, x_dtype=FLOAT32)
        # The first and the third cancel, except for rounding errors that depend on the order.
        case.weights = torch.tensor([3e3, 1.0, -3e3, 0.3]).expand(15, 4)
        rows = []
        for k in range(4):
            one = copy.copy(case)
            one.index, one.weights = index[:, k : k + 1], torch.ones(15, 1)
            rows.append(one.run(impl, ())[0] * case.weights[:, k : k + 1])
        expected = ((rows[0] + rows[1]) + rows[2]) + rows[3]
        other = ((rows[3] + rows[2]) + rows[1]) + rows[0]
        self.assertFalse(torch.equal(expected, other))
        self.assert_same_bits(case.run(impl, ()), [expected])

    def test_triton_saves_the_input_and_gate_and_up(self):
        case = Case(choices(20, 3, 2), 3, dtype=BFLOAT16)
        x, weights, *both = leaves = case.leaves()
        quantized = [DequantizedExperts(w.shape, w.dtype, lambda *_, w=w: w.detach().clone()) for w in both]
        for stored, known in ((both, leaves), (quantized, leaves[:2])):
            kept = saved_in(lambda stored=stored: experts(x, case.index, weights, *stored, impl="triton"))
            new = [t for t in beside(kept, [*known, case.index]) if t.is_floating_point()]
            self.assertEqual([t.shape for t in new], [(20 * 2, 2 * 64)])

    def test_no_gradients_wanted(self):
        case = Case(*FEW, dtype=BFLOAT16)
        x, *weights = case.leaves()
        pieces = (lambda first, last, w=w: w.detach()[first:last] for w in weights[1:])
        quantized = [DequantizedExperts(w.shape, w.dtype, piece) for w, piece in zip(weights[1:], pieces, strict=True)]
        for impl in IMPLEMENTATIONS:
            expected = case.run(impl, ())[0]
            for mode, both in ((torch.no_grad, quantized), (torch.inference_mode, weights[1:])):
                with mode():
                    y = experts(x, case.index, weights[0], *both, impl=impl)
                self.assertFalse(y.requires_grad)
                self.assertTrue(torch.equal(y, expected))


def together(before, document, after):
    """One row of three parts with the weights of the second."""
    row = document.cast(document.down.dtype)
    row.__dict__ |= {
        name: torch.cat([getattr(part, name) for part in (before, document, after)])
        for name in ("x", "index", "weights", "upstream")
    }
    return row


def others(document, count, routing, seed):
    """Other tokens for the same experts, with large numbers, NaN or infinity in some."""
    number, top_k = len(document.down), document.index.shape[1]
    index = {
        "random": choices(count, number, top_k, seed),
        "one": torch.full((count, top_k), seed % number),
        "elsewhere": torch.full((count, top_k), number),
    }[routing]
    _, hidden, width = document.down.shape
    made = Case(index, number, hidden, width, document.down.dtype, document.x.dtype, seed=100 + seed)
    made.x *= 10.0 ** (seed % 4)
    if count > 2 and seed % 2:
        made.x[count // 2], made.upstream[count // 3], made.weights[0] = float("nan"), float("inf"), float("nan")
    return made


AROUND = (("one", "one"), ("elsewhere", "random"), ("random", "random"), ("random", "one"))


def leaks(document, function, numbers, seed, bar=0.0, around=AROUND):
    """Compare a document alone with the document in rows of others. Return the rows with a difference above `bar`.

    A bar of 0 compares bits.
    """
    alone, found, names = document.run(function, NAMES[:2]), [], ("y", *NAMES[:2])
    start, tokens = numbers[0], len(document.x)
    for routings in around:
        before, after = (
            others(document, n, r, seed + i) for i, (n, r) in enumerate(zip(numbers, routings, strict=True))
        )
        row = together(before, document, after).run(function, NAMES[:2])
        for name, a, b in zip(names, row, alone, strict=True):
            a = a[start : start + tokens]
            same = (a - b).abs().max() <= bar * b.abs().max() if bar else torch.equal(bits(a), bits(b))
            if not same:
                found.append((routings, name))
    return found


PLACES = [(0, 30), (30, 0), (11, 50), (3, 2), (100, 133), (1, 0)]
SIZES = [(37, 33, FLOAT32, FLOAT32), (64, 64, FLOAT32, FLOAT32), (1, 1, FLOAT32, FLOAT32)]
SIZES += [(129, 7, BFLOAT16, BFLOAT16), (64, 64, BFLOAT16, FLOAT32)]


class IsolationTest(Assertions, InterpretedKernelsTest):
    """The results of a token do not depend on the other tokens of the row: to the last bit with a model's sizes."""

    @parameterized.expand(each(SIZES))
    def test_reference(self, _, hidden, width, dtype, x_dtype):
        for seed, (tokens, places) in enumerate(zip((1, 7, 16, 17, 40, 2), PLACES, strict=True)):
            number, top_k = ((5, 3), (9, 1))[seed % 2]
            document = Case(choices(tokens, number, top_k, seed), number, hidden, width, dtype, x_dtype, seed)
            # With other sizes, some CPUs compute the last rows of a block by other instructions than the first.
            bar = 0.0 if hidden % 4 == width % 4 == 0 else 2e-6
            self.assertEqual(leaks(document, "reference", places, seed, bar), [], seed)

    def test_triton(self):
        document = Case(choices(7, 3, 3, 7), 3, dtype=BFLOAT16, x_dtype=FLOAT32, seed=7)
        self.assertEqual(leaks(document, "triton", (3, 11), 7, around=AROUND[1:2]), [])


MATRICES = ("gate_up_down", "gate_up_up", "down_down", "down_up")


class AdaptersTestCase(Assertions, InterpretedKernelsTest):
    def matrices(self, case, ranks, dtype):
        number, hidden, width = case.down.shape
        found = []
        for seed, (rank, out, size) in enumerate(zip(ranks, (2 * width, hidden), (hidden, width), strict=True)):
            found += [normal(number, rank, size, seed=50 + seed) / 8, normal(number, out, rank, seed=60 + seed) / 4]
        return [x.to(dtype) for x in found]

    def run_op(self, case, impl, matrices, trained=(*NAMES, *MATRICES), stored=lambda gate_up, down: (gate_up, down)):
        """The output, and the gradients of the tensors `trained`. Without `impl`, the adapters join the weights."""
        x, weights, gate_up, down = leaves = case.leaves(trained)
        leaves += [m.detach().requires_grad_(n in trained) for n, m in zip(MATRICES, matrices, strict=True)]
        adapters = [Adapter(*leaves[4:6], 0.5) if matrices[0].numel() else None]
        adapters += [Adapter(*leaves[6:], 3.0) if matrices[2].numel() else None]
        if impl is None:
            joined = []
            for weight, adapter in zip((gate_up, down), adapters, strict=True):
                if adapter is not None:
                    weight = weight + adapter.scale * adapter.up @ adapter.down
                joined.append(weight)
            y = oracle(x, case.index, weights, *joined)
        else:
            names = ("gate_up_adapter", "down_adapter")
            adapters = dict(zip(names, adapters, strict=True))
            y = experts(x, case.index, weights, *stored(gate_up, down), **adapters, impl=impl)
        leaves = [leaf for leaf in leaves if leaf.requires_grad and leaf.numel()]
        return [y.detach(), *torch.autograd.grad(y, leaves, case.upstream.to(y))]


class AdapterTest(AdaptersTestCase):
    """Adapters of the experts' weights."""

    @parameterized.expand(
        each(
            [("reference", FLOAT64, *ranks) for ranks in ((16, 33), (3, 0), (0, 1))]
            + [("triton", BFLOAT16, *ranks) for ranks in ((16, 33), (0, 1))]
            + [("reference", FLOAT32, 4, 4)]
        )
    )
    def test_equals_weights_with_the_adapters(self, _, impl, dtype, *ranks):
        case = Case(torch.cat([choices(20, 3, 2), torch.tensor([[1, 3], [3, 0]] * 3)]), 3, dtype=dtype)
        matrices = self.matrices(case, ranks, torch.float32 if impl == "triton" else dtype)
        actual = self.run_op(case, impl, matrices)
        expected = self.run_op(case.cast(FLOAT64), None, [x.double() for x in matrices])
        for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
            self.assertEqual(a.shape, b.shape)
            self.assertLess(relative(a, b), {FLOAT64: 1e-13, FLOAT32: 2e-6, BFLOAT16: 4e-2}[dtype], number)
        self.assertEqual([a.dtype for a in actual], [dtype] * 5 + [matrices[0].dtype] * (len(actual) - 5))

    @parameterized.expand([(impl, ranks) for impl in IMPLEMENTATIONS for ranks in ((0, 0), (4, 8))])
    def test_gradients_of_some_inputs(self, impl, ranks):
        case, names = Case(*FEW, dtype=BFLOAT16), (*NAMES, *MATRICES * any(ranks))
        matrices = self.matrices(case, ranks, BFLOAT16)
        every = dict(zip(("y", *names), self.run_op(case, impl, matrices), strict=True))
        for trained in (("x",), ("down",), NAMES[:2], *[MATRICES[1:3]] * any(ranks)):
            found = self.run_op(case, impl, matrices, trained)
            self.assert_same_bits(found, [every["y"], *(every[name] for name in trained)], trained)

    def test_isolation(self):
        document = Case(choices(7, 2, 2), 2, dtype=BFLOAT16, x_dtype=FLOAT32)
        matrices = self.matrices(document, (4, 8), FLOAT32)
        adapters = {"gate_up_adapter": Adapter(*matrices[:2], 0.5), "down_adapter": Adapter(*matrices[2:], 3.0)}
        function = lambda *args: experts(*args, **adapters, impl="triton")  # noqa: E731
        found = leaks(document, function, (2, 9), 1, around=AROUND[:1])
        self.assertEqual(found, [])

    @parameterized.expand([((0, 0),), ((4, 8),)])
    def test_the_same_bits_twice_and_from_unwritten_buffers(self, ranks):
        case = Case(choices(9, 3, 2), 2, dtype=BFLOAT16)
        matrices = self.matrices(case, ranks, BFLOAT16)
        plain = self.run_op(case, "triton", matrices)
        with guarded_buffers():
            self.assert_same_bits(self.run_op(case, "triton", matrices), plain)


# Elements of three experts' first weights or six experts' second ones. With 1, it is one expert at a time.
PIECES = (3 * 128 * 64, 1)


class QuantizedExpertsTest(AdaptersTestCase):
    """Frozen weights that are computed for some experts at a time."""

    def setUp(self):
        super().setUp()
        self.computed = []

    def quantized(self, number, layout=lambda x: x):
        """Return a function that gives the op the last `number` of both weights as quantized ones."""

        def stored(*weights):
            return *weights[: 2 - number], *(self.record(x, layout) for x in weights[2 - number :])

        return stored

    def record(self, weights, layout):
        def compute(first, last):
            self.computed.append((weights.shape[1], first, last))
            return layout(weights[first:last].float())

        return DequantizedExperts(weights.shape, weights.dtype, compute)

    def pieces(self, elements):
        return mock.patch("transformers_packed.ops.backends.triton.grouped_products._PIECE", elements)

    @parameterized.expand(
        each(
            [
                ("reference", "random", 2, 1, 4, 33),
                ("reference", "on_another_device", 1, 1, 0, 8),
                ("reference", "no_tokens", 2, 1, 4, 8),
                ("triton", "on_another_device", 2, PIECES[0], 4, 33),
                ("triton", "experts_without_tokens", 1, PIECES[1], 0, 8),
                ("triton", "no_tokens", 2, PIECES[1], 4, 8),
            ]
        )
    )
    def test_the_same_bits_as_with_the_weights(self, _, impl, routing, number, piece, *ranks):
        case, trained = Case(*ROUTINGS[routing], dtype=BFLOAT16, x_dtype=FLOAT32), (*NAMES[:2], *MATRICES)
        matrices = self.matrices(case, ranks, FLOAT32)
        expected = self.run_op(case, impl, matrices, trained)
        with self.pieces(piece):
            found = self.run_op(case, impl, matrices, trained, self.quantized(number))
        self.assert_same_bits(found, expected)

    def test_computed_in_another_layout(self):
        case = Case(*FEW, dtype=BFLOAT16)
        matrices = self.matrices(case, (4, 8), BFLOAT16)
        expected = self.run_op(case, "triton", matrices, NAMES[:2])
        for name, layout in LAYOUTS.items():
            with self.pieces(PIECES[0]):
                found = self.run_op(case, "triton", matrices, NAMES[:2], self.quantized(2, layout))
            self.assert_same_bits(found, expected, name)

    @parameterized.expand(IMPLEMENTATIONS)
    def test_autocast(self, impl):
        case = Case(*FEW)

        def call(x, index, weights, *both):
            with torch.autocast("cpu", BFLOAT16):
                return experts(x, index, weights, *both, impl=impl)

        expected = case.run(call, NAMES[:2])
        with self.pieces(PIECES[0]):
            found = case.run(lambda *args: call(*args[:3], *self.quantized(2)(*args[3:])), NAMES[:2])
        self.assert_same_bits(found, expected)

    def test_a_piece_is_freed_before_the_next_one_is_computed(self):
        case, pieces = Case(choices(20, 5, 2), 5, dtype=BFLOAT16), []

        def stored(*weights):
            return *weights[:3], *(DequantizedExperts(x.shape, x.dtype, partial(compute, x)) for x in weights[3:])

        def compute(weights, first, last):
            # Triton's interpreter leaves cycles of references.
            gc.collect()
            self.assertTrue(all(piece.expired() for piece in pieces))
            found = weights[first:last].clone()
            pieces.append(StorageWeakRef(found.untyped_storage()))
            return found

        with self.pieces(1):
            case.run(lambda *args: experts(*stored(*args), impl="triton"), NAMES[:1])
        self.assertEqual(len(pieces), 20)

    def test_a_piece_is_computed_once_for_each_direction(self):
        case = Case(choices(20, 5, 2), 5, dtype=BFLOAT16)
        first, second = [(128, 0, 3), (128, 3, 5)], [(64, 0, 5)]
        for trained, ranks, backward in (
            (("x",), (0, 0), [*second, *first]),
            (MATRICES[2:], (4, 8), second),
        ):
            self.computed.clear()
            with self.pieces(PIECES[0]):
                self.run_op(case, "triton", self.matrices(case, ranks, BFLOAT16), trained, self.quantized(2))
            self.assertEqual(self.computed, [*first, *second, *backward], trained)


class SharedExpertTest(Assertions, InterpretedKernelsTest):
    """The output of the shared expert, times its gate, in the same sum."""

    def run_op(self, case, impl, dtype=None, trained=("x", "weights", "shared", "gate")):
        """The output, and the gradients of the tensors `trained`. Without `impl`, it is added afterwards."""
        leaves = case.leaves(trained)
        shared = [normal(len(case.x), n, dtype=dtype or case.x.dtype, seed=70 + n) for n in (case.x.shape[1], 1)]
        shared = [x.requires_grad_(name in trained) for name, x in zip(("shared", "gate"), shared, strict=True)]
        if impl is None:
            y = oracle(leaves[0], case.index, *leaves[1:]) + torch.sigmoid(shared[1]) * shared[0]
        else:
            y = experts(leaves[0], case.index, *leaves[1:], shared=shared, impl=impl)
        return [y.detach(), *torch.autograd.grad(y, [x for x in (*leaves, *shared) if x.requires_grad], case.upstream)]

    @parameterized.expand(
        each(
            [("reference", FLOAT64, "on_another_device"), ("reference", FLOAT32, "random")]
            + [("triton", BFLOAT16, "experts_without_tokens"), ("triton", BFLOAT16, "no_tokens")]
        )
    )
    def test_equals_the_definition(self, _, impl, dtype, routing):
        case = Case(*ROUTINGS[routing], dtype=dtype)
        actual = self.run_op(case, impl)
        expected = self.run_op(case.cast(FLOAT64), None, FLOAT64)
        for a, b in zip(actual, expected, strict=True):
            self.assertEqual((a.shape, a.dtype), (b.shape, dtype))
            self.assertLess(relative(a, b), {FLOAT64: 1e-13, FLOAT32: 2e-6, BFLOAT16: 4e-2}[dtype])

    @parameterized.expand(IMPLEMENTATIONS)
    def test_gradients_of_some_inputs(self, impl):
        case = Case(*FEW, dtype=BFLOAT16)
        every = dict(zip(("y", "x", "weights", "shared", "gate"), self.run_op(case, impl), strict=True))
        for trained in ("x", "shared", "gate"):
            self.assert_same_bits(self.run_op(case, impl, trained=(trained,)), [every["y"], every[trained]], trained)

    def test_in_another_dtype(self):
        """Autocast computes the shared expert in bfloat16 and leaves the input in float32."""
        case = Case(*FEW, dtype=BFLOAT16, x_dtype=FLOAT32)
        found, expected = (self.run_op(case, impl, BFLOAT16) for impl in IMPLEMENTATIONS)
        self.assertEqual([x.dtype for x in found], [x.dtype for x in expected])
        self.assertEqual([x.dtype for x in found], [FLOAT32] * 3 + [BFLOAT16] * 2)
        assert_near(found, expected, 4e-2)

    def test_bad_shapes(self):
        for shapes in (((3, 64), (3,)), ((3, 32), (3, 1)), ((2, 64), (2, 1))):
            with self.assertRaisesRegex(ValueError, r"an output \[3, 64\] and a gate \[3, 1\] of the shared expert"):
                experts(HIDDEN, INDEX, WEIGHTS, GATE_UP, DOWN, shared=tuple(map(torch.zeros, shapes)))


class VerifyTest(unittest.TestCase):
    def test_gpus_with_enough_shared_memory(self):
        x = mock.Mock(is_cuda=True, dtype=BFLOAT16, shape=(3, 64), device=torch.device("cuda", 0))
        weights = [torch.zeros(2, *shape, dtype=BFLOAT16) for shape in ((128, 64), (64, 64))]
        for capability, expected in (((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)):
            with mock.patch.object(torch.cuda, "get_device_capability", lambda device, found=capability: found):
                reason = verify_triton(x, None, None, *weights, None, None, None)
            self.assertEqual("compute capability" in reason, not expected)


HIDDEN, INDEX, WEIGHTS = torch.zeros(3, 64), torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 2)
GATE_UP, DOWN = torch.zeros(4, 128, 64), torch.zeros(4, 64, 64)
HALVES = [x.bfloat16() for x in (HIDDEN, WEIGHTS, GATE_UP, DOWN)]


def call(x=HIDDEN, index=INDEX, weights=WEIGHTS, gate_up=GATE_UP, down=DOWN, impl="auto"):
    return experts(x, index, weights, gate_up, down, impl=impl)


def half(impl, **changed):
    tensors = dict(zip(("x", "weights", "gate_up", "down"), HALVES, strict=True))
    return call(**(tensors | changed), impl=impl)


class BadInputTest(
    bad_input_tests(
        [
            ("hidden", lambda: call(torch.zeros(3, 63)), r"hidden_states \[T, hidden\].*got \(3, 63\)"),
            ("down_hidden", lambda: call(down=torch.zeros(4, 63, 64)), r"\[E, hidden, width\]"),
            ("down_width", lambda: call(down=torch.zeros(4, 64, 63)), r"\[E, hidden, width\]"),
            ("down_experts", lambda: call(down=torch.zeros(3, 64, 64)), r"\[E, hidden, width\]"),
            ("odd", lambda: call(gate_up=torch.zeros(4, 127, 64), down=torch.zeros(4, 64, 63)), "width"),
            ("index", lambda: call(index=INDEX[:2]), r"top_k_index and top_k_weights \[3, top_k\]"),
            ("top_k", lambda: call(weights=torch.zeros(3, 1)), r"got \(3, 2\) and \(3, 1\)"),
            ("flat", lambda: call(index=INDEX[:, 0], weights=WEIGHTS[:, 0]), r"\[3, top_k\]"),
        ],
        [
            ("float32", lambda impl: call(impl=impl), "needs products in bfloat16, not torch.float32"),
            ("float64", lambda impl: half(impl, x=HIDDEN.double()), "not torch.float64"),
            (
                "sizes",
                lambda impl: experts(
                    HALVES[0][:, :32], INDEX, WEIGHTS, HALVES[2][..., :32], HALVES[3][:, :32], impl=impl
                ),
                "needs multiples of 64, not hidden states of 32 and experts of 64",
            ),
            (
                "weights",
                lambda impl: half(impl, down=DOWN),
                "weights of one dtype, not torch.bfloat16 and torch.float32",
            ),
            (
                "width",
                lambda impl: half(impl, gate_up=HALVES[2][:, :64], down=HALVES[3][..., :32]),
                "needs multiples of 64, not hidden states of 64 and experts of 32",
            ),
        ],
    )
):
    pass


class CompilationTest(unittest.TestCase):
    """Kernels are compiled for GPUs that are not here."""

    # Of a program on GPUs of compute capability 9.0 and 10.0.
    SHARED_MEMORY = 227 * 1024

    def check(self, *ranks):
        # The processes of `run_script` have imported Triton as an interpreter.
        script = Path(__file__).parents[1] / "scripts" / "expert_kernels.py"
        command = [sys.executable, str(script), *map(str, ranks)]
        environment = os.environ | {"TRITON_INTERPRET": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        self.assertLessEqual(int(done.stdout), self.SHARED_MEMORY)

    def test_products_with_an_adapter(self):
        self.check(16)

    @pytest.mark.slow
    def test_all_ranks(self):
        self.check(0, 32, 64)
