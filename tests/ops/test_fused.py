"""Common tests of the fused ops: their Triton kernels, in Triton's interpreter, against the references.

test_fused_modules.py compares the references with the stock modules. test_causal_conv1d_qkv.py, test_cross_entropy.py and
test_streams.py have further tests of their ops.
"""

from functools import partial
from unittest import mock

import torch
from common.fused import CASES, HEAD_CASES, LOSS, beside, cast, errors, flatten, guarded_buffers, named, saved_in
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized

from transformers_packed.ops import (
    gated_delta_gates,
    gated_rms_norm,
    glu,
    linear_cross_entropy,
)
from transformers_packed.ops.backends.triton import glu as triton_glu
from transformers_packed.ops.terms import Adapter, Dequantized, LowRank, Projection


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
BARS = {FLOAT32: 1e-6, BFLOAT16: 1e-2}
SMALL = [(case, size) for case in CASES for size in case.small]
ONE_SIZE = [(case, case.small[-1]) for case in CASES if case.small]
# The convolution takes the interpreter as long as all others, with one size of heads as with two.
ONCE = [(case, size) for case, size in ONE_SIZE if size.get("dim") != 24 or case.name != "causal_conv1d_qkv"]
# Several tiles of tokens, the last of which is not full, and more tiles than programs that sum gradients: 130 tokens, except
# for these kernels.
SEVERAL_TILES = {"gated_delta_gates": 330, "causal_conv1d_qkv": 70, "mix_streams": 9, "add_to_streams": 9}


def columns_of_a_wider_row(x):
    """Place the same numbers between NaN, so that reads beside them show."""
    wide = x.new_full((*(n + 2 for n in x.shape[1:-1]), x.shape[-1] + 7), float("nan"))[None].repeat(
        len(x), *(1 for _ in x.shape[1:])
    )
    inside = wide[(slice(None), *(slice(1, -1) for _ in x.shape[1:-1]), slice(3, -4))]
    return inside.copy_(x)


def transposed(x):
    """Lay out the same numbers with the last dimension farthest apart in memory."""
    return x.transpose(1, -1).contiguous().transpose(1, -1)


def every_second(x):
    return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]


class FusedTest(InterpretedKernelsTest):
    @parameterized.expand(
        named(
            [(*case, SEVERAL_TILES.get(case[0].name, 130), FLOAT32) for case in SMALL]
            + [(*case, min(SEVERAL_TILES.get(case[0].name, 65), 65), BFLOAT16) for case in ONCE]
        )
    )
    def test_against_the_reference_in_float64(self, _, case, size, tokens, dtype):
        inputs = case.inputs(tokens, dtype=dtype, **size)
        actual = case.run(case.fused, inputs)
        expected = case.run("reference", cast(inputs, torch.float64))
        # The decay is float32 in every model. Everything else has the dtype of its input.
        dtypes = [FLOAT32 if (case.name, i) == ("gated_delta_gates", 0) else dtype for i in range(len(actual))]
        self.assertEqual([x.dtype for x in actual], dtypes)
        self.assertEqual([x.shape for x in actual], [x.shape for x in expected])
        self.assertLess(max(errors(actual, expected)), BARS[dtype])

    @parameterized.expand(named(ONCE))
    def test_one_token_and_a_batch_of_rows(self, _, case, size):
        rows = [case.inputs(tokens, **size)[: case.per_token] for tokens in (10, 11)]
        batch = [torch.cat([a, b[:, 1:]]) for a, b in zip(*rows, strict=True)]
        for inputs in (case.inputs(1, **size), [*batch, *case.inputs(10, **size)[case.per_token :]]):
            expected = case.run("reference", cast(inputs, torch.float64))
            self.assertLess(max(errors(case.run(case.fused, inputs), expected)), BARS[FLOAT32])

    @parameterized.expand(named(ONCE))
    def test_memory(self, _, case, size):
        """Buffers that nothing has written, writes outside of them, and tensors that are not contiguous."""
        inputs = case.inputs(min(SEVERAL_TILES.get(case.name, 33), 33), **size)
        plain = case.run(case.fused, inputs)
        with guarded_buffers():
            guarded = case.run(case.fused, inputs)
        self.assert_same_bits(guarded, plain)
        upstream = case.upstream(plain[: len(plain) - len(inputs) + case.constants])
        for layout in (columns_of_a_wider_row, transposed):
            laid_out = [layout(x) if x.ndim > 2 else every_second(x) for x in inputs]
            gradients = [layout(x) for x in upstream]
            self.assertFalse(any(x.is_contiguous() for x in (*laid_out, *gradients)))
            actual = case.run(case.fused, laid_out, gradients)
            if "lora" in case.name:
                # Products of matrices in another layout may round differently.
                self.assertLess(max(errors(actual, plain)), BARS[FLOAT32])
            else:
                self.assert_same_bits(actual, plain)

    @parameterized.expand(named((case, size) for case, size in ONE_SIZE if case.name.endswith("_linear")))
    def test_keeps_nothing_between_its_inputs_and_its_output(self, _, case, size):
        leaves = case.leaves(case.inputs(33, **size))
        kept = saved_in(lambda: case.outputs(case.fused, leaves))
        others = beside(kept, leaves)
        # One number per row of a norm.
        self.assertLessEqual(sum(x.numel() for x in others), 3 * 33)
        self.assertEqual(len(kept) - len(others), len(leaves))

    @parameterized.expand(named((case, size) for case, size in ONE_SIZE if case.name.endswith("_linear_lora")))
    def test_keeps_only_what_is_small_of_an_adapter(self, _, case, size):
        leaves = case.leaves(case.inputs(33, **size))
        others = beside(saved_in(lambda: case.outputs(case.fused, leaves)), leaves)
        width = leaves[-2].shape[-1]
        self.assertFalse([x.shape for x in others if x.numel() >= 33 * width])
        # The norms, the products with the narrow weight and with the first matrix, and copies of these matrices.
        narrow = len(leaves[-3]) * (len(leaves[-3]) <= 128) + size["rank"]
        self.assertLessEqual(sum(x.numel() for x in others), 33 * (3 + narrow) + narrow * width)

    @parameterized.expand(named(ONCE))
    def test_each_output_and_each_gradient_alone(self, _, case, size):
        inputs = case.inputs(3 if case.name == "causal_conv1d_qkv" else 9, **size)
        outputs = case.outputs(case.fused, inputs)
        self.assertFalse(any(x.requires_grad for x in outputs))
        everything = case.run(case.fused, inputs)[len(outputs) :]
        upstream = case.upstream(outputs)
        for i, expected in enumerate(everything):
            leaves = [x.detach().requires_grad_(i == j) for j, x in enumerate(inputs)]
            one = torch.autograd.grad(case.outputs(case.fused, leaves), leaves[i], upstream, allow_unused=True)
            self.assert_same_bits(one, [expected], f"input {i}")
        if len(outputs) == 1:
            return
        for i in {0, len(outputs) - 1}:
            alone = [x if i == j else torch.zeros_like(x) for j, x in enumerate(upstream)]
            expected = case.run(case.fused, inputs, alone)[len(outputs) :]
            leaves = [x.detach().requires_grad_(j < len(everything)) for j, x in enumerate(inputs)]
            output = case.outputs(case.fused, leaves)[i]
            actual = torch.autograd.grad(output, leaves[: len(everything)], upstream[i], materialize_grads=True)
            self.assert_same_bits(actual, expected, f"output {i}")

    @parameterized.expand(named(ONCE))
    def test_no_tokens(self, _, case, size):
        inputs = case.inputs(0, **size)
        results = case.run(case.fused, inputs)
        outputs = len(results) - len(inputs) + case.constants
        self.assertEqual([x.numel() for x in results[: outputs + case.per_token]], [0] * (outputs + case.per_token))
        for gradient in results[outputs + case.per_token :]:
            self.assertEqual(int(gradient.count_nonzero()), 0)

    @parameterized.expand(named(ONCE))
    def test_transforms_of_torch_func_run_the_reference(self, _, case, size):
        inputs = case.inputs(2, **size)

        def loss(impl, x):
            return sum(y.square().sum() for y in case.outputs(impl, [x, *inputs[1:]]))

        expected, got = (torch.func.grad(partial(loss, impl))(inputs[0]) for impl in ("reference", "auto"))
        self.assert_same_bits([got], [expected])
        with self.assertRaisesRegex(ValueError, r"does not support torch\.func transforms\. Use impl="):
            torch.func.grad(partial(loss, case.fused))(inputs[0])

    def test_small_and_large_decays(self):
        a = torch.linspace(-80, 80, 641)[:, None]
        zero = torch.zeros(1)
        for dtype, impl in ((FLOAT32, "triton"), (torch.float64, "reference")):
            leaf = a.to(dtype).requires_grad_()
            g = gated_delta_gates(leaf, leaf, zero.to(dtype), zero.to(dtype), impl=impl)[0]
            results = [g.detach(), *torch.autograd.grad(g.sum(), leaf)]
            if impl == "triton":
                actual = results
        for x, y in zip(actual, results, strict=True):
            self.assertLess(float(((x - y) / y).abs().max()), 1e-6)

    def test_a_label_that_is_no_word_makes_the_loss_nan(self):
        hidden, weight, labels = LOSS.inputs(3, **LOSS.small[0])
        for label in (-1, len(weight), 2**40):
            labels[0, 0] = label
            self.assertTrue(linear_cross_entropy(hidden, weight, labels, impl="triton").isnan())


HEADS, WIDTH, TOKENS = 4, 64, 33
AFTER = [
    ("swiglu", glu),
    ("sigmoid", partial(glu, activation="sigmoid")),
    (
        "norm",
        lambda gate, x, layer, impl: gated_rms_norm(
            *(y.unflatten(-1, (HEADS, -1)) for y in (x, gate)),
            torch.linspace(0.5, 2, WIDTH // HEADS, dtype=x.dtype),
            linear_weight=layer,
            impl=impl,
        ),
    ),
]


def adapted(out, trained, dtype=FLOAT32, weight=lambda x: x):
    """A layer with biases and two adapters, in which the tensors named in `trained` need gradients."""
    generator = torch.Generator().manual_seed(0)

    def normal(name, *shape):
        x = torch.randn(shape, generator=generator).bfloat16().to(dtype) / 8
        return x.requires_grad_(name in trained)

    adapters = [
        Adapter(normal("down", rank, WIDTH), normal("up", out, rank), scale, 0.0, normal("adapter_bias", out))
        for rank, scale in ((3, 1.7), (2, 0.5))
    ]
    return Projection(weight(normal("weight", out, WIDTH)), normal("bias", out), tuple(adapters))


TRAINED = [
    ("everything", ("weight", "bias", "down", "up", "adapter_bias")),
    ("adapters", ("down", "up")),
    ("down", ("down",)),
    ("up", ("up",)),
    ("biases", ("bias", "adapter_bias")),
    ("nothing", ()),
]


class LinearWithAdaptersTest(InterpretedKernelsTest):
    """A layer with adapters after an op: what is trained, and what is kept."""

    def results(self, op, impl, inputs, layer):
        leaves = [*inputs, *(t for t in flatten([layer])[1] if t is not None)]
        wanted = [x for x in leaves if x.requires_grad]
        y = op(*inputs, layer, impl=impl)
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, wanted, upstream)]

    def inputs(self, dtype=FLOAT32):
        generator = torch.Generator().manual_seed(2)
        return [torch.randn(1, TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_() for _ in range(2)]

    @parameterized.expand(
        [
            (f"{name}_{trained[0]}_{out}", op, trained[1], out)
            for name, op in AFTER
            for trained in TRAINED
            for out in (7, 150)
            # What is trained concerns the layer, which is the same after each op.
            if name == "swiglu" or (trained[0], out) in (("everything", 7), ("adapters", 150), ("nothing", 150))
        ]
    )
    def test_against_the_reference_in_float64(self, _, op, trained, out):
        inputs = self.inputs()
        expected = self.results(
            op,
            "reference",
            [x.detach().double().requires_grad_() for x in inputs],
            adapted(out, trained, torch.float64),
        )
        actual = self.results(op, "triton", inputs, adapted(out, trained))
        self.assertLess(max(errors(actual, expected)), 2e-6)
        kept = saved_in(lambda: op(*inputs, adapted(out, trained), impl="triton"))
        self.assertFalse([x for x in beside(kept, inputs) if x.numel() == TOKENS * WIDTH])

    @parameterized.expand([(7, TRAINED[0]), (150, TRAINED[0]), (7, TRAINED[1]), (150, TRAINED[2]), (150, TRAINED[4])])
    def test_a_product_recomputed_in_pieces(self, out, trained):
        """Only the product with a frozen weight is recomputed in pieces, the last of which is shorter."""
        layer, rows, add_rows = adapted(out, trained[1]), [], LowRank.add_rows
        expected = self.results(glu, "triton", self.inputs(), layer)
        with (
            mock.patch.object(triton_glu, "_PIECE", 4 * WIDTH + 1),
            mock.patch.object(LowRank, "add_rows", autospec=True) as add,
        ):
            add.side_effect = lambda term, x: rows.append(len(x)) or add_rows(term, x)
            actual = self.results(glu, "triton", self.inputs(), layer)
        self.assertLess(max(errors(actual, expected)), 1e-6)
        if "down" in trained[1]:
            in_pieces = "weight" not in trained[1]
            self.assertEqual(rows, [len(x) for x in torch.empty(TOKENS).split(4 if in_pieces else TOKENS)])

    @parameterized.expand(AFTER)
    def test_a_quantized_weight(self, _, op):
        for out in (7, 150):
            calls, trained = [], ("down", "up")

            def quantized(weight, calls=calls):
                return Dequantized(weight.shape, FLOAT32, lambda: calls.append(weight) or weight)

            actual = self.results(op, "triton", self.inputs(), adapted(out, trained, weight=quantized))
            self.assertEqual(len(calls), 2)
            expected = self.results(op, "reference", self.inputs(), adapted(out, trained))
            self.assertLess(max(errors(actual, expected)), 2e-6)

    @parameterized.expand(AFTER)
    def test_frozen_float32_weights_under_autocast(self, _, op):
        """Products in bfloat16, with gradients of the adapters in float32."""
        trained, found = ("down", "up"), []
        for impl in ("triton", "reference"):
            with torch.autocast("cpu", BFLOAT16):
                found.append(self.results(op, impl, self.inputs(BFLOAT16), adapted(150, trained)))
        self.assertEqual([x.dtype for x in found[0]], [BFLOAT16] * 3 + [FLOAT32] * 4)
        self.assertEqual([x.dtype for x in found[0]], [x.dtype for x in found[1]])
        self.assertLess(max(errors(*found)), 2e-2)


class BadInputTest(InterpretedKernelsTest):
    @parameterized.expand(named([(case,) for case in (*CASES, *HEAD_CASES) if case.small]))
    def test_names_of_implementations(self, _, case):
        inputs = case.inputs(3, **case.small[0])
        with self.assertRaisesRegex(ValueError, 'expected impl=.*got "fla"'):
            case.op("fla", *inputs)
        with (
            mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: False),
            self.assertRaisesRegex(ValueError, f'impl="{case.fused}" supports, got {case.fused}: needs CUDA tensors'),
        ):
            case.op(case.fused, *inputs)
