"""Experts in 4 bit (bitsandbytes) and in float8 (torchao): loading, training, saving and patching, on a CPU."""

import copy
import tempfile
import unittest
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
from common.processes import run_processes
from common.sharded import batch, wrapped_by
from common.shown import shows, shows_for_each
from mixins.model import packed_batch, relative_error, total_relative_error
from parameterized import parameterized
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3NextConfig,
    TorchAoConfig,
    set_seed,
)
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as builtin_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as builtin_qwen3_next

from transformers_packed import patch_model, registered, unpatch_model
from transformers_packed.models import experts as our_experts
from transformers_packed.models.families import EXPERT_WEIGHTS
from transformers_packed.models.quantized_weights import ExpertsIn4bit
from transformers_packed.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM
from transformers_packed.models.qwen3_next.modeling_qwen3_next import Qwen3NextForCausalLM


HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None
if HAS_BITSANDBYTES:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from bitsandbytes.nn import Linear4bit
    from bitsandbytes.nn.parametrize import replace_parameter_4bit
if find_spec("torchao"):
    from torchao.quantization import Float8WeightOnlyConfig, FqnToConfig

FAMILIES = {
    "qwen3_next": (Qwen3NextForCausalLM, builtin_qwen3_next.Qwen3NextForCausalLM, Qwen3NextConfig),
    "qwen3_5_moe": (Qwen3_5MoeForCausalLM, builtin_qwen3_5_moe.Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig),
}
# bitsandbytes' code for CPUs is wrong for rows that are no multiples of 64.
SIZE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "initializer_range": 0.1,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
WEIGHTS = ("gate_up_proj", "down_proj")
CASES = [("nf4", "qwen3_next", "nf4", True), ("fp4", "qwen3_5_moe", "fp4", False)]
DOCUMENTS = [torch.arange(1, n + 1) for n in (13, 20, 3)]


def four_bit(kind="nf4", double=True, **options):
    options |= {"bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_use_double_quant": double}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, **options)


def experts_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith("Experts")]


def weights_of(model):
    return [getattr(module, name) for module in experts_of(model) for name in WEIGHTS]


def in_4_bit(model):
    return [isinstance(weights, ExpertsIn4bit) for weights in weights_of(model)]


def replaced(model, **options):
    """The model with experts that bitsandbytes itself has replaced."""
    for module in experts_of(model):
        for name in WEIGHTS:
            replace_parameter_4bit(module, name, **options)
    return model


def adapted(model, **options):
    """The model with adapters on some linear layers and all experts."""
    options = {"target_modules": ["q_proj", "o_proj"], "target_parameters": list(EXPERT_WEIGHTS)} | options
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **options))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return model.train()


def step(model, rows=None):
    """The logits of a packed row, or of documents as rows, and the gradients."""
    model.zero_grad()
    found = [model(**row) for row in rows or [packed_batch(DOCUMENTS)]]
    sum(output.logits.float().square().mean(-1).sum() for output in found).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat([output.logits[0] for output in found]).detach(), gradients


def alone(model):
    return step(model, [{"input_ids": document[None]} for document in DOCUMENTS])


@cache
def source(family):
    """A stock model."""
    set_seed(0)
    return FAMILIES[family][1]._from_config(FAMILIES[family][2](**SIZE)).eval()


def ddp(family):
    """The gradients of adapters in both processes."""
    model = copy.deepcopy(source(family))
    model = adapted(patch_model(replaced(model)))
    wrapped = wrapped_by("ddp", model)
    return step(wrapped, [batch(torch.distributed.get_rank())])[1], in_4_bit(model)


class QuantizedExpertsTestCase(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.names = []
        run = our_experts.experts

        def record(*args, **kwargs):
            self.names.append("lora" if kwargs.get("gate_up_adapter") else "plain")
            return run(*args, **kwargs)

        self.enterContext(mock.patch.object(our_experts, "experts", record))

    def load(self, family, cls=None, config=None, **options):
        if not (folder := self.folder / "model").exists():
            source(family).save_pretrained(folder)
        options = {"dtype": torch.float32, "quantization_config": config or four_bit()} | options
        return (cls or FAMILIES[family][0]).from_pretrained(folder, **options)

    def stock(self, family, model):
        """A stock model with the weights of a quantized one."""
        stock, state = copy.deepcopy(source(family)), dict(source(family).state_dict())
        for name, module in model.named_modules():
            if isinstance(module, Linear4bit):
                state[f"{name}.weight"] = dequantize_4bit(module.weight.data, module.weight.quant_state)
            for leaf in WEIGHTS if isinstance(getattr(module, "down_proj", None), ExpertsIn4bit) else ():
                weights = getattr(module, leaf)
                state[f"{name}.{leaf}"] = dequantize_4bit(weights.packed, weights.state)
        stock.load_state_dict(state)
        return stock

    def check_same(self, found, expected, bar=2e-5):
        self.assertLess(relative_error(found[0], expected[0]), bar)
        self.assertEqual(found[1].keys(), expected[1].keys())
        self.assertLess(total_relative_error(found[1], expected[1]), bar)

    def check_same_bits(self, found, expected):
        self.assertTrue(torch.equal(found[0], expected[0]))
        self.assertEqual(found[1].keys(), expected[1].keys())
        for name, gradient in found[1].items():
            self.assertTrue(torch.equal(gradient, expected[1][name]), name)


@unittest.skipUnless(HAS_BITSANDBYTES, "needs bitsandbytes")
class LoadingTest(QuantizedExpertsTestCase):
    @shows_for_each(CASES, "dequantized to the bits of the library")
    def test_values_of_bitsandbytes(self, _, family, kind, double):
        model = self.load(family, config=four_bit(kind, double))
        for weights, original in zip(weights_of(model), weights_of(source(family)), strict=True):
            packed, state = quantize_4bit(original.data, quant_type=kind, compress_statistics=double)
            self.assertTrue(torch.equal(weights.packed, packed))
            self.assertTrue(torch.equal(weights.compute(), dequantize_4bit(packed, state)))
            self.assertEqual(
                (weights.shape, weights.dtype, weights.requires_grad), (original.shape, torch.float32, False)
            )
        self.assertIs(type(model.model.layers[0].mlp.shared_expert.up_proj), Linear4bit)
        self.assertIs(type(model.model.layers[0].mlp.gate.weight), torch.nn.Parameter)

    def test_skipped_experts_stay(self):
        model = self.load("qwen3_next", config=four_bit(llm_int8_skip_modules=["experts"]))
        model.save_pretrained(self.folder / "again")
        for loaded in (model, FAMILIES["qwen3_next"][0].from_pretrained(self.folder / "again")):
            for weights, original in zip(weights_of(loaded), weights_of(source("qwen3_next")), strict=True):
                self.assertIs(type(weights), torch.nn.Parameter)
                self.assertTrue(torch.equal(weights, original))
            self.assertIs(type(loaded.model.layers[0].mlp.shared_expert.up_proj), Linear4bit)

    def test_other_models_as_before(self):
        sizes = {name: SIZE[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
        other = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=4, num_local_experts=4))
        other.save_pretrained(self.folder / "mixtral")
        with registered():
            loaded = AutoModelForCausalLM.from_pretrained(self.folder / "mixtral", quantization_config=four_bit())
        stock = self.load("qwen3_next", FAMILIES["qwen3_next"][1])
        for model, full in ((stock, source("qwen3_next")), (loaded, other)):
            layers = [(module, full.get_submodule(n)) for n, module in model.named_modules() if n.endswith("experts")]
            self.assertEqual(len(layers), 2)
            for module, original in layers:
                for name in WEIGHTS:
                    self.assertTrue(torch.equal(getattr(module, name), getattr(original, name)))
            self.assertTrue(any(isinstance(module, Linear4bit) for module in model.modules()))

    @shows_for_each(CASES[:1], "`save_pretrained` of the base")
    def test_saved_and_loaded_again(self, _, family, kind, double):
        model = self.load(family, config=four_bit(kind, double))
        model.save_pretrained(self.folder / "again")
        expected, _ = step(adapted(model))
        stock = replaced(copy.deepcopy(source(family)), quant_type=kind, compress_statistics=double)
        names = {n for n in stock.state_dict() if "experts" in n and "shared_expert" not in n}
        state = load_file(self.folder / "again/model.safetensors")
        self.assertEqual({n for n in state if "experts" in n and "shared_expert" not in n}, names)
        for name in names:
            self.assertTrue(torch.equal(state[name], stock.state_dict()[name]), name)
        ours, stock = (cls.from_pretrained(self.folder / "again") for cls in FAMILIES[family][:2])
        self.assertTrue(all(in_4_bit(ours) + in_4_bit(stock)))
        self.assertTrue(torch.equal(step(adapted(ours))[0], expected))
        self.assertLess(relative_error(alone(adapted(stock))[0], expected), 1e-5)

    def test_dequantize(self):
        model = self.load("qwen3_next")
        expected, bits = self.stock("qwen3_next", model), [weights.compute() for weights in weights_of(model)]
        model.dequantize()
        for weights, computed in zip(weights_of(model), bits, strict=True):
            self.assertIs(type(weights), torch.nn.Parameter)
            self.assertTrue(torch.equal(weights, computed))
        model.save_pretrained(self.folder / "full")
        loaded = FAMILIES["qwen3_next"][1].from_pretrained(self.folder / "full")
        for name, value in expected.state_dict().items():
            self.assertTrue(torch.equal(loaded.state_dict()[name], value), name)


@unittest.skipUnless(HAS_BITSANDBYTES, "needs bitsandbytes")
class TrainingTest(QuantizedExpertsTestCase):
    @shows_for_each(CASES[1:], "LoRA of experts", "a packed row equals its documents")
    def test_equals_peft_with_the_stock_class(self, _, family, kind, double):
        model = self.load(family, config=four_bit(kind, double))
        stock = adapted(self.stock(family, model))
        model = adapted(model)
        found, expected = step(model), alone(stock)
        self.assertEqual(self.names, ["lora"] * 2)
        self.check_same(found, expected)
        self.assertEqual(len(found[1]), 2 * 2 * 2 + 4)
        for trained, folder in ((model, "ours"), (stock, "stock")):
            torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], 0.01).step()
            trained.save_pretrained(self.folder / folder)
        ours, theirs = (load_file(self.folder / f / "adapter_model.safetensors") for f in ("ours", "stock"))
        self.assertEqual(ours.keys(), theirs.keys())
        self.assertLess(total_relative_error(ours, theirs), 1e-5)

    @shows("nf4", "gradient checkpointing")
    def test_prepared_with_gradient_checkpointing(self):
        model = self.load("qwen3_next", dtype=torch.bfloat16)
        options = {"use_gradient_checkpointing": False}
        expected = step(adapted(prepare_model_for_kbit_training(copy.deepcopy(model), **options)))
        options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
        model = adapted(prepare_model_for_kbit_training(model, **options))
        self.names.clear()
        self.check_same_bits(step(model), expected)
        self.assertEqual(self.names, ["lora"] * 4)
        self.assertTrue(all(in_4_bit(model)))

    @shows("nf4", "an adapter is saved and loaded", "an adapter is merged into dequantized weights")
    def test_merging(self):
        model = adapted(self.load("qwen3_next"))
        expected, _ = step(model)
        model.save_pretrained(self.folder / "adapter")
        with self.assertRaisesRegex(
            ValueError, "weights in fewer bits. To merge an adapter, load the model without quantization"
        ):
            model.merge_and_unload()
        # The same weights, so that the results can be compared.
        for full in (
            self.stock("qwen3_next", self.load("qwen3_next")),
            patch_model(self.stock("qwen3_next", self.load("qwen3_next"))),
        ):
            merged = PeftModel.from_pretrained(full, self.folder / "adapter").merge_and_unload()
            self.assertFalse(isinstance(merged, PeftModel))
            with torch.no_grad():
                logits = [merged(input_ids=document[None]).logits[0] for document in DOCUMENTS]
            self.assertLess(relative_error(torch.cat(logits), expected), 1e-5)

    def test_trainable_weights_are_an_error(self):
        model = self.load("qwen3_next")
        before = [weights.packed.clone() for weights in weights_of(model)]
        for weights in weights_of(model):
            weights.requires_grad_()
        _, gradients = step(model)
        # Theirs runs, so that every gradient is there.
        self.assertEqual(self.names, [])
        self.assertEqual(sum("mlp.experts" in name for name in gradients), 4)
        with self.assertRaisesRegex(
            ValueError, "weights in a floating dtype for a change in place, got weights in fewer bits"
        ):
            torch.optim.SGD(weights_of(model), 0.1).step()
        self.assertTrue(all(map(torch.equal, before, (weights.packed for weights in weights_of(model)))))

    @shows("nf4", "DDP")
    def test_two_processes(self):
        (first, stored), (second, _) = run_processes(ddp, 2, family := "qwen3_5_moe")
        self.assertEqual(stored, [True] * 4)
        model = adapted(patch_model(replaced(copy.deepcopy(source(family)))))
        alone = [step(model, [batch(rank)])[1] for rank in (0, 1)]
        for name, gradient in first.items():
            self.assertTrue(torch.equal(gradient, second[name]))
            mean = (alone[0][name.removeprefix("module.")] + alone[1][name.removeprefix("module.")]) / 2
            torch.testing.assert_close(gradient, mean)


@unittest.skipUnless(HAS_BITSANDBYTES, "needs bitsandbytes")
class PatchTest(QuantizedExpertsTestCase):
    @parameterized.expand(CASES[:1])
    def test_replaced_by_bitsandbytes(self, _, family, kind, double):
        model = replaced(copy.deepcopy(source(family)), quant_type=kind, compress_statistics=double)
        values, names = [x.clone() for x in weights_of(model)], sorted(model.state_dict())
        self.assertIs(patch_model(model), model)
        self.assertTrue(all(in_4_bit(model)))
        for weights, expected in zip(weights_of(model), values, strict=True):
            self.assertTrue(torch.equal(weights.compute(), expected))
        for module in experts_of(model):
            self.assertFalse(module._forward_hooks or module._forward_pre_hooks)
            self.assertEqual(len(module._state_dict_hooks), 1)
        self.assertEqual(sorted(patch_model(model).state_dict()), names)
        stock = adapted(self.stock(family, model))
        self.check_same(step(adapted(model)), alone(stock))
        self.assertEqual(self.names, ["lora"] * 2)

    def test_unpatch(self):
        model = patch_model(replaced(copy.deepcopy(source("qwen3_next"))))
        expected = alone(adapted(self.stock("qwen3_next", model)))
        self.names.clear()
        self.check_same(alone(adapted(unpatch_model(model))), expected)
        self.assertEqual(self.names, [])
        self.assertTrue(all(in_4_bit(model)))

    @parameterized.expand(["down_proj", "parametrizations.down_proj.original"])
    def test_adapters_before_the_patch_are_an_error(self, target):
        model = replaced(copy.deepcopy(source("qwen3_next")))
        # PEFT finds these parameters by their whole names only.
        target = [f"model.layers.{i}.mlp.experts.{target}" for i in range(2)]
        model = adapted(model, target_parameters=target)
        classes, state = [type(module) for module in model.modules()], model.state_dict()
        with self.assertRaisesRegex(ValueError, "expected patch_model before get_peft_model for experts in 4 bit"):
            patch_model(model)
        self.assertEqual([type(module) for module in model.modules()], classes)
        self.assertEqual(list(model.state_dict()), list(state))

    def test_a_parameter_with_a_parametrization_of_its_own(self):
        class Double(torch.nn.Module):
            def forward(self, x):
                return 2 * x

        model = replaced(copy.deepcopy(source("qwen3_next")))
        module = experts_of(model)[0]
        torch.nn.utils.parametrize.register_parametrization(module, "down_proj", Double(), unsafe=True)
        expected, _ = alone(adapted(copy.deepcopy(model), target_parameters=None))
        patch_model(model)
        self.assertEqual(in_4_bit(model), [True, False, True, True])
        self.assertTrue(module._forward_hooks)
        logits, _ = alone(adapted(model, target_parameters=None))
        self.assertLess(relative_error(logits, expected), 1e-5)


class Float8Test(QuantizedExpertsTestCase):
    @unittest.skipUnless(find_spec("torchao"), "needs torchao")
    @shows("torchao", "LoRA of experts", "a packed row equals its documents")
    def test_torchao(self):
        config = Float8WeightOnlyConfig()
        config = TorchAoConfig(FqnToConfig({"re:.*experts[.](gate_up|down)_proj": config}))
        model = self.load("qwen3_next", config=config)
        stock = copy.deepcopy(source("qwen3_next"))
        for weights, full in zip(weights_of(model), weights_of(stock), strict=True):
            self.assertEqual(type(weights).__name__, "Float8Tensor")
            full.data.copy_(weights.dequantize())
        patched = patch_model(copy.deepcopy(stock))
        found, same, expected = step(adapted(model)), step(adapted(patched)), alone(adapted(stock))
        self.assertEqual(self.names, ["lora"] * 4)
        self.check_same_bits(found, same)
        self.check_same(found, expected)
