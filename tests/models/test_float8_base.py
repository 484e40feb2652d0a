"""LoRA over frozen weights that torchao has stored in float8, with and without products in float8."""

import copy
import unittest
from importlib.util import find_spec
from unittest import mock

import torch
from common.shown import shows
from mixins.lora import randomized
from mixins.model import packed_batch, total_relative_error
from mixins.patch import builtin_model, on_a_gpu
from parameterized import parameterized

from transformers_packed import patch_model, use_float8
from transformers_packed.models.projections import terms_of
from transformers_packed.ops import implementations_used
from transformers_packed.ops.dispatch import _used
from transformers_packed.ops.linear import shared_input_linears
from transformers_packed.ops.terms import Float8Weight, Projection
from transformers_packed.ops.terms import float8 as ops


HAS_TORCHAO = find_spec("torchao") is not None and find_spec("peft") is not None
if HAS_TORCHAO:
    from peft import LoraConfig, get_peft_model
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        Float8WeightOnlyConfig,
        PerRow,
        PerTensor,
        quantize_,
    )

LAYERS = ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")
LAYERS += ("gate_proj", "up_proj", "down_proj")
DOCUMENTS = [torch.arange(1, n) for n in (9, 30, 2, 17)]


def inside(layer, name):
    return isinstance(layer, torch.nn.Linear) and name.endswith(LAYERS) and "layers.1." not in name


def stored(model, config=None):
    quantize_(model, config or Float8WeightOnlyConfig(), filter_fn=inside)
    return model


def dequantized(model):
    """The same model with plain weights of the same values."""
    plain = copy.deepcopy(model)
    for layer in plain.modules():
        if type(layer) is torch.nn.Linear and hasattr(layer.weight, "qdata"):
            layer.weight = torch.nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    return plain


def adapted(model):
    torch.manual_seed(1)
    return randomized(get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=list(LAYERS))))


def run(model):
    model.zero_grad()
    loss = model(**packed_batch(DOCUMENTS, "cu_seqlens"), use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class ProductsTest(unittest.TestCase):
    def test_the_stored_bytes_are_used(self):
        """The same as a plain weight of the same values, but for the rounding of gradients to float8."""
        generator = torch.Generator().manual_seed(0)
        x, weight, dy = (torch.randn(*s, generator=generator) for s in ((20, 32), (48, 32), (20, 48)))
        scale = weight.abs().amax(1) / 448
        data = (weight / scale[:, None]).to(torch.float8_e4m3fn)
        values = data.float() * scale[:, None]
        stored = Float8Weight(data, scale, torch.float32)
        x.requires_grad_()
        with mock.patch.object(ops, "cast_rows", wraps=ops.cast_rows) as casts:
            (y,) = shared_input_linears(x, Projection(stored))
            (dx,) = torch.autograd.grad(y, x, dy)
        self.assertEqual([call.args[0].shape for call in casts.call_args_list], [x.shape, dy.shape])
        cast, row_scale = ops.cast_rows(x.detach())
        torch.testing.assert_close(y, cast.float() * row_scale[:, None] @ values.t(), rtol=1e-5, atol=1e-5)
        cast, row_scale = ops.cast_rows(dy, factor=scale)
        torch.testing.assert_close(dx, cast.float() * row_scale[:, None] @ data.float(), rtol=1e-5, atol=1e-5)
        error = (dx - dy @ values).norm() / (dy @ values).norm()
        self.assertTrue(1e-3 < error < 4e-2, error)


@unittest.skipUnless(HAS_TORCHAO, "needs torchao and peft")
class ModelTest(unittest.TestCase):
    def setUp(self):
        _used.clear()
        self.model = stored(patch_model(builtin_model("qwen3_5")))

    @shows("torchao", "LoRA of linear layers")
    def test_without_products_in_float8(self):
        """The fused layers compute what torchao's own forward does."""
        plain = adapted(dequantized(self.model))
        expected = run(plain)
        model = adapted(self.model)
        for fused in (False, True):
            if fused:
                with on_a_gpu():
                    loss, gradients = run(model)
                self.assertIn("linear_lora", implementations_used())
                self.assertNotIn("peft", implementations_used()["linear_lora"])
            else:
                loss, gradients = run(model)
            self.assertLess(abs(loss - expected[0]).item(), 1e-5)
            self.assertEqual(gradients.keys(), expected[1].keys())
            self.assertLess(total_relative_error(gradients, expected[1]), 1e-5)

    @shows("torchao", "FP8 products (`--float8`)")
    def test_products_in_float8(self):
        expected = run(adapted(dequantized(self.model)))
        plain = total_relative_error(run(adapted(use_float8(dequantized(self.model), inside)))[1], expected[1])
        model = adapted(use_float8(self.model, inside))
        with mock.patch.object(ops, "cast_rows", wraps=ops.cast_rows) as casts:
            loss, gradients = run(model)
        self.assertIn("linear_float8_lora", implementations_used())
        weights = {tuple(layer.weight.shape) for layer in model.modules() if hasattr(layer, "base_layer")}
        rows = sum(map(len, DOCUMENTS))
        self.assertTrue(all(len(call.args[0]) == rows for call in casts.call_args_list), weights)
        self.assertLess(abs(loss - expected[0]).item(), 0.05 * expected[0].item())
        error = total_relative_error(gradients, expected[1])
        # Weights that are cast from the same values round as well, to other scales.
        self.assertTrue(plain / 2 < error < 1.2 * plain, (error, plain))
        # In eval mode, products run in the dtype of the model.
        with torch.no_grad():
            batch = packed_batch(DOCUMENTS, "cu_seqlens")
            logits = [m.eval()(**batch).logits for m in (model, adapted(dequantized(self.model)))]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)

    def test_adapters_first(self):
        """The order of quantization and adapters does not matter."""
        first = run(adapted(use_float8(self.model, inside)))
        model = adapted(patch_model(builtin_model("qwen3_5")))
        base = lambda layer, name: inside(layer, name.removesuffix(".base_layer"))  # noqa: E731
        quantize_(model, Float8WeightOnlyConfig(), filter_fn=base)
        second = run(use_float8(model, base))
        self.assertTrue(torch.equal(first[0], second[0]))
        for name, gradient in first[1].items():
            self.assertTrue(torch.equal(gradient, second[1][name]), name)

    def test_the_weights_stay_as_they_are(self):
        before = {name: x.clone() for name, x in self.model.state_dict().items()}
        model = use_float8(self.model, inside)
        run(adapted(copy.deepcopy(model)))
        after = model.state_dict()
        self.assertEqual(before.keys(), after.keys())
        for name, x in before.items():
            self.assertIs(type(x), type(after[name]), name)
            values = (x.dequantize(), after[name].dequantize()) if hasattr(x, "qdata") else (x, after[name])
            self.assertTrue(torch.equal(*values), name)

    @parameterized.expand(["tensor", "activations", "trained", "hook", "e5m2"])
    def test_layers_that_run_their_own_forward(self, kind):
        layer = torch.nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
        config = {
            "tensor": lambda: Float8WeightOnlyConfig(granularity=PerTensor()),
            "activations": lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
            "trained": Float8WeightOnlyConfig,
            "hook": Float8WeightOnlyConfig,
            "e5m2": lambda: Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2),
        }[kind]()
        capability = mock.patch("torchao.quantization.quant_api._check_hardware_support")
        with capability:
            quantize_(layer, config)
        layer.weight.requires_grad_(kind == "trained")
        if kind == "hook":
            layer.register_forward_hook(lambda module, args, output: output + 1)
        self.assertIsNone(terms_of(layer, torch.randn(3, 32, dtype=torch.bfloat16)))
