"""`torch.compile` of packed rows and `torch.export` of unpacked ones."""

import unittest
from copy import deepcopy
from unittest import mock

import torch
from common.families import documents, tiny_model
from mixins.model import block_mask, packed_batch, padded_batch, relative_error
from mixins.vision import EXPERTS, TINY
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from transformers import Qwen3_5TextConfig, Qwen3NextConfig, set_seed

from transformers_packed import SequenceBoundaries, patch_model
from transformers_packed.models.padding import PaddedBatch
from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers_packed.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM
from transformers_packed.ops import dispatch


QWEN3_NEXT = Qwen3NextForCausalLM, Qwen3NextConfig(**TINY, **EXPERTS, mlp_only_layers=[0])
QWEN3_5 = Qwen3_5ForCausalLM, Qwen3_5TextConfig(**TINY)


# Where boundaries come from does not depend on the layers, and tracing takes most of the time.
SHALLOW = {**TINY, "num_hidden_layers": 1, "layer_types": ["linear_attention"]}


def trained(model):
    return [x for x in model.parameters() if x.requires_grad]


class CompileTest(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()
        self.addCleanup(torch._dynamo.reset)

    def model(self, cls, config):
        set_seed(0)
        return cls._from_config(config, attn_implementation="sdpa").train()

    def tiny(self, family):
        layers = {"layer_types": ["linear_attention", "full_attention"]} if family != "lfm2" else {}
        return patch_model(tiny_model(family, **layers)).train()

    def check(self, model, compiled, source="all", compiles_again=False):
        """Rows of any lengths give the bits of `model`. From the fourth on, nothing is compiled unless it `compiles_again`."""
        rows = [
            (1, 3, 65, 13),
            (70, 2, 9),
            (5, 6),
            *((n, 1 + 2 * n, 30 - n) * (1 + n % 3) for n in range(1, 6)),
            (40,),
        ]
        for number, lengths in enumerate(rows):
            batch = packed_batch(documents(lengths), source)
            expected = model(**batch).loss
            gradients = torch.autograd.grad(expected, trained(model), allow_unused=True)
            torch._dynamo.utils.counters.clear()
            with torch._dynamo.config.patch(error_on_recompile=number > 2 and not compiles_again):
                loss = compiled(**batch).loss
                found = torch.autograd.grad(loss, trained(compiled), allow_unused=True)
            counters = torch._dynamo.utils.counters
            self.assertTrue(all("packed rows differ in the lengths" in why for why in counters["graph_break"]))
            if number > 2 and not compiles_again:
                self.assertEqual(counters["frames"]["total"], 0)
            self.assertEqual(loss, expected)
            for one, other in zip(found, gradients, strict=True):
                self.assertTrue(one is other is None or torch.equal(one, other))

    @parameterized.expand(
        [
            ("qwen3_5_text", "all", "aot_eager"),
            ("qwen3_5_moe_text", "position_ids", "eager"),
            ("kimi_linear", "all", "eager"),
            ("lfm2", "all", "eager"),
        ]
    )
    def test_packed(self, family, source, backend):
        model = self.tiny(family)
        self.check(model, torch.compile(model, backend=backend), source)

    @parameterized.expand([("qwen3_5_text",), ("qwen3_5_moe_text",), ("bailing_hybrid",)])
    def test_compiles_nothing_of_a_training_row(self, family):
        """Its first compilation would take as long as that of a model, and keep all logits."""
        graphs = []

        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(self.tiny(family), backend=backend)
        compiled(**packed_batch(documents((5, 6)))).loss.backward()
        compiled(**padded_batch(documents((5, 6)), "right")).loss.backward()
        self.assertEqual(graphs, [])

    @parameterized.expand([("qwen3_5_text",), ("qwen3_5_moe_text",)])
    def test_adapters_and_checkpointing(self, family):
        """Dynamo looks into PEFT's forward, but into none of its layers."""
        model = get_peft_model(
            self.tiny(family), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        )
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        compiled = torch.compile(model, backend="eager")
        # PEFT's own calls are compiled, or break the graph, in the first row.
        compiled(**packed_batch(documents((5, 6))))
        self.check(model, compiled)

    @parameterized.expand([("qwen3_5_text",), ("bailing_hybrid",), ("kimi_linear",), ("olmo_hybrid",)])
    def test_layers(self, family):
        model = self.tiny(family)
        compiled = deepcopy(model)
        for layer in compiled.model.layers:
            layer.compile(backend="eager")
        self.check(model, compiled)

    def test_layers_around_a_mixer(self):
        """Those of stock classes are compiled, for a few lengths of rows, and their mixers run outside of the graphs."""
        model = self.tiny("lfm2")
        compiled = deepcopy(model)
        for layer in compiled.model.layers:
            layer.compile(backend="eager")
        self.check(model, compiled, compiles_again=True)

    @parameterized.expand([("qwen3_5_text",), ("kimi_linear",)])
    def test_checkpointed_layers(self, family):
        """Each layer is computed again in backward, as without a compiler."""
        model, calls = self.tiny(family), []
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        compiled = deepcopy(model)
        for layer in compiled.model.layers:
            layer.compile(backend="eager")
            layer.input_layernorm.register_forward_hook(lambda *_: calls.append("layer"))
        batch = packed_batch(documents((5, 30)))
        losses = [one(**batch).loss for one in (model, compiled)]
        self.assertEqual(*losses)
        gradients = [
            torch.autograd.grad(loss, trained(one)) for loss, one in zip(losses, (model, compiled), strict=True)
        ]
        self.assertTrue(all(map(torch.equal, *gradients)))
        self.assertEqual(len(calls), 2 * len(model.model.layers))

    def test_hooks_and_the_log(self):
        model, calls = self.model(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**SHALLOW)), []
        compiled = torch.compile(model, backend="eager")
        for module in (model, model.model, model.model.layers[0], model.model.layers[0].mlp.up_proj):
            module.register_forward_hook(lambda module, *_: calls.append(type(module).__name__))
        dispatch.logger.warning_once.cache_clear()
        with self.assertLogs("transformers_packed.ops.dispatch", "WARNING") as log:
            for lengths in ((5, 6), (7, 1, 2)):
                compiled(**packed_batch(documents(lengths))).loss.backward()
        self.assertEqual(calls, 2 * ["Linear", "Qwen3_5DecoderLayer", "Qwen3_5TextModel", "Qwen3_5ForCausalLM"])
        (line,) = log.output
        self.assertIn("torch.compile is not needed", line)

    def test_padded_batches_leave_padding_out(self):
        """As they do without a compiler, in training and evaluation."""
        model = self.model(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**SHALLOW))
        compiled, batch = torch.compile(model, backend="eager"), padded_batch(documents((12, 9)), "right")
        for training in (True, False):
            model.train(training)
            with mock.patch.object(
                PaddedBatch, "from_attention_mask", wraps=PaddedBatch.from_attention_mask
            ) as packed:
                self.assertEqual(compiled(**batch, use_cache=False).loss, model(**batch, use_cache=False).loss)
                self.assertEqual(packed.call_count, 2)

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
        model = self.model(*QWEN3_5).eval()
        (row,) = documents((70,))
        arguments = {"input_ids": row[None], "use_cache": False}
        exported = torch.export.export(model, (), arguments)
        self.assertLess(relative_error(exported.module()(**arguments).logits, model(**arguments).logits), 1e-6)

    @parameterized.expand([False, True])
    def test_export_of_a_padded_batch(self, strict):
        """The graph computes padding, because it cannot depend on its position."""
        model = self.model(*QWEN3_NEXT).eval()
        batch = {name: x for name, x in padded_batch(documents((70, 9)), "right").items() if name != "labels"}
        batch["use_cache"] = False
        with mock.patch.object(PaddedBatch, "from_attention_mask") as looked:
            exported = torch.export.export(model, (), batch, strict=strict)
            looked.assert_not_called()
        real = batch["attention_mask"].bool()
        expected = model(**batch, packs_padding=False).logits
        actual = exported.module()(**batch).logits
        self.assertLess(relative_error(actual[real], expected[real]), 1e-6)
        self.assertTrue(actual[~real].any())

    def test_compiled_padded_batch(self):
        """If the model does not pack it, its graph needs no break, also with position ids."""
        model = self.model(Qwen3_5ForCausalLM, Qwen3_5TextConfig(**SHALLOW)).model.eval()
        batch = {**padded_batch(documents((12, 9)), "right"), "position_ids": torch.arange(12).expand(2, 12)}
        real = batch.pop("labels") != -100
        with torch.no_grad(), mock.patch.object(PaddedBatch, "from_attention_mask") as looked:
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            found = compiled(**batch, packs_padding=False, use_cache=False).last_hidden_state
            looked.assert_not_called()
        with torch.no_grad():
            expected = model(**batch, packs_padding=False, use_cache=False).last_hidden_state
        self.assertLess(relative_error(found[real], expected[real]), 1e-6)
