"""Layers that compute a long row in segments, with the kernels of a GPU: `make test-gpu`."""

import gc
import unittest

import torch
from common.gpu import needs_gpu, report
from common.real_heads import SIZES_OF_4B, on_gpu
from mixins.model import gradients, packed_batch, relative_error, total_relative_error
from parameterized import parameterized
from transformers import Qwen3_5TextConfig, set_seed

from transformers_packed.data.planning.step_memory import Parameters, step_memory
from transformers_packed.models.families import sizes_of
from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers_packed.models.versions import can_cut_rows
from transformers_packed.ops import implementations_used


CONFIG = SIZES_OF_4B | {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
SEGMENT = 8192


@needs_gpu
@unittest.skipUnless(can_cut_rows(), "needs Transformers 5.24")
class SegmentsTest(unittest.TestCase):
    def run_with(self, model, batch: dict, **options):
        """The loss and the gradients of a step, and its peak of memory beyond the weights."""
        model.activation_checkpointing_enable({"use_reentrant": False} | options)
        model.zero_grad()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = model(**batch).loss
        found = gradients(model, loss)
        return loss.detach(), found, torch.cuda.max_memory_allocated() - before

    @parameterized.expand([("one document", (32768,)), ("several", (5000, 1, 20000, 3383, 4384))])
    def test_a_row_of_four_segments(self, name, lengths):
        set_seed(0)
        model = Qwen3_5ForCausalLM._from_config(Qwen3_5TextConfig(**CONFIG), dtype=torch.bfloat16).cuda().train()
        generator = torch.Generator().manual_seed(0)
        batch = on_gpu(packed_batch([torch.randint(1, 97, (n,), generator=generator) for n in lengths]))
        # Kernels are compiled and tuned in the first run.
        for options in ({}, {"segment_tokens": SEGMENT}):
            self.run_with(model, batch, **options)
        loss, expected, peak = self.run_with(model, batch)
        segment_loss, actual, segment_peak = self.run_with(model, batch, segment_tokens=SEGMENT)
        # Without what crosses the cuts, each piece would be a document.
        pieces = batch["input_ids"][0].cpu().split(SEGMENT)
        wrong = self.run_with(model, on_gpu(packed_batch(list(pieces))))[1]
        config, whole = model.config, [True] * model.config.num_hidden_layers
        given = sizes_of(config), Parameters.of(config), sum(lengths), 1, 1, 2, whole
        plan_whole, plan_cut = (step_memory(*given, segment_tokens=n).most for n in (None, SEGMENT))
        figures = {
            "loss": relative_error(segment_loss, loss),
            "gradients": total_relative_error(actual, expected),
            "gradients of other documents": total_relative_error(wrong, expected),
            "peak": segment_peak / peak,
            "peak, planned": plan_cut / plan_whole,
        }
        report(f"four segments, {name}", **figures)
        self.assertIn("states of segments", implementations_used()["gated_delta_rule"])
        expected_kernel = "cudnn after pieces" if torch.cuda.get_device_capability() == (9, 0) else "varlen_attn"
        self.assertIn(expected_kernel, implementations_used()["attention"])
        self.assertNotIn("mask of earlier keys", implementations_used()["attention"])
        self.assertLess(figures["loss"], 1e-3)
        self.assertLess(figures["gradients"], 3e-2)
        self.assertGreater(figures["gradients of other documents"], 3 * figures["gradients"])
        self.assertLess(abs(figures["peak"] - figures["peak, planned"]), 0.05)
