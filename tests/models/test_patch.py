"""`patch_model` and `unpatch_model` on live models. The oracle is the same model before patching."""

import pytest
import torch
from common.releases import STOCK_REFUSAL
from mixins.model import alone, gradients, packed_batch, relative_error
from mixins.patch import (
    BUILTINS,
    COMPOSITE,
    CONFIGS,
    PatchTestCase,
    builtin_model,
    documents,
    ours,
    snapshot,
)
from mixins.vision import TEXT, alone_batch, document
from parameterized import parameterized
from transformers import Qwen3_5TextConfig
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from transformers_packed import DataCollatorWithFlattening, patch_model, unpatch_model
from transformers_packed.models.families import modeling_module
from transformers_packed.models.registry import check_patch
from transformers_packed.models.releases import recorder_key
from transformers_packed.models.replacements import FAST_PATHS, REPLACEMENTS


class PatchTest(PatchTestCase):
    @parameterized.expand(CONFIGS)
    def test_packed_is_alone_and_back(self, family):
        """One object is patched twice and unpatched twice. Its weights never move."""
        model = builtin_model(family)
        input_ids = documents()[-1][None]
        requested = {"output_hidden_states": True}
        if family != "qwen3_5":
            requested["output_router_logits"] = True

        def outputs():
            result = model(input_ids, labels=input_ids, **requested)
            grads = gradients(model, result.loss)
            recorded = [*result.hidden_states, *(result.get("router_logits") or ())]
            return [result.logits, result.loss, *recorded, *grads.values()]

        expected, before = self.expected(model), outputs()
        untouched = snapshot(model)
        self.assertTrue(check_patch(model))
        self.assertEqual(snapshot(model), untouched)
        self.assertIs(patch_model(model), model)
        self.assertTrue(check_patch(model))
        self.assertIn("", ours(model))
        self.assertEqual(len(ours(model)), 2 + 2)  # the model, its base model, an attention and a linear layer
        faster = [type(module).__name__ for module in model.modules() if type(module) in FAST_PATHS]
        self.assertEqual(sum(name.endswith("DecoderLayer") for name in faster), 2)
        self.assertEqual(sum(name.endswith("RMSNorm") for name in faster), 2 * 2 + 2 + 1)
        self.assertEqual(sum(name.endswith("RMSNormGated") for name in faster), 1)
        patched = snapshot(model)
        for same in ("tensors", "modules", "attributes"):
            self.assertEqual(patched[same], untouched[same])
        self.check_packed_is_alone(model, expected, 4e-6 if family == "qwen3_5" else 1e-4)
        for got, want in zip(outputs(), before, strict=True):
            self.assertLess(relative_error(got, want), 3e-4)
        self.assertIs(patch_model(model), model)
        self.assertEqual(snapshot(model)["classes"], patched["classes"])

        self.assertIs(unpatch_model(model), model)
        self.assertEqual(ours(model), set())
        for _ in range(2):
            after = snapshot(model)
            for same in ("tensors", "modules", "attributes", "classes"):
                self.assertEqual(after[same], untouched[same])
            # Those of our classes may go with models of other tests.
            for key, value in untouched["recorders"].items():
                self.assertTrue("transformers_packed" in str(key) or after["recorders"].get(key) is value, key)
            for got, want in zip(outputs(), before, strict=True):
                self.assertTrue(torch.equal(got, want))
            unpatch_model(model)
        with self.assertRaisesRegex(*STOCK_REFUSAL):
            model(**packed_batch(documents()))

    def test_other_models_are_untouched(self):
        patched, other = builtin_model(), builtin_model()
        patch_model(patched)
        self.assertEqual(ours(other) | ours(builtin_model()), set())
        output = other(documents()[1][None], output_hidden_states=True)
        self.assertEqual(len(output.hidden_states), len(other.model.layers) + 1)

    def test_a_model_that_recorded_before(self):
        """Transformers installs its recording hooks once. They keep working after the switch, without duplicates."""
        model = builtin_model("qwen3_5_moe")
        input_ids, requested = documents()[-1][None], {"output_hidden_states": True, "output_router_logits": True}
        before = model(input_ids, **requested)
        for switch in (patch_model, unpatch_model):
            after = switch(model)(input_ids, **requested)
            for key in ("hidden_states", "router_logits"):
                self.assertEqual(len(after[key]), len(before[key]))
                for got, want in zip(after[key], before[key], strict=True):
                    self.assertLess(relative_error(got, want), 1e-5)

    def test_an_entry_of_a_recorder_that_somebody_changed_stays(self):
        model = builtin_model()
        entry = {"hidden_states": type(model.model.layers[0])}
        key = recorder_key(model)
        self.addCleanup(_CAN_RECORD_REGISTRY.__setitem__, key, _CAN_RECORD_REGISTRY.get(key))
        _CAN_RECORD_REGISTRY[key] = entry
        unpatch_model(patch_model(model))
        self.assertIs(_CAN_RECORD_REGISTRY.get(key), entry)

    def test_gradient_checkpointing(self):
        model = builtin_model()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        expected = self.expected(model)
        self.check_packed_is_alone(patch_model(model), expected)
        self.assertTrue(model.is_gradient_checkpointing)
        unpatch_model(model)
        loss = alone(model, documents())[1]
        for name, grad in gradients(model, loss).items():
            self.assertTrue(torch.equal(grad, expected[2][name]))

    def test_part_of_a_model_and_a_model_inside_another(self):
        model = builtin_model()
        patch_model(model.model.layers[0])
        self.assertEqual(ours(model), {"model.layers.0.linear_attn"})
        outer = torch.nn.ModuleDict({"policy": model, "value": torch.nn.Linear(2, 2)})
        patch_model(outer)
        self.assertIn("policy", ours(outer))
        self.assertEqual(ours(unpatch_model(outer)), set())

    @parameterized.expand(["compile_method", "wrapper"])
    @pytest.mark.slow
    def test_compiled(self, kind):
        """Traces of the old classes are replaced by traces of the new ones."""
        torch._dynamo.reset()
        self.addCleanup(torch._dynamo.reset)
        shallow = {"num_hidden_layers": 1, "layer_types": ["linear_attention"], "use_cache": False}
        model, rows = builtin_model(config=Qwen3_5TextConfig(**TEXT | shallow)).eval(), documents()[1:3]
        with torch.no_grad():
            logits = torch.cat([model(row[None]).logits[0] for row in rows])
            compiled = model
            if kind == "wrapper":
                compiled = torch.compile(model, backend="eager")
            else:
                model.compile(backend="eager")
            before = compiled(rows[0][None]).logits
            patch_model(compiled)
            self.assertIn("", ours(model))
            self.assertLess(relative_error(compiled(**packed_batch(rows)).logits[0], logits), 1e-5)
            unpatch_model(compiled)
            self.assertTrue(torch.equal(compiled(rows[0][None]).logits, before))


class HeadsTest(PatchTestCase):
    @parameterized.expand(BUILTINS)
    def test_every_language_model_of_the_family_has_a_class_of_ours(self, family):
        """A head that Transformers adds later would be converted partially, so it needs a class here first."""
        modeling_module(family)
        for name in BUILTINS[family].__all__:
            if not name.endswith(("PreTrainedModel", "VisionModel")):
                self.assertIn(getattr(BUILTINS[family], name), REPLACEMENTS, name)

    @parameterized.expand(
        [
            ("qwen3_next", "Qwen3NextForTokenClassification", None),
            ("qwen3_5", "Qwen3_5ForTokenClassification", "composite"),
            ("qwen3_5", "Qwen3_5TextModel", None),
            ("qwen3_5_moe", "Qwen3_5MoeModel", "composite"),
        ]
    )
    def test_one_result_per_token(self, family, head, composite):
        model = builtin_model(family, head, COMPOSITE[family] if composite else None)
        images = [document(9, 1, images=((1, 4, 4),)), document(3, 2), document(40, 3, videos=((2, 4, 4),))]
        features = images if composite else [{"input_ids": row.tolist()} for row in documents()]
        want = torch.cat([model(**alone_batch(feature))[0][0] for feature in features])
        patch_model(model)
        # Its labels would lack those of the first tokens, so the collator refuses token classifiers.
        options = {"on_leak": "ignore"} if head.endswith("ForTokenClassification") else {}
        batch = DataCollatorWithFlattening(return_cu_seqlens=True, model=model, **options)(features)
        batch.pop("labels")
        self.assertLess(relative_error(model(**batch)[0][0], want), 1e-5)
        again = torch.cat([unpatch_model(model)(**alone_batch(feature))[0][0] for feature in features])
        self.assertTrue(torch.equal(again, want))
