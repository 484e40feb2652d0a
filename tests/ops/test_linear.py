"""Linear layers with one input: how a model's modules become one call, and the fused op against its reference."""

import copy
import unittest
from unittest import mock

import torch
from common.fused import assert_near, flatten, relative, saved_in, unflatten
from parameterized import parameterized
from peft import LoraConfig, get_peft_model

from transformers_packed.models import projections
from transformers_packed.models.projections import project, terms_of, to_fuse
from transformers_packed.ops import gated_rms_norm, glu, linear
from transformers_packed.ops.linear import product_dtype, shared_input_linears
from transformers_packed.ops.terms import Adapter, Dequantized, Projection


BFLOAT16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float32, torch.float64
WIDTH = 6


def on_a_gpu(tensor=True):
    return mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda _: tensor)


def make(dtype=FLOAT64, bias=False):
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
        shared = linear.fused_linears

        def count(hidden_states, layers, *options):
            self.calls.append(len(layers))
            return shared(hidden_states, layers, *options)

        self.enterContext(mock.patch.object(projections, "fused_linears", count))
        self.enterContext(on_a_gpu())

    def check(self, layers, x, calls, used=(0, 1, 2), function=project):
        """`calls`: the number of layers in each fused call."""
        got, expected = results(function, layers, x, used), results(each_alone, layers, x, used)
        for a, b in zip(got, expected, strict=True):
            self.assertEqual(a is None, b is None)
            if a is not None:
                self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype))
                self.assertLess((a - b).abs().max(), 1e-12)
        self.assertEqual(self.calls, calls)
        self.calls.clear()

    def test_equals_each_layer_alone(self):
        """With outputs that nobody uses, a frozen weight, a frozen input and biases too."""
        for used in ((0, 1, 2), (1,), (0, 2)):
            self.check(*make(), [3], used=used)
        with on_a_gpu(False):
            self.check(*make(), [])
        layers, x = make()
        self.check(layers, x.detach(), [3])
        layers[1].weight.requires_grad_(False)
        self.check(layers, x, [3])
        self.check(*make(bias=True), [3])

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
                self.check(layers, x, [2])

    def test_other_classes_run_by_themselves(self):
        class Doubled(torch.nn.Linear):
            def forward(self, x):
                return 2 * super().forward(x)

        layers, x = make()
        self.check([layers[0], Doubled(6, 2, bias=False, dtype=x.dtype), layers[2]], x, [2])

    def test_an_op_before_a_layer_gets_its_parameters_or_a_function(self):
        (layer, *_), x = make(FLOAT32)
        layer.weight.requires_grad_(False)
        self.assertIs(to_fuse(layer, x).weight, layer.weight)
        with torch.autocast("cpu", BFLOAT16):
            # The op's result is in float32, and the layer's products are not.
            found = to_fuse(layer, x)(x)
            self.assertTrue(torch.equal(found, project(x, layer)[0]))
        self.assertEqual(found.dtype, BFLOAT16)
        layer.register_forward_hook(lambda *_: None)
        self.assertIs(to_fuse(layer, x), layer)
        glued = glu(x, x, layer)
        self.assertTrue(torch.equal(glued, layer(glu(x, x))))
        heads = x.unflatten(-1, (2, 3))
        normed = gated_rms_norm(heads, heads, torch.ones(3), linear_weight=layer)
        self.assertTrue(torch.equal(normed, layer(gated_rms_norm(heads, heads, torch.ones(3)).flatten(-2))))

    def test_autocast_runs_layers_together(self):
        """Each layer by itself would save a copy of the input, and of its weight, in the dtype of the products."""
        layers, x = make(FLOAT32)
        layers[0].weight.requires_grad_(False)
        known = {id(t) for layer in layers for t in layer.parameters()}
        saved = {}

        def pack(t):
            if id(t) not in known:
                saved[t.untyped_storage().data_ptr()] = t
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", BFLOAT16):
            outputs = project(x, *layers)
        self.assertEqual([y.dtype for y in outputs], [BFLOAT16] * 3)
        self.assertEqual(self.calls, [3])
        self.assertEqual([(t.dtype, t.shape) for t in saved.values()], [(BFLOAT16, x.shape)])
        sum(y.float().sum() for y in outputs).backward()
        self.assertEqual([layer.weight.grad is None for layer in layers], [True, False, False])
        self.assertEqual([layer.weight.grad.dtype for layer in layers[1:]], [FLOAT32] * 2)


def layer(out, *ranks, scales=(0.5, 3.0), bias=False, adapter_bias=False):
    """A function that makes a projection in the dtype that it gets."""

    def made(dtype=FLOAT64, width=WIDTH):
        def normal(*shape):
            return torch.randn(shape, dtype=FLOAT64).to(dtype).requires_grad_()

        adapters = tuple(
            Adapter(normal(rank, width), normal(out, rank), scale, 0.0, normal(out) if adapter_bias else None)
            for rank, scale in zip(ranks, scales, strict=False)
        )
        return Projection(normal(out, width), normal(out) if bias else None, adapters)

    return made


# 128 rows are narrow and join the stack, 129 are wide.
GROUPS = [
    ("ranks", [layer(150, 2), layer(129, 5), layer(128, 3), layer(1, 1)]),
    ("two_adapters", [layer(150, 2, 4), layer(7, 3, 1)]),
    ("both_biases", [layer(150, 2, 3, bias=True, adapter_bias=True), layer(7, 2, bias=True, adapter_bias=True)]),
    ("bare_layers_between", [layer(150, 2), layer(140), layer(7), layer(130, 3), layer(3, bias=True)]),
    ("bare", [layer(150), layer(7), layer(129, bias=True)]),
    (
        "everything",
        [
            layer(150, 2, 3, bias=True, adapter_bias=True),
            layer(140, bias=True),
            layer(7, 1, 4, bias=True, adapter_bias=True),
            layer(3),
            layer(129, 2),
        ],
    ),
]
EVERYTHING = GROUPS[-1][1]
KINDS = ("weight", "bias", "down", "up", "adapter_bias")


def made(group, dtype=FLOAT64, trained=KINDS, **options):
    """The projections of a group, in which the tensors of the kinds `trained` need gradients."""
    torch.manual_seed(0)
    found = []
    for weight, bias, adapters in (make(dtype, **options) for make in group):
        found.append(Projection(weight, bias, adapters))
        kinds = [("weight", weight), ("bias", bias)]
        for adapter in adapters:
            kinds += [("down", adapter.down), ("up", adapter.up), ("adapter_bias", adapter.bias)]
        for kind, tensor in kinds:
            if tensor is not None:
                tensor.requires_grad_(kind in trained)
    return found


def rows(*shape, dtype=FLOAT64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, dtype=FLOAT64, generator=generator).to(dtype).requires_grad_()


def run(impl, x, layers, used=None):
    """Outputs, and the gradients of the input and of all tensors of the layers, `None` where there is none."""
    structure, tensors = flatten(layers)
    leaves = [None if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
    x = x.detach().requires_grad_(x.requires_grad)
    outputs = shared_input_linears(x, *unflatten(structure, leaves), impl=impl)
    used = range(len(outputs)) if used is None else used
    losses = [(i + 1) * outputs[i].sin().sum() for i in used if outputs[i].requires_grad]
    if losses:
        sum(losses).backward()
    return [*(y.detach() for y in outputs), x.grad, *(None if t is None else t.grad for t in leaves)]


def shares_memory(x, tensors):
    return any(x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() for y in tensors)


class FusedTest(unittest.TestCase):
    def setUp(self):
        self.enterContext(on_a_gpu())

    def compare(self, got, expected, bar=1e-12):
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            self.assertEqual(a is None, b is None, f"result {i}")
            if a is not None:
                self.assertEqual((a.shape, a.dtype), (b.shape, b.dtype), f"result {i}")
                self.assertTrue(b.numel() == 0 or relative(a, b) < bar, f"result {i}")

    def check(self, x, layers, bar=1e-12, **options):
        self.compare(run("fused", x, layers, **options), run("reference", x, layers, **options), bar)

    @parameterized.expand(GROUPS)
    def test_equals_the_reference(self, _, group):
        self.check(rows(2, 5, WIDTH), made(group))
        self.check(rows(2, 5, WIDTH, dtype=FLOAT32), made(group, FLOAT32), 1e-5)

    def test_tokens_of_other_shapes(self):
        layers = made(EVERYTHING)
        for shape in [(WIDTH,), (1, WIDTH), (1, 1, WIDTH), (3, 1, 2, WIDTH), (2, 0, WIDTH)]:
            with self.subTest(shape):
                self.check(rows(*shape), layers)
        gradients = run("fused", rows(1, 0, WIDTH), layers)[len(layers) + 1 :]
        self.assertTrue(all(g is None or not g.count_nonzero() for g in gradients))

    def test_gradients_that_are_not_contiguous(self):
        layers, found = made(EVERYTHING), []
        for impl in ("fused", "reference"):
            x = rows(2, 5, WIDTH)
            outputs = shared_input_linears(x, *layers, impl=impl)
            # Expanded, and transposed.
            loss = outputs[0].sum() + (outputs[2].mT * torch.arange(5.0)).sum()
            found.append(torch.autograd.grad(loss, [x, layers[0].weight, layers[2].weight]))
        self.compare(*found)

    @parameterized.expand([("first", [0]), ("narrow", [2]), ("bare_ones", [1, 3]), ("last", [4])])
    def test_unused_outputs_leave_no_gradient(self, _, used):
        layers = made(EVERYTHING)
        self.check(rows(2, 5, WIDTH), layers, used=used)
        gradients = iter(run("fused", rows(2, 5, WIDTH), layers, used)[len(layers) + 1 :])
        for i, (_, bias, adapters) in enumerate(layers):
            expected = [True, bias is not None, *(x is not None for a in adapters for x in (a.down, a.up, a.bias))]
            for present in expected:
                self.assertEqual(next(gradients) is not None, present and i in used)

    @parameterized.expand(
        [
            ("frozen", (), False),
            ("weight", ("weight",), True),
            ("down", ("down",), True),
            ("adapters_and_biases", ("bias", "up", "adapter_bias"), False),
        ]
    )
    def test_what_is_frozen(self, _, trained, needed):
        """`x` is saved only if a gradient depends on it, and frozen tensors get no gradient."""
        layers, x = made(EVERYTHING, trained=trained), rows(2, 5, WIDTH)
        for inputs in (x, x.detach()):
            self.check(inputs, layers)
            kept = saved_in(lambda inputs=inputs: shared_input_linears(inputs, *layers, impl="fused"))
            self.assertEqual(shares_memory(inputs, kept), needed)
            self.assertEqual(bool(kept), bool(trained) or inputs.requires_grad)
            # Nothing else of the input's size: the adapters' small products do not make up for it.
            copies = [y for y in kept if y.shape == (10, WIDTH) and not shares_memory(inputs, [y])]
            self.assertEqual(copies, [])

    @parameterized.expand([(5, EVERYTHING)])
    def test_outputs_may_be_changed_in_place(self, tokens, group):
        for changed in range(len(group)):
            layers, found = made(group), []
            for impl in ("fused", "reference"):
                x = rows(1, tokens, WIDTH)
                outputs = shared_input_linears(x, *layers, impl=impl)
                outputs[changed].mul_(2)
                leaves = [x, *(t for t in flatten(layers)[1] if t is not None)]
                found.append(torch.autograd.grad(sum(y.sin().sum() for y in outputs), leaves))
            self.compare(*found)

    @parameterized.expand(
        [
            ("weight", Projection(torch.ones(3, 5)), r"expected a weight \[out, 6\].*got \(3, 5\)"),
            (
                "down",
                Projection(torch.ones(3, 6), None, (Adapter(torch.ones(2, 5), torch.ones(3, 2)),)),
                r"expected an adapter \[rank, 6\] and \[3, rank\].*got \(2, 5\) and \(3, 2\)",
            ),
            (
                "dropout",
                Projection(torch.ones(3, 6), None, (Adapter(torch.ones(2, 6), torch.ones(3, 2), dropout=1.0),)),
                "expected a dropout from 0 to less than 1.*got 1.0",
            ),
        ]
    )
    def test_bad_input(self, _, bad, message):
        with self.assertRaisesRegex(ValueError, message):
            shared_input_linears(torch.ones(2, 6), torch.ones(4, 6), bad)

    def test_not_on_a_cpu(self):
        with on_a_gpu(False), self.assertRaisesRegex(ValueError, "fused: needs CUDA tensors"):
            shared_input_linears(rows(2, WIDTH), *made([layer(7, 2)]), impl="fused")

    def test_mixed_dtypes_are_refused(self):
        reason = "fused: needs one dtype for all products"
        wide, narrow = made([layer(130, 2), layer(7, 2)], FLOAT32)
        (half,) = made([layer(130, 2)], BFLOAT16)
        for x, layers in [
            (rows(2, WIDTH, dtype=FLOAT32), [wide, half]),
            (rows(2, WIDTH), [wide, narrow]),
            (rows(2, WIDTH, dtype=BFLOAT16), [wide]),
        ]:
            with self.assertRaisesRegex(ValueError, reason):
                shared_input_linears(x, *layers, impl="fused")
            # The reference is PyTorch, and PyTorch says so too.
            with self.assertRaisesRegex(RuntimeError, "same dtype"):
                shared_input_linears(x, *layers)
        with torch.autocast("cpu", BFLOAT16):
            x = rows(2, WIDTH, dtype=FLOAT32)
            self.assertEqual([y.dtype for y in shared_input_linears(x, wide, half, impl="fused")], [BFLOAT16] * 2)
            with self.assertRaisesRegex(ValueError, reason):
                shared_input_linears(x.double(), narrow, impl="fused")


class PrecisionTest(unittest.TestCase):
    """Adapters in float32 on a layer in bfloat16, against PEFT's own forward and a computation in float64."""

    def setUp(self):
        self.enterContext(on_a_gpu())

    def lora(self, out, base_dtype, bias=True):
        base = torch.nn.Linear(48, out, bias=bias, dtype=base_dtype)
        config = LoraConfig(r=4, lora_alpha=12, target_modules=["0"])
        module = get_peft_model(torch.nn.Sequential(base), config).base_model.model[0]
        torch.nn.init.normal_(module.lora_B["default"].weight)
        return module

    def errors(self, base_dtype, x_dtype, out):
        torch.manual_seed(0)
        module = self.lora(out, base_dtype)
        adapter = [module.lora_A["default"].weight, module.lora_B["default"].weight]
        self.assertEqual([p.dtype for p in adapter], [FLOAT32] * 2)
        x = torch.randn(2, 33, 48).to(x_dtype).requires_grad_()
        upstream = torch.randn(2, 33, out).bfloat16()

        def fused(x):
            projection, _ = terms_of(module, x)
            self.assertEqual(len(projection.adapters), 1)
            return shared_input_linears(x, projection, impl="fused")[0]

        found = []
        for function in (fused, module):
            with torch.autocast("cpu", BFLOAT16):
                y = function(x)
            self.assertEqual(y.dtype, BFLOAT16)
            found.append([y.detach(), *torch.autograd.grad(y, [x, *adapter], upstream)])
        for a, b in zip(*found, strict=True):
            self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
        exact, wide = copy.deepcopy(module).double(), x.detach().double().requires_grad_()
        y = exact(wide)
        leaves = [wide, exact.lora_A["default"].weight, exact.lora_B["default"].weight]
        expected = [y.detach(), *torch.autograd.grad(y, leaves, upstream.double())]
        return [[relative(a, b) for a, b in zip(results, expected, strict=True)] for results in found]

    @parameterized.expand([(BFLOAT16, BFLOAT16, 200), (FLOAT32, FLOAT32, 7)])
    def test_is_not_worse_than_peft_under_autocast(self, base_dtype, x_dtype, out):
        for i, (ours, pefts) in enumerate(zip(*self.errors(base_dtype, x_dtype, out), strict=True)):
            self.assertGreater(pefts, 1e-4)
            self.assertLess(ours, 2 * pefts, f"result {i}")

    def test_trained_weights_under_autocast(self):
        """Outputs and gradients of weights are those of autocast alone. It sums gradients of the input in float32."""
        torch.manual_seed(0)
        x, weights = torch.randn(2, 33, 48), [torch.randn(out, 48) for out in (64, 64, 7, 7)]
        upstream = [torch.randn(2, 33, len(w)).bfloat16() for w in weights]

        def results(apply, dtype=FLOAT32):
            leaves = [t.to(dtype).requires_grad_() for t in (x, *weights)]
            # Of a leaf, autocast would cast once for all layers, and sum in bfloat16.
            outputs = apply(leaves[0] * 1, *leaves[1:])
            return [y.detach() for y in outputs], torch.autograd.grad(
                outputs, leaves, [u.to(outputs[0]) for u in upstream]
            )

        with torch.autocast("cpu", BFLOAT16):
            ours = results(lambda x, *weights: shared_input_linears(x, *weights, impl="fused"))
            theirs = results(lambda x, *weights: [torch.nn.functional.linear(x, w) for w in weights])
        exact = results(lambda x, *weights: [torch.nn.functional.linear(x, w) for w in weights], torch.float64)
        (ours, dx, *d_weights), (theirs, their_dx, *their_d_weights), (_, exact_dx, *_) = (
            (torch.cat(out, -1), *grads) for out, grads in (ours, theirs, exact)
        )
        self.assertTrue(torch.equal(ours, theirs))
        for our, their in zip(d_weights, their_d_weights, strict=True):
            self.assertEqual(our.dtype, FLOAT32)
            self.assertTrue(torch.equal(our, their))
        self.assertEqual(dx.dtype, FLOAT32)
        self.assertGreater(relative(their_dx, exact_dx), 1e-4)
        self.assertLess(relative(dx, exact_dx), 2 * relative(their_dx, exact_dx))


class QuantizedTest(unittest.TestCase):
    def setUp(self):
        self.enterContext(on_a_gpu())
        self.calls = 0

    def quantized(self, weight, dtype):
        def dequantize():
            self.calls += 1
            return weight

        return Dequantized(weight.shape, dtype, dequantize)

    def layers(self, dtype=FLOAT64, trained=KINDS, stored=None):
        """Those of `EVERYTHING` with frozen weights, the second of which is quantized in the second list."""
        plain = made(EVERYTHING, dtype, trained=trained)
        plain = [p._replace(weight=p.weight.detach()) for p in plain]
        fake = [p._replace(weight=self.quantized(p.weight.to(stored or dtype), dtype)) for p in plain]
        return plain, fake

    def test_equals_a_frozen_weight(self):
        plain, fake = self.layers()
        for x in (rows(2, 5, WIDTH), rows(2, 5, WIDTH).detach()):
            expected = run("fused", x, plain)
            self.assertEqual(self.calls, 0)
            for impl in ("fused", "reference"):
                got = run(impl, x, fake)
                gradients = iter(got[len(plain) + 1 :])
                for a, b in zip(got, expected, strict=True):
                    self.assertEqual(a is None, b is None)
                    self.assertTrue(a is None or relative(a, b) < 1e-12)
                self.assertIsNone(next(gradients))
                self.calls = 0

    def test_dequantizes_once_for_each_direction_that_somebody_needs(self):
        _, fake = self.layers()
        x = rows(2, 5, WIDTH)
        # One output of five, and an input without gradient.
        for inputs, used, again in ((x, slice(None), len(fake)), (x, slice(1, 2), 1), (x.detach(), slice(None), 0)):
            self.calls = 0
            outputs = shared_input_linears(inputs, *fake, impl="fused")
            self.assertEqual(self.calls, len(fake))
            sum(y.sum() for y in outputs[used]).backward()
            self.assertEqual(self.calls, len(fake) + again)

    def test_saves_neither_the_weight_nor_an_unneeded_input(self):
        x = rows(2, 5, WIDTH)
        for trained, needed in (((), False), (("up", "bias"), False), (("down",), True)):
            _, fake = self.layers(trained=trained)
            kept = saved_in(lambda fake=fake: shared_input_linears(x, *fake, impl="fused"))
            self.assertEqual(shares_memory(x, kept), needed)
            weights = [p.weight.compute() for p in fake]
            self.assertFalse([y for y in kept for w in weights if torch.equal(y, w)])

    @parameterized.expand([("fused",), ("reference",)])
    def test_products_in_less_precision_than_the_input(self, impl):
        """The output has the input's dtype, as that of a layer of bitsandbytes."""
        plain, _ = self.layers(FLOAT32)
        _, fake = self.layers(BFLOAT16)
        x = rows(2, 5, WIDTH, dtype=FLOAT32)
        self.assertEqual(product_dtype(x, fake[0]), BFLOAT16)
        found = []
        for layers in (fake, plain):
            outputs = shared_input_linears(x, *layers, impl=impl)
            self.assertEqual([y.dtype for y in outputs], [FLOAT32] * len(layers))
            leaves = [x, *(t for t in flatten(layers)[1] if t is not None and t.requires_grad)]
            upstream = [torch.ones_like(y) for y in outputs]
            found.append([*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, upstream)])
        assert_near(*found, 2e-2)
