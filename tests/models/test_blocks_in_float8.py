"""LoRA over layers and experts of a checkpoint in FP8, as Transformers loads them: a scale for each block, or for all."""

import unittest
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from unittest import mock

import torch
from common.blocks import BLOCK, LAYERS, store, stored_and_plain
from mixins.lora import randomized
from mixins.model import packed_batch, total_relative_error
from mixins.patch import builtin_model, on_a_gpu
from parameterized import parameterized
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Experts, FP8Linear

from transformers_packed import patch_model, registered
from transformers_packed.audit.isolation import changed_by_others
from transformers_packed.models.experts import _adapters_of, isolates
from transformers_packed.models.families import EXPERT_WEIGHTS
from transformers_packed.models.projections import terms_of
from transformers_packed.ops import implementations_used
from transformers_packed.ops.dispatch import _used
from transformers_packed.ops.terms import Dequantized


DOCUMENTS = [torch.arange(1, n) for n in (9, 30, 2, 17)]


def layer_in_blocks() -> FP8Linear:
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(48, 32)})
    store(model, (16, 24))
    return model["q_proj"]


def models(block=BLOCK, scale_format: str = "float", family: str = "qwen3_5"):
    return stored_and_plain(patch_model(builtin_model(family)), block, scale_format)


def run(model):
    model.zero_grad()
    loss = model(**packed_batch(DOCUMENTS, "cu_seqlens"), use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@unittest.skipUnless(find_spec("peft"), "needs peft")
class BlocksTest(unittest.TestCase):
    def setUp(self):
        _used.clear()

    @parameterized.expand(
        [("qwen3_5", BLOCK, "float"), ("qwen3_5", BLOCK, "ue8m0"), ("qwen3_5", None, "float")]
        + [("qwen3_5_moe", BLOCK, "float"), ("qwen3_next", BLOCK, "ue8m0"), ("qwen3_5_moe", None, "float")]
        + [("qwen3_5_moe", (128, 128), "float")]
        + [("kimi_linear", BLOCK, "float"), ("qwen4_exp", BLOCK, "float")]
    )
    def test_adapters(self, family, block, scale_format):
        from peft import LoraConfig, get_peft_model

        adapted = []
        for model in models(block, scale_format, family):
            torch.manual_seed(1)
            parameters = list(EXPERT_WEIGHTS) if family != "qwen3_5" else None
            config = LoraConfig(r=4, lora_alpha=8, target_modules=list(LAYERS), target_parameters=parameters)
            adapted.append(randomized(get_peft_model(model, config)))
        # PEFT draws other numbers for a weight in FP8.
        adapters = {name: x for name, x in adapted[0].state_dict().items() if "lora_" in name}
        adapted[1].load_state_dict(adapters, strict=False)
        self.assertEqual(family == "qwen3_5", not any(isinstance(x, FP8Experts) for x in adapted[0].modules()))
        with on_a_gpu():
            (loss, gradients), expected = map(run, adapted)
        self.assertLess(abs(loss / expected[0] - 1).item(), 1e-6)
        self.assertEqual(gradients.keys(), expected[1].keys())
        self.assertTrue(all("lora_" in name for name in gradients))
        self.assertLess(total_relative_error(gradients, expected[1]), 2e-6)
        used = implementations_used()
        for op, other in (("linear_lora", "peft"), ("experts_lora", "peft"), ("experts", "grouped_mm")):
            self.assertNotIn(other, used.get(op, ()))
        # PEFT's own forward of a plain layer adds in another order.
        expected = run(adapted[1])
        for checkpointing in (False, True):
            if checkpointing:
                adapted[0].gradient_checkpointing_enable({"use_reentrant": False})
            loss, gradients = run(adapted[0])
            self.assertLess(abs(loss - expected[0]).item(), 1e-5)
            self.assertLess(total_relative_error(gradients, expected[1]), 1e-5)

    def stored(self, family, folder):
        """A model of a checkpoint that Transformers has written to the folder."""
        skipped = ["lm_head", "in_proj_a", "in_proj_b", "in_proj_ba", "shared_expert_gate"]
        config = FineGrainedFP8Config(weight_block_size=(16, 16), modules_to_not_convert=skipped)
        capability = mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0))
        builtin_model(family).save_pretrained(folder)
        # Without a GPU, Transformers dequantizes.
        with mock.patch("torch.cuda.is_available", lambda: True), capability:
            stock = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
            stock.save_pretrained(folder)
            with registered():
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.assertTrue(any(x.dtype == torch.float8_e4m3fn for x in model.parameters()))
        for name, weight in model.named_parameters():
            self.assertTrue(torch.equal(weight.float(), stock.get_parameter(name).float()), name)
        return model

    @parameterized.expand(["qwen3_5", "qwen3_5_moe", "qwen3_next"])
    def test_checkpoint(self, family):
        """A checkpoint that Transformers has written keeps its bytes, and an adapter on it is saved and loaded."""
        from peft import LoraConfig, PeftModel, get_peft_model

        with TemporaryDirectory() as folder:
            model, again = (self.stored(family, folder) for _ in range(2))
            parameters = list(EXPERT_WEIGHTS) if family != "qwen3_5" else None
            config = LoraConfig(r=4, target_modules=["q_proj", "out_proj"], target_parameters=parameters)
            adapted = randomized(get_peft_model(model, config))
            adapted.save_pretrained(folder)
            again = PeftModel.from_pretrained(again, folder, is_trainable=True)
            (loss, gradients), expected = run(adapted), run(again)
            self.assertEqual(loss, expected[0])
            self.assertEqual(total_relative_error(gradients, expected[1]), 0)

    def test_merge(self):
        """An adapter is merged into dequantized weights, which are saved as such."""
        from peft import LoraConfig, PeftModel, get_peft_model

        with TemporaryDirectory() as folder:
            plain = self.stored("qwen3_5", folder)
            adapted = randomized(get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj", "out_proj"])))
            adapted.save_pretrained(f"{folder}/adapter")
            with torch.no_grad():
                expected = adapted(**packed_batch(DOCUMENTS, "cu_seqlens")).logits
            with self.assertRaisesRegex(RuntimeError, "Float8"):
                adapted.merge_and_unload()
            config = FineGrainedFP8Config(dequantize=True)
            base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
            PeftModel.from_pretrained(base, f"{folder}/adapter").merge_and_unload().save_pretrained(folder)
            with registered():
                merged = AutoModelForCausalLM.from_pretrained(folder)
        self.assertFalse(hasattr(merged.config, "quantization_config"))
        with torch.no_grad():
            found = merged(**packed_batch(DOCUMENTS, "cu_seqlens")).logits
        self.assertLess((found - expected).abs().max(), 1e-5)

    def test_documents_stay_apart(self):
        model, plain = models()
        batch = packed_batch(DOCUMENTS, "cu_seqlens")
        places = list(torch.arange(sum(map(len, DOCUMENTS))).split([len(x) for x in DOCUMENTS]))
        self.assertLess(changed_by_others(model, lambda: model(**batch), batch, places), 1e-4)
        with torch.no_grad():
            self.assertTrue(torch.equal(model(**batch).logits, plain(**batch).logits))

    def test_what_the_op_computes(self):
        layer = layer_in_blocks()
        x = torch.randn(5, 48)
        projection, dtype = terms_of(layer, x)
        self.assertIsInstance(projection.weight, Dequantized)
        self.assertIs(dtype, torch.float32)
        expected = Fp8Dequantize(None)._dequantize_one(layer.weight.data, layer.weight_scale_inv.data, torch.float32)
        self.assertTrue(torch.equal(projection.weight.compute(), expected))
        with torch.autocast("cpu", torch.bfloat16):
            projection, dtype = terms_of(layer, x)
        self.assertIs(dtype, torch.bfloat16)
        self.assertTrue(torch.equal(projection.weight.compute(), expected.to(torch.bfloat16)))

    @parameterized.expand(["hook", "forward", "dequantized"])
    def test_layers_that_run_themselves(self, kind):
        layer = layer_in_blocks()
        if kind == "hook":
            layer.register_forward_hook(lambda *_: None)
        elif kind == "forward":
            layer.forward = lambda x: x
        else:
            layer.weight.data = layer.weight.data.float()
        self.assertIsNone(terms_of(layer, torch.randn(5, 48)))

    @parameterized.expand(["hook", "dequantized", "clamped gate", "softcapped gate"])
    def test_experts_that_run_themselves(self, kind):
        model, _ = models(family="qwen3_5_moe")
        module = next(x for x in model.modules() if isinstance(x, FP8Experts))
        self.assertTrue(isolates(module))
        if kind == "hook":
            module.register_forward_hook(lambda *_: None)
            self.assertIsNone(_adapters_of(module)[1])
            return
        if kind == "dequantized":
            module.down_proj.data = module.down_proj.data.float()
        elif kind == "clamped gate":
            module.limit = 7.0
        else:
            module.gate_softcap = 5.0
        self.assertFalse(isolates(module))


if __name__ == "__main__":
    unittest.main()
