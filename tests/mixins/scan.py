"""Tests of both scans, `ssd` and `selective_scan`, whose kernels share chunks."""

from functools import partial
from unittest import mock

import torch
from common.fused import errors, guarded_buffers
from mixins.op import PackedOpTesterMixin
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.device_boundaries import DeviceBoundaries
from transformers_packed.ops.backends.triton import ssd as chunks
from transformers_packed.shared_prompts import SharedPrompts


# The last document has three chunks: a state passes through the one in the middle.
LENGTHS = (3, 1, 16, 33)
# Two chunks in the last one, for tests that run the kernels more than once.
SHORT = (2, 1, 4, 18)


def with_gradients(function, inputs, upstream):
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def against_documents_alone(call, formula, lengths, inputs, impl, **options):
    """Return the results of a packed row, and those of the formula on each document in float64."""
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = partial(call, boundaries=SequenceBoundaries.from_lengths(lengths), impl=impl, **options)

    def alone(*leaves):
        documents = zip(*(x.split(lengths, 1) for x in leaves[:4]), strict=True)
        return torch.cat([formula(*document, *leaves[4:], **options) for document in documents], 1)

    return with_gradients(packed, inputs, upstream), with_gradients(alone, [x.double() for x in inputs], upstream)


class PackedScanTesterMixin(PackedOpTesterMixin):
    """Set `call`, `make`, the function of a length and sizes that makes inputs, and `sizes`."""

    tolerance = 2e-5

    def make_inputs(self, length):
        *row, A, self.D, self.dt_bias = self.make(length, *self.sizes)
        # A weak decay, so that a document's state reaches the next one.
        self.A = A / 8
        return row

    def run_op(self, *row, boundaries=None):
        return self.call(*row, self.A, self.D, self.dt_bias, boundaries=boundaries, impl="reference")


class ScanReferenceTesterMixin:
    """Set `call`, `reference`, which takes its arguments, `formula`, `make_inputs` of a length and sizes, and `sizes`.

    The inputs are x, dt, B and C, with a row each, and then those without rows: A, D and dt_bias.
    """

    @parameterized.expand([(1,), (16,), (256,)])
    def test_chunk_size_does_not_matter(self, size):
        x, dt, B, C, A, D, bias = inputs = self.make_inputs(100, *self.sizes, torch.float64)
        actual = self.reference(x, dt, A, B, C, D, bias, chunk_size=size, seq_idx=None)
        self.assertLess(float((actual - self.formula(*inputs)).abs().max()), 1e-12)

    def test_a_batch_and_its_dtype(self):
        rows = [self.make_inputs(20, *self.sizes, torch.bfloat16) for _ in range(2)]
        rows[1][0] = rows[1][0] + 1
        batch = [torch.cat(pair) for pair in zip(*(row[:4] for row in rows), strict=True)]
        output = self.call(*batch, *rows[0][4:])
        self.assertEqual(output.dtype, torch.bfloat16)
        for i, row in enumerate(rows):
            self.assertTrue(torch.equal(output[i : i + 1], self.call(*row[:4], *rows[0][4:])))

    def test_refuses_rows_that_share_prompts(self):
        boundaries = SharedPrompts.of(SequenceBoundaries.from_lengths([4, 5]), [-1, 0])
        with self.assertRaisesRegex(ValueError, "the op .* does not support a row with shared prompts"):
            self.call(*self.make_inputs(9, *self.sizes), boundaries=boundaries)


class ScanTesterMixin:
    """Tests in Triton's interpreter. Set `call`, `make_inputs` and `sizes`, and `buffer_sizes` of the test on memory."""

    def setUp(self):
        super().setUp()
        # Short chunks, so that short documents have several.
        self.enterContext(mock.patch.object(chunks, "_CHUNK", 16))

    def run_kernel(self, inputs, **options):
        return with_gradients(lambda *x: self.call(*x, impl="triton", **options), inputs, torch.ones_like(inputs[0]))

    def test_no_document_sees_another(self):
        """The kernels walk token by token, too slow in the interpreter for the requirements on every op."""
        inputs, boundaries = self.make_inputs(sum(SHORT), *self.sizes), SequenceBoundaries.from_lengths(SHORT)
        before = self.run_kernel(inputs, boundaries=boundaries)
        for documents, factors in (((0, 2), (float("nan"), 0.5)), ((1, 3), (0.5, float("nan")))):
            changed = [x.clone() for x in inputs]
            for x in changed[:4]:
                for document, factor in zip(documents, factors, strict=True):
                    x.split(SHORT, 1)[document].mul_(factor)
            after = self.run_kernel(changed, boundaries=boundaries)
            for a, b in zip(after[:5], before[:5], strict=True):
                same = [torch.equal(*pair) for pair in zip(a.split(SHORT, 1), b.split(SHORT, 1), strict=True)]
                self.assertEqual(same, [i not in documents for i in range(len(SHORT))])

    def test_batches_and_columns_of_wider_rows(self):
        inputs = self.make_inputs(21, *self.sizes)
        expected = self.run_kernel(inputs)
        wide = [torch.full((1, 21, 3, *x.shape[2:]), float("nan")).index_copy(2, torch.tensor([1]), x[:, :, None])
                for x in inputs[:4]]  # fmt: skip
        inputs[:4] = (x[:, :, 1] for x in wide)
        self.assertFalse(any(x.is_contiguous() for x in inputs[:4]))
        self.assert_same_bits(self.run_kernel(inputs), expected)
        batch = [torch.cat([x, -x]) for x in inputs[:4]]
        alone = [self.call(*(x[i : i + 1] for x in batch), *inputs[4:], impl="triton") for i in range(2)]
        self.assertTrue(torch.equal(self.call(*batch, *inputs[4:], impl="triton"), torch.cat(alone)))

    def test_reads_no_buffer_that_it_did_not_write_and_writes_nothing_else(self):
        boundaries = SequenceBoundaries.from_lengths(SHORT)
        inputs = self.make_inputs(sum(SHORT), *self.buffer_sizes)
        plain = self.run_kernel(inputs, boundaries=boundaries)
        with guarded_buffers():
            self.assert_same_bits(self.run_kernel(inputs, boundaries=boundaries), plain)

    def test_boundaries_on_the_device_only(self):
        """As in a CUDA graph: documents may be empty, and the last one is."""
        inputs = self.make_inputs(22, *self.sizes)
        cu_seqlens = torch.tensor([0, 17, 17, 22, 22], dtype=torch.int32)
        in_graph = DeviceBoundaries(cu_seqlens, length=22, advice="Pass lengths.")
        outside = SequenceBoundaries.from_lengths([17, 5])
        results = [self.run_kernel(inputs, boundaries=boundaries) for boundaries in (in_graph, outside)]
        self.assertLess(max(errors(*results)), 1e-6)
