"""`torch.compile` of packed rows and `torch.export` of unpacked ones."""

import unittest
from unittest import mock

import pytest
import torch
from common.families import documents
from mixins.model import block_mask, gradients, packed_batch, padded_batch, relative_error, total_relative_error
from mixins.vision import EXPERTS, TINY
from parameterized import parameterized
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig, set_seed

from transformers_packed import SequenceBoundaries
from transformers_packed.models.padding import PaddedBatch
from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers_packed.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM
from transformers_packed.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM


FAMILIES = [
    # One dense layer and one with experts.
    ("qwen3_next", Qwen3NextForCausalLM, Qwen3NextConfig(**TINY, **EXPERTS, mlp_only_layers=[0])),
    ("qwen3_5", Qwen3_5ForCausalLM, Qwen3_5TextConfig(**TINY)),
    ("qwen3_5_moe", Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig(**TINY, **EXPERTS)),
]


# Where boundaries come from does not depend on the layers, and tracing takes most of the time.
SHALLOW = {**TINY, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}


class CompileTest(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()
        self.addCleanup(torch._dynamo.reset)

    def model(self, cls, config):
        set_seed(0)
        return cls._from_config(config, attn_implementation="sdpa").train()

    @parameterized.expand(
        [
            # Another row with the same numbers of documents and tokens runs without retracing.
            (*FAMILIES[0], ["all"], (2, 130, 60, 7)),
            (*FAMILIES[1], ["all", "cu_seqlens"], (70, 2, 9)),
            (*FAMILIES[2], ["all"], (70, 2, 9)),
        ]
    )
    @pytest.mark.slow
    def test_packed(self, _, cls, config, sources, second):
        """The result is the same as without a compiler, with graph breaks only at the sequence mixers."""
        model, ops = self.model(cls, config), set()

        def backend(graph, inputs):
            reason = graph.compile_subgraph_reason
            if reason.graph_break:
                ops.add(reason.user_stack[-2:][0].name)
            return graph.forward

        compiled = torch.compile(model, backend=backend)
        for source in sources:
            for lengths in ((1, 3, 65, 130), second):
                batch = packed_batch(documents(lengths), source)
                batch["position_ids"] = packed_batch(documents(lengths))["position_ids"]
                expected = model(**batch)
                expected_gradients = gradients(model, expected.loss)
                torch._dynamo.utils.counters.clear()
                output = compiled(**batch)
                breaks = dict(torch._dynamo.utils.counters["graph_break"])
                self.assertTrue(all("packed rows differ in the lengths" in reason for reason in breaks), breaks)
                if lengths == (2, 130, 60, 7):
                    self.assertEqual(torch._dynamo.utils.counters["frames"]["total"], 0)
                self.assertLess(relative_error(output.logits, expected.logits), 1e-5)
                self.assertLess(total_relative_error(gradients(model, output.loss), expected_gradients), 1e-5)
        if cls is Qwen3_5ForCausalLM:
            self.assertEqual(ops, {"causal_conv1d_qkv", "gated_delta_rule", "attention"})

    @pytest.mark.slow
    def test_other_sources(self):
        """Each source of boundaries works in one compiled model, which refuses malformed ones before and after."""
        model = self.model(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**SHALLOW)).eval()
        compiled = torch.compile(model, backend="eager")
        cu_seqlens = torch.tensor([0, 3, 11], dtype=torch.int32)
        input_ids = torch.randint(1, 97, (1, 12), generator=torch.Generator().manual_seed(0))

        def refuses():
            cu_seqlens[1:] = torch.tensor([3, 11])
            with self.assertRaisesRegex(ValueError, "expected cu_seqlens that ends at the row's 12 tokens, got 11"):
                compiled(input_ids=input_ids, cu_seqlens=cu_seqlens)

        refuses()
        for source in ("cu_seqlens", "seq_idx", "boundaries", "attention_mask", "position_ids"):
            for middle in (3, 8):
                # A buffer that is refilled.
                cu_seqlens[1:] = torch.tensor([middle, 12])
                boundaries = SequenceBoundaries.from_lengths([middle, 12 - middle])
                told = {"cu_seqlens": cu_seqlens, "seq_idx": boundaries.seq_idx, "boundaries": boundaries}
                told |= {"attention_mask": block_mask((middle, 12 - middle)), "position_ids": boundaries.position_ids}
                with self.subTest(source, middle=middle), torch.no_grad():
                    expected = model(input_ids=input_ids, boundaries=boundaries).logits
                    actual = compiled(input_ids=input_ids, use_cache=False, **{source: told[source]}).logits
                    self.assertLess(relative_error(actual, expected), 1e-5)
        refuses()

    def test_export_of_an_unpacked_row(self):
        model = self.model(*FAMILIES[1][1:]).eval()
        (row,) = documents((70,))
        arguments = {"input_ids": row[None], "use_cache": False}
        exported = torch.export.export(model, (), arguments)
        self.assertLess(relative_error(exported.module()(**arguments).logits, model(**arguments).logits), 1e-6)

    def test_export_of_a_padded_batch(self):
        """The graph computes padding, because it cannot depend on its position."""
        model = self.model(*FAMILIES[0][1:]).eval()
        batch = {name: x for name, x in padded_batch(documents((70, 9)), "right").items() if name != "labels"}
        batch["use_cache"] = False
        with mock.patch.object(PaddedBatch, "from_attention_mask") as looked:
            exported = torch.export.export(model, (), batch)
            looked.assert_not_called()
        real = batch["attention_mask"].bool()
        expected = model(**batch, packs_padding=False).logits
        actual = exported.module()(**batch).logits
        self.assertLess(relative_error(actual[real], expected[real]), 1e-6)
        self.assertTrue(actual[~real].any())

    def test_compiled_padded_batch(self):
        """It is no packed row, so its graph needs no break, also with position ids."""
        model = self.model(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**SHALLOW)).model.eval()
        batch = {**padded_batch(documents((12, 9)), "right"), "position_ids": torch.arange(12).expand(2, 12)}
        real = batch.pop("labels") != -100
        with torch.no_grad(), mock.patch.object(PaddedBatch, "from_attention_mask") as looked:
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            found = compiled(**batch, use_cache=False).last_hidden_state
            looked.assert_not_called()
        with torch.no_grad():
            expected = model(**batch, packs_padding=False, use_cache=False).last_hidden_state
        self.assertLess(relative_error(found[real], expected[real]), 1e-6)
