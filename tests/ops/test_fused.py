"""Common tests of the fused ops: their Triton kernels, in Triton's interpreter, against the references.

Each op has further tests in its own file: test_norm.py, test_glu.py, test_rotary.py, test_causal_conv1d_qkv.py,
test_gated_delta_gates.py and test_cross_entropy.py.
"""

import unittest
from functools import partial
from unittest import mock

import torch
from common.fused import CASES, LOSS, cast, errors, guarded_buffers, named
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized

from transformers_packed.ops import (
    gated_delta_gates,
    gated_rms_norm,
    glu,
    linear_cross_entropy,
)


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
BARS = {FLOAT32: 1e-6, BFLOAT16: 1e-2}
SMALL = [(case, size) for case in CASES for size in case.small]
ONE_SIZE = [(case, case.small[-1]) for case in CASES if case.small]


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


class InterpretedTest(InterpretedKernelsTest):
    def assert_same_bits(self, actual, expected, message=None):
        for a, b in zip(actual, expected, strict=True):
            self.assertTrue(torch.equal(a, b), message)


class FusedTest(InterpretedTest):
    @parameterized.expand(
        named(
            (*case, tokens, dtype)
            for case in SMALL
            for tokens, dtype in ((1, FLOAT32), (63, FLOAT32), (65, FLOAT32), (130, FLOAT32), (65, BFLOAT16))
        )
    )
    def test_against_the_reference_in_float64(self, _, case, size, tokens, dtype):
        inputs = case.inputs(tokens, dtype=dtype, **size)
        actual = case.run("triton", inputs)
        expected = case.run("reference", cast(inputs, torch.float64))
        # The decay is float32 in every model. Everything else has the dtype of its input.
        dtypes = [FLOAT32 if (case.name, i) == ("gated_delta_gates", 0) else dtype for i in range(len(actual))]
        self.assertEqual([x.dtype for x in actual], dtypes)
        self.assertEqual([x.shape for x in actual], [x.shape for x in expected])
        self.assertLess(max(errors(actual, expected)), BARS[dtype])

    @parameterized.expand(named(ONE_SIZE))
    def test_a_batch_of_rows(self, _, case, size):
        rows = [case.inputs(tokens, **size)[: case.per_token] for tokens in (10, 11)]
        batch = [torch.cat([a, b[:, 1:]]) for a, b in zip(*rows, strict=True)]
        batch += case.inputs(10, **size)[case.per_token :]
        expected = case.run("reference", cast(batch, torch.float64))
        self.assertLess(max(errors(case.run("triton", batch), expected)), BARS[FLOAT32])

    @parameterized.expand(
        named((*case, layout) for case in ONE_SIZE for layout in (columns_of_a_wider_row, transposed))
    )
    def test_inputs_and_gradients_that_are_not_contiguous(self, _, case, size, layout):
        inputs = case.inputs(33, **size)
        expected = case.run("triton", inputs)
        upstream = case.upstream(expected[: len(case.outputs("triton", inputs))])
        inputs = [layout(x) if x.ndim > 2 else every_second(x) for x in inputs]
        upstream = [layout(x) for x in upstream]
        self.assertFalse(any(x.is_contiguous() for x in (*inputs, *upstream)))
        self.assert_same_bits(case.run("triton", inputs, upstream), expected)

    @parameterized.expand(named(ONE_SIZE))
    def test_reads_no_buffer_that_it_did_not_write_and_writes_nothing_else(self, _, case, size):
        inputs = case.inputs(33, **size)
        plain = case.run("triton", inputs)
        with guarded_buffers():
            guarded = case.run("triton", inputs)
        self.assert_same_bits(guarded, plain)
        self.assert_same_bits(case.run("triton", inputs), plain, "not the same twice")

    @parameterized.expand(named((case, size) for case, size in ONE_SIZE if case.name.endswith("_linear")))
    def test_keeps_nothing_between_its_inputs_and_its_output(self, _, case, size):
        leaves = case.leaves(case.inputs(33, **size))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            case.outputs("triton", leaves)
        inputs = {x.untyped_storage().data_ptr() for x in leaves}
        others = [x for x in kept if x.untyped_storage().data_ptr() not in inputs]
        # One number per row of a norm.
        self.assertLessEqual(sum(x.numel() for x in others), 3 * 33)
        self.assertEqual(len(kept) - len(others), len(leaves))

    @parameterized.expand(named(ONE_SIZE))
    def test_each_output_and_each_gradient_alone(self, _, case, size):
        inputs = case.inputs(33, **size)
        outputs = case.outputs("triton", inputs)
        self.assertFalse(any(x.requires_grad for x in outputs))
        everything = case.run("triton", inputs)[len(outputs) :]
        upstream = case.upstream(outputs)
        for i, expected in enumerate(everything):
            leaves = [x.detach().requires_grad_(i == j) for j, x in enumerate(inputs)]
            one = torch.autograd.grad(case.outputs("triton", leaves), leaves[i], upstream, allow_unused=True)
            self.assert_same_bits(one, [expected], f"input {i}")
        if len(outputs) == 1:
            return
        for i in range(len(outputs)):
            alone = [x if i == j else torch.zeros_like(x) for j, x in enumerate(upstream)]
            expected = case.run("triton", inputs, alone)[len(outputs) :]
            leaves = [x.detach().requires_grad_(j < len(everything)) for j, x in enumerate(inputs)]
            output = case.outputs("triton", leaves)[i]
            actual = torch.autograd.grad(output, leaves[: len(everything)], upstream[i])
            self.assert_same_bits(actual, expected, f"output {i}")

    @parameterized.expand(named(ONE_SIZE))
    def test_no_tokens(self, _, case, size):
        inputs = case.inputs(0, **size)
        results = case.run("triton", inputs)
        outputs = len(results) - len(inputs) + case.constants
        self.assertEqual([x.numel() for x in results[: outputs + case.per_token]], [0] * (outputs + case.per_token))
        for gradient in results[outputs + case.per_token :]:
            self.assertEqual(int(gradient.count_nonzero()), 0)

    @parameterized.expand(named(ONE_SIZE))
    def test_second_derivatives_are_refused(self, _, case, size):
        leaves = [x.requires_grad_() for x in case.inputs(2, **size)[: case.per_token]]
        output = case.outputs("triton", [*leaves, *case.inputs(2, **size)[case.per_token :]])[-1]
        # With a constant output gradient, only the inputs can make the input gradients differentiable.
        for loss in (output.square().sum(), output.sum()):
            with self.assertRaisesRegex(ValueError, "got create_graph=True. .*CPU"):
                torch.autograd.grad(loss, leaves[-1], create_graph=True)

    @parameterized.expand(named(ONE_SIZE))
    def test_transforms_of_torch_func_run_the_reference(self, _, case, size):
        inputs = case.inputs(2, **size)

        def loss(impl, x):
            return sum(y.square().sum() for y in case.outputs(impl, [x, *inputs[1:]]))

        expected, got = (torch.func.grad(partial(loss, impl))(inputs[0]) for impl in ("reference", "auto"))
        self.assert_same_bits([got], [expected])
        with self.assertRaisesRegex(ValueError, r"does not support torch\.func transforms\. Use impl="):
            torch.func.grad(partial(loss, "triton"))(inputs[0])

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

    def test_labels_that_are_not_contiguous(self):
        hidden, weight, labels = LOSS.inputs(6, **LOSS.small[0])
        labels = labels[0].clamp_min(0)
        expected = linear_cross_entropy(hidden[0, ::2], weight, labels[::2].clone(), impl="triton")
        self.assertEqual(linear_cross_entropy(hidden[0, ::2], weight, labels[::2], impl="triton"), expected)

    def test_a_linear_cross_entropy_in_guarded_buffers(self):
        # tests/ops/test_cross_entropy.py leaves this case out. The GPU tests use it in this form.
        inputs = LOSS.inputs(65, **LOSS.small[0])
        plain = LOSS.run("triton", inputs)
        with guarded_buffers():
            self.assert_same_bits(LOSS.run("triton", inputs), plain)
        expected = LOSS.run("reference", cast(inputs, torch.float64))
        self.assertLess(max(errors(plain, expected)), BARS[FLOAT32])


class ReferenceTest(unittest.TestCase):
    @parameterized.expand(named(ONE_SIZE))
    def test_gradients_in_float64(self, _, case, size):
        leaves = case.leaves(case.inputs(3, dtype=torch.float64, **size))
        self.assertTrue(torch.autograd.gradcheck(lambda *x: case.outputs("reference", x), leaves, fast_mode=True))


class BadInputTest(InterpretedKernelsTest):
    @parameterized.expand([("swiglu", glu, 0), ("sigmoid", partial(glu, activation="sigmoid"), 0), ("norm", None, 1)])
    def test_a_cast_before_the_linear_layer(self, _, op, heads):
        x = torch.randn(5, *[2] * heads, 16, dtype=BFLOAT16)
        op = op or (lambda x, gate, w, **options: gated_rms_norm(x, gate, x[0, 0], linear_weight=w, **options))
        weight = torch.randn(3, x[0].numel())
        with self.assertRaisesRegex(ValueError, "needs torch.bfloat16 for the weight too"):
            op(x, x, weight, impl="triton")
        with torch.autocast("cpu", BFLOAT16):
            y = op(x, x, weight)
            self.assertEqual(y.dtype, BFLOAT16)
            self.assertTrue(torch.equal(y, op(x, x, weight, impl="reference")))

    @parameterized.expand(named([(case,) for case in (*CASES, LOSS) if case.small]))
    def test_names_of_implementations(self, _, case):
        inputs = case.inputs(3, **case.small[0])
        with self.assertRaisesRegex(ValueError, 'expected impl=.*got "fla"'):
            case.op("fla", *inputs)
        with (
            mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: False),
            self.assertRaisesRegex(ValueError, 'impl="triton" supports, got triton: needs CUDA tensors'),
        ):
            case.op("triton", *inputs)


if __name__ == "__main__":
    unittest.main()
