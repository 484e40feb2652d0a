"""LoRA over layers and experts of a checkpoint in FP8, as Transformers loads them: a scale for each block, or for all."""

import unittest
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from unittest import mock

import torch
import torch.distributed as dist
from common.blocks import BLOCK, LAYERS, mixture, store, stored_and_plain
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

from transformers_packed import patch_model, registered, use_float8
from transformers_packed.audit.isolation import changed_by_others
from transformers_packed.models import experts, float8, float8_marks, stored_weights
from transformers_packed.models.checkpoint_formats import Blocks, PackedWeight
from transformers_packed.models.experts import _adapters_of, isolates
from transformers_packed.models.families import EXPERT_WEIGHTS
from transformers_packed.models.float8_marks import MARK
from transformers_packed.models.projections import terms_of
from transformers_packed.models.releases import IGNORED_BY_DDP
from transformers_packed.models.stored_weights import (
    in_fewer_bits,
    weight_of_experts,
    weight_of_layer,
    why_not_in_float8,
)
from transformers_packed.models.versions import can_cut_rows, joins_stored_experts
from transformers_packed.ops import implementations_used
from transformers_packed.ops.dispatch import _used
from transformers_packed.ops.terms import BlocksWeight, Dequantized, DequantizedExperts, Float8Experts, Float8Weight


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
        if family != "qwen3_5" and not joins_stored_experts():
            self.skipTest("needs Transformers 5.21 for experts")
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

    @unittest.skipUnless(can_cut_rows(), "needs Transformers 5.24, which saves dequantized weights as they are")
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

    @shows("fp8", "FP8 products (`--float8`)")
    def test_products_in_float8(self):
        """Of the stored bytes, in blocks of 128 x 128."""
        model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(256, 128)})
        store(model, (128, 128), "ue8m0")
        layer, x = model["q_proj"], torch.randn(5, 256)
        found = weight_of_layer(layer, True, x)
        self.assertIsInstance(found, BlocksWeight)
        self.assertEqual(found.values.data_ptr(), layer.weight.data_ptr())
        self.assertTrue(torch.equal(found.scale, layer.weight_scale_inv.float()))
        self.assertIs(found.dtype, torch.float32)
        self.assertIs(type(weight_of_layer(layer, False, x)), Dequantized)
        self.assertIs(type(weight_of_layer(layer_in_blocks(), True, torch.randn(5, 48))), Dequantized)
        layer.activation_scheme = "static"
        self.assertIs(type(weight_of_layer(layer, True, x)), Dequantized)

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


def experts_in_float8(model):
    return {name.removesuffix(".experts") for name, x in model.named_modules() if vars(x).get(MARK) is not None}


def with_experts(layer, name):
    return isinstance(layer, FP8Experts)


class ExpertsInFloat8Test(unittest.TestCase):
    """`use_float8` multiplies the stored bytes of experts."""

    def setUp(self):
        _used.clear()

    def gradients(self, model):
        """Of the parameters that both models have in float32 and train."""
        found = run(model.requires_grad_(True))[1]
        return {name: x for name, x in found.items() if "norm" in name or name.endswith("mlp.gate.weight")}

    def test_by_default(self):
        """Experts of all layers but the first and the last one, and for rows of any length."""
        model, plain = mixture()
        with mock.patch.object(float8.logger, "info") as log:
            use_float8(model)
        self.assertIn(" and 2 of 4 modules of experts train in float8.", log.call_args.args[0])
        inner = {f"model.layers.{i}.mlp" for i in (1, 2)}
        self.assertEqual({x for x in experts_in_float8(model) if x.endswith("mlp")}, inner)
        found, expected = self.gradients(model), self.gradients(plain)
        self.assertEqual(implementations_used()["experts_float8"], ["reference"])
        self.assertEqual(found.keys(), expected.keys())
        error = total_relative_error(found, expected)
        self.assertTrue(5e-3 < error < 0.1, error)
        use_float8(model, lambda *_: False)
        self.assertEqual(experts_in_float8(model), set())
        self.assertLess(total_relative_error(self.gradients(model), expected), 2e-6)

    def test_the_share_of_a_row(self):
        """The experts of a token, in the two inner layers of four, whatever the length of the row."""
        model, _ = mixture()
        config = model.config
        linear = {n: x for n, x in model.named_modules() if isinstance(x, torch.nn.Linear) and "layers." in n}
        of_experts = 3 * config.num_experts_per_tok * 128 * 128
        total = sum(x.in_features * x.out_features for x in linear.values()) + 4 * of_experts
        self.assertEqual(float8.share_in_float8(model, 1), 2 * of_experts / total)
        use_float8(model)
        marked = sum(x.in_features * x.out_features for x in linear.values() if vars(x)[MARK] is not None)
        self.assertGreater(marked, 0)
        self.assertEqual(float8.share_in_float8(model, 10**12), (marked + 2 * of_experts) / total)

    def test_evaluation_is_that_of_the_stored_weights(self):
        model, plain = mixture()
        use_float8(model, with_experts)
        batch = packed_batch(DOCUMENTS, "cu_seqlens")
        with torch.no_grad():
            found, expected = (x.eval()(**batch).logits for x in (model, plain))
            self.assertLess((found - expected).abs().max(), 1e-5)
            self.assertGreater((model.train()(**batch).logits - expected).abs().max(), 1e-3)

    def test_linear_layers(self):
        """Those in blocks of 128 x 128 are chosen as others are, and others in blocks are refused."""
        model, plain = mixture()
        layers = {
            f"model.layers.{i}.linear_attn.{x}" for i in range(4) for x in ("in_proj_qkv", "in_proj_z", "out_proj")
        }
        linear = {name: x for name, x in model.named_modules() if isinstance(x, FP8Linear)}
        able = {name for name, x in linear.items() if not (x.in_features % 128 or x.out_features % 128)}
        self.assertTrue(able and layers & linear.keys() and able < linear.keys())
        use_float8(model, lambda layer, name: name in able)
        found, expected = self.gradients(model), self.gradients(plain)
        self.assertEqual(implementations_used()["linear_float8"], ["fused"])
        self.assertTrue(5e-3 < total_relative_error(found, expected) < 0.1)
        use_float8(model)
        chosen = {name for name, x in linear.items() if vars(x)[MARK] is not None}
        self.assertEqual(chosen, {x for x in able if "layers.1." in x or "layers.2." in x})
        other = next(iter(linear.keys() - able))
        with self.assertRaisesRegex(ValueError, f"{other}, which (needs sizes in multiples of 128|is .* multiples)"):
            use_float8(model, lambda layer, name: name == other)

    @parameterized.expand([(False,), (True,)])
    def test_adapters(self, checkpointing):
        from peft import LoraConfig, get_peft_model

        model, plain = mixture(layers=3)
        use_float8(model, with_experts)
        gradients, adapters = [], {}
        for each in (model, plain):
            torch.manual_seed(1)
            config = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=list(EXPERT_WEIGHTS))
            adapted = randomized(get_peft_model(each, config))
            if gradients:
                adapted.load_state_dict(adapters, strict=False)
            adapters = {name: x for name, x in adapted.state_dict().items() if "lora_" in name}
            if checkpointing:
                adapted.gradient_checkpointing_enable({"use_reentrant": False})
            gradients.append(run(adapted.train())[1])
        self.assertEqual(implementations_used()["experts_float8_lora"], ["reference"])
        self.assertEqual(gradients[0].keys(), gradients[1].keys())
        error = total_relative_error(*gradients)
        self.assertTrue(5e-3 < error < 0.1, error)

    def test_documents_stay_apart(self):
        model, _ = mixture()
        use_float8(model, with_experts)
        batch = packed_batch(DOCUMENTS, "cu_seqlens")
        places = list(torch.arange(sum(map(len, DOCUMENTS))).split([len(x) for x in DOCUMENTS]))
        self.assertLess(changed_by_others(model, lambda: model(**batch), batch, places), 1e-4)

    @parameterized.expand(
        [
            ("blocks", {"block": (64, 128)}, r"blocks of 128 x 128, not \(256, 128\) and \(64, 128\)"),
            ("no_blocks", {"block": None}, "blocks of 128 x 128, not .* and None"),
            ("sizes", {"moe_intermediate_size": 64}, r"multiples of 128 .*, not \(128, 64\)"),
            ("static", {}, "has scales for its inputs"),
        ]
    )
    def test_experts_that_are_refused(self, kind, options, message):
        model, _ = mixture(**options)
        for module in model.modules():
            if kind == "static" and isinstance(module, FP8Experts):
                module.activation_scheme = "static"
        with self.assertRaisesRegex(ValueError, f"model.layers.0.mlp.experts, which .*{message}"):
            use_float8(model, with_experts)
        self.assertEqual(experts_in_float8(model), set())
        # By default, they are left out.
        use_float8(model)
        self.assertFalse(any(x.endswith("mlp") for x in experts_in_float8(model)))

    def test_plain_experts_are_not_asked_about(self):
        asked = []
        use_float8(patch_model(builtin_model("qwen3_5_moe")), lambda module, name: asked.append(module))
        self.assertTrue(all(isinstance(module, torch.nn.Linear) for module in asked))

    @parameterized.expand(["dequantized", "activation"])
    def test_experts_that_have_changed_since(self, kind):
        """They run as without float8, and the log says why."""
        model, plain = mixture(layers=2)
        use_float8(model, with_experts)
        for module in (x for each in (model, plain) for x in each.modules() if hasattr(x, "down_proj")):
            if kind == "dequantized" and isinstance(module, FP8Experts):
                module.block_size = (64, 128)
                module.gate_up_proj_scale_inv.data = module.gate_up_proj_scale_inv.data.repeat_interleave(2, 1)
                module.down_proj_scale_inv.data = module.down_proj_scale_inv.data.repeat_interleave(2, 1)
        if kind == "activation":
            return self.check_activation(model)
        with mock.patch.object(float8_marks.logger, "warning_once") as warn:
            found = self.gradients(model)
        self.assertRegex(warn.call_args.args[0], "FP8Experts runs in its own dtype, because it needs .* blocks of 128")
        self.assertLess(total_relative_error(found, self.gradients(plain)), 2e-6)

    def check_activation(self, model):
        module = next(x for x in model.modules() if isinstance(x, FP8Experts))
        module.act_fn = torch.nn.GELU()
        x = torch.randn(3, 128)
        index, weights = torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
        theirs = mock.patch.object(experts, "fp8_grouped_mm_experts_forward", lambda *_: x)
        with mock.patch.object(float8_marks.logger, "warning_once") as warn, theirs:
            experts.experts_forward(module, x, index, weights)
        self.assertIn("because their activation is not SiLU", warn.call_args.args[0])

    @parameterized.expand(
        [("grouped_mm", "its implementation is 'grouped_mm'"), ("forward", "it has a forward of its own")]
    )
    def test_experts_that_this_package_does_not_run(self, kind, reason):
        model, _ = mixture(layers=2)
        use_float8(model, with_experts)
        module = next(x for x in model.modules() if isinstance(x, FP8Experts))
        x, index, weights = torch.randn(3, 128), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)
        if kind == "forward":
            module.forward = lambda x, *_: x
        else:
            module.config._experts_implementation = kind
        theirs = mock.patch.object(type(module), "forward", lambda _, x, *__: x)
        with mock.patch.object(float8_marks.logger, "warning_once") as warn, theirs:
            experts.run_experts(module, x, index, weights, x)
            self.assertIn(f"a FP8Experts runs in its own dtype, because {reason}", warn.call_args.args[0])
            warn.reset_mock()
            experts.run_experts(module.eval(), x, index, weights, x)
        warn.assert_not_called()

    def test_gpus_without_the_kernel(self):
        model, _ = mixture(layers=2)
        use_float8(model, with_experts)
        module = next(x for x in model.modules() if isinstance(x, FP8Experts))
        x = mock.Mock(wraps=torch.empty(3, 128), shape=(3, 128), dtype=torch.bfloat16, is_cuda=True)
        x.device = torch.device("cuda", 0)
        with mock.patch.object(torch.cuda, "get_device_capability", lambda *_: (8, 0)):
            with self.assertRaisesRegex(ValueError, "capability 9.0 to 11.0.*module_filter that leaves experts out"):
                experts._weights_for_op(module, x, None, None)

    @parameterized.expand([((8, 9), 0), ((9, 0), 2), ((12, 0), 0)])
    def test_gpus_without_the_kernel_leave_layers_dequantized(self, capability, chosen):
        model, _ = mixture(layers=4)
        found = mock.patch.object(torch.cuda, "get_device_capability", lambda *_: capability)
        with mock.patch.object(torch.cuda, "is_available", lambda: True), found:
            use_float8(model)
            stored = [x for x in model.modules() if isinstance(x, FP8Experts)]
            self.assertEqual(sum(vars(x)[float8_marks.MARK] is not None for x in stored), chosen)
            if not chosen:
                with self.assertRaisesRegex(ValueError, "a module_filter that selects .* 9.0 to 11.0"):
                    use_float8(model, with_experts)

    def test_experts_of_other_checkpoints(self):
        """Weights in blocks of 128 that compressed-tensors has written."""
        module = torch.nn.Module()
        for name, shape in (("gate_up_proj", (2, 256, 128)), ("down_proj", (2, 128, 128))):
            values, scale = torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(2, shape[1] // 128, 1)
            weight = PackedWeight(Blocks(values, scale, (128, 128), torch.bfloat16), torch.bfloat16)
            setattr(module, name, torch.nn.Parameter(weight, requires_grad=False))
        self.assertEqual(why_not_in_float8(module), "")
        for name in ("gate_up_proj", "down_proj"):
            weight = weight_of_experts(module, name, True, torch.zeros(1, 128))
            self.assertIsInstance(weight, Float8Experts)
            stored = getattr(module, name).stored
            self.assertEqual((weight.shape, weight.dtype), (stored.values.shape, torch.bfloat16))
            for found, expected in zip(weight.stored(), stored, strict=False):
                self.assertIs(found, expected)
            self.assertIsInstance(weight_of_experts(module, name, False, torch.zeros(1, 128)), DequantizedExperts)

    def test_copies_of_experts_in_host_memory(self):
        """Each product asks for copies of the bytes, which are not dequantized, and reads scales in float32."""
        model, _ = mixture(layers=2, scale_format="ue8m0")
        module = next(x for x in model.modules() if isinstance(x, FP8Experts))
        found = {}
        for name in ("gate_up_proj", "down_proj"):
            given = getattr(module, name).data, getattr(module, f"{name}_scale_inv").data
            copies = mock.Mock(side_effect=lambda given=given: [x.clone() for x in given])
            on_host = {"needs_copies": lambda *_: True, "copies_of": lambda *_, copies=copies: copies}
            with mock.patch.multiple(stored_weights, **on_host):
                found[name] = weight_of_experts(module, name, True, torch.zeros(1, 128))
            copies.assert_not_called()
            for number in (1, 2):
                values, scale = found[name].stored()
                self.assertEqual((values.dtype, scale.dtype), (torch.float8_e4m3fn, torch.float32))
                for x, y in zip((values, scale), given, strict=True):
                    self.assertTrue(torch.equal(x.float(), y.float()))
                    self.assertNotEqual(x.data_ptr(), y.data_ptr())
                self.assertEqual(copies.call_count, number)

    def test_linear_layers_of_other_checkpoints(self):
        for block, kind in (((128, 128), BlocksWeight), ((1, 256), Float8Weight), ((128, 64), Dequantized)):
            values = torch.randn(128, 256).to(torch.float8_e4m3fn)
            scale = torch.rand(128 // block[0], 256 // block[1])
            layer = torch.nn.Linear(256, 128, bias=False)
            weight = PackedWeight(Blocks(values, scale, block, torch.float32), torch.bfloat16)
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            found = weight_of_layer(layer, True, torch.zeros(1, 256))
            self.assertIs(type(found), kind)
            self.assertTrue(kind is Dequantized or found.scale.dtype == torch.float32)
            self.assertIs(type(weight_of_layer(layer, False, torch.zeros(1, 256))), Dequantized)


if __name__ == "__main__":
    unittest.main()
