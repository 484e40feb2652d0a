"""LoRA over layers and experts of a checkpoint in FP8, as Transformers loads them: a scale for each block, or for all."""

import unittest
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from unittest import mock

import torch
import torch.distributed as dist
from common.blocks import BLOCK, LAYERS, store, stored_and_plain
from common.processes import run_processes
from common.shown import shows
from mixins.lora import randomized
from mixins.model import packed_batch, total_relative_error
from mixins.patch import builtin_model
from mixins.stored import DOCUMENTS, StoredWeightsTestCase, run
from parameterized import parameterized
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Experts, FP8Linear

from transformers_packed import patch_model, registered
from transformers_packed.models.experts import _adapters_of, isolates
from transformers_packed.models.families import EXPERT_WEIGHTS
from transformers_packed.models.projections import terms_of
from transformers_packed.models.releases import IGNORED_BY_DDP
from transformers_packed.models.stored_weights import in_fewer_bits, weight_of_layer
from transformers_packed.ops.dispatch import _used
from transformers_packed.ops.terms import Dequantized


def layer_in_blocks() -> FP8Linear:
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(48, 32)})
    store(model, (16, 24))
    return model["q_proj"]


def models(block=BLOCK, scale_format: str = "float", family: str = "qwen3_5"):
    return stored_and_plain(patch_model(builtin_model(family)), block, scale_format)


def adapted():
    """A mixture with adapters of linear layers and experts."""
    from peft import LoraConfig, get_peft_model

    model, _ = models(family="qwen3_5_moe")
    torch.manual_seed(1)
    options = {"target_modules": ["q_proj", "out_proj"], "target_parameters": list(EXPERT_WEIGHTS)}
    return randomized(get_peft_model(model, LoraConfig(r=4, **options)))


def gradients_of(model, rank):
    model(**packed_batch(DOCUMENTS[rank:], "cu_seqlens"), use_cache=False).loss.backward()
    return {name.removeprefix("module."): x.grad for name, x in model.named_parameters() if x.grad is not None}


def gradients_under_ddp():
    model = adapted()
    setattr(model, IGNORED_BY_DDP, in_fewer_bits(model))
    return gradients_of(DistributedDataParallel(model), dist.get_rank())


@unittest.skipUnless(find_spec("peft"), "needs peft")
class BlocksTest(StoredWeightsTestCase):
    def setUp(self):
        _used.clear()

    @parameterized.expand(
        [("qwen3_5", BLOCK, "float"), ("qwen3_5", BLOCK, "ue8m0"), ("qwen3_5", None, "float")]
        + [("qwen3_5_moe", BLOCK, "float"), ("qwen3_next", BLOCK, "ue8m0"), ("qwen3_5_moe", None, "float")]
        + [("qwen3_5_moe", (128, 128), "float")]
        + [("kimi_linear", BLOCK, "float"), ("qwen4_exp", BLOCK, "float")]
    )
    @shows("fp8", "LoRA of linear layers", "LoRA of experts", "gradient checkpointing")
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
        self.check_adapters(*adapted)

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
    @shows("fp8", "an adapter is saved and loaded")
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

    @shows("fp8", "`save_pretrained` of the base")
    def test_the_base_is_saved(self):
        with TemporaryDirectory() as folder:
            self.stored("qwen3_5_moe", folder).save_pretrained(f"{folder}/again")
            given, found = (load_file(f"{x}/model.safetensors") for x in (folder, f"{folder}/again"))
        self.assertEqual(given.keys(), found.keys())
        for name, x in given.items():
            self.assertEqual(x.dtype, found[name].dtype, name)
            self.assertTrue(torch.equal(x.view(torch.uint8), found[name].view(torch.uint8)), name)

    @shows("fp8", "an adapter is merged into dequantized weights")
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

    @shows("fp8", "DDP")
    def test_two_processes(self):
        first, second = run_processes(gradients_under_ddp, 2)
        alone = [gradients_of(adapted(), rank) for rank in range(2)]
        self.assertEqual(first.keys(), alone[0].keys())
        for name, gradient in first.items():
            self.assertTrue(torch.equal(gradient, second[name]))
            torch.testing.assert_close(gradient, (alone[0][name] + alone[1][name]) / 2)

    @shows("fp8", "a packed row equals its documents")
    def test_documents_stay_apart(self):
        model, plain = models()
        self.check_isolation(model, plain)

    @shows("fp8", "dequantized to the bits of the library")
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

    @shows("fp8", "FP8 products (`--float8`)", says="no")
    def test_products_in_float8(self):
        self.assertIs(type(weight_of_layer(layer_in_blocks(), True, torch.randn(5, 48))), Dequantized)

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
