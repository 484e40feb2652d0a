"""Experts in host memory on a GPU: gradients, memory, and what waits for what: `make test-gpu`."""

import copy
import unittest
from unittest import mock

import torch
from common.blocks import stored_and_plain
from common.gpu import needs_gpu, report, synchronising_is_an_error
from common.late_experts import without_memory
from common.real_heads import model_on_gpu, row_on_gpu
from mixins.model import gradients, total_relative_error
from ops.test_grouped_dequantization import random_groups
from parameterized import parameterized
from peft import LoraConfig, get_peft_model

from transformers_packed import keep_experts_in_host_memory
from transformers_packed.models import experts as our_experts
from transformers_packed.models.checkpoint_formats import PackedWeight
from transformers_packed.models.experts import is_known
from transformers_packed.models.families import EXPERT_WEIGHTS
from transformers_packed.models.host_experts import bytes_in_host_memory
from transformers_packed.models.host_parameters import host_of
from transformers_packed.ops import host_weights, implementations_used


LENGTHS = (1500, 1, 400, 147)
# Experts of 12 MiB a layer in bfloat16.
SIZES = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "num_hidden_layers": 4}
KINDS = ("bfloat16", "nvfp4", "fp8")


def experts_of(model):
    return [module for module in model.modules() if is_known(module)]


def mixture(kind: str, experts: bool = True) -> torch.nn.Module:
    """A model in host memory, with adapters on linear layers and experts."""
    model = model_on_gpu("qwen3_5_moe", **SIZES).cpu()
    if kind == "fp8":
        model, _ = stored_and_plain(model, (128, 128))
    for module in experts_of(model) if kind == "nvfp4" else ():
        for name in ("gate_up_proj", "down_proj"):
            groups = random_groups(kind, getattr(module, name).shape, 16, divided=True, parts=2)
            # Random scales are up to 1.
            groups = groups._replace(whole=groups.whole * 64)
            setattr(module, name, torch.nn.Parameter(PackedWeight(groups, torch.bfloat16), requires_grad=False))
    torch.manual_seed(1)
    config = LoraConfig(
        r=8,
        target_modules=["q_proj", "o_proj", "out_proj", "up_proj"],
        target_parameters=list(EXPERT_WEIGHTS) if experts else None,
    )
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def step(model, lengths=LENGTHS):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**row_on_gpu(lengths), use_cache=False).loss
    return {"loss": loss.detach()} | gradients(model, loss)


@needs_gpu
class HostExpertsTest(unittest.TestCase):
    def setUp(self):
        torch.use_deterministic_algorithms(True)
        self.addCleanup(torch.use_deterministic_algorithms, False)

    def both(self, kind: str, checkpointing: bool = True, **options):
        """The model on the GPU, and the same with experts in host memory."""
        model = mixture(kind, **options)
        other = keep_experts_in_host_memory(copy.deepcopy(model))
        models = [x.to("cuda") for x in (model, other)]
        for x in models if checkpointing else ():
            x.gradient_checkpointing_enable({"use_reentrant": False})
        return models

    def assert_same(self, actual, expected):
        self.assertEqual(actual.keys(), expected.keys())
        self.assertEqual([name for name in expected if not torch.equal(actual[name], expected[name])], [])

    @parameterized.expand([(kind, again) for kind in KINDS for again in (False, True)])
    def test_changes_no_bit(self, kind, checkpointing):
        model, other = self.both(kind, checkpointing)
        devices = {x.device.type for x in other.parameters() if x.requires_grad}
        self.assertEqual(devices, {"cuda"})
        for lengths in (LENGTHS, (300, 900), LENGTHS):
            expected = step(model, lengths)
            self.assertTrue(all(x.isfinite().all() for x in expected.values()))
            self.assertTrue(any("experts" in name and x.any() for name, x in expected.items()))
            self.assert_same(step(other, lengths), expected)
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                logits = [x.eval()(**row_on_gpu(lengths), use_cache=False).logits for x in (model, other)]
            self.assertTrue(torch.equal(*logits))
            model.train(), other.train()
        self.assertIn("triton", implementations_used()["experts_lora"])
        self.assertTrue(
            all(pages.is_pinned() for module in experts_of(other) for pages in host_of(module).pages.values())
        )

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

        for layer in other.get_base_model().model.layers:
            layer.register_forward_pre_hook(delay)
            layer.register_full_backward_hook(delay)
        for _ in range(3):
            self.assert_same(step(other), expected)

    @parameterized.expand([("bfloat16",), ("nvfp4",)])
    def test_memory(self, kind):
        def peak(model):
            model.cuda()
            for _ in range(2):
                step(model)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(model)
            return before, torch.cuda.max_memory_allocated()

        model = mixture(kind)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        other = keep_experts_in_host_memory(copy.deepcopy(model))
        experts = bytes_in_host_memory(other)
        first, most = peak(model)
        model.cpu()
        del model
        torch.cuda.empty_cache()
        second, most_on_host = peak(other)
        report(f"experts in host memory, {kind}", MiB=experts / 2**20, saved_MiB=(most - most_on_host) / 2**20)
        # The GPU has those of two layers of four. The allocator rounds blocks up to 2 MiB.
        least = experts / 2 - 2**21
        self.assertGreaterEqual(first - second, least)
        self.assertGreaterEqual(most - most_on_host, least)

    def test_does_not_wait_for_the_gpu(self):
        _, other = self.both("nvfp4")
        for _ in range(2):
            step(other)
        row = row_on_gpu(LENGTHS)
        with synchronising_is_an_error(), torch.autocast("cuda", torch.bfloat16):
            other(**row, use_cache=False).loss.backward()

    def test_copies_run_beside_the_products(self):
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

    def test_grouped_mm(self):
        """Where the op does not run, Transformers' function reads the copies, and saves none for backward."""
        model, other = self.both("bfloat16", checkpointing=False, experts=False)
        # Its histogram and its sums are not deterministic.
        torch.use_deterministic_algorithms(False)
        self.enterContext(mock.patch.object(our_experts, "_weights_for_op", lambda *_: "a reason"))
        for _ in range(2):
            self.assertLess(total_relative_error(step(other), step(model)), 2e-2)
        with torch.autocast("cuda", torch.bfloat16):
            loss = other(**row_on_gpu(LENGTHS), use_cache=False).loss
        torch.cuda.synchronize()
        with_graph = torch.cuda.memory_allocated()
        copies = host_weights._COPIES[torch.device("cuda", torch.cuda.current_device())]
        without_memory(copies)
        # Both layers that were there are freed.
        self.assertLess(torch.cuda.memory_allocated(), with_graph - bytes_in_host_memory(other) / 2 + 2**20)
        loss.backward()

    def test_merge(self):
        model, other = self.both("bfloat16")
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            for x in (model, other):
                x.eval()(**row_on_gpu(LENGTHS), use_cache=False)
                x.merge_adapter()
            logits = [x(**row_on_gpu(LENGTHS), use_cache=False).logits for x in (model, other)]
        self.assertTrue(torch.equal(*logits))
