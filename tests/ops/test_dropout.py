"""Dropout of adapters' inputs: what the mask is, and that the backward of each op has the forward's."""

from functools import partial

import torch
from common.fused import assert_near, errors, flatten, relative
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized
from torch.utils.checkpoint import checkpoint

from transformers_packed.ops import gated_rms_norm, glu
from transformers_packed.ops.linear import shared_input_linears
from transformers_packed.ops.terms import Adapter, Projection


P = 0.25


def seed(number):
    return torch.tensor(number)


def dropped(*args):
    from transformers_packed.ops.backends.triton.dropout import dropped

    return dropped(*args)


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class MaskTest(InterpretedKernelsTest):
    def test_share_and_scale(self):
        p, x = 0.05, torch.ones(300, 200)
        y = dropped(x, seed(1), p)
        kept = y != 0
        # Five standard deviations.
        bar = 5 * (p * (1 - p) / x.numel()) ** 0.5
        self.assertLess(abs(float(kept.double().mean()) - (1 - p)), bar)
        self.assertLess((y[kept] - 1 / (1 - p)).abs().max(), 1e-6)
        self.assertLess(abs(float(y.double().mean()) - 1), bar / (1 - p))
        # In each column and row too, where a bad generator has patterns.
        for dim in (0, 1):
            share = kept.double().mean(dim)
            self.assertLess((share - (1 - p)).abs().max(), 5 * (p * (1 - p) / x.shape[dim]) ** 0.5)
            self.assertGreater(share.std(), 0.5 * (p * (1 - p) / x.shape[dim]) ** 0.5)

    def test_is_a_function_of_seed_and_position(self):
        x = normal(70, 50)
        expected = dropped(x, seed(5), P)
        self.assertTrue(torch.equal(dropped(x, seed(5), P), expected))
        self.assertTrue(torch.equal(dropped(x[:31], seed(5), P), expected[:31]))
        self.assertTrue(torch.equal(dropped(x.t().contiguous().t(), seed(5), P), expected))
        self.assertTrue(torch.equal(dropped(2 * x, seed(5), P), 2 * expected))

    def test_seeds_are_independent(self):
        x = torch.ones(100, 200)
        masks = [dropped(x, seed(number), 0.5) != 0 for number in (0, 1, 2**31 - 2)]
        for i, a in enumerate(masks):
            for b in masks[:i]:
                self.assertLess(abs(float((a == b).double().mean()) - 0.5), 5 * 0.5 / x.numel() ** 0.5)

    def test_dtypes_and_sizes(self):
        for dtype, count in ((torch.float16, 1023), (torch.bfloat16, 1025), (torch.float32, 0), (torch.float32, 1)):
            x = normal(count).to(dtype)
            y, wide = dropped(x, seed(5), P), dropped(x.float(), seed(5), P)
            self.assertEqual((y.dtype, y.shape), (dtype, x.shape))
            # One unit in the last place of bfloat16: the interpreter truncates.
            self.assertTrue(((y.float() - wide).abs() <= wide.abs() / 128).all())


TOKENS, WIDTH = 11, 16
# Adapters with and without dropout, on wide and narrow layers: (out, (rank, scale, dropout), ...).
LAYERS = [
    (130, (3, 0.5, P), (2, 2.0, 0.5)),
    (7, (2, 3.0, P)),
    (140, (4, 1.5, 0.0), (2, 1.0, P)),
    (5,),
]


def parameters(layers=LAYERS, width=WIDTH, frozen=False):
    """Projections with random parameters that need gradients, except for frozen weights."""
    found = []
    for out, *adapters in layers:
        made = [
            Adapter(normal(rank, width).requires_grad_(), normal(out, rank).requires_grad_(), scale, p)
            for rank, scale, p in adapters
        ]
        found.append(Projection(normal(out, width).requires_grad_(not frozen), None, tuple(made)))
    return found


def leaves_of(layers):
    return [t for t in flatten(layers)[1] if t is not None and t.requires_grad]


def revealed(layers, width=WIDTH):
    """Layers with the same dropout, each of whose adapters returns its input in columns of its own."""
    eye = torch.eye(width)
    found = []
    for _, _, adapters in layers:
        out = width * max(1, len(adapters))
        made = []
        for j, adapter in enumerate(adapters):
            up = torch.zeros(out, width)
            up[j * width : (j + 1) * width] = eye
            made.append(Adapter(eye, up, 1.0, adapter.dropout))
        found.append(Projection(torch.zeros(out, width), None, tuple(made)))
    return found


def masks_of(outputs, x, layers):
    """The factors of the inputs of all adapters, from the outputs of `revealed` layers for the input `x`."""
    parts = [y.split(x.shape[-1], dim=-1)[: len(p.adapters)] for y, p in zip(outputs, layers, strict=True)]
    return [[y / x for y in part] for part in parts]


def with_masks(x, layers, masks):
    """The layers' outputs for given factors of the adapters' inputs."""
    outputs = []
    for (weight, _, adapters), factors in zip(layers, masks, strict=True):
        y = x @ weight.t()
        for (down, up, scale, _, _), factor in zip(adapters, factors, strict=True):
            y = y + scale * (x * factor) @ down.t() @ up.t()
        outputs.append(y)
    return outputs


def gradients(outputs, leaves):
    loss = sum((y * normal(*y.shape)).sum() for y in outputs)
    return [*(y.detach() for y in outputs), *torch.autograd.grad(loss, leaves)]


fused = partial(shared_input_linears, impl="fused")


class LinearTest(InterpretedKernelsTest):
    def setUp(self):
        super().setUp()
        self.x = normal(1, TOKENS, WIDTH).requires_grad_()

    def masks(self, number):
        torch.manual_seed(number)
        layers = parameters()
        with torch.no_grad():
            return masks_of(fused(self.x, *revealed(layers)), self.x, layers)

    def test_masks(self):
        masks = self.masks(3)
        self.assertEqual([len(factors) for factors in masks], [2, 1, 2, 0])
        for factors, (_, *adapters) in zip(masks, LAYERS, strict=True):
            for factor, (_, _, p) in zip(factors, adapters, strict=True):
                kept = factor != 0
                self.assertLess((factor[kept] - 1 / (1 - p)).abs().max(), 1e-5)
                self.assertEqual(bool(kept.all()), p == 0)
                self.assertTrue(kept.any())
        with_dropout = [factor != 0 for factors in masks for factor in factors if (factor == 0).any()]
        self.assertEqual(len(with_dropout), 4)
        for i, a in enumerate(with_dropout):
            for b in with_dropout[:i]:
                self.assertFalse(torch.equal(a, b), "two adapters have one mask")
        self.assert_same_bits(self.masks(3)[0], masks[0])
        self.assertFalse(torch.equal(self.masks(4)[0][0], masks[0][0]))

    @parameterized.expand([(False,), (True,)])
    def test_the_backward_has_the_forwards_mask(self, frozen):
        masks, layers = self.masks(3), parameters(frozen=frozen)
        leaves = [self.x, *leaves_of(layers)]
        torch.manual_seed(3)
        got = gradients(fused(self.x, *layers), leaves)
        self.assertLess(max(errors(got, gradients(with_masks(self.x, layers, masks), leaves))), 1e-5)
        # Any other masks would show.
        wrong = gradients(with_masks(self.x, layers, self.masks(4)), leaves)
        self.assertGreater(max(errors(got, wrong)), 0.1)

    def test_each_call_has_masks_of_its_own(self):
        layers = parameters()
        torch.manual_seed(3)
        first, second = fused(self.x, *layers), fused(self.x, *layers)
        self.assertFalse(torch.equal(first[0], second[0]))
        torch.manual_seed(3)
        self.assert_same_bits((*first, *second), (*fused(self.x, *layers), *fused(self.x, *layers)))

    def test_the_reference_has_dropout_too(self):
        x = torch.ones(200, WIDTH)
        (layer,) = revealed(parameters(LAYERS[1:2]))
        (y,) = shared_input_linears(x, layer, impl="reference")
        self.assertLess((y[y != 0] - 1 / (1 - P)).abs().max(), 1e-6)
        self.assertLess(abs(float((y != 0).double().mean()) - (1 - P)), 5 * (P * (1 - P) / y.numel()) ** 0.5)


HEADS = 4


def through_glu(layer, gate, x):
    return glu(gate, x, layer, impl="triton")


def through_norm(layer, gate, x):
    split = [y.unflatten(-1, (HEADS, -1)) for y in (x, gate)]
    return gated_rms_norm(*split, torch.ones(WIDTH // HEADS), linear_weight=layer, impl="triton")


def product_of_glu(gate, x):
    return x * torch.nn.functional.silu(gate)


def product_of_norm(gate, x):
    x, gate = (y.unflatten(-1, (HEADS, -1)) for y in (x, gate))
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return (normed * torch.nn.functional.silu(gate)).flatten(-2)


OPS = [("glu", through_glu, product_of_glu), ("gated_rms_norm", through_norm, product_of_norm)]
# Two adapters, on a wide and on a narrow layer.
ONE_LAYER = [(f"{name}_{size[0]}", op, product, size) for name, op, product in OPS for size in LAYERS[:2]]


class LinearAfterAnOpTest(InterpretedKernelsTest):
    """The product is not saved, so its backward computes the product and then its dropout again."""

    def setUp(self):
        super().setUp()
        self.gate, self.x = (x.clone().requires_grad_() for x in normal(2, TOKENS, WIDTH).split(1))

    @parameterized.expand(ONE_LAYER)
    def test_the_backward_has_the_forwards_mask(self, _, op, product, size):
        (layer,) = layers = parameters([size], frozen=size == LAYERS[1])
        torch.manual_seed(3)
        with torch.no_grad():
            shown = op(revealed(layers)[0], self.gate, self.x)
            masks = masks_of([shown], product(self.gate, self.x), layers)
        self.assertTrue(all((factor == 0).any() for factor in masks[0]))
        leaves = [self.gate, self.x, *leaves_of(layers)]
        torch.manual_seed(3)
        got = gradients([op(layer, self.gate, self.x)], leaves)
        expected = gradients(with_masks(product(self.gate, self.x), layers, masks), leaves)
        self.assertLess(max(errors(got, expected)), 1e-5)


class CheckpointTest(InterpretedKernelsTest):
    def test_checkpointing_changes_nothing(self):
        layers = parameters(LAYERS, frozen=True)
        last = parameters(LAYERS[:1], width=7)[0]
        leaves = leaves_of([*layers, last])
        x = normal(1, TOKENS, WIDTH).requires_grad_()

        def block(x):
            wide, narrow, *others = fused(x, *layers)
            return wide, glu(narrow, narrow.cos(), last, impl="triton"), *others

        found = []
        for function in (block, partial(checkpoint, block, use_reentrant=False)):
            torch.manual_seed(3)
            for leaf in (x, *leaves):
                leaf.grad = None
            # Two blocks, the first of which draws other numbers than the second.
            outputs = [y for _ in range(2) for y in function(x)]
            sum((y * normal(*y.shape)).sum() for y in outputs).backward()
            found.append([*(y.detach() for y in outputs), *(leaf.grad for leaf in (x, *leaves))])
        self.assertGreater(relative(found[0][0], found[0][len(LAYERS)]), 1e-2)
        assert_near(*found, 1e-6)
