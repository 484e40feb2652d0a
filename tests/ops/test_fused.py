"""The layers' fused ops: their Triton kernels, in Triton's interpreter, against the references, and these against the
built-in modules."""

import unittest
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from common.fused import CASES, LOSS, boundaries_of, cast, errors, guarded_buffers, named, relative
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import (
    causal_conv1d_qkv,
    gated_delta_gates,
    gated_rms_norm,
    glu,
    linear_cross_entropy,
    qk_norm_rope,
    rms_norm,
)


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
BARS = {FLOAT32: 1e-6, BFLOAT16: 1e-2}
SMALL = [(case, size) for case in CASES for size in case.small]
ONE_SIZE = [(case, case.small[-1]) for case in CASES if case.small]


def columns_of_a_wider_row(x):
    """The same numbers between NaN: what is read beside them shows."""
    wide = x.new_full((*(n + 2 for n in x.shape[1:-1]), x.shape[-1] + 7), float("nan"))[None].repeat(
        len(x), *(1 for _ in x.shape[1:])
    )
    inside = wide[(slice(None), *(slice(1, -1) for _ in x.shape[1:-1]), slice(3, -4))]
    return inside.copy_(x)


def transposed(x):
    """The same numbers with the last dimension farthest apart in memory."""
    return x.transpose(1, -1).contiguous().transpose(1, -1)


def every_second(x):
    return torch.stack([x, torch.full_like(x, float("nan"))], dim=-1)[..., 0]


class InterpretedTest(InterpretedKernelsTest):
    def setUp(self):
        super().setUp()
        # What a kernel's program does for its runs of many tokens, it does for runs of a few too.
        self.enterContext(mock.patch("transformers_packed.ops.backends.triton.convolution._TOKENS", 6))

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
        # The decay is float32 in every model; all else has the dtype of the input that it belongs to.
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
        # One number for each row of a norm.
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
        # With a constant gradient coming in, nothing but the inputs would make theirs depend on anything.
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
        with self.assertRaisesRegex(ValueError, "torch.func. Use impl="):
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
        # The case that tests/ops/test_cross_entropy.py leaves out; the GPU tests use it in this form.
        inputs = LOSS.inputs(65, **LOSS.small[0])
        plain = LOSS.run("triton", inputs)
        with guarded_buffers():
            self.assert_same_bits(LOSS.run("triton", inputs), plain)
        expected = LOSS.run("reference", cast(inputs, torch.float64))
        self.assertLess(max(errors(plain, expected)), BARS[FLOAT32])


class HaloTest(InterpretedTest):
    """A part of a row, with the tokens before it, which count as far as the positions reach."""

    def compute(self, x, weight, position, upstream, halo=None):
        from transformers_packed.ops.backends.triton.convolution import CausalConv1dQKV

        inputs = [tensor.detach().requires_grad_() for tensor in (x, weight, halo) if tensor is not None]
        outputs = CausalConv1dQKV.apply(*inputs[:2], position, 1, 1, 16, 1e-6, *inputs[2:])
        return list(outputs), list(torch.autograd.grad(outputs, inputs, upstream))

    @parameterized.expand(
        [
            (before, length, width)
            for before in (0, 1, 2, 3, 5)
            for length in (3, 4, 6, 25)
            for width in (4, 3, 2)
            if width == 4 or length == 6
        ]
    )
    def test_equals_the_whole_row(self, before, length, width):
        generator = torch.Generator().manual_seed(0)
        # A document of which `before` tokens stand before the part, behind another one; two tokens begin a third.
        first = 4
        total, start = first + before + length, first + before
        x, weight = (torch.randn(*shape, generator=generator) for shape in ((total, 48), (48, width)))
        lengths = [first, before + length - 2, 2]
        position = torch.cat([torch.arange(n) for n in lengths]).to(torch.int32)
        upstream = [torch.randn(total, 1, 16, generator=generator) for _ in range(3)]
        # Of the outputs of the part alone, as its gradients are.
        alone = [F.pad(y[start:], (0, 0, 0, 0, start, 0)) for y in upstream]
        outputs, (dx, dweight) = self.compute(x, weight, position, alone)
        halo = x[start - (width - 1) : start].clone()
        halo[: max(0, width - 1 - before)] = float("nan")
        with guarded_buffers():
            found, gradients = self.compute(x[start:], weight, position[start:], [y[start:] for y in upstream], halo)
        self.assert_same_bits(found, [y[start:] for y in outputs])
        self.assert_same_bits(gradients[:1], [dx[start:]])
        torch.testing.assert_close(gradients[1], dweight, rtol=1e-5, atol=1e-5)
        self.assert_same_bits(gradients[2:], [dx[start - (width - 1) : start]])


class DocumentsMixin:
    """Documents in `causal_conv1d_qkv`."""

    lengths = (5, 1, 34, 9)
    impl: str

    def run_row(self, x, upstream, boundaries):
        """q, k, v and the gradient of x, `[T, ...]`, and the gradient of the weight."""
        x = x.detach().requires_grad_()
        weight = torch.randn(48, 4, generator=torch.Generator().manual_seed(2)).requires_grad_()
        options = {"key_heads": 1, "key_dim": 16, "value_dim": 16, "boundaries": boundaries, "impl": self.impl}
        outputs = causal_conv1d_qkv(x, weight, **options)
        gradients = torch.autograd.grad(outputs, (x, weight), upstream)
        return [*(y[0].detach() for y in (*outputs, gradients[0])), gradients[1]]

    def row(self):
        generator = torch.Generator().manual_seed(0)
        total = sum(self.lengths)
        x = torch.randn(1, total, 48, generator=generator)
        upstream = [torch.randn(1, total, 1, 16, generator=generator) for _ in range(3)]
        return x, upstream, SequenceBoundaries.from_lengths(self.lengths)

    def cut(self, results):
        """One list per document of what belongs to its tokens."""
        return list(zip(*(x.split(self.lengths) for x in results[:4]), strict=True))

    def spans(self, boundaries):
        cumulative = boundaries.cu_seqlens_cpu.tolist()
        return [slice(*span) for span in zip(cumulative, cumulative[1:], strict=False)]

    def test_each_document_equals_itself_alone(self):
        x, upstream, boundaries = self.row()
        alone = [self.run_row(x[:, s], [u[:, s] for u in upstream], None) for s in self.spans(boundaries)]
        expected = [*(torch.cat(column) for column in zip(*(y[:4] for y in alone), strict=True))]
        expected.append(sum(y[4] for y in alone))
        self.assertLess(max(errors(self.run_row(x, upstream, boundaries), expected)), 1e-6)
        # The comparison can fail.
        self.assertGreater(min(errors(self.run_row(x, upstream, None), expected)), 1e-2)

    @parameterized.expand([("halved", 0.5), ("nan", float("nan"))])
    def test_a_change_in_one_document_changes_no_bit_in_others(self, _, factor):
        x, upstream, boundaries = self.row()
        before = self.cut(self.run_row(x, upstream, boundaries))
        for changed, span in enumerate(self.spans(boundaries)):
            # Its last token is the one that a document behind it could see, and its first one that before it.
            other = x.clone()
            other[:, span] *= factor
            after = self.cut(self.run_row(other, upstream, boundaries))
            for document in range(len(self.lengths)):
                same = [torch.equal(a, b) for a, b in zip(after[document], before[document], strict=True)]
                self.assertEqual(same, [document != changed] * 4, f"document {document}, changed {changed}")

    def test_gradients_across_documents_are_exactly_zero(self):
        x, upstream, boundaries = self.row()
        for span in self.spans(boundaries):
            one = [torch.zeros_like(u) for u in upstream]
            for a, b in zip(one, upstream, strict=True):
                a[:, span] = b[:, span]
            gradient = self.run_row(x, one, boundaries)[3]
            self.assertGreater(int(gradient[span].count_nonzero()), 0)
            gradient[span] = 0
            self.assertEqual(int(gradient.count_nonzero()), 0)


class TritonDocumentsTest(DocumentsMixin, InterpretedTest):
    impl = "triton"


class ReferenceDocumentsTest(DocumentsMixin, unittest.TestCase):
    impl = "reference"


class ReferenceTest(unittest.TestCase):
    """The references are the built-in modules, bit for bit in float32."""

    def setUp(self):
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def assert_same(self, ours, theirs, inputs, summed=()):
        """Equal outputs; where sums may run in another order, in those of `summed` and in gradients, to 1e-6."""
        results = []
        for function in (ours, theirs):
            leaves = [x.detach().requires_grad_() for x in inputs]
            outputs = function(*leaves)
            upstream = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in outputs]
            results.append([x.detach() for x in (*outputs, *torch.autograd.grad(outputs, leaves, upstream))])
        self.assertLess(max(errors(*results)), 1e-6)
        for i, (a, b) in enumerate(zip(*(x[: len(outputs)] for x in results), strict=True)):
            self.assertTrue(i in summed or torch.equal(a, b), f"output {i}")

    def call(self, module, **weights):
        """The module as a function of its inputs and weights."""
        return lambda *inputs: torch.func.functional_call(module, weights, inputs)

    @parameterized.expand(named(ONE_SIZE))
    def test_gradients_in_float64(self, _, case, size):
        leaves = case.leaves(case.inputs(3, dtype=torch.float64, **size))
        self.assertTrue(torch.autograd.gradcheck(lambda *x: case.outputs("reference", x), leaves, fast_mode=True))

    def test_rms_norm(self):
        module = builtin.Qwen3_5RMSNorm(40, eps=1e-5)
        x, residual, weight = self.normal(2, 7, 40), self.normal(2, 7, 40), self.normal(40)
        self.assert_same(
            lambda x, w: (rms_norm(x, w, 1e-5, impl="reference"),),
            lambda x, w: (self.call(module, weight=w)(x),),
            [x, weight],
        )

        def added(x, residual, w):
            stream = residual + x
            return self.call(module, weight=w)(stream), stream

        self.assert_same(
            lambda x, r, w: rms_norm(x, w, 1e-5, residual=r, impl="reference"), added, [x, residual, weight]
        )

    def test_gated_rms_norm(self):
        module = builtin.Qwen3_5RMSNormGated(40, eps=1e-5)
        self.assert_same(
            lambda x, gate, w: (gated_rms_norm(x, gate, w, 1e-5, impl="reference"),),
            lambda x, gate, w: (self.call(module, weight=w)(x, gate),),
            [self.normal(9, 40), self.normal(9, 40), self.normal(40)],
        )

    def test_swiglu(self):
        config = Qwen3_5TextConfig(hidden_size=8, intermediate_size=24)
        module = builtin.Qwen3_5MLP(config, 24)
        self.assert_same(
            lambda x: (module.down_proj(glu(module.gate_proj(x), module.up_proj(x), impl="reference")),),
            lambda x: (module(x),),
            [self.normal(2, 7, 8)],
        )

    def test_sigmoid_gate(self):
        self.assert_same(
            lambda gate, x: (glu(gate, x, activation="sigmoid", impl="reference"),),
            lambda gate, x: (x * torch.sigmoid(gate),),
            [self.normal(2, 7, 8), self.normal(2, 7, 8)],
        )

    def test_gated_delta_gates(self):
        def theirs(a, b, a_log, dt_bias):
            return -a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias), b.sigmoid()

        inputs = [self.normal(2, 7, 6), self.normal(2, 7, 6), self.normal(6), self.normal(6)]
        self.assert_same(lambda *x: gated_delta_gates(*x, impl="reference"), theirs, inputs)

    def test_qk_norm_rope(self):
        norm = builtin.Qwen3_5RMSNorm(16)
        config = Qwen3_5TextConfig(
            hidden_size=64,
            num_attention_heads=3,
            head_dim=16,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        )
        cos, sin = builtin.Qwen3_5TextRotaryEmbedding(config)(self.normal(1), torch.arange(7)[None].expand(3, 2, 7))
        self.assertEqual(cos.shape, (2, 7, 8))

        def theirs(query_gate, key, query_weight, key_weight):
            query, gate = query_gate.chunk(2, dim=-1)
            query = self.call(norm, weight=query_weight)(query).transpose(1, 2)
            key = self.call(norm, weight=key_weight)(key).transpose(1, 2)
            query, key = builtin.apply_rotary_pos_emb(query, key, cos, sin)
            return query.transpose(1, 2), key.transpose(1, 2), gate

        inputs = [self.normal(2, 7, 3, 32), self.normal(2, 7, 1, 16), self.normal(16), self.normal(16)]
        self.assert_same(lambda *x: qk_norm_rope(*x, cos, sin, impl="reference"), theirs, inputs)

    def test_causal_conv1d_qkv(self):
        def theirs(x, weight):
            convolved = builtin.causal_conv1d_fn(x.transpose(1, 2), weight, None, activation="silu").transpose(1, 2)
            query, key, value = (y.unflatten(-1, (-1, 8)) for y in convolved.split([16, 16, 32], dim=-1))
            return builtin.l2norm(query), builtin.l2norm(key), value

        self.assert_same(
            lambda x, w: causal_conv1d_qkv(x, w, key_heads=2, key_dim=8, value_dim=8, impl="reference"),
            theirs,
            [self.normal(2, 7, 64), self.normal(64, 4)],
            summed=(0, 1, 2),
        )


def ones(*shape, dtype=FLOAT32):
    return torch.ones(shape, dtype=dtype)


def convolve(x, weight, *options, key_dim=16, value_dim=16, **more):
    return causal_conv1d_qkv(x, weight, *options, key_heads=1, key_dim=key_dim, value_dim=value_dim, **more)


def rotate(query_gate=(1, 5, 2, 16), key=(1, 5, 1, 8), weights=(8,), cos=(1, 5, 4), sin=None, impl="auto"):
    shapes = (query_gate, key, weights, weights, cos, sin or cos)
    return qk_norm_rope(*(ones(*shape) for shape in shapes), impl=impl)


SHAPES = [
    ("norm_weight", lambda: rms_norm(ones(2, 4), ones(3)), r"expected .*\(3,\)"),
    ("norm_residual", lambda: rms_norm(ones(2, 4), ones(4), residual=ones(1, 4)), "residual"),
    ("gated_norm_weight", lambda: gated_rms_norm(ones(2, 4), ones(2, 4), ones(1)), "expected"),
    ("gated_norm_gate", lambda: gated_rms_norm(ones(2, 4), ones(4), ones(4)), "gate"),
    ("swiglu", lambda: glu(ones(2, 4), ones(4)), "expected gate and hidden_states of one shape"),
    ("sigmoid_gate", lambda: glu(ones(2, 4), ones(2, 1), activation="sigmoid"), "expected gate and hidden_states"),
    ("swiglu_linear", lambda: glu(ones(2, 4), ones(4), ones(3, 4)), "expected gate and hidden_states"),
    ("swiglu_linear_weight", lambda: glu(*(ones(2, 4),) * 2, ones(4, 3)), r"a weight \[out, 4\]"),
    ("gate_linear_ndim", lambda: glu(*(ones(2, 4),) * 2, ones(4), activation="sigmoid"), r"a weight \[out, 4\]"),
    (
        "norm_linear_weight",
        lambda: gated_rms_norm(*(ones(2, 3, 4),) * 2, ones(4), linear_weight=ones(5, 4)),
        r"expected a weight \[out, 12\]",
    ),
    (
        "norm_linear_gate",
        lambda: gated_rms_norm(ones(2, 3, 4), ones(2, 12), ones(4), linear_weight=ones(5, 12)),
        "expected hidden_states and gate",
    ),
    ("decay_b", lambda: gated_delta_gates(ones(2, 4), ones(2, 3), ones(4), ones(4)), "expected"),
    ("decay_a_log", lambda: gated_delta_gates(ones(2, 4), ones(2, 4), ones(1), ones(4)), "value heads"),
    ("decay_dt_bias", lambda: gated_delta_gates(ones(2, 4), ones(2, 4), ones(4), ones(2, 4)), "value heads"),
    ("conv_channels", lambda: convolve(ones(1, 5, 48), ones(40, 4)), "expected"),
    ("conv_no_values", lambda: convolve(ones(1, 5, 32), ones(32, 4)), "number of heads"),
    ("conv_part_of_a_head", lambda: convolve(ones(1, 5, 56), ones(56, 4)), "number of heads"),
    ("conv_ndim", lambda: convolve(ones(5, 48), ones(48, 4)), r"\[B, T, D\]"),
    ("conv_weight_ndim", lambda: convolve(ones(1, 5, 48), ones(48, 1, 4)), r"weight \[D, W\]"),
    ("rotary_gate", lambda: rotate(query_gate=(1, 5, 2, 8)), "expected"),
    ("rotary_tokens", lambda: rotate(key=(1, 4, 1, 8)), "expected"),
    ("rotary_ndim", lambda: rotate(query_gate=(5, 2, 16), key=(5, 1, 8)), "expected"),
    ("rotary_weights", lambda: rotate(weights=(4,)), r"weights \[dim\]"),
    ("rotary_cos", lambda: rotate(cos=(1, 4, 4)), "expected"),
    ("rotary_cos_ndim", lambda: rotate(cos=(5, 4)), "expected"),
    ("rotary_sin", lambda: rotate(sin=(1, 5, 2)), "expected"),
    ("rotary_odd", lambda: rotate(cos=(1, 5, 3)), "expected"),
    ("rotary_too_wide", lambda: rotate(cos=(1, 5, 10)), "expected"),
]
HALF = ones(1, 5, 48, dtype=torch.float64)
UNSERVED = [
    ("norm_width", lambda impl: rms_norm(ones(1, 16400), ones(16400), impl=impl), "widths up to 16384, not 16400"),
    ("norm_float64", lambda impl: rms_norm(HALF, HALF[0, 0], impl=impl), "not torch.float64"),
    (
        "norm_dtypes",
        lambda impl: rms_norm(ones(2, 4), ones(4), residual=ones(2, 4, dtype=torch.float64), impl=impl),
        "not torch.float64",
    ),
    (
        "gated_norm_dtypes",
        lambda impl: gated_rms_norm(ones(2, 4), ones(2, 4, dtype=BFLOAT16), ones(4), impl=impl),
        "wants one dtype",
    ),
    ("swiglu_dtypes", lambda impl: glu(ones(4), ones(4, dtype=BFLOAT16), impl=impl), "wants one dtype"),
    (
        "gate_linear_dtypes",
        lambda impl: glu(ones(2, 4, dtype=BFLOAT16), ones(2, 4), ones(3, 4), activation="sigmoid", impl=impl),
        "wants one dtype",
    ),
    ("swiglu_float64", lambda impl: glu(HALF, HALF, impl=impl), "not torch.float64"),
    ("sigmoid_gate_float64", lambda impl: glu(HALF, HALF, activation="sigmoid", impl=impl), "not torch.float64"),
    (
        "decay_float64",
        lambda impl: gated_delta_gates(HALF, HALF, HALF[0, 0], HALF[0, 0], impl=impl),
        "not torch.float64",
    ),
    ("conv_bias", lambda impl: convolve(ones(1, 5, 48), ones(48, 4), ones(48), impl=impl), "without a bias"),
    ("conv_activation", lambda impl: convolve(ones(1, 5, 48), ones(48, 4), None, "gelu", impl=impl), "SiLU"),
    ("conv_width", lambda impl: convolve(ones(1, 5, 48), ones(48, 5), impl=impl), "up to 4 tokens, not 5"),
    (
        "conv_heads",
        lambda impl: convolve(ones(1, 5, 72), ones(72, 4), key_dim=24, value_dim=24, impl=impl),
        "power of two of channels, from 16 to 256, not 24",
    ),
    (
        "conv_two_dims",
        lambda impl: convolve(ones(1, 5, 64), ones(64, 4), value_dim=32, impl=impl),
        "not 16 and 32",
    ),
    ("rotary_dim", lambda impl: rotate((1, 5, 2, 24), (1, 5, 1, 12), (12,), impl=impl), "power of two"),
    ("rotary_none", lambda impl: rotate(cos=(1, 5, 0), impl=impl), "channels that turn"),
]


class OneTokenTest(InterpretedKernelsTest):
    @parameterized.expand([("silu",), ("sigmoid",)])
    def test_without_a_dimension_of_tokens(self, activation):
        found = []
        for impl in ("triton", "reference"):
            leaves = [x.requires_grad_() for x in torch.linspace(-1, 1, 96).split([16, 16, 64])]
            y = glu(leaves[0], leaves[1], leaves[2].view(4, 16), activation=activation, impl=impl)
            found.append(torch.autograd.grad(y.square().sum(), leaves))
        self.assertLess(max(errors(*found)), 1e-6)


class BadInputTest(InterpretedKernelsTest):
    @parameterized.expand([("swiglu", glu, 0), ("sigmoid", partial(glu, activation="sigmoid"), 0), ("norm", None, 1)])
    def test_a_cast_before_the_linear_layer(self, _, op, heads):
        x = torch.randn(5, *[2] * heads, 16, dtype=BFLOAT16)
        op = op or (lambda x, gate, w, **options: gated_rms_norm(x, gate, x[0, 0], linear_weight=w, **options))
        weight = torch.randn(3, x[0].numel())
        with self.assertRaisesRegex(ValueError, "wants torch.bfloat16 for the weight too"):
            op(x, x, weight, impl="triton")
        with torch.autocast("cpu", BFLOAT16):
            y = op(x, x, weight)
            self.assertEqual(y.dtype, BFLOAT16)
            self.assertTrue(torch.equal(y, op(x, x, weight, impl="reference")))

    @parameterized.expand(SHAPES)
    def test_shapes(self, _, call, message):
        with self.assertRaisesRegex(ValueError, message):
            call()

    @parameterized.expand(UNSERVED)
    def test_what_the_kernel_does_not_serve(self, _, call, message):
        with self.assertRaisesRegex(ValueError, message):
            call("triton")
        # It is the kernel alone that does not.
        call("auto")

    @parameterized.expand(named([(case,) for case in (*CASES, LOSS) if case.small]))
    def test_names_of_implementations(self, _, case):
        inputs = case.inputs(3, **case.small[0])
        with self.assertRaisesRegex(ValueError, 'expected impl=.*got "fla"'):
            case.op("fla", *inputs)
        with (
            mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: False),
            self.assertRaisesRegex(ValueError, 'impl="triton" can serve, got triton: needs CUDA tensors'),
        ):
            case.op("triton", *inputs)

    @parameterized.expand(["triton", "reference"])
    def test_a_row_that_its_boundaries_do_not_describe(self, impl):
        boundaries = boundaries_of(5, torch.device("cpu"))
        for shape in ((1, 4, 48), (1, 6, 48), (2, 5, 48)):
            with self.assertRaisesRegex(ValueError, r"expected hidden_states \[1, 5, D\]"):
                convolve(ones(*shape), ones(48, 4), boundaries=boundaries, impl=impl)

    def test_weights_of_the_heads_have_one_dtype(self):
        query_gate, key, weight, _, cos, sin = (
            ones(*x) for x in ((1, 5, 2, 16), (1, 5, 1, 8), (8,), (8,), *2 * [(1, 5, 4)])
        )
        with self.assertRaisesRegex(ValueError, "weights of one dtype"):
            qk_norm_rope(query_gate, key, weight, weight.bfloat16(), cos, sin, impl="triton")
        with self.assertRaisesRegex(ValueError, "no gradients of cos and sin"):
            qk_norm_rope(query_gate, key, weight, weight, cos.requires_grad_(), sin, impl="triton")


class AutocastTest(InterpretedKernelsTest):
    def test_a_stream_in_another_precision(self):
        """Under autocast a layer's result is in bfloat16 and the stream in float32."""
        generator = torch.Generator().manual_seed(0)
        x, residual = (torch.randn(3, 7, 48, generator=generator) for _ in range(2))
        weight, x = torch.randn(48, generator=generator), x.bfloat16()
        results = {}
        for impl in ("reference", "triton"):
            leaves = [y.detach().clone().requires_grad_() for y in (x, residual, weight)]
            normed, stream = rms_norm(leaves[0], leaves[2], residual=leaves[1], impl=impl)
            (normed.square().sum() + stream.sin().sum()).backward()
            results[impl] = [normed.detach(), stream.detach(), *(y.grad for y in leaves)]
        for actual, expected in zip(results["triton"], results["reference"], strict=True):
            self.assertEqual(actual.dtype, expected.dtype)
            self.assertLess(relative(actual, expected), 1e-6 if actual.dtype == torch.float32 else 1e-2)


if __name__ == "__main__":
    unittest.main()
