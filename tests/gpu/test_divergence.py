"""The divergence from a teacher on a GPU, against its definition in float64: `make test-gpu`."""

import itertools
import unittest

import torch
from common.fused import errors, guarded_buffers
from common.gpu import needs_gpu, report
from parameterized import parameterized

from transformers_packed.ops import linear_divergence


BARS = {torch.bfloat16: 6e-3, torch.float32: 1e-5}
SHAPED = {"logit_scale": 1.5, "teacher_logit_scale": 0.5, "softcap": 8.0, "teacher_softcap": 9.0, "temperature": 0.8}


def make(tokens, dtype, vocab=50_037):
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (tokens, 256), (vocab, 256), (tokens, 384), (vocab, 384)
    made = [torch.randn(size, generator=generator, device="cuda").mul(0.3).to(dtype) for size in sizes]
    # A teacher that often agrees with the student.
    made[3][:, :256], made[2][:, :256] = made[1], made[0]
    return made, torch.rand(tokens, generator=generator, device="cuda") < 0.7


def results(inputs, is_target, **options):
    leaves = [x.clone().requires_grad_() for x in inputs[:2]]
    found = linear_divergence(*leaves, *inputs[2:], is_target, return_entropies=True, **options)
    gradients = torch.autograd.grad(1000 * found[0], leaves)
    return [x.detach() for x in (*found, *gradients)]


@needs_gpu
class DivergenceTest(unittest.TestCase):
    def setUp(self):
        self.addCleanup(torch.cuda.empty_cache)
        # The reference in float64 has exact products.
        self.addCleanup(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")

    @parameterized.expand(itertools.product((0.0, 0.5, 1.0), (1, 1500), BARS, ({}, SHAPED)))
    def test_against_the_reference_in_float64(self, beta, tokens, dtype, options):
        inputs, is_target = make(tokens, dtype)
        is_target[0] = True
        exact = results([x.double() for x in inputs], is_target, beta=beta, impl="reference", **options)
        with guarded_buffers():
            ours = results(inputs, is_target, beta=beta, impl="triton", **options)
        found = errors(ours, exact)
        report(f"linear_divergence, beta {beta}, {tokens} tokens, {dtype}, {options}", triton=max(found))
        self.assertLess(max(found), BARS[dtype], found)
        self.assertEqual(sum(x.isnan().sum().item() for x in ours), 0)
        for one, other in zip(ours, results(inputs, is_target, beta=beta, impl="triton", **options), strict=True):
            self.assertTrue(torch.equal(one, other))

    def test_memory(self):
        """What the docstring says of a vocabulary of 248,320 words."""
        inputs, is_target = make(4000, torch.bfloat16, 248_320)
        leaves = [x.requires_grad_() for x in inputs[:2]]
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            gradients = torch.autograd.grad(linear_divergence(*leaves, *inputs[2:], is_target), leaves)
            peak, kept = torch.cuda.max_memory_allocated() - before, sum(x.nbytes for x in gradients)
            kept += gradients[1].numel() * 4 - gradients[1].nbytes
            del gradients
        report("linear_divergence, memory above the gradients", GiB=(peak - kept) / 2**30)
        self.assertLess(peak - kept, 1.05 * 2**30)
