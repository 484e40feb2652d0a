"""Weights in host memory on a GPU: what tests of experts and of decoder layers share."""

import copy
import unittest
from unittest import mock

import torch
from common.gpu import synchronising_is_an_error
from common.real_heads import row_on_gpu
from mixins.model import gradients
from ops.test_grouped_dequantization import random_groups
from peft import get_peft_model

from transformers_packed.models.checkpoint_formats import PackedWeight
from transformers_packed.ops import host_weights


LENGTHS = (1500, 1, 400, 147)


def in_nvfp4(shape) -> torch.nn.Parameter:
    """A random frozen weight."""
    groups = random_groups("nvfp4", shape, 16, divided=True, parts=2)
    # Random scales are up to 1.
    groups = groups._replace(whole=groups.whole * 64)
    return torch.nn.Parameter(PackedWeight(groups, torch.bfloat16), requires_grad=False)


def with_adapters(model: torch.nn.Module, config) -> torch.nn.Module:
    """The model with adapters that change its outputs."""
    model = get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def step(model, lengths=LENGTHS):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**row_on_gpu(lengths), use_cache=False).loss
    return {"loss": loss.detach()} | gradients(model, loss)


def copies_of_this_gpu():
    return host_weights._COPIES[torch.device("cuda", torch.cuda.current_device())]


def peak(model) -> tuple[int, int]:
    """The bytes between steps, and the most in a step."""
    model.cuda()
    for _ in range(2):
        step(model)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(model)
    return before, torch.cuda.max_memory_allocated()


class OnHostGpuTestCase(unittest.TestCase):
    """Tests of `make(kind, **options)`, a model in host memory, and of `keep`, which keeps weights there."""

    def setUp(self):
        torch.use_deterministic_algorithms(True)
        self.addCleanup(torch.use_deterministic_algorithms, False)

    def both(self, kind: str, checkpointing: bool = True, **options):
        """The model on the GPU, and the same with weights in host memory."""
        model = self.make(kind, **options)
        other = self.keep(copy.deepcopy(model))
        models = [x.to("cuda") for x in (model, other)]
        for x in models if checkpointing else ():
            x.gradient_checkpointing_enable({"use_reentrant": False})
        return models

    def assert_same(self, actual, expected):
        self.assertEqual(actual.keys(), expected.keys())
        self.assertEqual([name for name in expected if not torch.equal(actual[name], expected[name])], [])

    def check_bits(self, model, other, trained: str):
        """Rows of several lengths, some again, have the same losses, gradients and logits."""
        self.assertEqual({x.device.type for x in other.parameters() if x.requires_grad}, {"cuda"})
        for lengths in (LENGTHS, (300, 900), LENGTHS):
            expected = step(model, lengths)
            self.assertTrue(all(x.isfinite().all() for x in expected.values()))
            self.assertTrue(any(trained in name and x.any() for name, x in expected.items()))
            self.assert_same(step(other, lengths), expected)
            with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
                logits = [x.eval()(**row_on_gpu(lengths), use_cache=False).logits for x in (model, other)]
            self.assertTrue(torch.equal(*logits))
            model.train(), other.train()

    def check_slow_streams(self, which: str):
        """Each side waits for the other where it must."""
        model, other = self.both("bfloat16")
        expected = step(model)
        step(other)
        stream = copies_of_this_gpu().copies.stream if which == "copies" else torch.cuda.current_stream()

        def delay(*_):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)

        for layer in other.get_base_model().model.layers:
            layer.register_forward_pre_hook(delay)
            layer.register_full_backward_hook(delay)
        for _ in range(3):
            self.assert_same(step(other), expected)

    def peaks(self, kind: str):
        """Return what [`peak`] finds of the model on the GPU and of that with weights in host memory, and the latter."""
        model = self.make(kind)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        other = self.keep(copy.deepcopy(model))
        on_gpu = peak(model)
        model.cpu()
        del model
        torch.cuda.empty_cache()
        return on_gpu, peak(other), other

    def check_waits(self, kind: str):
        _, other = self.both(kind)
        for _ in range(2):
            step(other)
        row = row_on_gpu(LENGTHS)
        with synchronising_is_an_error(), torch.autocast("cuda", torch.bfloat16):
            other(**row, use_cache=False).loss.backward()

    def check_copies_run_beside(self, layers: int):
        """After two steps, a step waits for no copy that has not been started a layer before."""
        _, other = self.both("bfloat16")
        for _ in range(2):
            step(other)
        copies = copies_of_this_gpu()
        before = copies.misses
        with mock.patch.object(copies, "_start", wraps=copies._start) as start:
            step(other)
        self.assertEqual(copies.misses, before)
        # Two layers are there at each turn.
        self.assertEqual(start.call_count, 2 * (layers - 2))
