"""QLoRA: which layers bitsandbytes quantizes, and the fused layers with 4-bit weights, on a CPU."""

import copy
import tempfile
import unittest
from importlib.util import find_spec
from unittest import mock

import torch
from common.shown import shows
from mixins.model import packed_batch, total_relative_error
from parameterized import parameterized
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3_5TextConfig, Qwen3NextConfig, set_seed
from transformers.models.qwen3_5 import modeling_qwen3_5 as builtin
from transformers.quantizers.base import get_keys_to_not_convert

from transformers_packed import patch_model, registered
from transformers_packed.models import projections, stored_weights
from transformers_packed.models.quantization import SENSITIVE
from transformers_packed.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5ForCausalLM,
    Qwen3_5TextForSequenceClassification,
)


HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None
if HAS_BITSANDBYTES:
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit

SIZE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LAYERS = [
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj",
    "gate_proj", "up_proj", "down_proj",
]  # fmt: skip
LENGTHS = [13, 20, 3]


def four_bit(**options):
    dtype = torch.bfloat16
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=True,
        **options,
    )


def quantized_layers(model) -> set[str]:
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Linear4bit)}


@unittest.skipUnless(HAS_BITSANDBYTES, "needs bitsandbytes")
class QuantizationTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(directory.cleanup)
        cls.checkpoint = directory.name
        set_seed(0)
        cls.model = builtin.Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZE))
        cls.model.save_pretrained(cls.checkpoint)

    def load(self, cls=Qwen3_5ForCausalLM, **options):
        config = options.pop("quantization_config", None) or four_bit(**options)
        return cls.from_pretrained(self.checkpoint, quantization_config=config, dtype=torch.bfloat16)


class SkippedModulesTest(QuantizationTest):
    def test_sensitive_layers_and_the_head_stay(self):
        stock = quantized_layers(self.load(builtin.Qwen3_5ForCausalLM))
        self.assertIn("in_proj_a", stock)
        self.assertEqual(quantized_layers(self.load()), stock - set(SENSITIVE))

    def test_skipped_modules_of_the_user_are_added(self):
        config = four_bit(llm_int8_skip_modules=["q_proj"])
        expected = quantized_layers(self.load()) - {"q_proj"}
        self.assertEqual(quantized_layers(self.load(quantization_config=config)), expected)
        self.assertEqual(config.llm_int8_skip_modules, ["q_proj"])
        config = four_bit().to_dict() | {"llm_int8_skip_modules": ["q_proj"]}
        with registered():
            self.assertEqual(quantized_layers(self.load(AutoModelForCausalLM, quantization_config=config)), expected)

    def test_everything_that_transformers_skips_is_skipped(self):
        classifier = Qwen3_5TextForSequenceClassification(Qwen3_5TextConfig(**SIZE, num_labels=3, pad_token_id=0))
        with registered():
            sparse = AutoModelForCausalLM.from_config(
                Qwen3NextConfig(**SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
            )
        for model in (Qwen3_5ForCausalLM(self.model.config), classifier, sparse):
            for name in get_keys_to_not_convert(model):
                if type(model.get_submodule(name)) is torch.nn.Linear:
                    self.assertIn(name, ("lm_head", "score"))

    def test_saved_and_loaded_again(self):
        model = self.load()
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            for cls in (Qwen3_5ForCausalLM, builtin.Qwen3_5ForCausalLM):
                again = cls.from_pretrained(directory)
                self.assertEqual(quantized_layers(again), quantized_layers(model))


class FusedQuantizedLayersTest(QuantizationTest):
    def adapted(self, model, prepare=False):
        if prepare:
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        set_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=LAYERS))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return model.train()

    def step(self, model, fused, autocast):
        """Return the logits and the gradients of a packed row, and the number of calls of the fused op."""
        batch = packed_batch((torch.arange(sum(LENGTHS)) % 90 + 1).split(LENGTHS), "cu_seqlens")
        model.zero_grad()
        triton, shared = "transformers_packed.ops.backends.triton", projections.fused_linears
        with (
            mock.patch(f"{triton}.on_gpu", lambda tensor: fused),
            mock.patch(f"{triton}.problem", lambda: "are left out here"),
            mock.patch.object(projections, "fused_linears", side_effect=shared) as calls,
        ):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = model(**batch, skip_logits=False)
            output.loss.backward()
        gradients = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
        return output.logits.detach().float(), gradients, calls.call_count

    def exact(self, model):
        """The same weights and adapters in float32."""
        full = copy.deepcopy(self.model)
        weights = full.state_dict()
        for name, module in model.named_modules():
            if isinstance(module, Linear4bit):
                path = name.removeprefix("base_model.model.").removesuffix(".base_layer") + ".weight"
                weights[path] = dequantize_4bit(module.weight.data, module.weight.quant_state).float()
        full.load_state_dict(weights)
        full = self.adapted(patch_model(full))
        full.load_state_dict({n: x.float() for n, x in model.state_dict().items() if "lora_" in n}, strict=False)
        return full

    @parameterized.expand([("loaded", False, True), ("patched", True, False)])
    @shows("nf4", "LoRA of linear layers")
    def test_is_not_worse_than_peft(self, how, autocast, prepare):
        cls = Qwen3_5ForCausalLM if how == "loaded" else builtin.Qwen3_5ForCausalLM
        model = self.load(cls) if how == "loaded" else patch_model(self.load(cls))
        model = self.adapted(model, prepare)
        logits, gradients, calls = self.step(model, True, autocast)
        theirs, expected, none = self.step(model, False, autocast)
        self.assertEqual(none, 0)
        self.assertGreaterEqual(calls, 8)
        self.assertEqual(gradients.keys(), expected.keys())
        self.assertTrue(all("lora_" in name for name in gradients))
        true_logits, true_gradients, _ = self.step(self.exact(model), False, False)
        ours = total_relative_error(gradients, true_gradients)
        self.assertLess(ours, 6 * total_relative_error(expected, true_gradients))
        self.assertLess((logits - true_logits).norm(), 2 * (theirs - true_logits).norm())

    def test_a_weight_is_dequantized_once_for_each_direction(self):
        mlp = self.adapted(self.load()).base_model.model.model.layers[0].mlp
        x = torch.randn(1, 5, SIZE["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
        with (
            mock.patch("transformers_packed.ops.backends.triton.on_gpu", lambda tensor: True),
            mock.patch.object(stored_weights, "dequantize_4bit", wraps=stored_weights.dequantize_4bit) as calls,
        ):
            gate, up = projections.project(x, mlp.gate_proj, mlp.up_proj)
            self.assertEqual(calls.call_count, 2)
            (gate * up).sum().backward()
            self.assertEqual(calls.call_count, 4)

    @parameterized.expand([("uint8",), ("bfloat16",), ("float32",)])
    def test_the_bytes_may_have_another_dtype(self, storage):
        layer = Linear4bit(64, 32, bias=False, compute_dtype=torch.bfloat16, quant_storage=getattr(torch, storage))
        layer = layer.to("cpu")
        weight = stored_weights.weight_of_layer(layer, False, torch.empty(0)).compute()
        self.assertTrue(torch.equal(weight, dequantize_4bit(layer.weight.data, layer.weight.quant_state)))
