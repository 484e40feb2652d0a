"""Weights of quantized checkpoints load in their bits, and LoRA trains on them as on the weights that they stand for."""

import copy
import json
import unittest
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from common.blocks import LAYERS
from common.checkpoints import COMPRESSED, FORMATS, write
from common.processes import run_processes
from common.shown import shows, shows_for_each
from mixins.lora import randomized
from mixins.model import packed_batch, total_relative_error
from mixins.patch import COMPOSITE, builtin_model
from mixins.stored import DOCUMENTS, StoredWeightsTestCase, run
from parameterized import parameterized
from safetensors.torch import load_file, save_file
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

from transformers_packed import patch_model, registered
from transformers_packed.data.planning.step_memory import Parameters
from transformers_packed.models.checkpoint_formats import Blocks, PackedWeight, stored_weight
from transformers_packed.models.checkpoint_kinds import _KINDS, kept_by, stored_as
from transformers_packed.models.checkpoint_quantizer import CheckpointConfig, CheckpointQuantizer
from transformers_packed.models.experts import _adapters_of, isolates
from transformers_packed.models.families import EXPERT_WEIGHTS
from transformers_packed.models.installed import CHECKPOINTS, reading_checkpoints
from transformers_packed.models.quantized_weights import tensors_of
from transformers_packed.models.stored_weights import weight_of_layer
from transformers_packed.models.versions import joins_stored_experts
from transformers_packed.ops.dispatch import _used
from transformers_packed.ops.terms import Dequantized, Float8Weight


# One of each layout.
LAYOUTS = ["fp8_rows", "w4a16", "w8a16", "nvfp4", "awq", "gptq", "gptq_order", "auto_round"]
PRODUCTS = "FP8 products (`--float8`)"
DEQUANTIZED = "dequantized to the bits of the library"
VECTORS = Path(__file__).parent.parent / "common" / "packed_weights.safetensors"


def load(folder, **options):
    with registered():
        return AutoModelForCausalLM.from_pretrained(folder, **options)


def stored_and_plain(family, name, folder, dtype=torch.float32):
    """A model that loads a quantized checkpoint, and one that loads the weights that it stands for."""
    plain = write(builtin_model(family), folder, name)
    stored = load(folder, dtype=dtype)
    save_file(plain, Path(folder) / "model.safetensors", {"format": "pt"})
    config = json.loads((Path(folder) / "config.json").read_text())
    del config["quantization_config"]
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return stored, load(folder, dtype=dtype)


def adapted(model, **options):
    from peft import LoraConfig, get_peft_model

    experts = list(EXPERT_WEIGHTS) if hasattr(model.config, "num_experts") else None
    options |= {"target_modules": [*LAYERS, "in_proj_qkvz"], "target_parameters": experts}
    torch.manual_seed(1)
    return randomized(get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **options)))


def gradients_under_ddp(folder):
    """Gradients of other documents in each process, and how many weights are stored."""
    model = DistributedDataParallel(adapted(load(folder)))
    batch = packed_batch(DOCUMENTS[dist.get_rank() :], "cu_seqlens")
    model(**batch, use_cache=False).loss.backward()
    stored = sum(isinstance(x, PackedWeight) for x in model.parameters())
    return {name: x.grad for name, x in model.module.named_parameters() if x.grad is not None}, stored


def stored_layer(name):
    layer = torch.nn.Linear(32, 64, bias=False)
    weight = stored_weight(FORMATS[name][0](layer.weight.data)[0], FORMATS[name][1], torch.bfloat16)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def packed_integers(columns, groups):
    packed = torch.zeros(8, -(-columns // 8), dtype=torch.int32)
    return {"weight_packed": packed, "weight_scale": torch.ones(8, groups), "weight_shape": torch.tensor([8, columns])}


class VectorsTest(unittest.TestCase):
    @shows_for_each(["awq", "gptq", "gptq_order", "gptq_8_bit", "auto_round", "auto_round_gptq"], DEQUANTIZED)
    def test_weights_that_the_libraries_wrote(self, name):
        tensors = {x.split(".")[1]: y for x, y in load_file(VECTORS).items() if x.split(".")[0] == name}
        expected, newer = tensors.pop("weight"), tensors.pop("qzeros_v2", None)
        config = {"bits": 8 if "8" in name else 4}
        if name.startswith("auto_round"):
            config["packing_format"] = name.replace("_gptq", ":auto_gptq")
        self.assertTrue(torch.equal(stored_weight(tensors, config, torch.float16).compute(), expected))
        if newer is not None:
            found = stored_weight(
                tensors | {"qzeros": newer}, config | {"checkpoint_format": "gptq_v2"}, torch.float16
            )
            self.assertTrue(torch.equal(found.compute(), expected))

    @shows_for_each([*COMPRESSED], DEQUANTIZED)
    def test_weights_of_compressed_tensors(self, name):
        tensors, expected = FORMATS[name][0](torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))
        self.assertTrue(torch.equal(stored_weight(tensors, FORMATS[name][1], torch.bfloat16).compute(), expected))


@unittest.skipUnless(joins_stored_experts(), "needs Transformers 5.21")
class LoadingTest(unittest.TestCase):
    @parameterized.expand([*FORMATS])
    def test_bits(self, name):
        families = ("qwen3_5_moe", "qwen3_next") if name in ("nvfp4", "awq", "gptq_order") else ("qwen3_5_moe",)
        for family in families:
            with TemporaryDirectory() as folder:
                stored, plain = stored_and_plain(family, name, folder)
            found = [x for x in stored.parameters() if isinstance(x, PackedWeight)]
            self.assertGreater(len(found), 10)
            self.assertFalse(any(x.requires_grad for x in found))
            for (key, x), (other, y) in zip(stored.named_parameters(), plain.named_parameters(), strict=True):
                self.assertEqual(key, other)
                self.assertTrue(torch.equal(x.compute() if isinstance(x, PackedWeight) else x, y), key)
            self.assertEqual(Parameters.of(stored.config).quantized, sum(x.numel() for x in found))
            # Scales of rows, and orders of columns, are small beside weights of other sizes alone.
            if not name.endswith(("rows", "order", "gptq_8_bit", "int8")):
                held = sum(x.nbytes for weight in found for x in tensors_of(weight))
                expected = stored_as(stored.config).bytes * sum(x.numel() for x in found)
                self.assertLess(abs(held / expected - 1), 0.02)

    @parameterized.expand([(AutoModelForCausalLM,), (AutoModelForImageTextToText,)])
    def test_a_checkpoint_with_a_vision_tower(self, auto):
        builtin = builtin_model("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", COMPOSITE["qwen3_5_moe"])
        with TemporaryDirectory() as folder, registered():
            plain = write(builtin, folder, "gptq")
            model = auto.from_pretrained(folder, dtype=torch.float32)
        found = {name: x for name, x in model.named_parameters() if isinstance(x, PackedWeight)}
        self.assertGreater(len(found), 10)
        for name, x in found.items():
            if "experts" not in name:
                name = name if "language_model" in name else name.replace("model.", "model.language_model.", 1)
                self.assertTrue(torch.equal(x.compute(), plain[name]), name)
        batch = packed_batch(DOCUMENTS, "cu_seqlens")
        self.assertTrue(torch.isfinite(model(**batch, use_cache=False).loss))

    def test_a_stock_model(self):
        """It has the same weights, which its loader decompresses in the first forward, and `patch_model` serves it."""
        with TemporaryDirectory() as folder:
            write(builtin_model("qwen3_5"), folder, "w4a16")
            ours = load(folder, dtype=torch.bfloat16)
            stock = patch_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
        batch = packed_batch(DOCUMENTS, "cu_seqlens")
        with torch.no_grad():
            self.assertTrue(torch.equal(stock(**batch).logits, ours(**batch).logits))

    def test_a_quantized_head(self):
        """The loss without logits reads a plain head."""
        with TemporaryDirectory() as folder:
            builtin = builtin_model("qwen3_5")
            builtin.lm_head.weight.data = torch.randn(97, 32)
            builtin.save_pretrained(folder)
            tensors, plain = FORMATS["w4a16"][0](builtin.lm_head.weight.data)
            stored = load_file(Path(folder) / "model.safetensors")
            del stored["lm_head.weight"]
            stored |= {f"lm_head.{name}": x.contiguous() for name, x in tensors.items()}
            save_file(stored, Path(folder) / "model.safetensors", {"format": "pt"})
            path = Path(folder) / "config.json"
            config = json.loads(path.read_text()) | {"quantization_config": FORMATS["w4a16"][1]}
            path.write_text(json.dumps(config))
            model = load(folder)
        self.assertIs(type(model.lm_head.weight), torch.nn.Parameter)
        self.assertTrue(torch.equal(model.lm_head.weight, plain.float()))

    @parameterized.expand(["kimi_linear", "bailing_hybrid"])
    def test_weights_that_stay_in_float32(self, family):
        """Routers and others have the dtypes of a checkpoint in 16 bits."""
        with TemporaryDirectory() as folder:
            stored, plain = stored_and_plain(family, "w4a16", folder, torch.bfloat16)
        self.assertTrue(any(isinstance(x, PackedWeight) for x in stored.parameters()))
        self.assertIn(torch.float32, {x.dtype for x in stored.parameters()})
        for (name, x), y in zip(stored.named_parameters(), plain.parameters(), strict=True):
            self.assertEqual((x.dtype, x.shape), (y.dtype, y.shape), name)

    def test_bytes_for_a_device_map(self):
        with TemporaryDirectory() as folder:
            write(builtin_model("qwen3_5_moe"), folder, "nvfp4")
            model = load(folder, device_map="auto", max_memory={"cpu": 10**9})
        sizes = {name: model.hf_quantizer.param_element_size(model, name, x) for name, x in model.named_parameters()}
        for name, x in model.named_parameters():
            self.assertEqual(sizes[name], 0.5625 if isinstance(x, PackedWeight) else 4, name)

    def test_threads_that_load(self):
        mappings = AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING
        before = [dict(x) for x in mappings]
        first, second = reading_checkpoints(), reading_checkpoints()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        self.assertIs(AUTO_QUANTIZER_MAPPING["awq"], CheckpointQuantizer)
        second.__exit__(None, None, None)
        self.assertEqual([dict(x) for x in mappings], before)

    @shows("fp8_rows", PRODUCTS)
    def test_products_in_float8(self):
        """They read the stored bytes and scales of rows."""
        self.assertIs(type(weight_of_layer(stored_layer("fp8_rows"), True, torch.zeros(1, 32))), Float8Weight)

    @shows_for_each([name for name in FORMATS if name != "fp8_rows"], PRODUCTS, says="no")
    def test_products_in_float8_of_other_formats(self, name):
        """The products of their layers are those of dequantized weights."""
        found = [weight_of_layer(stored_layer(name), in_float8, torch.zeros(1, 32)) for in_float8 in (True, False)]
        self.assertEqual([type(x) for x in found], [Dequantized] * 2)
        self.assertEqual([x.dtype for x in found], [torch.bfloat16] * 2)

    def test_weights_that_are_joined_otherwise(self):
        """Experts whose order of columns differs are joined too. A model that cuts them gets plain weights, and says so."""
        groups = [stored_weight(FORMATS["gptq_order"][0](torch.randn(32, 32))[0], {"bits": 4}, torch.float32)] * 2
        joined = torch.cat([torch.stack(groups)] * 2, 1)
        self.assertIsInstance(joined, PackedWeight)
        self.assertTrue(torch.equal(joined.compute(1, 2)[0], torch.cat([x.compute() for x in groups])))
        for other in (torch.cat(groups, 1), torch.stack(groups, 1), torch.stack(groups).transpose(1, 2)):
            self.assertIs(type(other), torch.Tensor)
        # The last rows of a block are missing.
        values, scale = torch.ones(12, 32).to(torch.float8_e4m3fn), torch.ones(1, 2)
        blocks = [PackedWeight(Blocks(values, scale, (16, 16), torch.float32), torch.float32)] * 2
        self.assertIs(type(torch.cat(blocks)), torch.Tensor)


@unittest.skipUnless(find_spec("peft"), "needs peft")
@unittest.skipUnless(joins_stored_experts(), "needs Transformers 5.21")
class AdaptersTest(StoredWeightsTestCase):
    def setUp(self):
        _used.clear()
        self.folder = self.enterContext(TemporaryDirectory())

    @shows_for_each(
        [(name, "qwen3_5_moe") for name in FORMATS] + [("nvfp4", "qwen3_next"), ("w4a16", "qwen3_5")],
        "LoRA of linear layers",
        "LoRA of experts",
        "gradient checkpointing",
    )
    def test_gradients(self, name, family):
        self.check_adapters(*map(adapted, stored_and_plain(family, name, self.folder)))

    @shows_for_each(LAYOUTS, "an adapter is saved and loaded", "an adapter is merged into dequantized weights")
    def test_adapters_are_saved_and_merged(self, name):
        """An adapter goes back onto the checkpoint, and is merged into weights that were dequantized."""
        from peft import PeftModel

        write(builtin_model("qwen3_5_moe"), self.folder, name)
        trained = adapted(load(self.folder))
        trained.save_pretrained(f"{self.folder}/adapter")
        loss, gradients = run(trained)
        again = PeftModel.from_pretrained(load(self.folder), f"{self.folder}/adapter", is_trainable=True)
        found = run(again)
        self.assertEqual(found[0], loss)
        self.assertEqual(total_relative_error(found[1], gradients), 0)
        with self.assertRaisesRegex(ValueError, "for a change in place, .* or call its dequantize|Cannot merge LORA"):
            again.merge_and_unload()
        plain = load(self.folder)
        plain.dequantize()
        self.assertFalse(any(isinstance(x, PackedWeight) for x in plain.parameters()))
        merged = PeftModel.from_pretrained(plain, f"{self.folder}/adapter").merge_and_unload()
        merged.save_pretrained(f"{self.folder}/merged")
        batch = packed_batch(DOCUMENTS, "cu_seqlens")
        stock = patch_model(AutoModelForCausalLM.from_pretrained(f"{self.folder}/merged"))
        self.assertFalse(hasattr(stock.config, "quantization_config"))
        with torch.no_grad():
            self.assertLess((stock(**batch).logits - trained(**batch).logits).abs().max(), 5e-5)

    @shows_for_each(LAYOUTS, "`save_pretrained` of the base", says="error")
    def test_the_base_is_not_saved(self, name):
        write(builtin_model("qwen3_5"), self.folder, name)
        with self.assertRaisesRegex(ValueError, "not serializable"):
            load(self.folder).save_pretrained(f"{self.folder}/copy")

    @shows_for_each(LAYOUTS, "a packed row equals its documents")
    def test_documents_stay_apart(self, name):
        # Weights of AWQ are transposed, so their products add in another order.
        self.check_isolation(*stored_and_plain("qwen3_5_moe", name, self.folder), bar=1e-6 * (name == "awq"))

    def test_layers_and_experts_that_run_themselves(self):
        """They compute weights again in the backward, and keep none."""
        stored, plain = stored_and_plain("qwen3_5_moe", "awq", self.folder)
        for model in (stored, plain):
            model.model.layers[0].linear_attn.out_proj.register_forward_hook(lambda _, __, y: 2 * y)
            model.model.layers[1].mlp.experts.register_forward_hook(lambda _, __, y: 3 * y)
        module = next(x for x in stored.modules() if hasattr(x, "gate_up_proj"))
        self.assertTrue(isolates(module))
        self.assertIsNone(_adapters_of(stored.model.layers[1].mlp.experts)[1])
        found, expected = (run(adapted(model)) for model in (stored, plain))
        self.assertLess(abs(found[0] / expected[0] - 1).item(), 1e-6)
        self.assertLess(total_relative_error(found[1], expected[1]), 1e-5)
        layer = stored.model.layers[0].linear_attn.out_proj
        x = torch.randn(3, layer.in_features, requires_grad=True)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
            layer(x).sum().backward()
        self.assertNotIn(layer.weight.shape, kept)
        self.assertNotIn(layer.weight.shape[::-1], kept)

    @shows_for_each(["fp8_rows", "w4a16", "nvfp4", "gptq_order"], "DDP")
    def test_two_processes(self, name):
        write(builtin_model("qwen3_5_moe"), self.folder, name)
        (first, stored), (second, _) = run_processes(gradients_under_ddp, 2, self.folder)
        self.assertGreater(stored, 10)
        alone = []
        for rank in range(2):
            model = adapted(load(self.folder))
            model(**packed_batch(DOCUMENTS[rank:], "cu_seqlens"), use_cache=False).loss.backward()
            alone.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
        for name, gradient in first.items():
            self.assertTrue(torch.equal(gradient, second[name]))
            torch.testing.assert_close(gradient, (alone[0][name] + alone[1][name]) / 2)

    def test_copies_stay_in_fewer_bits(self):
        weight = stored_weight(FORMATS["nvfp4"][0](torch.randn(32, 32))[0], {}, torch.bfloat16)
        parameter = torch.nn.Parameter(weight, requires_grad=False)
        for copied in (copy.deepcopy(parameter), parameter.clone(), parameter.float(), parameter.detach()):
            self.assertIsInstance(copied, PackedWeight)
            self.assertTrue(torch.equal(copied.compute(), weight.compute()))
        self.assertIs(parameter.float().dtype, torch.float32)
        # What a CUDA graph reads.
        held = [x.data_ptr() for x in tensors_of(parameter)]
        self.assertEqual(
            held, [x.data_ptr() for x in (weight.stored.values, weight.stored.scale, weight.stored.whole)]
        )
        self.assertIn("PackedWeight((32, 32), nvfp4, torch.bfloat16, cpu)", repr(weight))
        with self.assertRaisesRegex(ValueError, "to shard or split, got weights in fewer bits"):
            parameter.split(16)
        # A move to a device sets the data of a parameter.
        layer = torch.nn.Linear(32, 32, bias=False)
        layer.weight, other = parameter, weight.copied(lambda x: x.flip(0) if x.ndim == 2 else x)
        layer._apply(lambda x: other)
        self.assertIs(layer.weight, parameter)
        self.assertTrue(torch.equal(layer.weight.compute(), other.compute()))
        with self.assertRaisesRegex(ValueError, "for a change in place"):
            layer.weight.data = torch.zeros(32, 32)


class EdgesTest(unittest.TestCase):
    def test_methods(self):
        self.assertEqual({*_KINDS} - {"bitsandbytes", "fp8"}, {*CHECKPOINTS})
        config = CheckpointConfig(quant_method="gptq", bits=4)
        self.assertEqual((config.bits, hasattr(copy.deepcopy(config), "desc_act")), (4, False))

    def test_layers_of_other_settings(self):
        config = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round"}
        config["extra_config"] = {"model.layers.0.mlp.up_proj": {"group_size": 32}, ".*o_proj": {"bits": 16}}
        kept = kept_by(SimpleNamespace(quantization_config=config), builtin_model("qwen3_5"))
        names = "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.o_proj", "lm_head"
        self.assertEqual([*map(bool, map(kept, names))], [False, True, True])

    def test_bits_of_the_tensors(self):
        tensors, plain = FORMATS["gptq_8_bit"][0](torch.randn(32, 32))
        self.assertTrue(torch.equal(stored_weight(tensors, {"bits": 4}, torch.float16).compute(), plain))

    def test_integers_with_zeros_in_groups(self):
        generator = torch.Generator().manual_seed(0)
        values, zero = (torch.randint(-128, 128, (8, n), generator=generator, dtype=torch.int8) for n in (32, 2))
        scale = torch.rand(8, 2, generator=generator)
        tensors = {"weight": values, "weight_scale": scale, "weight_zero_point": zero}
        expected = (values.float() - zero.repeat_interleave(16, 1)) * scale.repeat_interleave(16, 1)
        self.assertTrue(torch.equal(stored_weight(tensors, {}, torch.float32).compute(), expected))
        tensors = {"weight": values, "weight_scale": scale[:, 0]}
        self.assertTrue(torch.equal(stored_weight(tensors, {}, torch.float32).compute(), values * scale[:, :1]))

    def test_orders(self):
        tensors, plain = FORMATS["w4a16"][0](torch.randn(8, 32))
        for order in (torch.full((32,), -1), torch.arange(32) // 16):
            found = stored_weight(tensors | {"weight_g_idx": order.int()}, {}, torch.bfloat16)
            self.assertIsNone(found.stored.order)
            self.assertTrue(torch.equal(found.compute(), plain))
        for order in (torch.full((32,), 2), torch.arange(-1, 31) // 16, torch.zeros(16)):
            with self.assertRaisesRegex(ValueError, "or GPTQ, got"):
                stored_weight(tensors | {"weight_g_idx": order.int()}, {}, torch.bfloat16)


@unittest.skipUnless(joins_stored_experts(), "needs Transformers 5.21")
class RefusedTest(unittest.TestCase):
    @parameterized.expand(
        [
            ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "got awq bits=4 version=gemv"),
            ({"quant_method": "gptq", "bits": 3}, "got gptq bits=3. Pass the checkpoint that it was made from"),
            ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format=marlin"),
            ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "got modelopt quant_algo=W4A8"),
            ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format=True"),
            (FORMATS["w4a16"][1] | {"transform_config": {"a": 1}}, "transform_config="),
            (FORMATS["fp8_rows"][1] | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config="),
            ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, "format=mxfp4"),
        ]
    )
    def test_formats(self, quantization, message):
        groups = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}}}
        quantization = (groups if "format" in quantization else {}) | quantization
        with TemporaryDirectory() as folder:
            builtin_model("qwen3_5").save_pretrained(folder)
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
            with self.assertRaisesRegex(ValueError, message):
                load(folder)

    def test_releases_that_cannot_load_them(self):
        with TemporaryDirectory() as folder:
            write(builtin_model("qwen3_5"), folder, "modelopt")
            message = "expected transformers >= 5.21 for a checkpoint by modelopt, got"
            old = mock.patch("transformers_packed.models.checkpoint_kinds.joins_stored_experts", lambda: False)
            with old, self.assertRaisesRegex(ValueError, message):
                load(folder)

    @parameterized.expand(
        [
            ({"weight_packed": torch.zeros(8, 3, dtype=torch.int32)}, r"got weight_packed \(8, 3\) torch.int32"),
            ({"weight_packed": torch.zeros(8, 4, dtype=torch.uint8)}, r"weight_packed \(8, 4\) torch.uint8"),
            ({"weight": torch.zeros(8, 4, dtype=torch.uint8)}, r"or GPTQ, got weight \(8, 4\) torch.uint8"),
            ({"qweight": torch.zeros(8, 4, dtype=torch.int32)}, r"got qweight \(8, 4\) torch.int32"),
            ({"weight": torch.zeros(8, 4, dtype=torch.int32)}, r"got weight \(8, 4\) torch.int32"),
            (packed_integers(40, 3), r"weight_scale \(8, 3\)"),
            (packed_integers(35, 1), r"weight_packed \(8, 5\)"),
        ]
    )
    def test_tensors(self, tensors, message):
        with self.assertRaisesRegex(ValueError, message):
            stored_weight(tensors, {"bits": 4}, torch.bfloat16)


if __name__ == "__main__":
    unittest.main()
