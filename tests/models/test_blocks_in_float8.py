"""LoRA over layers of a checkpoint in FP8, as Transformers loads them: a scale for each block, or for the whole weight."""

import copy
import unittest
from importlib.util import find_spec

import torch
from mixins.lora import randomized
from mixins.model import packed_batch, total_relative_error
from mixins.patch import builtin_model, on_a_gpu
from parameterized import parameterized
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, FP8Linear

from transformers_packed import patch_model
from transformers_packed.audit.isolation import changed_by_others
from transformers_packed.models.projections import terms_of
from transformers_packed.ops import implementations_used
from transformers_packed.ops.dispatch import _used
from transformers_packed.ops.terms import Dequantized


LAYERS = ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")
LAYERS += ("gate_proj", "up_proj", "down_proj")
DOCUMENTS = [torch.arange(1, n) for n in (9, 30, 2, 17)]
# The last blocks of some layers have fewer rows or columns.
BLOCK = (16, 24)


def in_blocks(layer: torch.nn.Linear, block, scale_format: str = "float") -> FP8Linear:
    """The layer as a checkpoint in FP8 has it, with the scales of random blocks."""
    options = {"block_size": block, "scale_fmt": scale_format, "has_bias": layer.bias is not None}
    stored = FP8Linear(layer.in_features, layer.out_features, **options).requires_grad_(False)
    scale = torch.rand(stored.weight_scale_inv.shape) * 0.02 + 0.002
    stored.weight_scale_inv.data = scale.to(stored.weight_scale_inv.dtype)
    stored.weight.data = (layer.weight.data / scale_of_each(stored)).to(torch.float8_e4m3fn)
    if layer.bias is not None:
        stored.bias.data = layer.bias.data
    return stored


def scale_of_each(layer: FP8Linear) -> torch.Tensor:
    scale, block = layer.weight_scale_inv.data.float(), layer.block_size
    if block is None:
        return scale
    rows = scale.repeat_interleave(block[0], 0)[: layer.out_features]
    return rows.repeat_interleave(block[1], 1)[:, : layer.in_features]


def stored_and_plain(block=BLOCK, scale_format: str = "float"):
    """A model with layers in FP8, and the same one with plain weights of the same values."""
    torch.manual_seed(0)
    plain = patch_model(builtin_model("qwen3_5"))
    stored = copy.deepcopy(plain)
    for name, layer in list(plain.named_modules()):
        if type(layer) is torch.nn.Linear and name.endswith(LAYERS):
            stored.set_submodule(name, in_blocks(layer, block, scale_format))
            found = stored.get_submodule(name)
            layer.weight.data = found.weight.data.float() * scale_of_each(found)
    return stored, plain


def run(model):
    model.zero_grad()
    loss = model(**packed_batch(DOCUMENTS, "cu_seqlens"), use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@unittest.skipUnless(find_spec("peft"), "needs peft")
class BlocksTest(unittest.TestCase):
    def setUp(self):
        _used.clear()

    @parameterized.expand([(BLOCK, "float"), (BLOCK, "ue8m0"), (None, "float")])
    def test_adapters(self, block, scale_format):
        from peft import LoraConfig, get_peft_model

        adapted = []
        for model in stored_and_plain(block, scale_format):
            torch.manual_seed(1)
            config = LoraConfig(r=4, lora_alpha=8, target_modules=list(LAYERS))
            adapted.append(randomized(get_peft_model(model, config)))
        # PEFT draws other numbers for a weight in FP8.
        adapters = {name: x for name, x in adapted[0].state_dict().items() if "lora_" in name}
        adapted[1].load_state_dict(adapters, strict=False)
        with on_a_gpu():
            (loss, gradients), expected = map(run, adapted)
        self.assertLess(abs(loss - expected[0]).item(), 1e-6)
        self.assertEqual(gradients.keys(), expected[1].keys())
        self.assertTrue(all("lora_" in name for name in gradients))
        self.assertLess(total_relative_error(gradients, expected[1]), 1e-6)
        self.assertNotIn("peft", implementations_used()["linear_lora"])
        # PEFT's own forward of a plain layer adds in another order.
        expected = run(adapted[1])
        for checkpointing in (False, True):
            if checkpointing:
                adapted[0].gradient_checkpointing_enable({"use_reentrant": False})
            loss, gradients = run(adapted[0])
            self.assertLess(abs(loss - expected[0]).item(), 1e-5)
            self.assertLess(total_relative_error(gradients, expected[1]), 1e-5)

    def test_documents_stay_apart(self):
        model, plain = stored_and_plain()
        batch = packed_batch(DOCUMENTS, "cu_seqlens")
        places = list(torch.arange(sum(map(len, DOCUMENTS))).split([len(x) for x in DOCUMENTS]))
        self.assertLess(changed_by_others(model, lambda: model(**batch), batch, places), 1e-4)
        with torch.no_grad():
            self.assertTrue(torch.equal(model(**batch).logits, plain(**batch).logits))

    def test_what_the_op_computes(self):
        layer = in_blocks(torch.nn.Linear(48, 32), (16, 24))
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
        layer = in_blocks(torch.nn.Linear(48, 32), (16, 24))
        if kind == "hook":
            layer.register_forward_hook(lambda *_: None)
        elif kind == "forward":
            layer.forward = lambda x: x
        else:
            layer.weight.data = layer.weight.data.float()
        self.assertIsNone(terms_of(layer, torch.randn(5, 48)))


if __name__ == "__main__":
    unittest.main()
