"""Gradient checkpointing that keeps attention, with the kernels of a GPU: `make test-gpu`."""

import unittest

import pytest
import torch
from common.real_heads import model_on_gpu, on_gpu, random_documents
from mixins.model import gradients, packed_batch
from parameterized import parameterized
from torch.profiler import ProfilerActivity, profile

from transformers_packed.models.versions import can_select_checkpoints
from transformers_packed.ops import implementations_used


@pytest.mark.gpu
@unittest.skipUnless(
    torch.cuda.is_available() and can_select_checkpoints(), "needs a CUDA device and Transformers 5.23"
)
class KeptAttentionTest(unittest.TestCase):
    def run_with(self, model, batch: dict, **options):
        """The gradients of a step, and how often the forward kernel of attention ran."""
        model.activation_checkpointing_enable({"use_reentrant": False} | options)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            found = gradients(model, model(**batch).loss)
        kernels = [event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        forward = sum("flash" in name and ("fwd" in name or "fprop" in name) for name in kernels)
        return found, forward

    @parameterized.expand(
        [
            ((5000, 1, 700), "varlen_attn", {"keep_attention": True}),
            ((5000, 1, 700), "varlen_attn", {"keep_attention": True, "offload": True}),
            ((16384,), "cudnn", {"keep_attention": True}),
            ((16384,), "cudnn", {"keep_attention": "auto", "offload": True}),
        ]
    )
    def test_runs_each_kernel_once(self, lengths, kernel, options):
        """With deterministic kernels, no bit changes."""
        torch.use_deterministic_algorithms(kernel == "varlen_attn")
        self.addCleanup(torch.use_deterministic_algorithms, False)
        model, batch = model_on_gpu(), on_gpu(packed_batch(random_documents(lengths)))
        expected, twice = self.run_with(model, batch)
        actual, once = self.run_with(model, batch, **options)
        self.assertIn(kernel, implementations_used()["attention"])
        self.assertEqual((once, twice), (1, 2))
        for name, gradient in expected.items():
            if kernel == "varlen_attn":
                self.assertTrue(torch.equal(actual[name], gradient), name)
            else:
                self.assertLess((actual[name] - gradient).norm(), 1e-2 * gradient.norm(), name)
