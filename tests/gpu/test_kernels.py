"""Every implementation of every op on a GPU against the reference on the CPU: `make test-gpu`."""

import unittest
from functools import lru_cache

import torch
from common.gpu import TOTAL, kept, lengths_of, needs_gpu, report, synchronising_is_an_error
from common.mixing_ops import BARS, AttentionCase, ConvCase, RuleCase, run_with_gradients
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.ops.attention import IMPLEMENTATIONS as ATTENTION
from transformers_packed.ops.convolution import IMPLEMENTATIONS as CONV
from transformers_packed.ops.gated_delta_rule import IMPLEMENTATIONS as RULE


SMALL = [1, 130, 2, 64, 3, 63, 300, 65, 1, 129, 256]
# cuDNN computes long documents: a batch of two, one alone, and a rest for another kernel.
LONG = [9000, 130, 8800, 1, 20000]


def lengths_for(impl: str, short: list[int]) -> list[int]:
    """Return `short`, or lengths of documents that the implementation computes."""
    return LONG if impl == "cudnn" else short


def tilelang_serves() -> bool:
    """Check whether flash-linear-attention uses TileLang for parts of its backward."""
    from fla.ops.common.backends.tilelang import CommonTileLangBackend

    return CommonTileLangBackend.can_use()


RULE_CASE, CONV_CASE, SDPA_CASE, FLEX_CASE = (
    RuleCase(),
    ConvCase(),
    AttentionCase("sdpa"),
    AttentionCase("flex_attention"),
)
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
# All implementations with their dtypes. On a GPU the reference is an implementation like any other.
KERNELS = [
    *((RULE_CASE, impl, BFLOAT16) for impl in RULE),
    (RULE_CASE, "reference", FLOAT32),
    *((CONV_CASE, impl, dtype) for impl in CONV for dtype in (BFLOAT16, FLOAT32)),
    *((SDPA_CASE, impl, BFLOAT16) for impl in ATTENTION["sdpa"]),
    (SDPA_CASE, "per_document(sdpa)", FLOAT32),
    (FLEX_CASE, "flex_attention", BFLOAT16),
    (FLEX_CASE, "flex_attention", FLOAT32),
]


def named(cases):
    """Prepend a name to each case, for the names of the tests."""
    plain = lambda x: str(x).removeprefix("torch.").replace("(", "_").replace(")", "")  # noqa: E731
    return [("_".join(plain(getattr(x, "name", x)) for x in case).replace(" ", ""), *case) for case in cases]


@lru_cache
def reference(case, documents):
    """Return inputs rounded to bfloat16, the weight, and the result of the float32 reference on the CPU."""
    boundaries = SequenceBoundaries.from_lengths(lengths_of(documents))
    inputs = [x.float() for x in case.cast(case.make(TOTAL), "cpu", BFLOAT16)]
    weight = torch.randn(1, TOTAL, *case.output_shape, generator=torch.Generator().manual_seed(1))
    results = kept(
        f"{case.name} {documents}", lambda: run_with_gradients(case, "reference", inputs, weight, boundaries)
    )
    return inputs, weight, results


def relative(actual, expected) -> float:
    expected = expected.to(actual.device, torch.float32)
    return ((actual.float() - expected).norm() / expected.norm()).item()


@needs_gpu
class KernelsTest(unittest.TestCase):
    def need(self, case, impl, dtype):
        """Skip implementations missing in this environment, with the reason that a user would read."""
        lengths = lengths_for(impl, [1, 3])
        inputs = [x.requires_grad_() for x in case.cast(case.make(sum(lengths)), "cuda", dtype)]
        try:
            case.run(impl, inputs, SequenceBoundaries.from_lengths(lengths, device="cuda"))
        except ValueError as error:
            self.skipTest(str(error))

    @parameterized.expand(
        named(
            (*kernel, documents)
            for kernel in KERNELS
            for documents in ((1, 3) if kernel[1] == "cudnn" else (1, 34, 1000))
            # SDPA itself would allocate the matrix of all pairs of 65,536 tokens.
            if (*kernel[1:], documents) != ("per_document(sdpa)", FLOAT32, 1)
        )
    )
    def test_against_the_cpu(self, _, case, impl, dtype, documents):
        self.need(case, impl, dtype)
        inputs, weight, expected = reference(case, documents)
        boundaries = SequenceBoundaries.from_lengths(lengths_of(documents), device="cuda")
        self.assertEqual((boundaries.num_documents, boundaries.total_length), (documents, TOTAL))
        actual = run_with_gradients(case, impl, case.cast(inputs, "cuda", dtype), weight.cuda(), boundaries)
        # Compare each document separately, so that long documents cannot hide errors in short ones.
        pairs = zip(actual[0].split(boundaries.lengths, 1), expected[0].split(boundaries.lengths, 1), strict=True)
        output = max(relative(a, b) for a, b in pairs)
        gradient = max(relative(a, b) for a, b in zip(actual[1:], expected[1:], strict=True))
        report(f"{case.name}: {impl}, {dtype}, {documents} documents", output=output, gradient=gradient)
        self.assertLess(output, BARS[dtype][0])
        self.assertLess(gradient, BARS[dtype][1])

    @parameterized.expand(named(kernel for kernel in KERNELS if kernel[2] == BFLOAT16))
    def test_the_comparison_can_fail(self, _, case, impl, dtype):
        self.need(case, impl, dtype)
        inputs, weight, expected = reference(case, 1000)
        one_document = SequenceBoundaries.from_lengths([TOTAL], device="cuda")
        output = run_with_gradients(case, impl, case.cast(inputs, "cuda", dtype), weight.cuda(), one_document)[0]
        pairs = zip(output.split(lengths_of(1000), 1), expected[0].split(lengths_of(1000), 1), strict=True)
        self.assertGreater(max(relative(a, b) for a, b in pairs), 10 * BARS[dtype][0])

    @parameterized.expand(named(KERNELS))
    def test_no_document_sees_another(self, _, case, impl, dtype):
        self.need(case, impl, dtype)
        lengths = lengths_for(impl, SMALL)
        # Otherwise the backward of FlashAttention adds up in any order, as that of cuDNN always does. New buffers are
        # filled with NaN.
        torch.use_deterministic_algorithms(impl != "cudnn")
        self.addCleanup(torch.use_deterministic_algorithms, False)
        # Flex attention, and TileLang in the backward of flash-linear-attention, multiply values of other documents by
        # zero. Zero times NaN is NaN.
        multiplies = impl == "flex_attention" or (case.name, impl) == ("gated_delta_rule", "fla") and tilelang_serves()
        poisons = (0.5,) if multiplies else (0.5, float("nan"))
        boundaries = SequenceBoundaries.from_lengths(lengths, device="cuda")
        inputs = case.cast(case.make(boundaries.total_length), "cuda", dtype)
        per_token = [x.shape[:2] == (1, boundaries.total_length) for x in inputs]
        weight = torch.randn(1, boundaries.total_length, *case.output_shape, device="cuda")

        def parts(values):
            return [x[0].split(lengths) for x, cut in zip(values, (True, *per_token), strict=True) if cut]

        def equal(number: int, a: torch.Tensor, b: torch.Tensor) -> bool:
            return torch.equal(a, b) if impl != "cudnn" or number == 0 else relative(a, b) < 1e-3

        before = parts(run_with_gradients(case, impl, inputs, weight, boundaries))
        for document in range(len(lengths)):
            start, end = boundaries.cu_seqlens_cpu[document : document + 2].tolist()
            for poison in poisons:
                changed = [x.clone() for x in inputs]
                for x, cut in zip(changed, per_token, strict=True):
                    if cut:
                        x[:, start:end] *= poison
                after = parts(run_with_gradients(case, impl, changed, weight, boundaries))
                for number, (a, b) in enumerate(zip(after, before, strict=True)):
                    same = [equal(number, x, y) for x, y in zip(a, b, strict=True)]
                    del same[document]
                    self.assertTrue(all(same), f"{poison} in document {document}")
                self.assertFalse(torch.equal(after[0][document], before[0][document]))
            one = torch.zeros_like(weight)
            one[:, start:end] = weight[:, start:end]
            for gradient in parts(run_with_gradients(case, impl, inputs, one, boundaries))[1:]:
                self.assertEqual(
                    [int(g.count_nonzero()) for i, g in enumerate(gradient) if i != document and g.any()], []
                )
        report(f"{case.name}: {impl}, {dtype}", others="bit for bit the same", gradients="exactly 0 across")

    @parameterized.expand(named(kernel for kernel in KERNELS if kernel[2] == BFLOAT16))
    def test_does_not_wait_for_the_gpu(self, _, case, impl, dtype):
        self.need(case, impl, dtype)
        inputs = case.cast(case.make(TOTAL), "cuda", dtype)
        weight = torch.randn(1, TOTAL, *case.output_shape, device="cuda")
        # The first row compiles and tunes. The second one is new to every cache.
        documents = 3 if impl == "cudnn" else 34
        rows = [SequenceBoundaries.from_lengths(lengths_of(documents + n), device="cuda") for n in (0, 1)]
        run_with_gradients(case, impl, inputs, weight, rows[0])
        with synchronising_is_an_error():
            run_with_gradients(case, impl, inputs, weight, rows[1])
