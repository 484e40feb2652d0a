"""Checkpointed layers whose backward computes the MLP again, and then the mixer."""

import gc
import re
import unittest
import weakref
from collections import Counter
from contextlib import nullcontext
from functools import partial
from unittest import mock

import torch
from common.late_copies import on_a_cpu
from common.memory import Memory
from mixins.lora import all_linear, builtin_model
from mixins.model import gradients, packed_batch
from mixins.patch import BUILTINS, OTHERS, documents, on_a_gpu
from mixins.triton import InterpretedKernelsTest
from mixins.vision import TEXT, TINY
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import noop_context_fn
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, set_seed

from transformers_packed import add_mtp, keep_layers_in_host_memory, patch_model, use_float8
from transformers_packed.models import halves
from transformers_packed.models.checkpointing import bytes_on_host, runs_in_halves
from transformers_packed.models.losses import OWN, MtpLoss
from transformers_packed.models.versions import can_select_checkpoints
from transformers_packed.ops import host_memory, implementations_used, offload


FAMILIES = [family for family in (*BUILTINS, *OTHERS) if family != "qwen4_exp"]
PLAIN = {"use_reentrant": False}
# The weights of the last product of each mixer.
OUTPUTS = re.compile(r"(linear_attn|self_attn)\.(o|out)_proj\.(base_layer\.)?weight$")
WITH_KERNELS = {"gated_rms_norm_linear", "sigmoid_gate_linear", "swiglu_linear", "rms_norm"}
SIZES = TINY | {"vocab_size": 61, "num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}
# Weights of up to 128 rows share a product with their adapters.
SIZES |= {"hidden_size": 160, "linear_key_head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2}


class Products(TorchDispatchMode):
    """Counts the products of a forward with weights."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        super().__init__()
        self.names = {(x.data_ptr(), x.t().stride()): name for name, x in weights.items()}
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket.__name__.rstrip("_") in ("mm", "addmm"):
            places = [(x.data_ptr(), x.stride()) for x in args if isinstance(x, torch.Tensor)]
            self.counts.update(self.names[place] for place in places if place in self.names)
        return operator(*args, **(kwargs or {}))


def lora(dropout: float = 0.0) -> torch.nn.Module:
    set_seed(0)
    config = LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    return get_peft_model(builtin_model("qwen3_5"), config)


@unittest.skipUnless(can_select_checkpoints(), "needs Transformers 5.23")
class HalvesTestCase(unittest.TestCase):
    def setUp(self):
        super().setUp()
        self.enterContext(on_a_cpu(64))
        self.enterContext(halves.use_halves())
        # Of each layer, whether it ran in halves.
        self.ran: list[bool] = []
        run = halves.Halves.of

        def noted(host, x):
            found = run(host, x)
            self.ran.append(found is not None)
            return found

        self.enterContext(mock.patch.object(halves.Halves, "of", noted))

    def enable(self, model, options=None, offload=True, **more) -> None:
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        inner.activation_checkpointing_enable(PLAIN | (options or {}), offload=offload, **more)

    def whole(self):
        """Let all layers run as a whole."""
        return mock.patch.object(halves, "_can_run_in_halves", return_value=False)

    def at_once(self):
        """Let layers of the first row run in halves."""
        return mock.patch.object(offload, "_inputs_first", False)

    def step(self, model, batch, whole=False):
        set_seed(0)
        self.ran.clear()
        with self.whole() if whole else self.at_once():
            found = gradients(model, model(**batch).loss)
        return found, list(self.ran)

    def check(self, model, batch=None, ran=None, **options):
        """No bit changes between layers as a whole and in halves, as all of them are unless `ran` says so."""
        batch = batch or packed_batch(documents()) | {"use_cache": False}
        self.enable(model, **options)
        expected, none = self.step(model, batch, whole=True)
        self.assertEqual(none, [])
        for _ in range(2):
            actual, found = self.step(model, batch)
            self.assertEqual(found, ran or [True] * len(found))
            self.assertEqual(actual.keys(), expected.keys())
            self.assertEqual([name for name in expected if not torch.equal(actual[name], expected[name])], [])
        self.assertGreater(len(found), 0)

    def check_products(self, model, documents, layers) -> None:
        weights = {name: x for name, x in model.named_parameters() if OUTPUTS.search(name)}
        batch, counts = packed_batch(documents) | {"use_cache": False}, []
        self.enable(model)
        for whole in (True, False):
            with Products(weights) as products:
                self.step(model, batch, whole)
            counts.append([products.counts[name] for name in weights])
        self.assertEqual(self.ran, [True] * layers)
        self.assertEqual((counts[0], sorted(counts[1])[:layers]), ([2] * len(weights), [1] * layers))
        self.assertEqual(sum(counts[1]), 2 * len(weights) - layers)


class HalvesTest(HalvesTestCase):
    @parameterized.expand([(family, dtype) for family in FAMILIES for dtype in (torch.float32, torch.bfloat16)])
    def test_changes_no_bit(self, family, dtype):
        model = patch_model(builtin_model(family)).to(dtype).train()
        # One kind of its layers has no class of ours.
        self.check(model, ran=[True] if family == "olmo_hybrid" else None)
        self.assertEqual(len(self.ran), 1 if family == "olmo_hybrid" else len(model.model.layers))

    @parameterized.expand([(family, fused) for family in ("qwen3_5", "qwen3_next") for fused in (False, True)])
    def test_adapters(self, family, fused):
        with on_a_gpu() if fused else nullcontext():
            self.check(patch_model(all_linear(family)).train())

    def test_dropout_is_drawn_again(self):
        model = patch_model(lora(0.5)).train()
        self.check(model)
        # It matters.
        batch = packed_batch(documents()) | {"use_cache": False}
        expected, _ = self.step(model, batch)
        self.enable(model, {"preserve_rng_state": False})
        actual, _ = self.step(model, batch)
        self.assertFalse(all(torch.equal(actual[name], expected[name]) for name in expected))

    @parameterized.expand([("tree",), ("padded",), ("automatic",), ("kept",), ("kept_auto",), ("mtp",), ("float8",)])
    def test_other_ways_to_train(self, way):
        model, options, batch = patch_model(builtin_model("qwen3_5")), {}, None
        if way == "tree":
            ids = torch.arange(122)[None] % 90
            batch = {"input_ids": ids, "labels": ids, "cu_seqlens": torch.tensor([0, 9, 11, 81, 84, 89, 91, 92, 122])}
            batch |= {"parent_of": torch.tensor([-1, 0, 1, 2, 0, 1, 2, 3]), "use_cache": False}
        elif way == "padded":
            ids = torch.arange(122).view(2, 61) % 90
            batch = {"input_ids": ids, "labels": ids, "attention_mask": (ids > 5).long(), "use_cache": False}
        elif way == "automatic":
            options = {"offload": "auto"}
        elif way.startswith("kept"):
            options = {"options": {"keep_attention": True if way == "kept" else "auto"}}
            self.enterContext(mock.patch.object(offload, "LONG_DOCUMENT", 0))
        elif way == "mtp":
            model = patch_model(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT, mtp_num_hidden_layers=1)))
            add_mtp(model)
            model.losses = (*OWN, MtpLoss(0.5))
        elif way == "float8":
            use_float8(model, lambda module, name: "mlp" in name)
        self.check(model.train(), batch, **options)

    @parameterized.expand([("qwen3_5",), ("kimi_linear",), ("olmo_hybrid",)])
    def test_the_last_product_of_each_half_runs_once(self, family):
        layers = 1 if family == "olmo_hybrid" else 2
        self.check_products(patch_model(builtin_model(family)).train(), documents(), layers)

    def test_memory(self):
        """The activations of a mixer and of an MLP never exist together."""
        set_seed(0)
        config = Qwen3_5TextConfig(vocab_size=32, hidden_size=64, intermediate_size=1536, num_hidden_layers=3)
        config.update(
            {"linear_num_value_heads": 8, "linear_num_key_heads": 8, "num_attention_heads": 8, "head_dim": 64}
        )
        model = patch_model(Qwen3_5ForCausalLM(config)).train()
        batch, peaks = packed_batch([torch.arange(500) % 30]) | {"use_cache": False}, []
        self.enable(model)
        layer, mlp, found = model.model.layers[1], [], []

        def note_mlp(module, args):
            mlp.append(weakref.ref(args[0].untyped_storage()))

        layer.mlp.register_forward_pre_hook(note_mlp)
        layer.linear_attn.register_forward_pre_hook(
            lambda module, args, kwargs: found.append(sum(x() is not None for x in mlp)), with_kwargs=True
        )
        layer.mlp.register_forward_pre_hook(lambda *_: found.append("mlp"))
        for whole in (True, False):
            # Buffers are of the host.
            self.step(model, batch, whole)
            mlp.clear()
            found.clear()
            with Memory() as memory:
                self.step(model, batch, whole)
            peaks.append(memory.peak)
            # The backward computes the MLP again before the mixer, whose activations do not live any more.
            self.assertEqual(found, [0, "mlp", *([0, "mlp"] if whole else ["mlp", 0])])
        # At least the outputs of gate and up.
        self.assertGreater(peaks[0] - peaks[1], 2 * 500 * 1536 * 4)

    def test_host_memory(self):
        """Two tensors of each layer."""
        model, layers = patch_model(builtin_model("qwen3_5")).train(), 2
        batch = packed_batch(documents()) | {"use_cache": False}
        self.enable(model)
        self.step(model, batch)
        (copies,) = model.host_checkpoints._copies.values()
        self.assertEqual((len(copies.free), len(copies.free_unasked), copies.allocated), (layers, layers, 2 * layers))
        self.assertEqual(bytes_on_host(model), 2 * bytes_on_host(model, unasked=False))

    def test_a_retained_graph_and_two_rows(self):
        model = patch_model(builtin_model("qwen3_5")).train()
        rows = [packed_batch([torch.arange(n) % 90, torch.arange(9)]) | {"use_cache": False} for n in (50, 90)]
        self.enable(model)
        with self.whole():
            expected = [gradients(model, model(**row).loss) for row in rows]
        with self.at_once():
            loss = model(**rows[0]).loss
            model.zero_grad()
            loss.backward(retain_graph=True)
            loss.backward()
            for name, x in model.named_parameters():
                self.assertTrue(torch.equal(x.grad, 2 * expected[0][name]), name)
            found = gradients(model, sum(model(**row).loss for row in rows))
        for name, x in found.items():
            torch.testing.assert_close(x, expected[0][name] + expected[1][name], rtol=1e-4, atol=1e-6)
        self.assertEqual(self.ran, [True] * 6)

    @parameterized.expand([(4, True), (3, False)])
    def test_the_first_row_has_to_leave_room_for_inputs(self, buffers, at_once):
        """The inputs of both layers, and as many tensors more."""
        model, batch = patch_model(builtin_model("qwen3_5")).train(), packed_batch(documents()) | {"use_cache": False}
        for offload_ in (True, "auto") if at_once else ("auto",):
            self.ran.clear()
            with mock.patch.object(host_memory, "free_host_memory", lambda: 2 * buffers << 16):
                self.enable(model, offload=offload_)
                for _ in range(2):
                    gradients(model, model(**batch).loss)
            self.assertEqual(self.ran, [at_once] * 2 + [True, at_once])
            self.assertTrue(runs_in_halves(model))
            del model.host_checkpoints

    def test_no_room(self):
        """No tensor more is on the device."""
        model, batch = patch_model(builtin_model("qwen3_5")).train(), packed_batch(documents()) | {"use_cache": False}
        saved = []
        with mock.patch.object(host_memory, "free_host_memory", lambda: 0):
            self.enable(model, offload="auto")
            for whole in (True, False):
                loss = model(**batch).loss if whole else self.enterContext(self.at_once()) or model(**batch).loss
                gc.collect()
                saved.append(sum(isinstance(x, offload._Kept) for x in gc.get_objects()))
                loss.backward()
                del loss
        self.assertEqual(self.ran, [False] * 4)
        self.assertEqual(*saved)

    def test_hooks_of_the_layer_run_once(self):
        """They are outside of both halves, as they are outside of a layer that runs as a whole."""
        model, calls = patch_model(builtin_model("qwen3_5")).train(), Counter()
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda *_: calls.update(["before"]))
            layer.register_forward_hook(lambda module, args, output: calls.update(["after"]) or 2 * output)
            layer.register_full_backward_hook(lambda *_: calls.update(["backward"]))
        self.check(model)
        self.assertEqual(calls, dict.fromkeys(("before", "after", "backward"), 2 * 3))

    def test_recorded_outputs(self):
        model, batch = patch_model(builtin_model("qwen3_5")).train(), packed_batch(documents()) | {"use_cache": False}
        self.enable(model)
        found = []
        for whole in (True, False):
            with self.whole() if whole else self.at_once():
                found.append(model(**batch, output_hidden_states=True).hidden_states)
        self.assertEqual(len(found[0]), 3)
        self.assertTrue(all(map(torch.equal, *found)))

    @parameterized.expand(
        [("reentrant",), ("context_fn",), ("on_device",), ("subclass",), ("small",), ("segments",), ("host_weights",)]
    )
    def test_layers_that_run_as_a_whole(self, kind):
        model, batch = patch_model(builtin_model("qwen3_5")).train(), packed_batch(documents()) | {"use_cache": False}
        options = {
            "reentrant": {"use_reentrant": True},
            "context_fn": {"context_fn": noop_context_fn},
            "segments": {"segment_tokens": 64},
        }
        expected = gradients(model, model(**batch).loss)
        if kind == "subclass":
            ours = type(model.model.layers[0])
            # PEFT and others derive classes like this.
            theirs = type(
                "Theirs", (ours,), {"forward": lambda self, *args, **kwargs: ours.forward(self, *args, **kwargs)}
            )
            for layer in model.model.layers:
                layer.__class__ = theirs
        if kind == "host_weights":
            model.requires_grad_(False)
            model.model.embed_tokens.requires_grad_(True)
            expected = gradients(model, model(**batch).loss)
            with mock.patch("transformers_packed.models.host_parameters.SMALLEST", 0):
                keep_layers_in_host_memory(model)
        self.enable(model, options.get(kind), offload=kind != "on_device")
        with self.at_once(), on_a_cpu(1 << 20) if kind == "small" else nullcontext():
            actual = gradients(model, model(**batch).loss)
        self.assertFalse(any(self.ran))
        exact = kind != "segments"
        for name, x in expected.items():
            torch.testing.assert_close(
                actual[name], x, **({"rtol": 0, "atol": 0} if exact else {"rtol": 1e-3, "atol": 1e-5})
            )

    def test_a_replaced_forward(self):
        """What wraps our forward runs outside of both halves."""
        model, calls = patch_model(builtin_model("qwen3_5")).train(), []
        for layer in model.model.layers:
            run = layer.forward
            layer.forward = partial(lambda run, *args, **kwargs: calls.append(1) or run(*args, **kwargs), run)
        self.check(model)
        self.assertEqual(len(calls), 2 * 3)

    def test_evaluation(self):
        model, batch = patch_model(builtin_model("qwen3_5")).train(), packed_batch(documents()) | {"use_cache": False}
        self.enable(model)
        with torch.no_grad(), self.at_once():
            model(**batch)
        self.assertEqual(self.ran, [])


class KernelsTest(HalvesTestCase, InterpretedKernelsTest):
    """With the kernels of this package, whose functions save what the backward needs before their last product."""

    @parameterized.expand([(False,), (True,)])
    def test_products_and_bits(self, adapters):
        set_seed(0)
        layers = ["linear_attention", "full_attention"]
        config = Qwen3_5TextConfig(**SIZES | {"num_hidden_layers": 2, "layer_types": layers})
        model = Qwen3_5ForCausalLM._from_config(config, attn_implementation="sdpa")
        if adapters:
            model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
        model, documents = patch_model(model).train(), [torch.arange(n) for n in (3, 1, 8)]
        self.check_products(model, documents, 2)
        self.assertLessEqual(WITH_KERNELS, {op for op, names in implementations_used().items() if "triton" in names})
        self.check(model, packed_batch(documents) | {"use_cache": False})
