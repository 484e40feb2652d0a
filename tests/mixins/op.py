"""Requirements on every op for packed rows. Test classes of ops mix in [`PackedOpTesterMixin`]."""

from itertools import pairwise

import torch
from common.fused import errors
from parameterized import parameterized

from transformers_packed import SequenceBoundaries


LENGTHS = [
    ("one_token_documents", [1, 1, 1]),
    ("short_and_long", [5, 1, 70, 7]),
    ("around_the_chunk", [63, 64, 65]),
    ("equal", [9, 9, 9]),
    ("many_buckets", [130, 3, 64, 2, 90, 129, 1]),
]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest entry or 1e-2, whichever is larger."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-2))


class PackedOpTesterMixin:
    """Tests of isolation between documents.

    A test class defines `make_inputs(length)`, which returns a list of tensors `[1, length, ...]`, and
    `run_op(*inputs, boundaries=None)`, which returns `[1, length, ...]`.
    """

    tolerance = 1e-5

    def setUp(self):
        torch.manual_seed(0)

    def run_with_gradients(self, inputs, weight, boundaries=None):
        """Return the output and the gradients of its sum weighted by `weight`, all detached."""
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        output = self.run_op(*leaves, boundaries=boundaries)
        gradients = torch.autograd.grad((output * weight).sum(), leaves)
        return [output.detach(), *gradients]

    def make_row(self, lengths):
        boundaries = SequenceBoundaries.from_lengths(lengths)
        inputs = self.make_inputs(boundaries.total_length)
        weight = torch.randn_like(self.run_op(*inputs, boundaries=boundaries))
        return boundaries, inputs, weight

    def cut(self, tensors, lengths):
        """Split tensors into one list per document."""
        return list(zip(*(x.split(lengths, dim=1) for x in tensors), strict=True))

    @parameterized.expand(LENGTHS)
    def test_packed_equals_documents_alone(self, _, lengths):
        boundaries, inputs, weight = self.make_row(lengths)
        alone = [
            self.run_with_gradients(document[:-1], document[-1]) for document in self.cut([*inputs, weight], lengths)
        ]
        together = [torch.cat(column, dim=1) for column in zip(*alone, strict=True)]

        def errors_of(boundaries):
            packed = self.run_with_gradients(inputs, weight, boundaries)
            return [relative_error(a, b) for a, b in zip(packed, together, strict=True)]

        self.assertLess(max(errors_of(boundaries)), self.tolerance, errors_of(boundaries))
        # Without boundaries, documents leak, which shows that the comparison can fail: outputs leak forward, gradients
        # backward.
        output_error, *gradient_errors = errors_of(None)
        self.assertGreater(output_error, 100 * self.tolerance)
        self.assertGreater(max(gradient_errors), 100 * self.tolerance)

    @parameterized.expand([LENGTHS[1], LENGTHS[3]])
    def test_no_document_sees_another(self, _, lengths):
        """Neither halved numbers nor a NaN change a bit elsewhere, and gradients across documents are exactly zero."""
        boundaries, inputs, weight = self.make_row(lengths)
        before = self.cut(self.run_with_gradients(inputs, weight, boundaries), lengths)
        for changed, (start, end) in enumerate(pairwise(boundaries.cu_seqlens_cpu.tolist())):
            halved, poisoned = ([x.clone() for x in inputs] for _ in range(2))
            for half, nan in zip(halved, poisoned, strict=True):
                half[:, start:end] *= 0.5
                nan[:, (start + end) // 2] = float("nan")
            for others, is_nan in ((halved, False), (poisoned, True)):
                after = self.cut(self.run_with_gradients(others, weight, boundaries), lengths)
                for document, (now, then) in enumerate(zip(after, before, strict=True)):
                    same = [torch.equal(a, b) for a, b in zip(now, then, strict=True)]
                    if document == changed:
                        self.assertFalse(same[0])
                        self.assertEqual(bool(now[0].isnan().any()), is_nan)
                    else:
                        self.assertTrue(all(same), f"document {document} of {lengths} changed with {changed}: {same}")
            one_document = torch.zeros_like(weight)
            one_document[:, start:end] = weight[:, start:end]
            gradients = self.run_with_gradients(inputs, one_document, boundaries)[1:]
            for gradient in gradients:
                self.assertEqual(int(gradient[:, :start].count_nonzero()), 0)
                self.assertEqual(int(gradient[:, end:].count_nonzero()), 0)
            self.assertGreater(sum(int(gradient[:, start:end].count_nonzero()) for gradient in gradients), 0)


class BuiltinTesterMixin:
    """Compare the reference of an op with the stock module that it replaces, bit for bit in float32."""

    def setUp(self):
        super().setUp()
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def assert_same(self, ours, theirs, inputs, summed=()):
        """Check that outputs are equal bit for bit. Gradients and outputs in `summed` may differ by 1e-6."""
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
        """Wrap the module as a function of its inputs with the given weights."""
        return lambda *inputs: torch.func.functional_call(module, weights, inputs)
