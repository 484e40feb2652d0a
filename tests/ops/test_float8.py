"""Products of linear layers in float8, against the definitions in float64, and what they promise about documents."""

import unittest
from unittest import mock

import torch
from common.fused import assert_near, beside, flatten, relative, saved_in, unflatten
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized

from transformers_packed.ops import float8, gated_rms_norm, glu
from transformers_packed.ops.linear import shared_input_linears
from transformers_packed.ops.terms import Adapter, Float8Weight, Projection


BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# The product of a float32 sum and two powers of two, against float64.
BAR = 2e-6


def rounded(x):
    """Round float64 to the nearest number of e4m3, ties to even: 3 bits of mantissa, steps of at least 2**-9."""
    exponent = (torch.frexp(x).exponent - 1).clamp(min=-6)
    step = torch.exp2((exponent - 3).double())
    return torch.round(x / step) * step


def scales(x, dim):
    """The least powers of two, at least 2**-100, by which all numbers along `dim` are at most 448."""
    return torch.exp2(torch.ceil(torch.log2(x.abs().amax(dim, keepdim=True) / 448)).clamp(min=-100))


def quantized(x, dim=1):
    s = scales(x, dim)
    return rounded(x / s), s


class Oracle:
    """The three products of a group of layers as the module defines them, in float64."""

    def __init__(self, x, weights):
        self.cast, self.scale = quantized(x)
        self.weights = [quantized(weight) for weight in weights]

    def outputs(self):
        return [(self.cast * self.scale) @ (cast * scale).t() for cast, scale in self.weights]

    def input_gradient(self, gradients):
        # One scale for each row, for all layers together.
        absorbed = [d * scale.t() for d, (_, scale) in zip(gradients, self.weights, strict=True)]
        cast, scale = quantized(torch.cat(absorbed, 1))
        return (cast @ torch.cat([weight for weight, _ in self.weights])) * scale

    def weight_gradients(self, gradients):
        found = []
        for d in gradients:
            cast, scale = quantized(d * self.scale, 0)
            found.append((cast * scale).t() @ self.cast)
        return found


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


# The rows of an input, or of a gradient.
ROWS = {
    "normal": lambda rows: rows,
    "of_many_sizes": lambda rows: rows * torch.logspace(-30, 30, len(rows))[:, None],
    "with_zeros": lambda rows: rows * (torch.arange(len(rows)) % 3 > 0)[:, None],
    "all_zero": torch.zeros_like,
    "denormal": lambda rows: torch.where((torch.arange(len(rows)) % 2 > 0)[:, None], rows * 1e-40, rows),
    "with_outliers": lambda rows: rows * torch.where(normal(*rows.shape, seed=3) > 2, 1e6, 1.0),
    "of_powers_of_two": lambda rows: torch.exp2(rows.round() * 3),
    "at_the_largest": lambda rows: rows.sign() * 448 * torch.exp2(torch.arange(len(rows)) % 7)[:, None],
}


def make(tokens=21, width=48, outs=(32,), dtype=FLOAT32, kind="normal", weights=FLOAT32):
    """An input, weights and gradients of outputs."""
    change = ROWS[kind]
    x = change(normal(tokens, width)).to(dtype)
    layers = [(normal(out, width, seed=i) / width**0.5).to(weights) for i, out in enumerate(outs)]
    gradients = [change(normal(tokens, out, seed=9 + i)).to(dtype) for i, out in enumerate(outs)]
    if kind != "normal":
        # Gradients and input have their sizes in opposite order, so that nothing overflows.
        gradients = [d.flip(0) for d in gradients]
    return x, layers, gradients


def run(x, weights, gradients):
    """Outputs, the gradient of the input, and the gradients of the weights."""
    x = x.detach().requires_grad_()
    weights = [weight.detach().requires_grad_() for weight in weights]
    outputs = shared_input_linears(x, *(Projection(Float8Weight(weight)) for weight in weights))
    found = torch.autograd.grad(outputs, [x, *weights], gradients)
    return [y.detach() for y in outputs], found[0], list(found[1:])


def doubles(tensors):
    return [x.double() for x in tensors]


class OracleTest(unittest.TestCase):
    def check(self, got, expected, bar=BAR):
        self.assertTrue(got.isfinite().all() and expected.isfinite().all())
        # Rows may differ by 60 orders of magnitude, so each has a bar of its own.
        error = (got.double() - expected).norm(dim=-1)
        size = expected.norm(dim=-1)
        self.assertLessEqual((error - bar * size).max(), 1e-37)

    def check_all(self, x, weights, gradients, bar=BAR):
        outputs, d_x, d_weights = run(x, weights, gradients)
        oracle = Oracle(x.double(), doubles(weights))
        for got, expected in zip(outputs, oracle.outputs(), strict=True):
            self.check(got, expected, bar)
        self.check(d_x, oracle.input_gradient(doubles(gradients)), bar)
        for got, expected in zip(d_weights, oracle.weight_gradients(doubles(gradients)), strict=True):
            self.check(got, expected, bar)
        return outputs, d_x, d_weights

    @parameterized.expand(ROWS)
    def test_kinds_of_rows(self, kind):
        self.check_all(*make(61, outs=(32, 16), kind=kind))

    @parameterized.expand([(1, 16, (16,)), (37, 128, (144,)), (300, 80, (48, 160, 16))])
    def test_sizes(self, tokens, width, outs):
        self.check_all(*make(tokens, width, outs))

    def test_in_bfloat16(self):
        x, weights, gradients = make(61, outs=(32, 16), dtype=BFLOAT16, weights=BFLOAT16)
        outputs, d_x, d_weights = self.check_all(x, weights, gradients, bar=2**-8)
        self.assertEqual({y.dtype for y in (*outputs, d_x, *d_weights)}, {BFLOAT16})

    def test_adapters(self):
        """Adapters run in the dtype of the products, and add to what float8 gives without them."""
        x, weights, gradients = make(37, outs=(32, 16, 48))
        adapters = [
            tuple(
                Adapter(normal(rank, 48, seed=i) / 7, normal(len(weight), rank, seed=i), 0.5 + i, 0.0, bias)
                for rank, bias in ((4, None), (2, normal(len(weight), seed=5)))[: i + 1]
            )
            for i, weight in enumerate(weights)
        ]
        biases = [normal(len(weight)) for weight in weights]
        structure, tensors = flatten(
            [Projection(Float8Weight(w), *others) for w, *others in zip(weights, biases, adapters, strict=True)]
        )
        leaves = [None if leaf is None else leaf.detach().requires_grad_() for leaf in (x, *tensors)]
        given = [leaf for leaf in leaves if leaf is not None]
        outputs = shared_input_linears(leaves[0], *unflatten(structure, leaves[1:]))
        found = torch.autograd.grad(outputs, given, gradients)
        # The adapters and biases without the weights, in float64.
        exact = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
        layers = unflatten(structure, exact[1:])
        layers = [p._replace(weight=torch.zeros_like(p.weight.values)) for p in layers]
        added = shared_input_linears(exact[0], *layers, impl="reference")
        inner = [leaf for leaf in exact if leaf is not None]
        expected = torch.autograd.grad(added, inner, doubles(gradients), allow_unused=True)
        oracle = Oracle(x.double(), doubles(weights))
        for y, own, others in zip(outputs, oracle.outputs(), added, strict=True):
            self.check(y, own + others)
        d_weights = iter(oracle.weight_gradients(doubles(gradients)))
        for leaf, got, want in zip(given, found, expected, strict=True):
            if leaf is leaves[0]:
                want = want + oracle.input_gradient(doubles(gradients))
            elif any(leaf.shape == weight.shape for weight in weights):
                want = next(d_weights)
            self.assertLess(relative(got, want), BAR)
        self.assertIsNone(next(d_weights, None))

    def test_float32_weights_under_autocast(self):
        """The weights are cast to float8 without a stop in bfloat16, and get gradients in float32."""
        x, weights, gradients = make(61, outs=(32, 16))
        gradients = [d.bfloat16() for d in gradients]
        with torch.autocast("cpu", BFLOAT16):
            outputs, d_x, d_weights = run(x, weights, gradients)
        self.assertEqual({y.dtype for y in outputs}, {BFLOAT16})
        self.assertEqual({d.dtype for d in (d_x, *d_weights)}, {FLOAT32})
        oracle = Oracle(x.bfloat16().double(), doubles(weights))
        gradients = doubles(gradients)
        expected = [*oracle.outputs(), oracle.input_gradient(gradients), *oracle.weight_gradients(gradients)]
        # The results are rounded to bfloat16, and hardly any is rounded to another side.
        assert_near((*outputs, d_x, *d_weights), [want.bfloat16() for want in expected], 2e-4)

    @parameterized.expand([(str(used), used) for used in ((0,), (0, 2))])
    def test_outputs_without_gradient(self, _, used):
        """An output that nothing uses counts as one with zeros as gradients, and its weight gets no gradient."""
        x, weights, gradients = make(37, outs=(32, 16, 48))
        leaves = [leaf.detach().requires_grad_() for leaf in (x, *weights)]
        outputs = shared_input_linears(leaves[0], *(Projection(Float8Weight(w)) for w in leaves[1:]))
        torch.autograd.backward([outputs[i] for i in used], [gradients[i] for i in used])
        gradients = [d.double() * (i in used) for i, d in enumerate(gradients)]
        oracle = Oracle(x.double(), doubles(weights))
        self.check(leaves[0].grad, oracle.input_gradient(gradients))
        for i, (leaf, want) in enumerate(zip(leaves[1:], oracle.weight_gradients(gradients), strict=True)):
            self.assertEqual(leaf.grad is None, i not in used)
            if i in used:
                self.check(leaf.grad, want)

    @parameterized.expand([("input",), ("first_weight",), ("weights",)])
    def test_what_is_frozen(self, frozen):
        """The other gradients have the same bits, and frozen tensors get none."""
        x, weights, gradients = make(37, outs=(32, 16))
        _, *expected = run(x, weights, gradients)
        expected = [expected[0], *expected[1]]
        trained = [frozen != "input", frozen == "input", frozen != "weights"]
        leaves = [t.detach().requires_grad_(need) for t, need in zip((x, *weights), trained, strict=True)]
        outputs = shared_input_linears(leaves[0], *(Projection(Float8Weight(w)) for w in leaves[1:]))
        torch.autograd.backward(outputs, gradients)
        for leaf, need, want in zip(leaves, trained, expected, strict=True):
            self.assertEqual(leaf.grad is not None, need)
            self.assertTrue(not need or torch.equal(leaf.grad, want))

    def test_mixed_groups(self):
        """Layers in float8 and others, in any order, in one call."""
        x, weights, gradients = make(37, outs=(32, 16, 48))
        biases = [normal(32), None, normal(48)]
        for chosen in ((0,), (1, 2), (0, 2)):
            leaves = [leaf.detach().requires_grad_() for leaf in (x, *weights)]
            layers = [Projection(Float8Weight(w) if i in chosen else w, biases[i]) for i, w in enumerate(leaves[1:])]
            outputs = shared_input_linears(leaves[0], *layers)
            found = torch.autograd.grad(outputs, leaves, gradients)
            inputs = [doubles(part[i] for i in chosen) for part in (weights, gradients)]
            oracle = Oracle(x.double(), inputs[0])
            rest = [i for i in range(3) if i not in chosen]
            ys, d_weights = iter(oracle.outputs()), iter(oracle.weight_gradients(inputs[1]))
            d_x = oracle.input_gradient(inputs[1]) + sum(gradients[i].double() @ weights[i].double() for i in rest)
            self.check(found[0], d_x)
            for i in range(3):
                y = next(ys) if i in chosen else x.double() @ weights[i].double().t()
                self.check(outputs[i], y if biases[i] is None else y + biases[i])
                want = next(d_weights) if i in chosen else gradients[i].double().t() @ x.double()
                self.check(found[1 + i], want)

    def test_layouts_of_inputs_and_gradients(self):
        """Strided and expanded tensors, more dimensions, and no rows at all."""
        x, (weight,), (gradient,) = make(30)
        (y,), d_x, (d_weight,) = run(x, [weight], [gradient])
        strided = [torch.stack([t, t], -1)[..., 0] for t in (x, weight, gradient)]
        transposed = [t.t().contiguous().t() for t in (x, weight, gradient)]
        for other, w, d in (strided, transposed):
            (got,), got_x, (got_weight,) = run(other, [w], [d])
            self.assertTrue(torch.equal(got, y) and torch.equal(got_x, d_x) and torch.equal(got_weight, d_weight))
        (got,), got_x, (got_weight,) = run(x.view(2, 15, -1), [weight], [gradient.view(2, 15, -1)])
        self.assertEqual((got.shape, got_x.shape), ((2, 15, 32), (2, 15, 48)))
        self.assertTrue(torch.equal(got.view(30, -1), y) and torch.equal(got_weight, d_weight))
        for expanded in (gradient[:1].expand(30, -1), gradient[:, :1].expand(-1, 32), torch.ones(()).expand(30, 32)):
            _, got_x, (got_weight,) = run(x, [weight], [expanded])
            _, want_x, (want_weight,) = run(x, [weight], [expanded.contiguous()])
            self.assertTrue(torch.equal(got_x, want_x) and torch.equal(got_weight, want_weight))


def identical(a, b):
    """Whether two lists of tensors have the same bits, except for the kind of NaN."""
    same = [torch.equal(x.nan_to_num(nan=12345.0), y.nan_to_num(nan=12345.0)) for x, y in zip(a, b, strict=True)]
    return all(same)


PLANTED = {"minus_inf": -float("inf"), "nan": float("nan")}


class OverflowTest(unittest.TestCase):
    """Infinities and NaN are visible in all that depends on them, and nowhere else."""

    def planted(self, place, value):
        x, weights, gradients = make(37, outs=(32, 16))
        tensors = [x, weights[0], gradients[0]]
        tensors[place] = tensors[place].clone()
        tensors[place][5, 7] = value
        return run(tensors[0], [tensors[1], weights[1]], [tensors[2], gradients[1]])

    def check(self, tensor, wrong, others=True):
        """All numbers of the row `wrong` are infinite or NaN. With `others`, those of other rows are finite."""
        finite = tensor.isfinite()
        self.assertFalse(finite[wrong].any())
        rest = torch.arange(len(tensor)) != wrong
        self.assertTrue(not others or finite[rest].all())

    @parameterized.expand(PLANTED)
    def test_in_the_input(self, name):
        outputs, d_x, d_weights = self.planted(0, PLANTED[name])
        for y in outputs:
            self.check(y, 5)
        # The gradient of the input does not depend on the input.
        self.assertTrue(d_x.isfinite().all())
        for d_weight in d_weights:
            self.check(d_weight.t(), 7, others=False)

    @parameterized.expand(PLANTED)
    def test_in_a_gradient(self, name):
        outputs, d_x, d_weights = self.planted(2, PLANTED[name])
        self.assertTrue(all(y.isfinite().all() for y in outputs))
        self.check(d_x, 5)
        self.check(d_weights[0], 7)
        self.assertTrue(d_weights[1].isfinite().all())


LENGTHS = (5, 1, 20, 11)


class IsolationTest(unittest.TestCase):
    """Documents of a row do not change each other's outputs and gradients."""

    def setUp(self):
        self.x, self.weights, self.gradients = make(sum(LENGTHS), outs=(32, 16))
        self.places = list(torch.arange(sum(LENGTHS)).split(LENGTHS))

    @parameterized.expand([("other", 1.0), ("large", 1e20), ("nan", float("nan"))])
    def test_outputs_and_gradients_of_the_input(self, _, factor):
        outputs, d_x, _ = run(self.x, self.weights, self.gradients)
        for place in self.places:
            x, gradients = self.x.clone(), [d.clone() for d in self.gradients]
            for i, tensor in enumerate((x, *gradients)):
                tensor[place] = normal(len(place), tensor.shape[1], seed=20 + i) * factor
            others = torch.tensor([i for i in range(len(x)) if i not in place])
            got, got_x, _ = run(x, self.weights, gradients)
            for a, b in zip((*outputs, d_x), (*got, got_x), strict=True):
                self.assertTrue(torch.equal(a[others], b[others]))
                self.assertFalse(torch.equal(a[place], b[place]))

    def of_documents(self, factor, alone=False):
        """Gradients of weights for two documents. The second one has gradients `factor` times as large.

        The documents have their non-zero inputs in different columns, so each has columns of its own in the gradients.
        """
        own = torch.arange(48) < 32
        first = torch.arange(len(self.x)) < 20
        x = self.x * torch.where(first[:, None], own, ~own)
        gradients = []
        for d in self.gradients:
            # Gradients of at least 1 / 8 of the largest one, 3.
            d = d.clamp(-3, 3)
            d = torch.where(d.abs() < 3 / 8, 3 / 8, d)
            d = d * torch.where(first, 1.0, factor)[:, None]
            gradients.append(d * first[:, None] if alone else d)
        return [d[:, own] for d in run(x, self.weights, gradients)[2]]

    def test_weights_with_larger_gradients_of_another_document(self):
        """They round smaller ones of a column only if these are below 2**-14 of the largest one."""
        expected = self.of_documents(1.0, alone=True)
        for exponent in (0, 3, 8):
            self.assertTrue(identical(expected, self.of_documents(2.0**exponent)), exponent)
        self.assertFalse(identical(expected, self.of_documents(2.0**16)))
        assert_near(self.of_documents(2.0**14), expected, 0.2)
        self.assertFalse(any(d.any() for d in self.of_documents(2.0**30)))

    def test_a_document_with_an_overflow_is_visible_in_the_weights(self):
        """A document cannot vanish silently behind another one whose gradients overflow."""
        self.assertFalse(any(d.isfinite().all() for d in self.of_documents(float("inf"))))


class MemoryTest(unittest.TestCase):
    TOKENS, WIDTH, OUTS = 512, 256, (64, 32)

    def saved(self, dtype, float8s, trained=True, bias=False):
        """The bytes that the layers save besides `x` and their parameters, and whether they save `x`."""
        x, weights, _ = make(self.TOKENS, self.WIDTH, self.OUTS, dtype=dtype, weights=dtype)
        x.requires_grad_()
        layers = []
        for w, in_float8 in zip(weights, float8s, strict=True):
            w.requires_grad_(trained)
            b = normal(len(w)).to(dtype).requires_grad_() if bias else None
            layers.append(Projection(Float8Weight(w) if in_float8 else w, b))
        kept = saved_in(lambda: shared_input_linears(x, *layers))
        new = beside(kept, [x, *(t for t in flatten(layers)[1] if t is not None)])
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in new}
        return sum(storages.values()), len(beside(kept, [x])) < len(kept)

    @parameterized.expand([(BFLOAT16,), (FLOAT32,)])
    def test_one_byte_for_each_element_of_the_input(self, dtype):
        found, saved_input = self.saved(dtype, (True, True))
        self.assertFalse(saved_input)
        # And a scale for each row of the input and of the weights.
        self.assertEqual(found, self.TOKENS * self.WIDTH + 4 * (self.TOKENS + sum(self.OUTS)))

    def test_frozen_weights_save_no_input(self):
        for bias in (False, True):
            found, saved_input = self.saved(BFLOAT16, (True, True), trained=False, bias=bias)
            self.assertFalse(saved_input)
            self.assertEqual(found, 4 * (self.TOKENS + sum(self.OUTS)))


class ErrorsTest(unittest.TestCase):
    @parameterized.expand([(f"{out}_{width}", out, width) for out, width in ((32, 24), (24, 32))])
    def test_sizes(self, _, out, width):
        x, (weight,), _ = make(20, width, (out,))
        with self.assertRaisesRegex(ValueError, rf"multiples of 16 as sizes, not \({out}, {width}\)"):
            shared_input_linears(x, Projection(Float8Weight(weight)))
        # Also if only one layer of a group is wrong.
        with self.assertRaisesRegex(ValueError, "multiples of 16"):
            shared_input_linears(x, Projection(normal(32, width)), Projection(Float8Weight(weight)))

    def test_transforms(self):
        x, (weight,), _ = make()

        def loss(x):
            return shared_input_linears(x, Projection(Float8Weight(weight)))[0].sum()

        for transformed in (torch.func.grad(loss), torch.func.vmap(loss)):
            with self.assertRaisesRegex(ValueError, "does not support torch.func transforms"):
                transformed(x)

    @parameterized.expand([((8, 0), None, "8.9"), ((9, 4), "6.4", "NVIDIA")])
    def test_devices(self, capability, hip, message):
        rows = mock.Mock(is_cuda=True)
        with (
            mock.patch("torch.cuda.get_device_capability", lambda device: capability),
            mock.patch("torch.version.hip", hip),
        ):
            self.assertIn(message, float8.verify(rows, torch.empty(16, 16), BFLOAT16))
            self.assertIn("bf16=True", float8.verify(rows, torch.empty(16, 16), FLOAT32))


def through_glu(impl, x, layer):
    gate, up = x.chunk(2, -1)
    return glu(gate, up, layer, impl=impl)


def through_norm(impl, x, layer):
    x, gate = x.unflatten(-1, (2, 3, 16)).unbind(-3)
    return gated_rms_norm(x, gate, torch.linspace(0.5, 2, 16), linear_weight=layer, impl=impl)


class FusedOpsTest(InterpretedKernelsTest):
    """A layer in float8 behind another op, in its kernel and by itself."""

    @parameterized.expand(
        [
            ("glu_trained", through_glu, False, True),
            ("glu_frozen", through_glu, False, False),
            ("glu_adapted_and_trained", through_glu, True, True),
            ("norm_trained", through_norm, False, True),
            ("norm_adapted", through_norm, True, False),
        ]
    )
    def test_equals_the_layer_alone(self, _, op, adapted, trained):
        weight, found = normal(32, 48) / 7, []
        parts = [normal(4, 48) / 7, normal(32, 4)] if adapted else []
        for impl in ("reference", "triton"):
            x = normal(2, 10, 96).requires_grad_()
            leaves = [t.clone().requires_grad_(t is not weight or trained) for t in (weight, *parts)]
            adapters = (Adapter(*leaves[1:], 1.5),) if adapted else ()
            with mock.patch("transformers_packed.ops.backends.triton.glu._PIECE", 200):
                y = op(impl, x, Projection(Float8Weight(leaves[0]), None, adapters))
                y.backward(normal(2, 10, 32, seed=2))
            found.append([y.detach(), x.grad, *(leaf.grad for leaf in leaves if leaf.requires_grad)])
        # The kernel may round its result to another number, which float8 then may round to the other side.
        assert_near(*found, 3e-3)
        plain = op("reference", normal(2, 10, 96), Projection(weight, None, adapters))
        self.assertGreater(relative(found[1][0], plain.detach()), 5e-3)

    def through(self, op, impl, x, weight, gradient):
        """The output, and the gradients of the inputs and of the weight."""
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        y = op(impl, leaves[0], Projection(Float8Weight(leaves[1])))
        return [y.detach(), *torch.autograd.grad(y, leaves, gradient)]

    @parameterized.expand([(1, FLOAT32), (37, BFLOAT16)])
    def test_rows_of_several_blocks(self, tokens, dtype):
        x, weight, gradient = (t.to(dtype) for t in (normal(tokens, 160), normal(32, 80) / 9, normal(tokens, 32)))
        options = {"_BLOCK": 32, "ROWS": 32, "COLUMNS": 32}
        with mock.patch.multiple("transformers_packed.ops.backends.triton.glu", **options):
            found = self.through(through_glu, "triton", x, weight, gradient)
        bar = 3e-3 if dtype == FLOAT32 else 2e-2
        for a, b in zip(found, self.through(through_glu, "reference", x, weight, gradient), strict=True):
            self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
            self.assertLess(relative(a, b), bar)

    @parameterized.expand([(through_glu, "minus_inf"), (through_norm, "nan")])
    def test_infinities_and_nan(self, op, name):
        """They are visible in the row and in the gradient of the weight. Other rows have the same bits."""
        x, weight, gradient = normal(21, 96), normal(32, 48) / 7, normal(21, 32)
        wrong = x.clone()
        wrong[5, 60] = PLANTED[name]
        y, d_x, _ = self.through(op, "triton", x, weight, gradient)
        others = torch.arange(21) != 5
        for impl in ("triton", "reference"):
            found, d_found, d_weight = self.through(op, impl, wrong, weight, gradient)
            self.assertFalse(found[5].isfinite().any())
            self.assertFalse(d_weight.isfinite().all())
            if impl == "triton":
                self.assertTrue(torch.equal(found[others], y[others]))
                self.assertTrue(torch.equal(d_found[others], d_x[others]))


class Buffer:
    """A tensor in the middle of a larger one, whose other elements have to stay."""

    MARGIN = 144

    def __init__(self, *shape, dtype=FLOAT32):
        self.whole = torch.full([size + 2 * self.MARGIN for size in shape], 7.0).to(dtype)
        self.place = tuple(slice(self.MARGIN, self.MARGIN + size) for size in shape)

    @property
    def inner(self):
        return self.whole[self.place]

    def check(self, case):
        rest = torch.ones(self.whole.shape, dtype=torch.bool)
        rest[self.place] = False
        case.assertTrue((self.whole.float()[rest] == 7).all(), "a write outside of the tensor")


# Several blocks, of whose last one only a part is used.
SIZES = [(1, 16), (37, 272)]


class CastsTest(InterpretedKernelsTest):
    """The kernels' casts have the bits of the torch forms."""

    def setUp(self):
        super().setUp()
        from transformers_packed.ops.backends.triton import float8 as kernels

        self.kernels = kernels

    def rows(self, rows, columns, dtype=FLOAT32):
        """Rows of many sizes, among them zeros, denormals, powers of two and the boundaries of scales."""
        x = normal(rows, columns) * torch.logspace(-12, 12, rows)[:, None]
        for i, row in enumerate((0.0, 1e-40, 2.0**20, 448.0, 448.0001, 2.0**-30)):
            if i < rows - 1:
                x[i] = row * (x[i].sign() if i else 1)
        # Triton's interpreter reads denormal numbers of 16 bits as zeros.
        return x.to(dtype) if dtype == FLOAT32 else x.where(x.abs() > 2.0**-100, 0).to(dtype)

    def equal(self, a, b, message=""):
        self.assertTrue(torch.equal(a.float(), b.float()), message)

    @parameterized.expand([(3, 48, torch.float16), (37, 64, FLOAT32), (33, 528, BFLOAT16)])
    def test_rows_and_their_transposes(self, rows, columns, dtype):
        x = self.rows(rows, columns, dtype) if dtype != torch.float16 else normal(rows, columns).half()
        wide = torch.cat([x, x], 1)[:, :columns]
        cast, scale = float8.cast_rows(x)
        for inputs in (x, wide):
            found, found_scale = self.kernels.cast_rows(inputs, factor=None)
            self.equal(found_scale, scale)
            self.equal(found, cast)
            self.assertTrue(found.is_contiguous())
        # Rows are filled up with zeros.
        padded = -(-rows // 16) * 16
        for inputs, s in ((cast, None), (x, scale), (wide, scale)):
            ours, theirs = Buffer(columns, padded, dtype=float8.DTYPE), Buffer(columns, padded, dtype=float8.DTYPE)
            self.kernels.transposed(inputs, s, ours.inner)
            float8.transposed(inputs, s, theirs.inner)
            self.equal(ours.inner, theirs.inner)
            ours.check(self)
            self.equal(theirs.inner[:, :rows].t(), cast)
            self.assertFalse(theirs.inner[:, rows:].float().any())

    @parameterized.expand(SIZES)
    def test_gradients(self, rows, columns):
        """Two gradients side by side, cast with common scales of rows, for rows, columns or both."""
        generator = torch.Generator().manual_seed(0)
        factors = [torch.exp2(torch.randint(-9, 9, (n,), generator=generator).float()) for n in (rows, 2 * columns)]
        padded = -(-rows // 16) * 16
        for dtype in (BFLOAT16, FLOAT32):
            part = self.rows(rows, columns, dtype)
            # The second one is not contiguous.
            parts = [part, torch.cat([part.flip(0)] * 2, 1)[:, :columns]]
            results = []
            for add_maxima, cast_both in (
                (self.kernels.add_maxima, self.kernels.cast_both),
                (float8.add_maxima, float8.cast_both),
            ):
                maxima = [torch.zeros(n, dtype=torch.int32) for n in (rows, 2 * columns)]
                buffers = [
                    Buffer(rows, 2 * columns, dtype=float8.DTYPE),
                    Buffer(rows),
                    Buffer(2 * columns, padded, dtype=float8.DTYPE),
                    Buffer(2 * columns),
                ]
                inner = [buffer.inner for buffer in buffers]
                owned = [slice(i * columns, (i + 1) * columns) for i in range(2)]
                calls = [
                    (part, factors[0], factors[1][own], maxima[0], maxima[1][own])
                    for part, own in zip(parts, owned, strict=True)
                ]
                for call in calls:
                    add_maxima(*call)
                for call, own in zip(calls, owned, strict=True):
                    cast_both(*call, inner[0][:, own], inner[1], inner[2][own], inner[3][own])
                for buffer in buffers:
                    buffer.check(self)
                results.append([*maxima, *inner])
            for i, (a, b) in enumerate(zip(*results, strict=True)):
                self.equal(a, b, (i, dtype))

    # Interpreting takes long for many small blocks.
    @parameterized.expand([(3, 48), (6, 272)])
    def test_rows_side_by_side(self, rows, columns):
        """Up to three tensors are cast with a common scale of each row, and with factors of columns."""
        generator = torch.Generator().manual_seed(0)
        self.enterContext(mock.patch.object(self.kernels, "_BLOCK", 128))
        for dtype in (BFLOAT16, FLOAT32):
            part = self.rows(rows, columns, dtype)
            for parts in ([part], [part.flip(0), part[:, :16], part]):
                width = sum(x.shape[1] for x in parts)
                factor = torch.exp2(torch.randint(-9, 9, (width,), generator=generator).float())
                found, expected = (
                    self.kernels.cast_rows(*parts, factor=factor),
                    float8.cast_rows(*parts, factor=factor),
                )
                for a, b in zip(found, expected, strict=True):
                    self.equal(a, b)
