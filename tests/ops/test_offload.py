"""Checkpoints in host memory: their buffers, and how models enable them. `tests/gpu` has the copies."""

import copy
import gc
import unittest
from functools import partial
from unittest import mock

import torch
from common.late_copies import LateCopies, on_a_cpu
from mixins.model import gradients, packed_batch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, set_seed

from transformers_packed import patch_model
from transformers_packed.models.versions import can_select_checkpoints
from transformers_packed.ops import offload


def on_host(functions) -> list[bool]:
    return [isinstance(getattr(function, "func", None), offload.HostCheckpoints) for function in functions]


class SavedTest(unittest.TestCase):
    def setUp(self):
        self.enterContext(on_a_cpu(5))
        self.host = offload.HostCheckpoints()
        self.enterContext(set_checkpoint_early_stop(False))

    @property
    def copies(self) -> LateCopies:
        (copies,) = self.host._copies.values()
        return copies

    def layers(self, x, number: int = 5, **others):
        run = partial(self.host, partial(checkpoint, use_reentrant=False))
        for _ in range(number):
            x = run(lambda x, *rest: (x * x + sum(rest)).sin(), x, *others.values())
        return x

    def resident(self) -> int:
        """How many saved tensors are on the device."""
        return sum(isinstance(x, offload._Saved) and x.tensor is not None for x in gc.get_objects())

    def expected(self, x, number: int = 5):
        y = x.detach().clone().requires_grad_()
        z = y
        for _ in range(number):
            z = (z * z).sin()
        return torch.autograd.grad(z.sum(), y)[0]

    def test_a_layer_at_a_time(self):
        x = torch.randn(8, requires_grad=True)
        for _ in range(3):
            output, before = self.layers(x), self.copies.copies
            self.assertEqual(self.resident(), 1)
            self.assertTrue(torch.equal(torch.autograd.grad(output.sum(), x)[0], self.expected(x)))
            # The last input never left.
            self.assertEqual(self.copies.copies - before, 4)
            del output
            self.assertEqual((len(self.copies.free), self.copies.allocated), (5, 5))

    def test_the_next_one_is_on_its_way(self):
        found = []

        def layer(x):
            found.append(self.resident())
            return x.sin()

        x = torch.randn(8, requires_grad=True)
        y, run = x, partial(self.host, partial(checkpoint, use_reentrant=False))
        for _ in range(4):
            y = run(layer, y)
        found.clear()
        y.sum().backward()
        # Beside the one in use, which nobody counts any more.
        self.assertEqual(found, [1, 1, 1, 0])

    def test_a_graph_used_twice_and_two_graphs(self):
        x, other = torch.randn(8, requires_grad=True), torch.randn(6, requires_grad=True)
        output = self.layers(x)
        for _ in range(2):
            (gradient,) = torch.autograd.grad(output.sum(), x, retain_graph=True)
            self.assertTrue(torch.equal(gradient, self.expected(x)))
        both = output.sum() + self.layers(other).sum()
        gradients = torch.autograd.grad(both, (x, other))
        self.assertTrue(all(torch.equal(g, self.expected(y)) for g, y in zip(gradients, (x, other), strict=True)))

    def test_a_graph_that_is_never_used(self):
        x = torch.randn(8, requires_grad=True)
        self.layers(x)
        gc.collect()
        self.assertEqual(len(self.copies.free), 5)
        self.assertEqual(self.copies.queue, [])
        output = self.layers(x)
        self.assertTrue(torch.equal(torch.autograd.grad(output.sum(), x)[0], self.expected(x)))

    def test_a_layer_that_writes_into_its_input(self):
        run = partial(self.host, partial(checkpoint, use_reentrant=False))
        given = torch.randn(8, requires_grad=True) * 2
        kept = run(torch.sin, given)
        with torch.no_grad():
            given.add_(1)
        with self.assertRaisesRegex(ValueError, "layers that leave their input as it is"):
            self.layers(torch.randn(8, requires_grad=True))
        # It does not concern later rows, and no buffer is lost.
        x = torch.randn(8, requires_grad=True)
        self.assertTrue(torch.equal(torch.autograd.grad(self.layers(x).sum(), x)[0], self.expected(x)))
        with self.assertRaisesRegex(ValueError, "layers that leave their input as it is"):
            kept.sum().backward()
        del kept
        gc.collect()
        self.assertEqual(len(self.copies.free), self.copies.allocated)

    def test_a_copy_of_a_model_has_its_own_buffers(self):
        self.layers(torch.randn(8, requires_grad=True))
        wrapped = copy.deepcopy(partial(self.host, checkpoint))
        self.assertIsNot(wrapped.func, self.host)
        self.assertEqual(wrapped.func._copies, {})


class BuffersTest(unittest.TestCase):
    def setUp(self):
        self.pool = LateCopies(torch.device("cpu"))

    def test_pinned_pages(self):
        """Whole pages of the host's memory, whatever the default device is, and not for longer than their buffer."""
        cudart = mock.Mock(**{"cudaHostRegister.return_value": 0})
        with mock.patch.object(offload, "_cudart", lambda: cudart), torch.device("meta"):
            buffers = [offload.Copies.allocate(self.pool, 1 << 16) for _ in range(3)]
            for buffer, call in zip(buffers, cudart.cudaHostRegister.call_args_list, strict=True):
                self.assertEqual((buffer.device.type, buffer.nbytes, buffer.data_ptr() % 4096), ("cpu", 1 << 16, 0))
                self.assertEqual(call.args[:2], (buffer.data_ptr(), 1 << 16))
                # What PyTorch asks to find out whether a tensor is pinned.
                self.assertEqual(buffer.untyped_storage().data_ptr(), buffer.data_ptr())
            address = buffers.pop().data_ptr()
            del buffer
            gc.collect()
            self.pool.stream.synchronize.assert_called_once()
            cudart.cudaHostUnregister.assert_called_once_with(address)
            cudart.cudaHostRegister.return_value = 2
            with self.assertRaisesRegex(MemoryError, "expected 1 MiB more of host memory .* got error 2"):
                offload.Copies.allocate(self.pool, 1 << 20)
            buffers.clear()


@unittest.skipUnless(can_select_checkpoints(), "needs Transformers 5.23")
class ModelTest(unittest.TestCase):
    def setUp(self):
        set_seed(0)
        config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
        self.model = patch_model(Qwen3_5ForCausalLM(config)).train()

    def functions(self, model=None):
        layers = (model or self.model).model.layers
        return [layer._gradient_checkpointing_func for layer in layers if layer.gradient_checkpointing]

    def test_the_options_of_transformers(self):
        batch = packed_batch([torch.arange(1, 6), torch.arange(1, 4)])
        expected = gradients(self.model, self.model(**batch).loss)
        for reentrant in (False, True):
            self.model.activation_checkpointing_enable({"use_reentrant": reentrant}, every_n_layers=2, offload=True)
            functions = self.functions()
            self.assertEqual(on_host(functions), [True, True])
            self.assertEqual(len({id(function.func) for function in functions}), 1)
            inner = functions[0].args[0]
            self.assertEqual((inner.func, inner.keywords), (checkpoint, {"use_reentrant": reentrant}))
            actual = gradients(self.model, self.model(**batch).loss)
            self.assertTrue(all(torch.equal(actual[name], expected[name]) for name in expected))
        self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.assertEqual([function.func for function in self.functions()], [checkpoint] * 4)
