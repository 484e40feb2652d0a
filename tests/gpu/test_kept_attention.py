"""Gradient checkpointing that keeps attention, with the kernels of a GPU: `make test-gpu`."""

import unittest

import pytest
import torch
from common.real_heads import FAMILIES, REAL_HEADS
from mixins.model import gradients, packed_batch
from parameterized import parameterized
from torch.profiler import ProfilerActivity, profile
from transformers import set_seed

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

    @parameterized.expand([((5000, 1, 700), "varlen_attn"), ((16384,), "cudnn")])
    def test_runs_each_kernel_once(self, lengths, kernel):
        """With deterministic kernels, no bit changes."""
        torch.use_deterministic_algorithms(kernel == "varlen_attn")
        self.addCleanup(torch.use_deterministic_algorithms, False)
        cls, config_class, options = FAMILIES["qwen3_5"]
        set_seed(0)
        model = cls._from_config(config_class(**REAL_HEADS | options), dtype=torch.bfloat16).cuda().train()
        generator = torch.Generator().manual_seed(0)
        batch = packed_batch([torch.randint(1, 97, (n,), generator=generator) for n in lengths])
        batch = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
        expected, twice = self.run_with(model, batch)
        actual, once = self.run_with(model, batch, keep_attention=True)
        self.assertIn(kernel, implementations_used()["attention"])
        self.assertEqual((once, twice), (1, 2))
        for name, gradient in expected.items():
            if kernel == "varlen_attn":
                self.assertTrue(torch.equal(actual[name], gradient), name)
            else:
                self.assertLess((actual[name] - gradient).norm(), 1e-2 * gradient.norm(), name)
