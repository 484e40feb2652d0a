"""Gradient checkpointing that keeps attention, with the kernels of a GPU: `make test-gpu`."""

import unittest
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common.real_heads import model_on_gpu, on_gpu, random_documents
from mixins.model import gradients, packed_batch
from parameterized import parameterized
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from transformers_packed.models.versions import can_select_checkpoints
from transformers_packed.ops import implementations_used
from transformers_packed.ops.kept_attention import keeping_attention
from transformers_packed.ops.offload import HostCheckpoints, all_checkpoints


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
        if options["keep_attention"] == "auto":
            # The first row allocates the buffers of its inputs.
            self.run_with(model, batch, **options)
        actual, once = self.run_with(model, batch, **options)
        self.assertIn(kernel, implementations_used()["attention"])
        self.assertEqual((once, twice), (1, 2))
        for name, gradient in expected.items():
            if kernel == "varlen_attn":
                self.assertTrue(torch.equal(actual[name], gradient), name)
            else:
                self.assertLess((actual[name] - gradient).norm(), 1e-2 * gradient.norm(), name)

    def attended(self, x, after=lambda x: x):
        """A function with flash attention under checkpointing, without kept outputs and with small ones on the host."""

        def layer(x):
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return after(F.scaled_dot_product_attention(*[x.sin()] * 3, is_causal=True)).exp()

        host, usual = HostCheckpoints(lambda: 0), partial(checkpoint, use_reentrant=False)
        with all_checkpoints():
            return usual(layer, x), host(usual, layer, x, context_fn=partial(keeping_attention, host, True)), host

    def test_small_and_empty_outputs(self):
        """Flash attention returns an empty tensor too."""
        x = torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        expected, actual, host = self.attended(x)
        self.assertGreater(host.bytes, 0)
        torch.testing.assert_close(*(torch.autograd.grad(y.float().sum(), x)[0] for y in (actual, expected)))

    def test_a_layer_that_writes_into_the_output(self):
        """Nobody asked for it to be kept, so it is computed again. Without checkpointing, autograd has an error."""
        x = torch.randn(1, 4, 512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        expected, actual, _ = self.attended(x, lambda x: x.mul_(2))
        torch.testing.assert_close(*(torch.autograd.grad(y.float().sum(), x)[0] for y in (actual, expected)))
