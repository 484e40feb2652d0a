"""Gradient checkpointing that does not compute attention again."""

import gc
import unittest
from collections import Counter
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from common.late_copies import on_a_cpu
from mixins.lora import all_linear, builtin_model
from mixins.model import gradients, packed_batch
from mixins.patch import documents
from parameterized import parameterized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from transformers_packed import patch_model
from transformers_packed.models.versions import can_select_checkpoints
from transformers_packed.ops import offload
from transformers_packed.ops.kept_attention import keeping_attention


KEPT = {"keep_attention": True}
CALLS = []


@torch.library.custom_op("kept_attention_test::attention", mutates_args=())
def attention(x: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Stands for a kernel of a GPU, which draws its dropout."""
    CALLS.append(dropout_p)
    return F.dropout(x, dropout_p) if dropout_p else x.clone()


def keep_output(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.dropout = inputs[1]


def times_mask(ctx, gradient):
    return gradient * (ctx.saved_tensors[0] != 0) / (1 - ctx.dropout), None


attention.register_autograd(times_mask, setup_context=keep_output)


class Attentions(TorchDispatchMode):
    """Counts the calls of attention kernels, forward and backward."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = str(operator)
        if "attention" in name:
            self.counts["backward" if "backward" in name else "forward"] += 1
        return operator(*args, **(kwargs or {}))


@unittest.skipUnless(can_select_checkpoints(), "needs Transformers 5.23")
class KeptAttentionTest(unittest.TestCase):
    def run_with(self, model, options: dict | None, batch: dict, **more):
        """The gradients of a step, and how often kernels of attention ran."""
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        inner.activation_checkpointing_enable(options, **more)
        with Attentions() as attentions:
            found = gradients(model, model(**batch).loss)
        return found, attentions.counts

    @parameterized.expand([("qwen3_next", False), ("qwen3_5", True)])
    def test_changes_no_bit(self, family, lora):
        model = patch_model(all_linear(family) if lora else builtin_model(family)).train()
        batch = packed_batch(documents()) | {"use_cache": False}
        expected, before = self.run_with(model, {"use_reentrant": False}, batch)
        for more in ({}, {"offload": True}):
            actual, after = self.run_with(model, KEPT, batch, **more)
            self.assertEqual(actual.keys(), expected.keys())
            self.assertEqual([name for name in expected if not torch.equal(actual[name], expected[name])], [])
            self.assertEqual(before["forward"], 2 * before["backward"])
            self.assertEqual(after["forward"], after["backward"])
            self.assertEqual(after["backward"], before["backward"])
        self.assertGreater(before["backward"], 0)

    @parameterized.expand([(True, 0, True), ("auto", 0, True), ("auto", 100, True), ("auto", 0, False)])
    def test_in_host_memory(self, keep, long_document, has_room):
        """`"auto"` keeps attention of long documents, where the host has room."""
        model, batch = patch_model(builtin_model("qwen3_5")).train(), packed_batch(documents()) | {"use_cache": False}
        expected, before = self.run_with(model, {"use_reentrant": False}, batch)
        room = {} if has_room else {"free_host_memory": lambda: 0}
        with on_a_cpu(64), mock.patch.multiple(offload, LONG_DOCUMENT=long_document, **room):
            actual, after = self.run_with(model, {"keep_attention": keep}, batch, offload=has_room or "auto")
        self.assertEqual([name for name in expected if not torch.equal(actual[name], expected[name])], [])
        kept = has_room and long_document < 100
        self.assertEqual(after["forward"], after["backward"] if kept else before["forward"])
        if has_room:
            (copies,) = model.host_checkpoints._copies.values()
            # To the host and back, but for what was saved last.
            self.assertEqual(copies.copies, 2 * copies.allocated - 1)
            self.assertEqual(len(copies.free), copies.allocated)
            # Kernels of attention return an output and the sums.
            self.assertEqual(copies.allocated, len(model.model.layers) + kept * 2 * after["backward"])

    def test_comes_back_before_its_use(self):
        """Inputs from the last layer to the first, each followed by the attention of its layer. And it may again."""
        x, found = torch.randn(4, 16, requires_grad=True), []

        def layer(x):
            return attention(x.t().sin(), 0.0).t() * 2

        with on_a_cpu(5):
            host = offload.HostCheckpoints()
            fetch = mock.patch.object(offload._Saved, "fetch", autospec=True, side_effect=offload._Saved.fetch)
            y = x
            for _ in range(3):
                run = partial(host, partial(checkpoint, use_reentrant=False))
                y = run(layer, y, context_fn=partial(keeping_attention, host))
            kept = [saved for saved in gc.get_objects() if isinstance(saved, offload._Saved)]
            self.assertEqual([tuple(saved.stride) for saved in kept if saved.shape == (16, 4)], [(1, 16)] * 3)
            CALLS.clear()
            with fetch as fetched:
                found.append(torch.autograd.grad(y.sum(), x, retain_graph=True)[0])
            shapes = [tuple(call.args[0].shape) for call in fetched.call_args_list]
            # Each but the first is fetched ahead, and then loaded.
            back = [*[(16, 4)] * 2, *[(4, 16)] * 2]
            self.assertEqual(shapes, [(4, 16), *back, *back, *back[:2]])
            found.append(torch.autograd.grad(y.sum(), x)[0])
        z = x
        for _ in range(3):
            z = 2 * z.sin()
        expected = torch.autograd.grad(z.sum(), x)[0]
        self.assertEqual(CALLS, [])
        self.assertTrue(all(torch.allclose(gradient, expected) for gradient in found))

    @parameterized.expand(
        [
            ({"use_reentrant": True}, "use_reentrant=False with keep_attention, got use_reentrant=True"),
            ({"use_reentrant": False, "context_fn": lambda: None}, "no context_fn with keep_attention, got one"),
        ]
    )
    def test_refuses_other_options(self, options, message):
        model = patch_model(builtin_model("qwen3_5"))
        with self.assertRaisesRegex(ValueError, message):
            model.activation_checkpointing_enable(options | {"keep_attention": True})
        self.assertFalse(model.is_gradient_checkpointing)

    @parameterized.expand([(0.0, 1), (0.5, 2)])
    def test_dropout_is_drawn_again(self, dropout, calls):
        """Otherwise the dropout behind attention would draw other numbers in the backward."""
        found = []
        for options in ({}, {"context_fn": keeping_attention}):
            CALLS.clear()
            torch.manual_seed(0)
            x = torch.randn(64, requires_grad=True)

            def layer(x):
                return F.dropout(attention(x, dropout), 0.5).square()

            checkpoint(layer, x, use_reentrant=False, **options).sum().backward()
            found.append(x.grad)
        self.assertTrue(torch.equal(*found))
        self.assertEqual(len(CALLS), calls)

    def test_without_it(self):
        """The other options are those of Transformers then."""
        model = patch_model(builtin_model("qwen3_5"))
        for options in (None, {}, {"keep_attention": False}):
            model.activation_checkpointing_enable(options)
            function = model.model.layers[0]._gradient_checkpointing_func
            self.assertEqual(function.keywords, {"use_reentrant": False})
