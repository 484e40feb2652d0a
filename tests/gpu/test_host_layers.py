"""Decoder layers in host memory on a GPU: gradients, memory, and what waits for what: `make test-gpu`."""

import copy
import unittest
from importlib.util import find_spec
from unittest import mock

import torch
from common.blocks import stored_and_plain
from common.gpu import needs_gpu, report, synchronising_is_an_error
from common.real_heads import model_on_gpu, row_on_gpu
from mixins.model import gradients
from ops.test_grouped_dequantization import random_groups
from parameterized import parameterized
from peft import LoraConfig, get_peft_model

from transformers_packed import keep_layers_in_host_memory
from transformers_packed.models.checkpoint_formats import PackedWeight
from transformers_packed.models.host_experts import bytes_in_host_memory
from transformers_packed.models.host_parameters import can_read_host_weights, host_of
from transformers_packed.ops import host_weights


LENGTHS = (1500, 1, 400, 147)
# Weights of 8 MiB in bfloat16.
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
SIZES["layer_types"] = ["linear_attention", "linear_attention", "full_attention"] * 2
KINDS = ["bfloat16", "nvfp4", "fp8", *(["nf4"] if find_spec("bitsandbytes") else [])]


def layers_of(model):
    return [module for module in model.modules() if can_read_host_weights(module)]


def dense(kind: str, **options) -> torch.nn.Module:
    """A model in host memory, with adapters on linear layers."""
    model = model_on_gpu("qwen3_5", **SIZES)
    for layer in layers_of(model) if kind in ("nvfp4", "nf4") else ():
        for name, module in list(layer.named_modules()):
            if not isinstance(module, torch.nn.Linear) or module.weight.numel() < 1 << 20:
                continue
            if kind == "nf4":
                from transformers_packed.models.quantization import in_4bit, nf4

                layer.set_submodule(name, in_4bit(module, nf4(torch.bfloat16)))
            else:
                groups = random_groups(kind, module.weight.shape, 16, divided=True, parts=2)
                # Random scales are up to 1.
                groups = groups._replace(whole=groups.whole * 64)
                module.weight = torch.nn.Parameter(PackedWeight(groups, torch.bfloat16), requires_grad=False)
    model = model.cpu()
    if kind == "fp8":
        model, _ = stored_and_plain(model, (128, 128))
    # PEFT reads it.
    model.is_loaded_in_4bit = kind == "nf4"
    torch.manual_seed(1)
    targets = ["q_proj", "o_proj", "out_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(**{"r": 8, "target_modules": targets} | options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def step(model, lengths=LENGTHS):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**row_on_gpu(lengths), use_cache=False).loss
    return {"loss": loss.detach()} | gradients(model, loss)


@needs_gpu
class HostLayersTest(unittest.TestCase):
    def setUp(self):
        torch.use_deterministic_algorithms(True)
        self.addCleanup(torch.use_deterministic_algorithms, False)

    def both(self, kind: str, checkpointing: bool = True, **options):
        """The model on the GPU, and the same with layers in host memory."""
        model = dense(kind, **options)
        other = keep_layers_in_host_memory(copy.deepcopy(model))
        models = [x.to("cuda") for x in (model, other)]
        for x in models if checkpointing else ():
            x.gradient_checkpointing_enable({"use_reentrant": False})
        return models

    def assert_same(self, actual, expected):
        self.assertEqual(actual.keys(), expected.keys())
        self.assertEqual([name for name in expected if not torch.equal(actual[name], expected[name])], [])

    @parameterized.expand(
        [(kind, True, {}) for kind in KINDS]
        # PEFT then calls the layers. Those of bitsandbytes keep weights for the backward.
        + [(kind, again, {"use_dora": True}) for kind in KINDS[::3] for again in (False, True)]
    )
    def test_changes_no_bit(self, kind, checkpointing, options):
        model, other = self.both(kind, checkpointing, **options)
        self.assertEqual({x.device.type for x in other.parameters() if x.requires_grad}, {"cuda"})
        for lengths in (LENGTHS, (300, 900), LENGTHS):
            expected = step(model, lengths)
            self.assertTrue(all(x.isfinite().all() for x in expected.values()))
            self.assertTrue(any("lora_A" in name and x.any() for name, x in expected.items()))
            self.assert_same(step(other, lengths), expected)
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                logits = [x.eval()(**row_on_gpu(lengths), use_cache=False).logits for x in (model, other)]
            self.assertTrue(torch.equal(*logits))
            model.train(), other.train()
        self.assertTrue(all(x.is_pinned() for layer in layers_of(other) for x in host_of(layer).pages.values()))

    @parameterized.expand([("copies",), ("computation",)])
    def test_slow_streams(self, which):
        """Each side waits for the other where it must."""
        model, other = self.both("bfloat16")
        expected = step(model)
        step(other)
        copies = host_weights._COPIES[torch.device("cuda", torch.cuda.current_device())]
        stream = copies.copies.stream if which == "copies" else torch.cuda.current_stream()

        def delay(*_):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)

        for layer in layers_of(other):
            layer.register_forward_pre_hook(delay)
            layer.register_full_backward_hook(delay)
        for _ in range(3):
            self.assert_same(step(other), expected)

    @parameterized.expand([(kind,) for kind in KINDS])
    def test_memory(self, kind):
        """The GPU has two layers at most."""

        def peak(model):
            model.cuda()
            for _ in range(2):
                step(model)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(model)
            return before, torch.cuda.max_memory_allocated()

        model = dense(kind)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        other = keep_layers_in_host_memory(copy.deepcopy(model))
        first, most = peak(model)
        model.cpu()
        del model
        torch.cuda.empty_cache()
        second, most_on_host = peak(other)
        each = sorted(sum(x.nbytes for x in host_of(layer).pages.values()) for layer in layers_of(other))
        saved = (most - most_on_host) / 2**20
        report(f"layers in host memory, {kind}", MiB=bytes_in_host_memory(other) / 2**20, saved_MiB=saved)
        # The allocator rounds large blocks up to 2 MiB.
        least = sum(each[:-2]) - 3 * 2**21
        self.assertGreater(least, 0)
        self.assertGreaterEqual(first - second, least)
        self.assertGreaterEqual(most - most_on_host, least)

    @parameterized.expand([(kind,) for kind in KINDS])
    def test_does_not_wait_for_the_gpu(self, kind):
        _, other = self.both(kind)
        for _ in range(2):
            step(other)
        row = row_on_gpu(LENGTHS)
        with synchronising_is_an_error(), torch.autocast("cuda", torch.bfloat16):
            other(**row, use_cache=False).loss.backward()

    def test_copies_run_beside_the_computation(self):
        """After two steps, a step waits for no copy that has not been started a layer before."""
        _, other = self.both("bfloat16")
        for _ in range(2):
            step(other)
        copies = host_weights._COPIES[torch.device("cuda", torch.cuda.current_device())]
        before = copies.misses
        with mock.patch.object(copies, "_start", wraps=copies._start) as start:
            step(other)
        self.assertEqual(copies.misses, before)
        # Two layers are there at each turn.
        self.assertEqual(start.call_count, 2 * (SIZES["num_hidden_layers"] - 2))
