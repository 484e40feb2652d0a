"""Decoder layers in host memory: training, moves, files and refusals, on a CPU that takes copies of them as a GPU does."""

import copy
import gc
import tempfile
import unittest
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import chain
from unittest import mock

import torch
from common.blocks import mixture, stored_and_plain
from common.four_bit import store_in_nf4
from common.late_experts import copied_on_a_cpu
from mixins.lora import randomized
from mixins.model import packed_batch
from mixins.on_host import ROWS, OnHostTestCase, ddp_steps, four_layers, gradients, loss_of, run
from mixins.patch import CONFIGS, builtin_model, on_a_gpu
from ops.test_grouped_dequantization import random_groups
from parameterized import parameterized
from peft import LoraConfig, PeftModel, get_peft_model

from transformers_packed import (
    add_mtp,
    keep_experts_in_host_memory,
    keep_layers_in_host_memory,
    patch_model,
    unpatch_model,
    use_cuda_graphs,
    use_float8,
)
from transformers_packed.models import cuda_graphs, host_parameters
from transformers_packed.models.checkpoint_formats import PackedWeight
from transformers_packed.models.experts import is_known
from transformers_packed.models.families import EXPERT_WEIGHTS
from transformers_packed.models.host_experts import bytes_in_host_memory, names_in_host_memory
from transformers_packed.models.host_parameters import can_read_host_weights, host_of, loading_to_host
from transformers_packed.models.losses import OWN, MtpLoss
from transformers_packed.models.stored_weights import why_not_in_float8
from transformers_packed.ops import implementations_used
from transformers_packed.ops.dispatch import _used
from transformers_packed.ops.host_weights import HostTensors
from transformers_packed.training.restore import exact_for


KINDS = ["float32", "bfloat16", "nvfp4", "int4", "fp8", "nf4"]
PACKED = {"nvfp4": {"divided": True, "parts": 2}, "int4": {"zero": True}}
ADAPTED = ["q_proj", "o_proj", "out_proj"]
BITSANDBYTES = unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
# Bytes of a tiny layer's weight that moves. Gates of the delta rule have fewer.
SMALL = 512


def layers_of(model):
    return [module for module in model.modules() if can_read_host_weights(module)]


def linears_of(layer):
    return [linear for linears in host_parameters._linears_of(layer).values() for linear in linears]


def tiny(family="qwen3_5", kind="float32", adapters=True, **options):
    """A model with linear layers of a kind, and adapters on some of them."""
    if kind == "nf4" and not find_spec("bitsandbytes"):
        raise unittest.SkipTest("needs bitsandbytes")
    model = four_layers(family)
    if kind == "bfloat16":
        model = model.bfloat16()
    if kind == "fp8":
        model, _ = stored_and_plain(model, (16, 16))
    if kind == "nf4":
        store_in_nf4(model, torch.float32)
    for module in chain.from_iterable(x.modules() for x in layers_of(model) if kind in PACKED):
        if isinstance(module, torch.nn.Linear) and module.weight.shape[1] % 16 == 0:
            stored = PackedWeight(random_groups(kind, module.weight.shape, 16, **PACKED[kind]), torch.float32)
            module.weight = torch.nn.Parameter(stored, requires_grad=False)
    torch.manual_seed(1)
    experts = list(EXPERT_WEIGHTS) if any(is_known(x) for x in model.modules()) else None
    config = LoraConfig(**{"r": 4, "target_modules": ADAPTED, "target_parameters": experts} | options)
    return randomized(get_peft_model(model, config)) if adapters else model.requires_grad_(False)


class HostLayersTestCase(OnHostTestCase):
    def setUp(self):
        self.enterContext(mock.patch.object(host_parameters, "SMALLEST", SMALL))

    def check(self, model, checkpointing=None, find=run, fused=True):
        """Outputs and gradients are the same with all layers, whether anything is copied or not."""
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": False, **checkpointing})
        other = copy.deepcopy(model)
        self.assertIs(keep_layers_in_host_memory(other), other)
        self.assertGreater(len(names_in_host_memory(other)), 4 * len(layers_of(other)))
        for context in (nullcontext, on_a_gpu) if fused else (nullcontext,):
            with context():
                expected = find(model)
                self.assertTrue(any("lora_A" in str(name) and x.any() for name, x in expected.items()))
                self.assert_same(find(other), expected)
                # It has no copies yet.
                late = copy.deepcopy(other)
                with copied_on_a_cpu() as copies:
                    self.assert_same(find(late), expected)
                    self.assertGreater(copies.copies.copies, len(layers_of(late)))
                    self.assertEqual(on_the_device(late), 2)
        return model, other


def on_the_device(model) -> int:
    """The layers whose copies are on the device."""
    copies = [copy for layer in layers_of(model) if (host := host_of(layer)) for copy in host.copies.values()]
    sizes = [sum(x.untyped_storage().nbytes() for x in copy.buffers.values()) for copy in copies]
    return sum(map(bool, sizes))


class TrainingTest(HostLayersTestCase):
    @parameterized.expand([(kind, again) for kind in KINDS for again in (False, True)])
    def test_changes_no_bit(self, kind, again):
        # Layers in FP8 run in the op in any case.
        self.check(tiny(kind=kind), {} if again else None)

    @parameterized.expand([(None,), ({},)])
    def test_products_in_float8(self, checkpointing):
        """Of linear layers and experts in blocks, whose backward reads bytes that were given up after the forward."""
        _used.clear()
        model, _ = mixture()
        use_float8(model, lambda layer, name: why_not_in_float8(layer) == "")
        config = LoraConfig(r=4, target_modules=ADAPTED, target_parameters=list(EXPERT_WEIGHTS))
        adapted = randomized(get_peft_model(model, config)).train()
        self.check(adapted, checkpointing, lambda model: gradients(model, ROWS[0]), fused=False)
        self.assertLess({"linear_float8_lora", "experts_float8_lora"}, {*implementations_used()})

    @parameterized.expand(["qwen3_next", "qwen3_5_moe", "kimi_linear", "bailing_hybrid", "qwen4_exp"])
    def test_families(self, family):
        _, other = self.check(tiny(family), {}, lambda model: gradients(model, ROWS[0]), fused=False)
        experts = [module for module in other.modules() if is_known(module)]
        hosts = {id(host_of(layer)) for layer in layers_of(other)}
        self.assertEqual(len(hosts), len(layers_of(other)))
        # They are copied with their layer.
        self.assertTrue({id(host_of(module)) for module in experts} <= hosts)

    @parameterized.expand(
        [
            ("dora", {"use_dora": True}, {}, {}),
            ("dropout", {"lora_dropout": 0.5}, {}, {}),
            ("segments", {}, {"segment_tokens": 64}, {}),
            ("offload", {}, {"offload": True}, {}),
            ("attention", {}, {"keep_attention": True}, {}),
            ("some", {}, {"every_n_layers": 2}, {}),
            ("reentrant", {}, {"use_reentrant": True}, {}),
        ]
    )
    def test_options(self, name, adapters, checkpointing, _):
        row = [torch.arange(1, n) for n in (9, 85, 50)]

        def find(model):
            torch.manual_seed(0)
            if name == "reentrant":
                model.enable_input_require_grads()
            return gradients(model, row)

        self.check(tiny(kind="nf4" if find_spec("bitsandbytes") else "nvfp4", **adapters), checkpointing, find)

    def test_each_copy_is_on_its_way(self):
        """After two steps, no layer waits for a copy that has not been started a layer before."""
        model = keep_layers_in_host_memory(tiny())
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with copied_on_a_cpu() as copies:
            for _ in range(2):
                gradients(model, ROWS[0])
            misses, made = copies.misses, copies.copies.copies
            gradients(model, ROWS[0])
            self.assertEqual(copies.misses, misses)
            # Those of two layers are there at each turn.
            self.assertEqual(copies.copies.copies - made, 2 * (4 - 2))

    def test_asked_for_before_their_backward(self):
        """A function may keep a weight where no checkpoint sees it, and read it before the layer is computed again."""
        model, asked = keep_layers_in_host_memory(tiny()), []
        model.gradient_checkpointing_enable({"use_reentrant": False})
        with copied_on_a_cpu() as copies:
            loss, get = loss_of(model, ROWS[0]), copies.get
            noted = mock.patch.object(copies, "get", lambda host, key: [asked.append(host), get(host, key)][1])
            with noted:
                loss.backward()
        last_first = [host_of(layer) for layer in reversed(layers_of(model))]
        self.assertEqual(list(map(id, asked)), [id(host) for host in last_first for _ in range(2)])

    def test_head_of_multi_token_prediction(self):
        config = type(CONFIGS["qwen3_5"])(**CONFIGS["qwen3_5"].to_dict() | {"mtp_num_hidden_layers": 1})
        model = patch_model(builtin_model("qwen3_5", config=config))
        add_mtp(model)
        model.losses = (*OWN, MtpLoss(0.5))
        model = randomized(get_peft_model(model.train(), LoraConfig(r=4, target_modules=ADAPTED)))
        _, other = self.check(model, {}, lambda model: gradients(model, ROWS[0]))
        self.assertEqual(len(layers_of(other)), 3)

    @parameterized.expand([("nf4",), ("nvfp4",)])
    def test_a_loss_inside_of_a_layer(self, kind):
        """Nobody has asked for its weights. A kernel would read memory that is not there."""
        model, inner = keep_layers_in_host_memory(tiny(kind=kind)), []
        layers_of(model)[1].mlp.register_forward_hook(lambda module, inputs, output: inner.append(output))
        with on_a_gpu(), copied_on_a_cpu():
            loss_of(model, ROWS[0])
            with self.assertRaisesRegex(ValueError, "a loss of the outputs of layers, got the backward of something"):
                inner[0].square().sum().backward()

    def test_another_model_dies(self):
        """What came before a layer may be gone when the next one runs."""
        model, other = (keep_layers_in_host_memory(tiny()) for _ in range(2))
        expected = gradients(model, ROWS[0])
        with copied_on_a_cpu():
            with torch.no_grad():
                loss_of(other, ROWS[1])
            del other
            gc.collect()
            for _ in range(2):
                self.assert_same(gradients(model, ROWS[0]), expected)

    def test_a_move_gives_up_copies(self):
        model = keep_layers_in_host_memory(tiny())
        with copied_on_a_cpu() as copies:
            expected = gradients(model, ROWS[0])
            self.assertEqual((len(copies.layers), on_the_device(model)), (2, 2))
            model.to("cpu")
            self.assertEqual((len(copies.layers), on_the_device(model)), (0, 0))
            self.assert_same(gradients(model, ROWS[0]), expected)

    def test_another_device(self):
        """Layers run where their inputs are, and a graph of the first device finds its copies there."""
        model, on = keep_layers_in_host_memory(tiny()), HostTensors.on
        with copied_on_a_cpu() as copies:
            expected = gradients(model, ROWS[0])
            loss = loss_of(model, ROWS[0])
            model.to("cpu")
            second = torch.device("cpu", 1)
            with mock.patch.object(HostTensors, "on", lambda host, device, key: on(host, second, key)):
                self.assert_same(gradients(model, ROWS[0]), expected)
            self.assertEqual((copies.layers, on_the_device(model)), ([], 2))
            model.zero_grad()
            loss.backward()
            for name, x in model.named_parameters():
                self.assertTrue(x.grad is None or torch.equal(x.grad, expected[name]), name)

    def test_modules_beside_copies_of_peft(self):
        """Nobody reads them, until adapters are off."""
        options = {"target_modules": ["q_proj"], "modules_to_save": ["down_proj", "v_proj"]}
        model, other = self.check(tiny(**options), {})
        names = names_in_host_memory(other)
        self.assertEqual(sum(".original_module." in name for name in names), 4 + 2)
        made = lambda: [copy for layer in layers_of(other) for copy in host_of(layer).copies.values()]  # noqa: E731
        row = packed_batch(ROWS[0], "cu_seqlens")
        with copied_on_a_cpu():
            loss_of(other, ROWS[0])
            # PEFT has not called any.
            self.assertEqual({key for copy in made() for key in copy.buffers}, {"linear layers"})
            with model.disable_adapter(), other.disable_adapter():
                expected, found = (x(**row).logits for x in (model, other))
            self.assertTrue(torch.equal(found, expected))
            self.assertFalse(torch.equal(found, other(**row).logits))
            self.assert_same(gradients(other, ROWS[0]), gradients(model, ROWS[0]))
            self.assertEqual({len(copy.buffers) for copy in made()}, {2})
        # Copies of an adapter that is not active yet move to the GPU, because it may be trained.
        late = tiny(**options)
        late.add_adapter("other", LoraConfig(r=4, **options))
        keep_layers_in_host_memory(late)
        self.assertEqual([name for name in names_in_host_memory(late) if ".modules_to_save." in name], [])

    def test_experts_that_are_trained_stay(self):
        """Such as those of a trained head of multi-token prediction."""
        model = tiny("qwen3_5_moe", adapters=False)
        trained, frozen = (next(x for x in layer.modules() if is_known(x)) for layer in layers_of(model)[:2])
        trained.requires_grad_(True)
        keep_layers_in_host_memory(model)
        self.assertEqual((host_of(trained), host_of(frozen)), (None, host_of(layers_of(model)[1])))

    def test_wrapped_layers_run(self):
        model, seen = tiny(), []
        for layer in layers_of(model):
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_hook(lambda *_: seen.append(1))
        _, other = self.check(model, {})
        seen.clear()
        loss_of(model, ROWS[0])
        expected = len(seen)
        with copied_on_a_cpu():
            loss_of(other, ROWS[0])
        self.assertEqual(len(seen), 2 * expected)
        self.assertGreater(expected, 10)

    def test_a_model_without_adapters(self):
        model = tiny(adapters=False)
        other = keep_layers_in_host_memory(copy.deepcopy(model))
        ids = torch.arange(1, 9)[None]
        with copied_on_a_cpu():
            options = {"max_new_tokens": 4, "do_sample": False}
            expected, found = (x.eval().generate(ids, **options) for x in (model, other))
            self.assertTrue(torch.equal(found, expected))
            with torch.inference_mode():
                self.assertTrue(torch.equal(other(ids).logits, model(ids).logits))
        # A trained layer stays where it is.
        model = tiny(adapters=False)
        trained = layers_of(model)[1].mlp.up_proj.requires_grad_(True)
        expected = gradients(copy.deepcopy(model), ROWS[0])
        keep_layers_in_host_memory(model)
        self.assertIsNone(host_of(trained))
        with copied_on_a_cpu():
            self.assert_same(gradients(model, ROWS[0]), expected)
        self.assertEqual(len(expected), 2)

    def test_weights_that_are_replaced(self):
        model = keep_layers_in_host_memory(tiny(adapters=False))
        with copied_on_a_cpu() as copies:
            self.check_replaced(model, layers_of(model)[0].mlp.up_proj, "weight", copies)

    def test_two_processes(self):
        """They have the layers once, and train as with layers on the device."""
        ignored = self.check_two_processes(ddp)
        self.assertGreater(len(ignored), 4 * 4)

    def test_a_copy_of_the_model(self):
        model = keep_layers_in_host_memory(tiny("qwen3_5_moe", "nf4" if find_spec("bitsandbytes") else "nvfp4"))
        other = copy.deepcopy(model)
        with copied_on_a_cpu():
            self.assert_same(gradients(other, ROWS[0]), gradients(model, ROWS[0]))
        pages = [
            {x.data_ptr() for layer in layers_of(one) for x in host_of(layer).pages.values()} for one in (model, other)
        ]
        self.assertEqual([len(x) for x in pages], [12, 12])
        self.assertFalse(pages[0] & pages[1])


def ddp(on_host):
    with mock.patch.object(host_parameters, "SMALLEST", SMALL):
        return ddp_steps(tiny(), keep_layers_in_host_memory if on_host else None)


class MovesTest(HostLayersTestCase):
    @parameterized.expand([(kind,) for kind in KINDS])
    def test_stay_where_they_are(self, kind):
        """The meta device stands for a GPU."""
        model = tiny(kind=kind)
        before = {name: x.detach().clone() for name, x in model.named_parameters()}
        keep_layers_in_host_memory(model)
        names = names_in_host_memory(model)
        self.assertEqual(
            {name.split(".")[-2 - ("base_layer" in name)] for name in names} - {"in_proj_a", "in_proj_b"},
            {f"in_proj_{x}" for x in ("qkv", "z")}
            | {f"{x}_proj" for x in ("q", "k", "v", "o", "out", "gate", "up", "down")},
        )
        self.check_moved_to_meta(model, names, before)
        if kind not in ("nvfp4", "int4", "nf4"):
            self.check_kept_dtype(model)

    def test_biases_move(self):
        linear = layers_of(model := tiny(adapters=False))[0].mlp.up_proj
        linear.bias = torch.nn.Parameter(torch.randn(linear.out_features), False)
        expected = model(**packed_batch(ROWS[0], "cu_seqlens")).logits
        keep_layers_in_host_memory(model)
        with copied_on_a_cpu():
            self.assertTrue(torch.equal(model(**packed_batch(ROWS[0], "cu_seqlens")).logits, expected))
        model.to("meta")
        self.assertEqual([linear.weight.device.type, linear.bias.device.type], ["cpu", "meta"])

    def test_small_and_shared_weights_move(self):
        model = tiny(adapters=False)
        first, second, third, _ = layers_of(model)
        second.mlp.up_proj.weight = first.mlp.up_proj.weight
        with mock.patch.object(host_parameters, "SMALLEST", third.mlp.up_proj.weight.nbytes):
            keep_layers_in_host_memory(model)
        self.assertEqual([host_of(x.mlp.up_proj) is None for x in (first, second, third)], [True, True, False])
        gates = [x for name, x in third.named_modules() if name.endswith(("in_proj_a", "in_proj_b"))]
        self.assertEqual([host_of(x) for x in gates], [None] * 2)

    def test_adapters_that_are_not_active_move(self):
        model = tiny()
        model.add_adapter("other", LoraConfig(r=32, target_modules=ADAPTED))
        frozen = [name for name, x in model.named_parameters() if "other" in name and not x.requires_grad]
        self.assertTrue(frozen)
        keep_layers_in_host_memory(model)
        self.assertEqual([name for name in names_in_host_memory(model) if "lora_" in name], [])

    def test_no_tensor_is_there_twice(self):
        model = tiny(kind="nf4" if find_spec("bitsandbytes") else "nvfp4", adapters=False)
        keep_layers_in_host_memory(model)
        hosts = [host_of(layer) for layer in layers_of(model)]
        pages = [{*host.pages.values()} for host in hosts]
        places = [range(x.data_ptr(), x.data_ptr() + x.nbytes) for each in pages for x in each]
        tensors = [x for layer in layers_of(model) for x in host_parameters._all_tensors_of(linears_of(layer))]
        self.assertTrue(all(any(x.data_ptr() in place for place in places) for x in tensors))
        for layer in layers_of(model):
            for linear in linears_of(layer):
                self.assertIs(vars(linear).get("quant_state"), getattr(linear.weight, "quant_state", None))

    def test_files(self):
        model = tiny(adapters=False)
        expected = {name: x.clone() for name, x in model.state_dict().items()}
        row = packed_batch(ROWS[0], "cu_seqlens")
        logits = model(**row).logits
        keep_layers_in_host_memory(model)
        self.assert_same(dict(model.state_dict()), expected)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = type(model).from_pretrained(folder)
        self.assertTrue(torch.equal(loaded(**row).logits, logits))
        self.assertEqual(names_in_host_memory(loaded), [])
        keep_layers_in_host_memory(loaded.requires_grad_(False)).load_state_dict(expected)

    @parameterized.expand([("float32",), ("nf4",)])
    def test_adapters_are_saved_and_merged(self, kind):
        model = tiny(kind=kind)
        row = packed_batch(ROWS[0], "cu_seqlens")
        plain = copy.deepcopy(model)
        keep_layers_in_host_memory(model)
        with copied_on_a_cpu():
            before = model(**row).logits
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                base = keep_layers_in_host_memory(tiny(kind=kind, adapters=False))
                self.assertTrue(torch.equal(PeftModel.from_pretrained(base, folder).train()(**row).logits, before))
            for change in ("merge_adapter", "unmerge_adapter", "merge_and_unload"):
                # The last one returns the model without adapters.
                model, plain = (getattr(x, change)() or x for x in (model, plain))
                after = model(**row).logits
                self.assertFalse(torch.equal(after, before))
                self.assertTrue(torch.equal(after, plain(**row).logits), change)
            self.assertGreater(len(names_in_host_memory(model)), 4 * 4)

    @BITSANDBYTES
    @parameterized.expand([("qwen3_5",), ("qwen3_5_moe",)])
    def test_quantized_while_they_are_loaded(self, family):
        from transformers_packed.models.quantization import nf4

        moved, cpu = [], torch.Tensor.cpu
        with tempfile.TemporaryDirectory() as folder:
            source = tiny(family, adapters=False)
            source.save_pretrained(folder)
            cls, options = type(source), {"quantization_config": nf4(torch.float32), "dtype": torch.float32}
            expected = cls.from_pretrained(folder, **options)
            with (
                loading_to_host(layers=True),
                mock.patch.object(torch.Tensor, "cpu", lambda x: [moved.append(x), cpu(x)][1]),
            ):
                model = cls.from_pretrained(folder, **options)
            self.assert_in_place(model, expected)
            self.assertGreater(len(moved), len(names_in_host_memory(model)))
            expected.save_pretrained(folder)
            with loading_to_host(layers=True):
                again = cls.from_pretrained(folder, dtype=torch.float32)
            self.assert_in_place(again, expected)

    def assert_in_place(self, model, expected):
        """They are not yet in pages, but already stay."""
        self.assertEqual(bytes_in_host_memory(model), 0)
        names = set(names_in_host_memory(model))
        row = packed_batch(ROWS[0], "cu_seqlens")
        for one in (model, expected):
            for module in one.modules():
                if hasattr(module, "support_avx512bf16_for_cpu"):
                    module.support_avx512bf16_for_cpu = False
        other = keep_layers_in_host_memory(copy.deepcopy(model.requires_grad_(False)))
        # Linear layers in full precision were not quantized.
        self.assertLessEqual(names, {*names_in_host_memory(other)})
        with copied_on_a_cpu():
            self.assertTrue(torch.equal(other(**row).logits, expected(**row).logits))
        model.to("meta")
        self.assertEqual({name for name, x in model.named_parameters() if x.device.type == "cpu"}, names)


class RefusalsTest(HostLayersTestCase):
    def check_error(self, message, model):
        with self.assertRaisesRegex(ValueError, message):
            keep_layers_in_host_memory(model)
        self.assertEqual(names_in_host_memory(model), [])

    def test_models(self):
        stock = builtin_model("qwen3_5").requires_grad_(False)
        self.check_error(
            "expected decoder layers of this package, got Qwen3_5ForCausalLM. Load it .* patch_model", stock
        )
        olmo = patch_model(builtin_model("olmo_hybrid")).requires_grad_(False)
        self.check_error("expected decoder layers of this package, got OlmoHybridForCausalLM", olmo)
        trained = patch_model(builtin_model("qwen3_5"))
        self.check_error(
            "large frozen weights, got small or trained ones alone. Call it after get_peft_model", trained
        )
        mixed = tiny(adapters=False)
        mixed.model.layers[1].__class__ = type(stock.model.layers[1])
        self.check_error("expected decoder layers of this package, got Qwen3_5DecoderLayer", mixed)
        hooked = tiny(adapters=False)
        vars(layers_of(hooked)[0].mlp)["_hf_hook"] = None
        self.check_error("expected layers that stay in host memory, got a device_map", hooked)
        shared = tiny(adapters=False)
        layers_of(shared)[0].mlp.down_proj.weight.device_mesh = None
        self.check_error("expected whole layers in host memory, got layers that several processes share", shared)
        with mock.patch("transformers_packed.models.host_experts.gathers_weights", lambda model: True):
            self.check_error("without FSDP and ZeRO-3 for layers in host memory, got a sharded", tiny(adapters=False))
        other = tiny(adapters=False)
        layers_of(other)[3].mlp.up_proj.weight = type("Int8Params", (torch.nn.Parameter,), {})(
            torch.ones(48, 32), False
        )
        self.check_error("a linear layer in host memory, plain or quantized .* got weight, a Int8Params", other)
        mixture = tiny("qwen3_5_moe", adapters=False)
        mixture.set_experts_implementation("grouped_mm")
        self.check_error('expected experts_implementation="transformers_packed" for experts in host', mixture)
        mixture.set_experts_implementation("transformers_packed")
        next(x for x in mixture.modules() if is_known(x)).down_proj.requires_grad_(True)
        self.check_error("expected frozen weights in host memory, got a trained down_proj", mixture)

    def test_what_comes_later(self):
        model = keep_layers_in_host_memory(tiny(adapters=False))
        # The check before the first step would need wider weights.
        self.assertEqual(exact_for(model).refused, "weights are in host memory")
        row = packed_batch(ROWS[0], "cu_seqlens")
        with self.assertRaisesRegex(ValueError, "got weights in host memory, which stock classes do not copy"):
            unpatch_model(model)
        layers_of(model)[2].mlp.up_proj.weight.requires_grad_(True)
        message = (
            "that stay frozen, got Qwen3_5DecoderLayer.mlp.up_proj.weight, which trains now. Freeze it again, or let"
        )
        with copied_on_a_cpu(), self.assertRaisesRegex(ValueError, message):
            model(**row)
        layers_of(model)[2].mlp.up_proj.weight.requires_grad_(False)
        with (
            mock.patch("torch.compiler.is_compiling", lambda: True),
            self.assertRaisesRegex(ValueError, "without compil"),
        ):
            layers_of(model)[0](torch.ones(1, 2, 32), None)
        model(**row)

    def test_a_head_that_trains_later(self):
        """A frozen head of multi-token prediction has moved with the layers of the trunk."""
        config = type(CONFIGS["qwen3_5"])(**CONFIGS["qwen3_5"].to_dict() | {"mtp_num_hidden_layers": 1})
        for trains in (False, True):
            model = patch_model(builtin_model("qwen3_5", config=config))
            head = add_mtp(model)
            model.requires_grad_(False)
            head.requires_grad_(trains)
            keep_layers_in_host_memory(model)
            self.assertEqual(bool(names_in_host_memory(head)), not trains)
            if trains:
                MtpLoss(0.5).prepare(model, None)
                continue
            message = (
                "prediction on the GPU, .* got a frozen one in host memory. Call head.requires_grad_.True. before"
            )
            with self.assertRaisesRegex(ValueError, message):
                MtpLoss(0.5).prepare(model, None)
            self.assertFalse(any(x.requires_grad for x in head.parameters()))

    def test_graphs(self):
        model = keep_layers_in_host_memory(tiny())
        use_cuda_graphs(model, 64)
        (text,) = cuda_graphs.text_models_of(model)
        reason = cuda_graphs.reason_of_layers(text, torch.device("cpu"))
        self.assertEqual(reason, "weights are in host memory")

    def test_experts_first(self):
        """Both calls in any order keep the same weights."""
        for calls in ((keep_experts_in_host_memory, keep_layers_in_host_memory), (keep_layers_in_host_memory,) * 2):
            model = tiny("qwen3_5_moe")
            expected = gradients(model, ROWS[0])
            for call in calls:
                call(model)
            with copied_on_a_cpu():
                self.assert_same(gradients(model, ROWS[0]), expected)
            self.assertEqual(len({id(host_of(x)) for x in model.modules() if host_of(x)}), 4)
