"""Decoder layers in host memory: training, moves, files and refusals, on a CPU that takes copies of them as a GPU does."""

import copy
import unittest
from contextlib import nullcontext
from importlib.util import find_spec
from unittest import mock

import torch
from common.blocks import stored_and_plain
from common.late_experts import copied_on_a_cpu
from mixins.lora import randomized
from mixins.model import packed_batch
from mixins.patch import CONFIGS, builtin_model, on_a_gpu
from ops.test_grouped_dequantization import random_groups
from parameterized import parameterized
from peft import LoraConfig, get_peft_model

from transformers_packed import (
    add_mtp,
    keep_layers_in_host_memory,
    patch_model,
)
from transformers_packed.models import host_parameters
from transformers_packed.models.checkpoint_formats import PackedWeight
from transformers_packed.models.experts import is_known
from transformers_packed.models.families import EXPERT_WEIGHTS
from transformers_packed.models.host_experts import names_in_host_memory
from transformers_packed.models.host_parameters import can_read_host_weights, host_of
from transformers_packed.models.losses import OWN, MtpLoss


KINDS = ["float32", "bfloat16", "nvfp4", "int4", "fp8", "nf4"]
PACKED = {"nvfp4": {"divided": True, "parts": 2}, "int4": {"zero": True}}
ROWS = [[torch.arange(1 + i, n + i) for n in lengths] for i, lengths in enumerate(((9, 30, 2), (17,), (3, 4, 5, 6)))]
ADAPTED = ["q_proj", "o_proj", "out_proj"]
BITSANDBYTES = unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
# Bytes of a tiny layer's weight that moves. Gates of the delta rule have fewer.
SMALL = 512


def layers_of(model):
    return [module for module in model.modules() if can_read_host_weights(module)]


def quantized(layer: torch.nn.Linear, kind: str) -> torch.nn.Module:
    if kind == "nf4":
        from transformers_packed.models.quantization import in_4bit, nf4

        layer = in_4bit(layer, nf4(torch.float32))
        # In evaluation on some CPUs, bitsandbytes needs layers of larger sizes.
        layer.support_avx512bf16_for_cpu = False
        return layer
    stored = PackedWeight(random_groups(kind, layer.weight.shape, 16, **PACKED[kind]), torch.float32)
    layer.weight = torch.nn.Parameter(stored, requires_grad=False)
    return layer


def tiny(family="qwen3_5", kind="float32", adapters=True, **options):
    """A model with linear layers of a kind, and adapters on some of them."""
    if kind == "nf4" and not find_spec("bitsandbytes"):
        raise unittest.SkipTest("needs bitsandbytes")
    config = None
    if family in CONFIGS:
        given = CONFIGS[family].to_dict()
        config = type(CONFIGS[family])(**given | {"num_hidden_layers": 4, "layer_types": 2 * given["layer_types"]})
    model = patch_model(builtin_model(family, config=config)).train()
    if kind == "bfloat16":
        model = model.bfloat16()
    if kind == "fp8":
        model, _ = stored_and_plain(model, (16, 16))
    for layer in layers_of(model):
        for name, module in list(layer.named_modules()):
            if isinstance(module, torch.nn.Linear) and kind in (*PACKED, "nf4") and module.weight.shape[1] % 16 == 0:
                layer.set_submodule(name, quantized(module, kind))
    torch.manual_seed(1)
    experts = list(EXPERT_WEIGHTS) if any(is_known(x) for x in model.modules()) else None
    config = LoraConfig(**{"r": 4, "target_modules": ADAPTED, "target_parameters": experts} | options)
    return randomized(get_peft_model(model, config)) if adapters else model.requires_grad_(False)


def loss_of(model, row):
    return model(**packed_batch(row, "cu_seqlens"), use_cache=False).loss


def gradients(model, *rows):
    model.zero_grad()
    loss = sum(loss_of(model, row) for row in rows)
    loss.backward()
    return {"loss": loss.detach()} | {
        name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None
    }


def run(model):
    """The losses and gradients of several rows, and what evaluation between them finds."""
    found = {}
    for number, row in enumerate(ROWS):
        found |= {(number, name): x for name, x in gradients(model, row).items()}
        with torch.no_grad():
            found[number] = model.eval()(**packed_batch(row, "cu_seqlens"), use_cache=False).logits
        model.train()
    return found | {("both", name): x for name, x in gradients(model, *ROWS[:2]).items()}


class HostLayersTestCase(unittest.TestCase):
    def setUp(self):
        self.enterContext(mock.patch.object(host_parameters, "SMALLEST", SMALL))

    def assert_same(self, actual, expected):
        self.assertEqual(actual.keys(), expected.keys())
        self.assertEqual([name for name, x in expected.items() if not torch.equal(actual[name], x)], [])

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
    copies = [host.copy for layer in layers_of(model) if (host := host_of(layer))]
    sizes = [sum(x.untyped_storage().nbytes() for x in copy.buffers.values()) for copy in copies if copy]
    return sum(map(bool, sizes))


class TrainingTest(HostLayersTestCase):
    @parameterized.expand([(kind, again) for kind in KINDS for again in (False, True)])
    def test_changes_no_bit(self, kind, again):
        # Layers in FP8 run in the op in any case.
        self.check(tiny(kind=kind), {} if again else None)

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

    def test_head_of_multi_token_prediction(self):
        config = type(CONFIGS["qwen3_5"])(**CONFIGS["qwen3_5"].to_dict() | {"mtp_num_hidden_layers": 1})
        model = patch_model(builtin_model("qwen3_5", config=config))
        add_mtp(model)
        model.losses = (*OWN, MtpLoss(0.5))
        model = randomized(get_peft_model(model.train(), LoraConfig(r=4, target_modules=ADAPTED)))
        _, other = self.check(model, {}, lambda model: gradients(model, ROWS[0]))
        self.assertEqual(len(layers_of(other)), 3)

    def test_wrapped_layers_run(self):
        model, seen = tiny(), []
        for layer in layers_of(model):
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    module.register_forward_hook(lambda module, *_: seen.append(module.weight.device))
        _, other = self.check(model, {})
        self.assertTrue(seen)

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
        row, linear = packed_batch(ROWS[0], "cu_seqlens"), layers_of(model)[0].mlp.up_proj
        with copied_on_a_cpu() as copies:
            for change in (
                lambda: linear.weight.data.mul_(2),
                lambda: setattr(linear.weight, "data", linear.weight.detach() * 2),
                lambda: linear.load_state_dict({name: 2 * x for name, x in linear.state_dict().items()}),
                lambda: setattr(linear, "weight", torch.nn.Parameter(linear.weight.detach() * 2, False)),
            ):
                before = model(**row).logits
                for event in list(copies.copies.queue):
                    event.wait()
                change()
                after = model(**row).logits
                self.assertFalse(torch.equal(after, before))
                with mock.patch.object(host_parameters, "is_apart", lambda device: False):
                    self.assertTrue(torch.equal(model(**row).logits, after))

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
