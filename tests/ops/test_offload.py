"""Checkpoints in host memory: their buffers, and how models enable them. `tests/gpu` has the copies."""

import copy
import gc
import tempfile
import unittest
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from common.families import tiny_model
from common.late_copies import Doubled, LateCopies, on_a_cpu
from mixins.lora import builtin_model
from mixins.model import gradients, packed_batch
from mixins.patch import BUILTINS, OTHERS, documents, on_a_gpu
from mixins.vision import TEXT
from parameterized import parameterized
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig, set_seed
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.falcon_h1 import modeling_falcon_h1

from transformers_packed import add_mtp, patch_model, use_float8
from transformers_packed.models import checkpointing
from transformers_packed.models.checkpoint_formats import Blocks, PackedWeight
from transformers_packed.models.losses import OWN, MtpLoss
from transformers_packed.models.versions import can_select_checkpoints
from transformers_packed.ops import host_memory, host_tensors, offload
from transformers_packed.ops.kept_outputs import Layer


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
        return sum(isinstance(x, host_tensors.Saved) and x.tensor is not None for x in gc.get_objects())

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

    def test_a_layer_that_writes_into_a_small_input(self):
        """It stays on the device. PyTorch finds such changes only without hooks."""
        run = partial(self.host, partial(checkpoint, use_reentrant=False))
        for number in (4, 8):
            given = torch.randn(number, requires_grad=True) * 2
            output = run(lambda x: x.mul_(2).sin(), given)
            with self.assertRaisesRegex(ValueError, "input as it is.*Let it write into a copy.$"):
                output.sum().backward()

    def test_a_layer_that_fails(self):
        def fails(x):
            raise RuntimeError("no")

        run = partial(self.host, partial(checkpoint, use_reentrant=False))
        for _ in range(2):
            with self.assertRaisesRegex(RuntimeError, "no"):
                run(fails, torch.randn(8, requires_grad=True))
            gc.collect()
            # The next layer gets its buffer.
            self.assertEqual((len(self.copies.free), self.copies.allocated), (1, 1))

    def test_rows_of_two_lengths(self):
        """Buffers of a longer row replace those of a shorter one, and serve both."""
        sizes = 8, 1 << 15, 8
        for size, allocated, nbytes in zip(sizes, (5, 10, 10), (1 << 16, 1 << 17, 1 << 17), strict=True):
            x = torch.randn(size, requires_grad=True)
            self.assertTrue(torch.equal(torch.autograd.grad(self.layers(x).sum(), x)[0], self.expected(x)))
            self.assertEqual([buffer.nbytes for buffer in self.copies.free], [nbytes] * 5)
            self.assertEqual((self.copies.allocated, self.host.bytes), (allocated, 5 * nbytes))

    def test_what_leaves_together(self):
        """A kernel's second output does not wait until the first one has arrived in host memory."""
        tensors = [torch.full((8,), x) for x in (1.0, 2.0, 3.0)]
        saved = [self.host.save(tensors[0], inside=True), self.host.save(tensors[1], inside=True, beside=True)]
        self.assertEqual([len(self.copies.queue), *[x.tensor is None for x in saved]], [2, False, False])
        saved.append(self.host.save(tensors[2]))
        self.assertEqual([len(self.copies.queue), *[x.tensor is None for x in saved]], [1, True, True, False])
        for tensor in tensors:
            tensor.add_(1)
        with self.assertRaisesRegex(ValueError, "input as it is"):
            saved.pop().load()
        for tensor, x in zip(tensors, saved, strict=False):
            self.assertTrue(torch.equal(x.load(), tensor - 1))

    def test_a_change_of_what_leaves_together(self):
        tensors = torch.zeros(8), torch.zeros(8)
        kept = [self.host.save(tensors[0], inside=True), self.host.save(tensors[1], inside=True, beside=True)]
        tensors[0].add_(1)
        with self.assertRaisesRegex(ValueError, "output of attention as it is.*keep_attention=False.$"):
            self.host.save(torch.zeros(8))
        self.assertEqual(len(kept), 2)

    def test_a_copy_of_a_model_has_its_own_buffers(self):
        self.layers(torch.randn(8, requires_grad=True))
        wrapped = copy.deepcopy(partial(self.host, checkpoint))
        self.assertIsNot(wrapped.func, self.host)
        self.assertEqual(wrapped.func._copies, {})


class AutomaticTest(SavedTest):
    """The same, if nobody asked for the copies, and where they stop."""

    FREE = 1 << 40

    def setUp(self):
        self.enterContext(mock.patch.object(host_memory, "free_host_memory", lambda: self.FREE))
        self.warned = self.enterContext(mock.patch.object(offload.logger, "warning_once"))
        super().setUp()
        self.needed = 0
        self.host = offload.HostCheckpoints(lambda: self.needed)

    def step(self) -> int:
        """Run a step on tensors as large as those of training, and return its copies."""
        x = torch.randn(8, requires_grad=True)
        before = self.copies.copies if self.host._copies else 0
        with mock.patch.object(offload, "SMALLEST_UNASKED", 1):
            self.assertTrue(torch.equal(torch.autograd.grad(self.layers(x).sum(), x)[0], self.expected(x)))
        return self.copies.copies - before

    def test_large_tensors(self):
        with mock.patch.object(offload, "leaves", return_value=False) as leaves:
            asked = offload.HostCheckpoints()
            for host, smallest in ((self.host, 1 << 24), (asked, 1 << 20)):
                host(lambda f, x: torch.relu(x), None, torch.ones(2, requires_grad=True))
                self.assertEqual(leaves.call_args.args[1], smallest)
                with offload.all_checkpoints():
                    host(lambda f, x: torch.relu(x), None, torch.ones(2, requires_grad=True))
                    self.assertEqual(leaves.call_args.args[1], 0)

    @parameterized.expand([(1, 3), (2, 1)])
    def test_half_of_the_memory_of_the_host(self, processes, buffers):
        size = 1 << 16
        with mock.patch.object(host_memory, "free_host_memory", lambda: 7 * size):
            with mock.patch.dict("os.environ", LOCAL_WORLD_SIZE=str(processes)):
                self.assertEqual(self.step(), 2 * buffers)
        self.assertEqual((self.copies.allocated, self.host.bytes), (buffers, buffers * size))
        self.assertIn("half of the free memory", self.warned.call_args.args[0])

    def test_pages_that_cannot_be_pinned(self):
        with mock.patch.object(LateCopies, "allocate", side_effect=MemoryError):
            self.assertEqual(self.step(), 0)
            self.assertIn("CUDA cannot pin more", self.warned.call_args.args[0])
            # Nobody tries again.
            self.step()
            LateCopies.allocate.assert_called_once()
            self.host = offload.HostCheckpoints()
            with self.assertRaises(MemoryError):
                self.layers(torch.randn(8, requires_grad=True))

    @parameterized.expand([(0.9, 1 << 40, False), (1.2, 1 << 40, True), (1.2, 1 << 18, False)])
    def test_copies_that_take_longer_than_layers(self, ms, room, stops):
        with mock.patch.multiple(LateCopies, copy_ms=ms, has_room=room), mock.patch.object(offload, "_LAYERS", 8):
            # The first step gets its memory, the next two tell, and the device has computed them in the fifth.
            found = [self.step() for _ in range(6)]
        self.assertEqual(found, [9, 9, 9, 9, 2, 0] if stops else [9] * 6)
        self.assertEqual(self.warned.called, stops)
        if stops:
            self.assertEqual((self.host.bytes, self.copies.free), (0, []))

    def test_moments_need_room(self):
        self.needed = (1 << 20) - (1 << 18)
        with mock.patch.multiple(LateCopies, copy_ms=2, has_room=1 << 20), mock.patch.object(offload, "_LAYERS", 8):
            self.assertEqual([self.step() for _ in range(6)], [9] * 6)

    def test_small_tensors_of_the_check_tell_nothing(self):
        with mock.patch.multiple(LateCopies, copy_ms=2), mock.patch.object(offload, "_LAYERS", 8):
            for _ in range(4):
                with offload.all_checkpoints():
                    self.layers(torch.randn(8, requires_grad=True)).sum().backward()
            self.assertEqual(self.copies.layers, [])

    def test_a_copy_of_a_model_is_automatic_too(self):
        self.assertTrue(copy.deepcopy(partial(self.host, checkpoint)).func.automatic)


class LimitTest(unittest.TestCase):
    def setUp(self):
        self.enterContext(mock.patch.object(host_memory, "free_host_memory", lambda: 20 << 20))
        self.enterContext(mock.patch.object(offload.logger, "warning_once"))
        self.pool = LateCopies(torch.device("cpu"), lambda: 0)

    def test_a_buffer_stays_if_a_larger_one_has_no_room(self):
        small = [self.pool.take(3 << 20) for _ in range(3)]
        self.pool.free += small
        for _ in range(3):
            self.assertIsNone(self.pool.take(6 << 20))
        self.assertEqual((len(self.pool.free), self.pool.allocated, self.pool.bytes), (3, 3, 9 << 20))
        # One makes room for another that fits.
        self.assertIsNotNone(self.pool.take(7 << 19))
        self.assertEqual((len(self.pool.free), self.pool.allocated), (2, 4))

    def test_tiny_tensors(self):
        for size in (0, 1, 15):
            # Kernels return empty tensors too, for which the system gives no pages.
            self.assertEqual(self.pool.take(size).nbytes, 1 << 16)


class HostMemoryTest(unittest.TestCase):
    GIB = 1 << 30

    def free(self, files: dict[str, str]) -> float:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                path = Path(folder, name)
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
            available = mock.Mock(return_value=mock.Mock(available=64 * self.GIB))
            with (
                mock.patch.object(host_memory, "_GROUPS", Path(folder)),
                mock.patch.object(host_memory.psutil, "virtual_memory", available),
            ):
                return host_memory.free_host_memory() / self.GIB

    def test_limits_of_containers(self):
        stat = f"anon {3 * self.GIB}\ninactive_file {4 * self.GIB}\nactive_file {self.GIB}\nfile {9 * self.GIB}\n"
        two = {"memory.max": f"{32 * self.GIB}", "memory.current": f"{20 * self.GIB}", "memory.stat": stat}
        one = {"memory/memory.limit_in_bytes": f"{32 * self.GIB}", "memory/memory.usage_in_bytes": f"{30 * self.GIB}"}
        self.assertEqual(self.free({}), 64)
        self.assertEqual(self.free(two), 17)
        self.assertEqual(self.free(two | {"memory.max": "max\n"}), 64)
        self.assertEqual(self.free(one | {"memory/memory.stat": stat}), 7)
        self.assertEqual(self.free(two | {"memory.max": f"{99 * self.GIB}"}), 64)


class BuffersTest(unittest.TestCase):
    def setUp(self):
        self.pool = LateCopies(torch.device("cpu"))

    def test_pinned_pages(self):
        """Whole pages of the host's memory, whatever the default device is, and not for longer than their buffer."""
        cudart = mock.Mock(**{"cudaHostRegister.return_value": 0})
        self.enterContext(mock.patch.object(LateCopies, "pin", offload.Copies.pin))
        with mock.patch.object(host_memory, "_cudart", lambda: cudart), torch.device("meta"):
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
            self.assertFalse(functions[0].func.automatic)
            self.assertEqual(len({id(function.func) for function in functions}), 1)
            inner = functions[0].args[0]
            self.assertEqual((inner.func, inner.keywords), (checkpoint, {"use_reentrant": reentrant}))
            actual = gradients(self.model, self.model(**batch).loss)
            self.assertTrue(all(torch.equal(actual[name], expected[name]) for name in expected))
        self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.assertEqual([function.func for function in self.functions()], [checkpoint] * 4)

    @parameterized.expand([(family,) for family in (*BUILTINS, *OTHERS)])
    def test_changes_no_bit(self, family):
        self.check(patch_model(builtin_model(family)).train(), packed_batch(documents()))

    @parameterized.expand([("tree",), ("padded",), ("mtp",), ("float8",)])
    def test_other_ways_to_train(self, way):
        model, batch, ids = patch_model(builtin_model("qwen3_5")), packed_batch(documents()), torch.arange(122) % 90
        if way == "tree":
            batch = {"input_ids": ids[None], "labels": ids[None]}
            batch |= {"cu_seqlens": torch.tensor([0, 9, 11, 81, 122]), "parent_of": torch.tensor([-1, 0, 1, 0])}
        elif way == "padded":
            ids = ids.view(2, 61)
            batch = {"input_ids": ids, "labels": ids, "attention_mask": (ids > 5).long()}
        elif way == "mtp":
            model = patch_model(Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TEXT, mtp_num_hidden_layers=1)))
            add_mtp(model)
            model.losses = (*OWN, MtpLoss(0.5))
        else:
            use_float8(model, lambda module, name: "mlp" in name)
        self.check(model.train(), batch)

    def check(self, model, batch):
        """Gradients with inputs in host memory are those with inputs on the device."""
        found = []
        for offload_ in (False, True):
            with on_a_cpu(64):
                model.activation_checkpointing_enable({"use_reentrant": False}, offload=offload_)
                found.append(gradients(model, model(**batch, use_cache=False).loss))
        expected, actual = found
        self.assertEqual(actual.keys(), expected.keys())
        self.assertEqual([name for name in expected if not torch.equal(actual[name], expected[name])], [])
        (copies,) = model.host_checkpoints._copies.values()
        layers = sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
        # Of each layer to the host and back, but for the last one.
        self.assertEqual(copies.copies, 2 * layers - 1)

    def test_outputs_of_linear_layers(self):
        """The check keeps them in all layers. On a CPU, those of products in FP8 have functions of this package."""
        use_float8(self.model, lambda module, name: "mlp" in name)
        batch = packed_batch([torch.arange(1, 60), torch.arange(1, 4)])
        expected = gradients(self.model, self.model(**batch).loss)
        known, calls = Layer.known, []

        def count(layer):
            found = known(layer)
            calls.append(len(found))
            return found

        with on_a_cpu(64), offload.all_checkpoints():
            self.model.activation_checkpointing_enable({"use_reentrant": False}, offload="auto")
            with mock.patch.object(Layer, "known", count):
                actual = gradients(self.model, self.model(**batch).loss)
        self.assertEqual([name for name in expected if not torch.equal(actual[name], expected[name])], [])
        # Gate and up have one call, in the forward and again, and down, which ends a layer, has one in the forward.
        self.assertEqual(calls, [0, 0] * 4 + [2] * 4)
        gc.collect()
        (copies,) = self.model.host_checkpoints._copies.values()
        self.assertEqual(len(copies.free_unasked), 3 * 4)

    @parameterized.expand([("mixer",), ("packed_weights",)])
    def test_kernels_of_others_that_write_into_outputs(self, which):
        """Such as Liger's rotary embeddings, into which the first outputs of attention go as they are."""
        model, batch = patch_model(tiny_model("falcon_h1")).train(), packed_batch(documents())
        if which == "packed_weights":
            # The stock layers run them.
            for layer in model.model.layers:
                values = (layer.self_attn.q_proj.weight / 8).detach().to(torch.float8_e4m3fn)
                blocks = Blocks(values, torch.ones(1, 1), values.shape, torch.float32)
                layer.self_attn.q_proj.weight = torch.nn.Parameter(PackedWeight(blocks, torch.float32), False)
            model.set_attn_implementation("eager")

        def rotate(query, key, cos, sin, **_):
            return Doubled.apply(query), Doubled.apply(key)

        with on_a_gpu(), mock.patch.object(modeling_falcon_h1, "apply_rotary_pos_emb", rotate):
            expected = gradients(model, model(**batch, use_cache=False).loss)
            with on_a_cpu(64), offload.all_checkpoints():
                model.activation_checkpointing_enable({"use_reentrant": False}, offload="auto")
                actual = gradients(model, model(**batch, use_cache=False).loss)
        self.assertEqual([name for name in expected if not torch.equal(actual[name], expected[name])], [])

    def test_a_context_of_the_user(self):
        """It selects products by their number, so the second computation has to have all of them."""
        use_float8(self.model, lambda module, name: "mlp" in name)
        batch = packed_batch([torch.arange(1, 60), torch.arange(1, 4)])
        expected = gradients(self.model, self.model(**batch).loss)
        context_fn = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        options = {"use_reentrant": False, "context_fn": context_fn}
        with on_a_cpu(64), offload.all_checkpoints():
            self.model.activation_checkpointing_enable(options, offload="auto")
            actual = gradients(self.model, self.model(**batch).loss)
            self.assertEqual([name for name in expected if not torch.equal(actual[name], expected[name])], [])
            self.assertEqual(self.model.host_checkpoints.bytes_unasked, 0)
            self.assertTrue(copy.deepcopy(self.model.host_checkpoints).computes_all)
            self.model.activation_checkpointing_enable({"use_reentrant": False}, offload="auto")
            gradients(self.model, self.model(**batch).loss)
        self.assertGreater(self.model.host_checkpoints.bytes_unasked, 0)

    def test_least_memory(self):
        """Then copies never end, and outputs of linear layers do not join them."""
        for options, least in (({}, False), ({"segment_tokens": 64}, True), ({}, False)):
            self.model.activation_checkpointing_enable(options, offload="auto")
            self.assertEqual(self.model.host_checkpoints.needed() == float("inf"), least)
        with mock.patch.object(checkpointing, "bytes_in_host_memory", return_value=1):
            self.assertEqual(self.model.host_checkpoints.needed(), float("inf"))

    def test_automatic(self):
        self.model.activation_checkpointing_enable(offload="auto")
        functions = self.functions()
        self.assertEqual((on_host(functions), functions[0].func.automatic), ([True] * 4, True))
        # Transformers' own copies cost time.
        with mock.patch("torch.accelerator.current_accelerator", return_value=torch.device("xpu")):
            self.model.activation_checkpointing_enable(offload="auto")
        self.assertEqual([function.func for function in self.functions()], [checkpoint] * 4)
        with self.assertRaisesRegex(ValueError, "offload of True, False or \"auto\", got 'cpu'"):
            self.model.activation_checkpointing_enable(offload="cpu")
