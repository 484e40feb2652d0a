"""Outputs of linear layers that checkpointed layers keep in host memory. `tests/gpu/test_offload.py` has a GPU."""

import gc
import unittest
import weakref
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from common.late_copies import Doubled, Event, LateCopies, on_a_cpu
from parameterized import parameterized
from torch.utils.checkpoint import checkpoint

from transformers_packed.ops import host_memory, host_tensors, kept_outputs, linear, offload
from transformers_packed.ops.terms import (
    Adapter,
    BlocksWeight,
    Dequantized,
    Float8Weight,
    Products,
    Projection,
    planned,
)


T, WIDTH, OUT = 6, 8, 12
# Elements: inputs and wide outputs go to the host, the output of one feature does not.
SMALLEST = T * WIDTH
NUMBER = 6


class Calls:
    """Counts the outputs that layers compute and those that they know, and lets the device take time for them.

    A layer takes 1 ms, and 1 ms more for each wide output. Its backward takes 4 ms. In `slow` rows, all takes longer.
    """

    def __init__(self):
        self.computed, self.known, self.clocks, self.slow = 0, 0, [], 1

    def take(self, ms):
        for clocks in self.clocks:
            clocks.at += ms * self.slow

    def forward(self, products, rows, known=(), forward=Products.forward):
        found = forward(products, rows, known)
        self.known += len(known)
        self.computed += len(found) - len(known)
        self.take(1 + 2 - len(known))
        return found

    def backward(self, *args, gradients=Products.parameter_gradients):
        self.take(4)
        return gradients(*args)


class Model:
    """Layers with two wide outputs and a narrow one of the same input, and what follows them."""

    def __init__(self, kind: str = "plain", number: int = NUMBER, change: bool = False):
        generator = torch.Generator().manual_seed(0)
        random = partial(torch.randn, generator=generator)
        self.weights = [[random(out, WIDTH) / 4 for out in (OUT, OUT, 1)] for _ in range(number)]
        self.back = [random(WIDTH, OUT) / 4 for _ in range(number)]
        self.adapters = [[random(2, WIDTH) / 4, random(OUT, 2) / 4] for _ in range(number)]
        self.kind, self.change = kind, change
        for x in self.trained():
            x.requires_grad_()

    def trained(self):
        if self.kind == "plain":
            return [x for weights in self.weights for x in weights]
        return [x for adapter in self.adapters for x in adapter]

    def layer(self, n, x):
        weights = self.weights[n]
        if self.kind == "plain":
            projections = map(Projection, weights)
        else:
            stored = [Dequantized(w.shape, w.dtype, partial(lambda w: w * 1, w)) for w in weights]
            adapter = Adapter(*self.adapters[n], 2.0, 0.5 if self.kind == "dropout" else 0.0)
            projections = Projection(stored[0], None, (adapter,)), Projection(stored[1]), Projection(weights[2])
        a, b, c = linear._fused(x, *projections)
        if self.change:
            a = a.mul_(2)
        return x + (a.sigmoid() * b * c) @ self.back[n].t()

    def __call__(self, run, x):
        for n in range(len(self.weights)):
            x = run(partial(self.layer, n), x)
        return x

    def gradients(self, run, x, times: int = 1):
        torch.manual_seed(0)
        with mock.patch.object(linear, "recipe_of", lambda x: (None, None, None)):
            y = self(run, x).square().sum()
            for left in reversed(range(times)):
                for tensor in (x, *self.trained()):
                    tensor.grad = None
                y.backward(retain_graph=left > 0)
        return [tensor.grad for tensor in (x, *self.trained())]


class KnownTest(unittest.TestCase):
    """What a second computation leaves out, with each kind of term."""

    def check(self, projections, width=WIDTH):
        rows = torch.randn(T, width, generator=torch.Generator().manual_seed(1))
        plan, tensors = planned(list(projections))

        def outputs(known):
            ctx = SimpleNamespace(needs_input_grad=(True,) * len(tensors))
            products = Products(ctx, plan, tensors, torch.float32)
            products.prepare(rows, keep=True)
            return products.forward(rows, known)

        whole = outputs(())
        for known in ((0,), (1, 2), (0, 2), (0, 1, 2)):
            for i, (y, expected) in enumerate(zip(outputs(known), whole, strict=True)):
                self.assertTrue(y is None if i in known else torch.equal(y, expected), (i, known))

    def adapters(self, out, width=WIDTH, dropout=0.0):
        torch.manual_seed(out)
        return (Adapter(torch.randn(2, width), torch.randn(out, 2), 2.0, dropout),)

    def test_plain_and_quantized_weights(self):
        a, b, c = (torch.randn(n, WIDTH) for n in (OUT, 200, 300))
        stored = Dequantized(c.shape, c.dtype, lambda: c)
        # The first weight is narrow enough for the product of the adapters.
        self.check(
            [Projection(a, torch.randn(OUT), self.adapters(OUT)), Projection(b, torch.randn(200)), Projection(stored)]
        )
        self.check([Projection(b), Projection(stored, torch.randn(300), self.adapters(300)), Projection(a)])

    def test_float8(self):
        weights = [torch.randn(n, WIDTH) for n in (16, 32, 48)]
        first, *others = map(Float8Weight, weights)
        self.check([Projection(first, torch.randn(16), self.adapters(16)), *map(Projection, others)])

    def test_blocks(self):
        stored = [torch.randn(n, 256) for n in (128, 256)]
        first, second = (
            BlocksWeight(x.to(torch.float8_e4m3fn), torch.ones(len(x) // 128, 2), x.dtype) for x in stored
        )
        last = Projection(torch.randn(OUT, 256))
        self.check([Projection(first, torch.randn(128), self.adapters(128, 256)), Projection(second), last], 256)


class Clocks(LateCopies):
    """Copies on a CPU that know what time it is for the device and for the copies, which take a time for each byte."""

    bytes_per_ms, calls = 1e6, Calls()

    def __init__(self, device, needed=None):
        super().__init__(device, needed)
        self.at = self.copied_at = self.waited = 0.0
        self.calls.clocks.append(self)

    def compute_stream(self):
        return SimpleNamespace(wait_event=self.wait)

    def wait(self, event):
        self.waited += max(event.at - self.at, 0.0)
        self.at = max(event.at, self.at)
        event.wait()

    def now(self):
        return self.known(Event(self, self.at))

    def start(self, target, source):
        event = self.known(super().start(target, source))
        self.copied_at = event.at = max(self.at, self.copied_at) + target.nbytes / self.bytes_per_ms
        return event

    def known(self, event):
        event.query = lambda: True
        return event


class CallsTest(unittest.TestCase):
    """Each output has a layer's time for its copy."""

    def test_outputs_leave_at_the_same_call_of_the_next_layer(self):
        outputs, left = kept_outputs.Outputs(), []

        class Saved:
            def __init__(self, name):
                self.name, self.call = name, outputs.call

            def leave_unchanged(self):
                left.append(self.name)

        alive = []
        for layer, calls in enumerate((3, 2, 1)):
            outputs.begin_layer(1, None)
            for call in range(1, calls + 1):
                outputs.begin_call()
                left.append(f"call {call}")
                alive.append(Saved(f"{layer}.{call}"))
                outputs.kept.append(weakref.ref(alive[-1]))
        first = ["call 1", "call 2", "call 3"]
        self.assertEqual(left, [*first, "0.1", "call 1", "0.2", "call 2", "0.3", "1.1", "call 1"])


class KeptOutputsTest(unittest.TestCase):
    def setUp(self):
        self.calls = Calls()
        self.enterContext(on_a_cpu(SMALLEST))
        self.enterContext(mock.patch.multiple(offload, SMALLEST_UNASKED=1, Copies=Clocks))
        self.enterContext(mock.patch.object(Clocks, "calls", self.calls))
        methods = {"forward": self.calls.forward, "parameter_gradients": self.calls.backward}
        for name, method in methods.items():
            patch = mock.patch.object(Products, name, lambda *args, method=method: method(*args))
            self.enterContext(patch)
        self.x = torch.randn(T, WIDTH, requires_grad=True)
        self.needed = 0
        self.new()

    def new(self, asked: bool = False, reentrant: bool = False):
        self.host = offload.HostCheckpoints(None if asked else lambda: self.needed)
        self.run_layer = partial(self.host, partial(checkpoint, use_reentrant=reentrant))

    @property
    def copies(self) -> Clocks:
        (copies,) = self.host._copies.values()
        return copies

    def step(self, model, run=None, times=1):
        """Run a step, and return how many outputs its layers computed again, and how many they knew."""
        clocks, self.calls.clocks = self.calls.clocks, []
        expected = model.gradients(lambda layer, x: layer(x), self.x)
        self.calls.computed, self.calls.known, self.calls.clocks = 0, 0, clocks
        found = model.gradients(run or self.run_layer, self.x, times)
        self.assertTrue(all(map(torch.equal, found, expected)))
        return self.calls.computed - 3 * len(model.weights), self.calls.known

    def steps(self, model, number: int):
        """The outputs that layers knew in each step, and the time that the device took and waited in the last one."""
        found = []
        for _ in range(number):
            before = (self.copies.at, self.copies.waited) if self.host._copies else (0.0, 0.0)
            found.append(self.step(model)[1])
        return found, self.copies.at - before[0], self.copies.waited - before[1]

    @parameterized.expand([(kind, slow) for kind in ("plain", "lora", "dropout") for slow in (1, 20)])
    def test_as_many_as_the_copies_have_time_for(self, kind, slow):
        """In the 3 ms of a layer, an input of 192 bytes and outputs of 288 bytes each. The first rows may be slow."""
        for bytes_per_ms, kept in ((100, 0), (190, 1), (400, 2)):
            self.new()
            with mock.patch.object(Clocks, "bytes_per_ms", bytes_per_ms):
                self.calls.slow = slow
                self.steps(Model(kind), 6)
                self.calls.slow = 1
                found, ms, waited = self.steps(Model(kind), 24)
            # The last layer keeps none.
            self.assertEqual(found[-4:], [kept * (NUMBER - 1)] * 4)
            self.assertLess(waited, 0.02 * ms)
            self.assertAlmostEqual(ms - waited, NUMBER * 10 - kept * (NUMBER - 1))
            self.assertFalse(self.copies.outputs.quota.grows and kept < 2)
            self.assertEqual(self.step(Model(kind)), ((3 - kept) * NUMBER + kept, kept * (NUMBER - 1)))

    @parameterized.expand([(1 << 41,), (float("inf"),)])
    def test_none_without_room(self, needed):
        self.needed = needed
        self.assertEqual(self.steps(Model(), 4)[0], [0] * 4)

    def test_no_more_than_there_is_room_for(self):
        # Of this, a fifth stays free.
        with mock.patch.object(Clocks, "has_room", 2.5 * 4 * T * WIDTH):
            self.assertEqual(self.steps(Model(), 8)[0][-1], NUMBER - 1)
        self.assertEqual(self.copies.outputs.quota.value, 2)

    def test_no_more_of_a_longer_row(self):
        self.warm()
        # One output of a short row has room, and none of a row that is four times as long.
        with mock.patch.object(Clocks, "has_room", 2.5 * 4 * T * WIDTH):
            self.assertEqual(self.step(Model())[1], NUMBER - 1)
            self.x = torch.randn(4 * T, WIDTH, requires_grad=True)
            self.assertEqual(self.steps(Model(), 4)[0], [0] * 4)
        self.assertEqual(self.steps(Model(), 4)[0][-1], 2 * (NUMBER - 1))

    def test_none_of_the_longest_row_so_far(self):
        """What a step of it needs is not known before."""
        self.warm()
        self.assertEqual(self.step(Model())[1], 2 * (NUMBER - 1))
        self.x = torch.randn(2 * T, WIDTH, requires_grad=True)
        found = self.steps(Model(), 6)[0]
        self.assertEqual((found[0], found[-1]), (0, 2 * (NUMBER - 1)))

    def test_copies_of_outputs_do_not_end_those_of_inputs(self):
        """They share a stream, so an input may be late because of them."""
        self.warm()
        quota = self.copies.outputs.quota
        with mock.patch.object(quota, "begin_row"):
            for value, more in ((0.0, NUMBER - 1), (2.0, 0)):
                self.copies.layers, quota.value = [], value
                self.step(Model())
                self.assertEqual(len(self.copies.layers), more)

    def test_room_beside_steps(self):
        """What a step has needed at its peak is not free between steps."""
        found = {"mem_get_info": (5, 100), "memory_reserved": 70, "memory_allocated": 20}
        with mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=x) for name, x in found.items()}):
            self.assertEqual(host_memory.free_device_memory(torch.device("cuda")), 5 + 50)
            self.assertEqual(host_memory.free_device_memory(torch.device("cuda"), 62), 5 + 8)

    def test_statistics_that_are_reset_between_steps(self):
        """The peak is read where the backward of a row ends, too."""

        def run(layer, x):
            y = self.run_layer(layer, x)
            # A row has begun, and its backward is to come.
            self.copies.allocated_in_step = Clocks.has_room
            return y

        for _ in range(6):
            if self.host._copies:
                self.copies.allocated_in_step = 0
            known = self.step(Model(), run)[1]
        self.assertEqual((known, self.copies.peak), (0, Clocks.has_room))

    def test_none_meanwhile(self):
        with offload.without_outputs():
            self.assertEqual(self.steps(Model(), 6)[0], [0] * 6)
        self.assertEqual(self.copies.outputs.quota.value, 0)
        self.warm()
        with offload.without_outputs():
            self.assertEqual(self.steps(Model(), 2)[0], [0] * 2)
        self.assertEqual(self.steps(Model(), 2)[0], [2 * (NUMBER - 1)] * 2)

    def test_layers_that_share_a_second_input(self):
        """As those of Zamba do. It stays where it is."""

        def run(layer, x):
            return self.run_layer(lambda hidden_states, embeddings: layer(hidden_states), x, self.x)

        for _ in range(8):
            known = self.step(Model(), run)[1]
        self.assertEqual((known, self.copies.outputs.number), (2 * (NUMBER - 1), NUMBER))

    def test_none_of_copies_that_somebody_asked_for(self):
        self.new(asked=True)
        self.assertEqual(self.steps(Model(), 4)[0], [0] * 4)

    def test_none_with_reentrant_autograd(self):
        """It saves the input of a layer after the layer."""
        self.new(reentrant=True)
        self.assertEqual(self.steps(Model(), 6)[0], [0] * 6)

    def test_fewer_once_the_copies_take_longer(self):
        """Such as because of other processes."""
        self.steps(Model(), 12)
        with mock.patch.object(Clocks, "bytes_per_ms", 100):
            self.assertEqual(self.steps(Model(), 12)[0][-1], 0)

    def test_more_again_once_the_copies_are_fast(self):
        self.test_fewer_once_the_copies_take_longer()
        with mock.patch.object(kept_outputs, "_AGAIN", 4):
            self.assertEqual(self.steps(Model(), 12)[0][-1], 2 * (NUMBER - 1))

    def test_the_host_is_ahead(self):
        """What the device has not used yet tells nothing."""
        self.steps(Model(), 8)
        before = self.copies.outputs.quota.value
        with mock.patch.object(Clocks, "known", lambda self, event: event):
            # In this time, no copy is far enough behind.
            self.copies.time = -1e6
            self.steps(Model(), 3)
        self.assertLessEqual(self.copies.outputs.quota.value, before + 1)

    def test_the_host_is_always_a_row_ahead(self):
        """Each row ends before the device has come to its last wait."""
        self.warm()
        waits = []

        def known(clocks, event):
            event.query = partial(lambda row: len(waits) > row + 1, len(waits))
            return event

        with mock.patch.multiple(Clocks, known=known, bytes_per_ms=100):
            for _ in range(16):
                found = self.step(Model())[1]
                waits.append(len(self.copies.outputs.quota.waits))
        self.assertEqual(found, 0)
        # Those of one row.
        self.assertEqual(max(waits), waits[0])

    def warm(self):
        self.steps(Model(), 8)

    def test_a_graph_used_twice(self):
        self.warm()
        self.assertEqual(self.step(Model(), times=2)[1], 2 * 2 * (NUMBER - 1))

    def test_somebody_writes_into_an_output(self):
        """It is computed again."""
        self.warm()
        self.assertEqual(self.step(Model(change=True))[1], NUMBER - 1)

    def test_a_kernel_writes_into_an_output(self):
        """PyTorch does not count that, so such a caller keeps none."""
        self.warm()

        class Rotating(Model):
            def layer(self, n, x):
                a, b, c = linear._fused(x, *map(Projection, self.weights[n]), keep=False)
                a = Doubled.apply(a)
                return x + (a.sigmoid() * b * c) @ self.back[n].t()

        self.assertEqual(self.step(Rotating())[1], 0)
        with offload.all_checkpoints():
            self.assertEqual(self.step(Rotating())[1], 0)

    def test_in_the_check(self):
        """All of them, whatever the copies have time for. Training goes on after it."""
        for _ in range(2):
            for model in (Model(), Model(change=True)):
                with offload.all_checkpoints():
                    self.assertEqual(self.step(model, times=2)[1], 2 * (1 if model.change else 2) * NUMBER)
            self.warm()

    def test_they_leave_and_come_back_with_inputs(self):
        """In backward, the device has the outputs of one layer beside those that it uses."""
        self.warm()
        resident = []

        def note(layer, x):
            def run(x):
                found = [x for x in gc.get_objects() if isinstance(x, host_tensors.Output) and x.tensor is not None]
                resident.append(len(found))
                return layer(x)

            return self.run_layer(run, x)

        self.assertEqual(self.step(Model(), run=note)[1], 2 * (NUMBER - 1))
        # In backward, also those of the layer itself, of which the last one has none.
        self.assertEqual(resident, [0, 2, 2, 2, 2, 2, 2, 4, 4, 4, 4, 2])

    def test_they_come_back_after_what_the_next_layer_keeps(self):
        """Such as the output of attention. The layer that is computed needs it before the one before needs its outputs."""
        self.warm()
        back, fetch = [], host_tensors.Saved.fetch

        def note(saved):
            if saved.tensor is None:
                back.append("output" if type(saved) is host_tensors.Output else "kept" if saved.inside else "input")
            return fetch(saved)

        def run(layer, x):
            saved = []

            def keeping(x):
                if saved:
                    self.host.load(saved[0])
                else:
                    saved.append(self.host.save(x.detach() * 2, inside=True))
                return layer(x)

            return self.run_layer(keeping, x)

        with mock.patch.object(host_tensors.Saved, "fetch", note):
            self.assertEqual(self.step(Model(), run=run)[1], 2 * (NUMBER - 1))
        layer = ["kept", "output", "output", "input"]
        # What the last layer keeps never leaves, and its input leaves for that.
        self.assertEqual(back, ["input", "output", "output", "input", *layer * (NUMBER - 2), "kept"])

    def test_buffers_are_used_again(self):
        self.warm()
        before = self.copies.allocated
        self.steps(Model(), 3)
        gc.collect()
        self.assertEqual(self.copies.allocated, before)
        self.assertEqual(len(self.copies.free_unasked), 2 * (NUMBER - 1))

    def test_buffers_of_several_sizes(self):
        """At the limit of the host's memory, a buffer makes room only for one that then fits."""
        self.warm()
        gc.collect()
        copies, page = self.copies, 1 << 16
        while copies.free_unasked:
            copies.drop_unasked()
        copies.most_unasked, allocated = 9 * page, []
        for _ in range(4):
            taken = [copies.take(size * page, unasked=True) for size in (3, 1) * 8]
            for buffer in taken:
                if buffer is not None:
                    copies.give_back(buffer, unasked=True)
            allocated.append(copies.allocated)
        self.assertEqual(len(set(allocated)), 1)
        self.assertEqual(copies.bytes_unasked, sum(x.nbytes for x in copies.free_unasked))
        self.assertEqual(copies.bytes_unasked, 9 * page)

    def test_layers_before_the_first_trained_one(self):
        """They keep none, which would leave at once and let the device wait."""
        model, x = Model(), self.x.detach()
        for weight in model.weights[0] + model.weights[1]:
            weight.requires_grad_(False)
        for _ in range(12):
            self.calls.known = 0
            with mock.patch.object(linear, "recipe_of", lambda x: (None, None, None)):
                model(self.run_layer, x).square().sum().backward()
        self.assertEqual(self.calls.known, 2 * (NUMBER - 3))
        self.assertEqual(self.copies.waited, 0)

    def test_no_layer_runs_in_evaluation(self):
        self.warm()
        self.calls.known = 0
        with torch.no_grad():
            Model()(self.run_layer, self.x)
        self.assertEqual((self.calls.known, len(self.copies.outputs.kept)), (0, 0))
        self.assertEqual(self.step(Model())[1], 2 * (NUMBER - 1))
