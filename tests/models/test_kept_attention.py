"""Gradient checkpointing that does not compute attention again."""

import gc
import unittest
from collections import Counter
from contextlib import nullcontext
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from common.late_copies import on_a_cpu
from mixins.lora import all_linear, builtin_model
from mixins.model import gradients, packed_batch
from mixins.patch import documents
from parameterized import parameterized
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from transformers_packed import SequenceBoundaries, patch_model
from transformers_packed.models.checkpointing import keep_long_attention
from transformers_packed.models.versions import can_select_checkpoints
from transformers_packed.ops import host_memory, host_tensors, offload
from transformers_packed.ops.kept_attention import keeping_attention
from transformers_packed.parallel import RowShard


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


@torch.library.custom_op("kept_attention_test::twice_attention", mutates_args=())
def twice_attention(x: torch.Tensor) -> torch.Tensor:
    """Stands for a kernel whose backward does not read its output."""
    CALLS.append(0.0)
    return 2 * x


twice_attention.register_autograd(lambda ctx, gradient: 2 * gradient)


@torch.library.custom_op("kept_attention_test::attention_into", mutates_args=("output",))
def attention_into(x: torch.Tensor, output: torch.Tensor) -> None:
    """Stands for a kernel that writes into a given output."""
    CALLS.append(0.0)
    output.copy_(x)


class Into(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        output = torch.full_like(x, float("nan"))
        attention_into(x, output)
        return output

    @staticmethod
    def backward(ctx, gradient):
        return gradient


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
        free = host_memory.free_host_memory if has_room else lambda: 0
        changed = mock.patch.multiple(offload, LONG_DOCUMENT=long_document, _inputs_first=False)
        with on_a_cpu(64), changed, mock.patch.object(host_memory, "free_host_memory", free):
            actual, after = self.run_with(model, {"keep_attention": keep}, batch, offload=has_room or "auto")
        self.assertEqual([name for name in expected if not torch.equal(actual[name], expected[name])], [])
        kept = has_room and long_document < 100
        self.assertEqual(after["forward"], after["backward"] if kept else before["forward"])
        if has_room:
            (copies,) = model.host_checkpoints._copies.values()
            # To the host and back, but for what was saved last: an input, or the output and the sums of attention.
            self.assertEqual(copies.copies, 2 * copies.allocated - 1 - kept)
            # Kernels of attention return an output and the sums.
            inputs, outputs = len(model.model.layers), kept * 2 * after["backward"]
            unasked = outputs if keep == "auto" else 0
            self.assertEqual((len(copies.free), len(copies.free_unasked)), (inputs + outputs - unasked, unasked))
            self.assertEqual(copies.allocated, inputs + outputs)

    def test_inputs_have_the_memory_first(self):
        """Outputs of `"auto"` get what is left once the inputs of a row have their buffers, and give it back to longer rows."""
        model = patch_model(builtin_model("qwen3_5")).train()
        short, long = (packed_batch([torch.arange(n) % 90]) | {"use_cache": False} for n in (40, 700))
        model.activation_checkpointing_enable({"keep_attention": "auto"}, offload="auto")
        layers, counts, allocated = len(model.model.layers), [], []
        # Buffers of short rows have 64 KiB, and inputs of long ones twice as much.
        limit = (2 * layers + 1) << 16
        room = mock.patch.object(host_memory, "free_host_memory", lambda: 2 * limit)
        with on_a_cpu(64), mock.patch.object(offload, "LONG_DOCUMENT", 0), room:
            for batch in (short, short, short, long, long):
                with Attentions() as attentions:
                    gradients(model, model(**batch).loss)
                counts.append(attentions.counts["forward"])
                (copies,) = model.host_checkpoints._copies.values()
                allocated.append(copies.allocated)
                size = batch["input_ids"].numel() * model.config.hidden_size * 4
                self.assertEqual(sum(x.nbytes >= size for x in copies.free), layers)
                self.assertLessEqual(copies.bytes, limit)
                self.assertEqual(copies.bytes, sum(x.nbytes for x in (*copies.free, *copies.free_unasked)))
                self.assertEqual(copies.bytes_unasked, sum(x.nbytes for x in copies.free_unasked))
        kernels = model.config.layer_types.count("full_attention")
        self.assertEqual(counts[:3], [2 * kernels, *[kernels] * 2])
        # The output and the sums have buffers of their own, which are used again.
        self.assertEqual(allocated[:3], [layers, *[layers + 2 * kernels] * 2])

    def test_the_check_before_the_first_step_is_no_first_row(self):
        """Its rows have small inputs, whose outputs are kept at once."""
        model, counts = patch_model(builtin_model("qwen3_5")).train(), []
        check, row = (packed_batch([torch.arange(n) % 90]) | {"use_cache": False} for n in (40, 700))
        model.activation_checkpointing_enable({"keep_attention": "auto"}, offload="auto")
        with on_a_cpu(64), mock.patch.object(offload, "LONG_DOCUMENT", 0):
            for context, batch in ((offload.all_checkpoints, check), (nullcontext, row), (nullcontext, row)):
                with context(), Attentions() as attentions:
                    gradients(model, model(**batch).loss)
                counts.append(attentions.counts["forward"] // attentions.counts["backward"])
        self.assertEqual(counts, [1, 2, 1])

    def test_comes_back_before_its_use(self):
        """Inputs from the last layer to the first, each followed by the attention of its layer. And it may again."""
        x, found = torch.randn(4, 16, requires_grad=True), []

        def layer(x):
            return attention(x.t().sin(), 0.0).t() * 2

        with on_a_cpu(5):
            host = offload.HostCheckpoints()
            fetch = mock.patch.object(host_tensors.Saved, "fetch", autospec=True, side_effect=host_tensors.Saved.fetch)
            y = x
            for _ in range(3):
                run = partial(host, partial(checkpoint, use_reentrant=False))
                y = run(layer, y, context_fn=partial(keeping_attention, host))
            kept = [saved for saved in gc.get_objects() if isinstance(saved, host_tensors.Saved)]
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

    @parameterized.expand([(5, False), (5, True), (1000, False)])
    def test_a_layer_that_writes_into_the_output(self, smallest, retained):
        """In host memory, and on the device."""
        x = torch.randn(4, 16, requires_grad=True)

        def layer(x):
            return attention(x.sin(), 0.0).mul_(x).exp()

        with (
            on_a_cpu(smallest),
            self.assertRaisesRegex(ValueError, "output of attention as it is, with keep_attention"),
        ):
            host = offload.HostCheckpoints()
            run = partial(host, partial(checkpoint, use_reentrant=False), layer)
            context_fn = partial(keeping_attention, host)
            y = run(x, context_fn=context_fn)
            # The copy of the first output has ended before the next layer begins.
            y = run(y, context_fn=context_fn) if retained else y
            y.sum().backward()

    @parameterized.expand([(5,), (1000,)])
    def test_a_layer_that_writes_into_an_output_that_nobody_asked_for(self, smallest):
        """It is computed again."""
        x = torch.randn(4, 16, requires_grad=True)

        def layer(x):
            return twice_attention(x.sin()).mul_(x).exp()

        expected = torch.autograd.grad(layer(layer(x)).sum(), x)[0]
        CALLS.clear()
        with on_a_cpu(smallest), mock.patch.object(offload, "_inputs_first", False):
            host = offload.HostCheckpoints()
            run = partial(host, partial(checkpoint, use_reentrant=False), layer)
            context_fn = partial(keeping_attention, host, True)
            y = run(run(x, context_fn=context_fn), context_fn=context_fn)
            (gradient,) = torch.autograd.grad(y.sum(), x)
        self.assertTrue(torch.equal(gradient, expected))
        self.assertEqual(len(CALLS), 4)

    def test_another_kernel_in_the_backward(self):
        """What another one returns would be no output of it."""
        x, host = torch.randn(1, 2, 16, 8, requires_grad=True), offload.HostCheckpoints()

        def layer(x):
            return F.scaled_dot_product_attention(*[x.sin()] * 3)

        with sdpa_kernel(SDPBackend.MATH):
            y = checkpoint(layer, x, use_reentrant=False, context_fn=partial(keeping_attention, host))
        with self.assertRaisesRegex(ValueError, "expected the kernel of the forward.*, none, got aten.*sdpa_kernel"):
            y.sum().backward()

    def test_what_stays_on_the_device_keeps_no_graph(self):
        def saved() -> list[host_tensors.Kept]:
            return [x for x in gc.get_objects() if isinstance(x, host_tensors.Kept)]

        host, x = offload.HostCheckpoints(), torch.randn(4, 16, requires_grad=True)
        # A test that failed may have left some.
        others = saved()
        run = partial(host, partial(checkpoint, use_reentrant=False), lambda x: attention(x.sin(), 0.0).exp())
        y = run(x, context_fn=partial(keeping_attention, host))
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        kept = [one.tensor for one in saved() if not any(one is other for other in others)]
        # The input and the output of attention.
        self.assertEqual([tensor.grad_fn for tensor in kept], [None, None])

    def test_only_if_the_output_is_in_host_memory(self):
        """Sums alone are no reason to keep an output on the GPU."""

        def layer(x):
            return F.scaled_dot_product_attention(*[x.sin()] * 3, is_causal=True)

        x = torch.randn(1, 2, 16, 8, requires_grad=True)
        sums = 4 * 2 * 16
        for most, expected in ((8 * sums, 1), (sums, 2)):
            with on_a_cpu(5), mock.patch.object(offload, "_inputs_first", False), Attentions() as attentions:
                host = offload.HostCheckpoints(lambda: 0)
                host.save(torch.zeros(8))
                (copies,) = host._copies.values()
                copies.take = lambda size, *rest, take=copies.take, most=most: (
                    take(size, *rest) if size <= most else None
                )
                run = partial(host, partial(checkpoint, use_reentrant=False))
                run(layer, x, context_fn=partial(keeping_attention, host, True)).sum().backward()
            self.assertEqual(attentions.counts, {"forward": expected, "backward": 1})
            # Buffers of the input, the output and the sums, the first of which was free, or none but that.
            self.assertEqual(copies.allocated, 3 if expected == 1 else 1)

    @parameterized.expand([(row, size) for row in (100, 99) for size in (1, 2)])
    def test_rows_that_processes_share(self, long_document, size):
        """The length of a document counts, not that of its part."""
        row, found = SequenceBoundaries.from_lengths([99, 1]), []
        row = RowShard.cut(row, 0, size) if size > 1 else row
        with mock.patch.object(offload, "LONG_DOCUMENT", long_document):
            run = partial(lambda x, boundaries: x, boundaries=row)
            keep_long_attention(None, lambda function, *args, **kwargs: found.append(sorted(kwargs)), run, 0)
        self.assertEqual(found, [["context_fn"] if long_document == 99 else []])

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

    def test_what_a_kernel_writes_into_arguments_is_written_again(self):
        x, host = torch.randn(4, 16, requires_grad=True), offload.HostCheckpoints()
        for context_fn in (
            keeping_attention,
            partial(keeping_attention, host),
            partial(keeping_attention, host, True),
        ):
            CALLS.clear()
            y = checkpoint(lambda x: Into.apply(x.sin()).exp(), x, use_reentrant=False, context_fn=context_fn)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            self.assertTrue(torch.allclose(gradient, x.cos() * x.sin().exp()))
            self.assertEqual(len(CALLS), 2)

    def test_without_it(self):
        """The other options are those of Transformers then."""
        model = patch_model(builtin_model("qwen3_5"))
        for options in (None, {}, {"keep_attention": False}):
            model.activation_checkpointing_enable(options)
            function = model.model.layers[0]._gradient_checkpointing_func
            self.assertEqual(function.keywords, {"use_reentrant": False})
