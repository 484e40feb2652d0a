"""Tests of scans in Triton's interpreter: `ssd` and `selective_scan`, whose kernels share chunks."""

from functools import partial

import torch
from common.fused import errors, guarded_buffers

from transformers_packed import SequenceBoundaries
from transformers_packed.device_boundaries import DeviceBoundaries


LENGTHS = (5, 1, 16, 33)


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


class ScanTesterMixin:
    """Set `call`, `make_inputs` of a length and sizes, `sizes` of most tests, and `buffer_sizes` of that on memory.

    The inputs are x, dt, B and C, with a row each, and then those without rows.
    """

    def run_kernel(self, inputs, **options):
        return with_gradients(lambda *x: self.call(*x, impl="triton", **options), inputs, torch.ones_like(inputs[0]))

    def test_batches_and_columns_of_wider_rows(self):
        inputs = self.make_inputs(21, *self.sizes)
        expected = self.run_kernel(inputs)
        wide = [torch.full((1, 21, 3, *x.shape[2:]), float("nan")).index_copy(2, torch.tensor([1]), x[:, :, None])
                for x in inputs[:4]]  # fmt: skip
        inputs[:4] = (x[:, :, 1] for x in wide)
        self.assertFalse(any(x.is_contiguous() for x in inputs[:4]))
        for a, b in zip(self.run_kernel(inputs), expected, strict=True):
            self.assertTrue(torch.equal(a, b))
        batch = [torch.cat([x, -x]) for x in inputs[:4]]
        alone = [self.call(*(x[i : i + 1] for x in batch), *inputs[4:], impl="triton") for i in range(2)]
        self.assertTrue(torch.equal(self.call(*batch, *inputs[4:], impl="triton"), torch.cat(alone)))

    def test_reads_no_buffer_that_it_did_not_write_and_writes_nothing_else(self):
        boundaries = SequenceBoundaries.from_lengths(LENGTHS)
        for sizes in self.buffer_sizes:
            inputs = self.make_inputs(sum(LENGTHS), *sizes)
            plain = self.run_kernel(inputs, boundaries=boundaries)
            with guarded_buffers():
                guarded = self.run_kernel(inputs, boundaries=boundaries)
            for a, b in zip(guarded, plain, strict=True):
                self.assertTrue(torch.equal(a, b))

    def test_boundaries_on_the_device_only(self):
        """As in a CUDA graph: documents may be empty, and the last one is."""
        inputs = self.make_inputs(40, *self.sizes)
        cu_seqlens = torch.tensor([0, 17, 17, 40, 40], dtype=torch.int32)
        in_graph = DeviceBoundaries(cu_seqlens, length=40, advice="Pass lengths.")
        outside = SequenceBoundaries.from_lengths([17, 23])
        results = [self.run_kernel(inputs, boundaries=boundaries) for boundaries in (in_graph, outside)]
        self.assertLess(max(errors(*results)), 1e-6)
