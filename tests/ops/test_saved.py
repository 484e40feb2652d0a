"""What autograd functions save, and when: before their last product, which gradient checkpointing then leaves out."""

import gc
import unittest
import weakref
from contextlib import nullcontext
from functools import partial

import torch
from common.families import tiny_model
from common.launches import launches
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from transformers_packed import patch_model
from transformers_packed.ops import experts, gated_rms_norm, glu
from transformers_packed.ops.autograd import save, saved
from transformers_packed.ops.linear import shared_input_linears
from transformers_packed.ops.terms import Adapter, Float8Weight, Projection


# Weights of up to 128 rows share a product with the adapters.
TOKENS, WIDTH, OUT, RANK = 6, 160, 144, 2
# FLOPs of the products with the weight and with the first matrix of the adapter.
LARGE, NARROW = 2 * TOKENS * WIDTH * OUT, 2 * TOKENS * WIDTH * RANK


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, other=None):
        save(ctx, x, other, x * x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        x, other, square = saved(ctx)
        assert other is None and torch.equal(square, x * x)
        return 3 * square * gradient, None


def run(function, *inputs):
    """The output of a function of tensors that need gradients, and their gradients."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    y = function(*inputs)
    y.sin().sum().backward()
    return y.detach(), *(x.grad for x in inputs)


def again(function):
    return partial(checkpoint, function, use_reentrant=False)


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.overloadpacket.__name__.rstrip("_") in ("mm", "addmm", "_scaled_mm"):
            left, right = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            self.flops += 2 * left.numel() * right.shape[1]
        return op(*args, **(kwargs or {}))


def work_again(function, *inputs):
    """The FLOPs and launches that checkpointing adds to those of a function and of its gradients."""
    found = []
    for each in (function, again(function)):
        with Products() as products, launches() as launched:
            run(each, *inputs)
        found.append((products.flops, launched))
    (flops, launched), (more_flops, more_launched) = found
    return more_flops - flops, more_launched - launched


class Packed:
    """What a hook returns for a tensor. `made` has weak references to all of them."""

    def __init__(self, x, made):
        self.x = x
        made.append(weakref.ref(self))

    @classmethod
    def hooks(cls, made):
        # As gradient checkpointing does.
        def pack(x):
            return cls(x.detach() if x.requires_grad else x, made)

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda found: found.x)


class SaveTest(unittest.TestCase):
    def setUp(self):
        self.x = torch.arange(1.0, 4.0, requires_grad=True)

    @parameterized.expand([("plain", Cube.apply), ("checkpointed", again(Cube.apply))])
    def test_gradients(self, _, function):
        for retained in (True, False):
            y = function(self.x)
            for _ in range(1 + retained):
                (found,) = torch.autograd.grad(y.sum(), self.x, retain_graph=retained)
                self.assertEqual(found.tolist(), [3.0, 12.0, 27.0])

    @parameterized.expand([("plain",), ("hooked",)])
    def test_a_second_backward_is_an_error(self, kind):
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with hooks if kind == "hooked" else nullcontext():
            y = Cube.apply(self.x)
        y.sum().backward()
        with self.assertRaisesRegex(RuntimeError, "backward through the graph a second time"):
            y.sum().backward()

    @parameterized.expand([("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode), ("detached", None)])
    def test_nothing_is_packed_without_a_need(self, _, mode):
        packed = []
        with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda x: x), mode() if mode else nullcontext():
            Cube.apply(self.x if mode else self.x.detach())
        self.assertEqual(packed, [])


def layer(adapted, in_float8):
    generator = torch.Generator().manual_seed(0)
    weight, down, up = (torch.randn(size, generator=generator) for size in ((OUT, WIDTH), (RANK, WIDTH), (OUT, RANK)))
    weight = Float8Weight(weight.bfloat16()) if in_float8 else weight
    adapters = (Adapter(down.requires_grad_(), up.requires_grad_()),) if adapted else ()
    return Projection(weight, None, adapters)


LAST = {
    "glu": lambda last, x: glu(x, x + 1, last, impl="triton"),
    "sigmoid": lambda last, x: glu(x, x + 1, last, activation="sigmoid", impl="triton"),
    "linear": lambda last, x: shared_input_linears(x, last, impl="fused")[0],
    "norm": lambda last, x: gated_rms_norm(
        *(x.view(1, TOKENS, 2, -1),) * 2, torch.ones(WIDTH // 2), linear_weight=last, impl="triton"
    ),
}


class FreedTest(InterpretedKernelsTest):
    """What hooks return is freed without the collector of cycles, which may come after many layers."""

    def setUp(self):
        super().setUp()
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)

    def test_an_output(self):
        class Exp(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                y = x.exp()
                save(ctx, y)
                return y

        packed = []
        with Packed.hooks(packed):
            y = Exp.apply(torch.ones(2, requires_grad=True))
        self.assertIsNotNone(packed[0]())
        del y
        self.assertIsNone(packed[0]())

    def test_layers(self):
        model = get_peft_model(tiny_model("qwen3_5"), LoraConfig(r=2, target_modules="all-linear"))
        patch_model(model)
        packed = []
        with Packed.hooks(packed):
            y = model(input_ids=torch.arange(12)[None], use_cache=False).logits
        self.assertGreater(len(packed), 30)
        del y
        self.assertEqual([found().x.shape for found in packed if found() is not None], [])

    def test_compiled_in_one_graph(self):
        last, x = layer(False, True), torch.randn(1, TOKENS, WIDTH).bfloat16()

        def block(x):
            return LAST["linear"](last, x)

        compiled = torch.compile(block, backend="eager", fullgraph=True)
        self.assertTrue(all(map(torch.equal, run(compiled, x), run(block, x))))


class LastProductTest(InterpretedKernelsTest):
    """A layer that ends with a product, as most decoder layers do, computes all but this product again."""

    # The op, and whether its layer is adapted and in float8.
    @parameterized.expand(
        [("glu", True, False), ("sigmoid", False, False), ("linear", True, True), ("norm", False, True)]
    )
    def test_ops(self, name, adapted, in_float8):
        last, op = layer(adapted, in_float8), LAST[name]
        x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
        x = x.bfloat16() if in_float8 else x

        def block(x):
            return x[..., :OUT] + op(last, x)

        expected, found = run(block, x), run(again(block), x)
        self.assertTrue(all(map(torch.equal, found, expected)))
        with torch.no_grad(), Products() as products:
            block(x)
        self.assertGreaterEqual(products.flops, adapted * NARROW + LARGE * (not in_float8))
        self.assertEqual(work_again(block, x)[0], adapted * NARROW)

    def test_experts(self):
        generator = torch.Generator().manual_seed(0)
        gate_up, down = (torch.randn(size, generator=generator).bfloat16() for size in ((3, 128, 64), (3, 64, 64)))
        adapters = [
            Adapter(*(torch.randn(3, *size, generator=generator).requires_grad_() for size in sizes))
            for sizes in (((RANK, 64), (128, RANK)), ((RANK, 64), (64, RANK)))
        ]
        index, weights = torch.tensor([[0, 1], [1, 2], [2, 0]]), torch.full((3, 2), 0.5)

        def block(x):
            return x + experts(
                x, index, weights, gate_up, down, gate_up_adapter=adapters[0], down_adapter=adapters[1], impl="triton"
            )

        x = torch.randn(3, 64, generator=generator).bfloat16()
        self.assertTrue(all(map(torch.equal, run(block, x), run(again(block), x))))
        _, launches = work_again(block, x)
        self.assertEqual(launches, {"_plan": 1, "_place": 1, "_narrow_rows": 1, "_gate_up": 1})
