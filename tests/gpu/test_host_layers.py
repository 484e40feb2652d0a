"""Decoder layers in host memory on a GPU: gradients, memory, and what waits for what: `make test-gpu`."""

import unittest
from importlib.util import find_spec

import torch
from common.blocks import stored_and_plain
from common.four_bit import store_in_nf4
from common.gpu import needs_gpu, report
from common.real_heads import model_on_gpu
from mixins.on_host_gpu import OnHostGpuTestCase, copies_of_this_gpu, in_nvfp4, step, with_adapters
from parameterized import parameterized
from peft import LoraConfig

from transformers_packed import keep_layers_in_host_memory
from transformers_packed.models.host_experts import bytes_in_host_memory
from transformers_packed.models.host_parameters import can_read_host_weights, host_of
from transformers_packed.ops import host_weights


# Weights of 8 MiB in bfloat16.
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6}
SIZES["layer_types"] = ["linear_attention", "linear_attention", "full_attention"] * 2
# Elements of weights that are quantized.
LARGE = 1 << 20
KINDS = ["bfloat16", "nvfp4", "fp8", *(["nf4"] if find_spec("bitsandbytes") else [])]


def layers_of(model):
    return [module for module in model.modules() if can_read_host_weights(module)]


def dense(kind: str, **options) -> torch.nn.Module:
    """A model in host memory, with adapters on linear layers."""
    model = model_on_gpu("qwen3_5", **SIZES)
    if kind == "nf4":
        store_in_nf4(model, torch.bfloat16, LARGE)
    for layer in layers_of(model) if kind == "nvfp4" else ():
        for module in layer.modules():
            if isinstance(module, torch.nn.Linear) and module.weight.numel() >= LARGE:
                module.weight = in_nvfp4(module.weight.shape)
    model = model.cpu()
    if kind == "fp8":
        model, _ = stored_and_plain(model, (128, 128))
    torch.manual_seed(1)
    targets = ["q_proj", "o_proj", "out_proj", "up_proj", "down_proj"]
    return with_adapters(model, LoraConfig(**{"r": 8, "target_modules": targets} | options))


@needs_gpu
class HostLayersTest(OnHostGpuTestCase):
    make, keep = staticmethod(dense), staticmethod(keep_layers_in_host_memory)

    @parameterized.expand(
        [(kind, True, {}) for kind in KINDS]
        # PEFT then calls the layers. Those of bitsandbytes keep weights for the backward.
        + [(kind, again, {"use_dora": True}) for kind in KINDS[::3] for again in (False, True)]
    )
    def test_changes_no_bit(self, kind, checkpointing, options):
        model, other = self.both(kind, checkpointing, **options)
        self.check_bits(model, other, "lora_A")
        self.assertTrue(all(x.is_pinned() for layer in layers_of(other) for x in host_of(layer).pages.values()))

    @parameterized.expand([("copies",), ("computation",)])
    def test_slow_streams(self, which):
        self.check_slow_streams(which)

    @parameterized.expand([(kind,) for kind in KINDS])
    def test_memory(self, kind):
        """The GPU has two layers at most."""
        (first, most), (second, most_on_host), other = self.peaks(kind)
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
        self.check_waits(kind)

    @unittest.skipIf(torch.cuda.device_count() < 2, "needs two GPUs")
    def test_another_gpu(self):
        """A model moves to another GPU and back."""
        model, other = self.both("bfloat16")
        self.assert_same(step(other), step(model))
        for number in (1, 0):
            with torch.cuda.device(number):
                for x in (model, other):
                    x.to("cuda")
                for _ in range(2):
                    self.assert_same(step(other), step(model))
                self.assertEqual(len(copies_of_this_gpu().layers), 2)
                self.assertEqual(host_weights._COPIES[torch.device("cuda", 1 - number)].layers, [])

    def test_copies_run_beside_the_computation(self):
        self.check_copies_run_beside(SIZES["num_hidden_layers"])
