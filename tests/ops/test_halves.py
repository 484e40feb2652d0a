"""What both halves of checkpointed functions save, with copies that take as long as they may."""

import gc
import unittest
from functools import partial
from unittest import mock

import torch
from common.late_copies import LateCopies, on_a_cpu
from parameterized import parameterized
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from transformers_packed.ops import host_memory, offload
from transformers_packed.ops.halves import Halves, is_alias


class Stream(torch.autograd.Function):
    """Returns its input, as a norm of a residual stream does."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin(), x

    @staticmethod
    def backward(ctx, gradient, stream):
        (x,) = ctx.saved_tensors
        return stream + gradient * x.cos()


def first(x):
    """The residual stream, and what is made of it."""
    return Stream.apply(x)[1], (x * x).sin()


def second(residual, made):
    return (residual * residual).cos() + (made * made).cos()


def expected(x, number):
    y = x.detach().clone().requires_grad_()
    z = y
    for _ in range(number):
        z = second(*first(z))
    return torch.autograd.grad(z.sum(), y)[0]


def resident() -> int:
    """How many saved tensors are on the device."""
    return sum(isinstance(x, offload._Saved) and x.tensor is not None for x in gc.get_objects())


class HalvesTestCase(unittest.TestCase):
    def setUp(self):
        self.enterContext(on_a_cpu(5))
        self.enterContext(set_checkpoint_early_stop(False))
        self.warned = self.enterContext(mock.patch.object(offload.logger, "warning_once"))
        self.host = offload.HostCheckpoints()
        # Of each layer, whether it ran in halves.
        self.ran: list[bool] = []
        gc.collect()

    @property
    def copies(self) -> LateCopies:
        (copies,) = self.host._copies.values()
        return copies

    def layer(self, x, first=first, second=second):
        halves = Halves.of(self.host, x)
        self.ran.append(halves is not None)
        once = partial(self.host, partial(checkpoint, use_reentrant=False))
        if halves is None:
            return once(lambda x: second(*first(x)), x)
        once = partial(once, save=halves.save)
        try:
            return once(second, *once(first, x))
        finally:
            halves.end()

    def layers(self, x, number: int = 4, **steps):
        for _ in range(number):
            x = self.layer(x, **steps)
        return x

    def check(self, x, output, number: int = 4, **options):
        self.assertTrue(torch.equal(torch.autograd.grad(output.sum(), x, **options)[0], expected(x, number)))


class SavedTest(HalvesTestCase):
    """All layers run in halves."""

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.object(offload, "_inputs_first", False))

    def test_the_input_is_saved_once(self):
        x = torch.randn(8, requires_grad=True)
        for step in range(1, 4):
            output = self.layers(x)
            # What the last half takes.
            self.assertEqual(resident(), 2)
            self.check(x, output)
            del output
            # Of each layer two tensors to the host and back, but for the last one, which never left.
            self.assertEqual(self.copies.copies, step * (2 * 4 + 2 * 3))
            self.assertEqual((len(self.copies.free), len(self.copies.free_unasked)), (4, 4))
            self.assertEqual((self.copies.allocated, self.copies.queue), (8, []))
        self.assertEqual(self.ran, [True] * 12)

    def test_comes_back_before_its_use(self):
        """While a first half is computed again, both tensors of the layer before are on their way."""
        found = []

        def noted(step, *tensors):
            found.append((step.__name__, resident()))
            return step(*tensors)

        x = torch.randn(8, requires_grad=True)
        steps = {step.__name__: partial(noted, step) for step in (first, second)}
        output, fetches = self.layers(x, 3, **steps), []
        found.clear()
        fetch = offload._Saved.fetch

        def noted_fetch(saved):
            if saved.tensor is None:
                fetches.append(len(found))
            return fetch(saved)

        with mock.patch.object(offload._Saved, "fetch", noted_fetch):
            self.check(x, output, 3)
        # A second half has the input that the first half needs next. What the first half made is not counted any more.
        halves = [("second", 1), ("first", 2)]
        self.assertEqual(found, [*halves, *halves, halves[0], ("first", 0)])
        # Before the first half of the layer after it.
        self.assertEqual(fetches, [1, 1, 3, 3])

    def test_a_graph_used_twice_and_two_graphs(self):
        x, other = torch.randn(8, requires_grad=True), torch.randn(6, requires_grad=True)
        output = self.layers(x)
        for _ in range(3):
            self.check(x, output, retain_graph=True)
        both = output.sum() + self.layers(other).sum()
        found = torch.autograd.grad(both, (x, other))
        self.assertTrue(all(torch.equal(g, expected(y, 4)) for g, y in zip(found, (x, other), strict=True)))

    def test_a_graph_that_is_never_used(self):
        self.layers(torch.randn(8, requires_grad=True))
        gc.collect()
        self.assertEqual((len(self.copies.free), len(self.copies.free_unasked), self.copies.queue), (4, 4, []))

    def test_a_backward_of_the_second_halves_only(self):
        weight, x = torch.randn(8, requires_grad=True), torch.randn(8)
        output = self.layer(self.layer(x), second=lambda residual, made: residual + made * weight)
        for _ in range(2):
            (found,) = torch.autograd.grad(output.sum(), weight, retain_graph=True)
            z = second(x, (x * x).sin())
            self.assertTrue(torch.equal(found, (z * z).sin()))

    @parameterized.expand([("first", "input"), ("second", "input"), ("second", "made")])
    def test_a_half_that_writes_into_its_argument(self, which, what):
        def writes(*tensors):
            with torch.no_grad():
                tensors[what == "made"].mul_(2)
            return (first if which == "first" else second)(*tensors)

        for followed in (True, False):
            x = torch.randn(8, requires_grad=True) * 2
            with self.assertRaisesRegex(ValueError, "layers that leave their input as it is"):
                # PyTorch itself refuses to write into the output of `Stream`.
                output = self.layer(x, **{"first": lambda x: (x, (x * x).sin())} | {which: writes})
                if followed and what == "input":
                    # The next layer finds it.
                    self.layers(output, 1)
                else:
                    output = self.layers(output, 2) if followed else output
                    output.sum().backward()
            output = x = None
            gc.collect()
            if followed and what == "input":
                # No buffer is lost. PyTorch keeps a graph whose backward could not load an argument.
                self.assertEqual(len(self.copies.free) + len(self.copies.free_unasked), self.copies.allocated)

    def test_an_error_gives_the_room_back(self):
        def fails(x):
            raise RuntimeError("no")

        for _ in range(2):
            with self.assertRaisesRegex(RuntimeError, "no"):
                self.layer(torch.randn(8, requires_grad=True), first=fails)
        gc.collect()
        self.assertEqual((len(self.copies.free_unasked), self.copies.allocated), (1, 2))

    def test_what_is_made_is_larger(self):
        """It takes other room, or stays on the device."""
        x = torch.randn(1 << 14, requires_grad=True)
        widened = {
            "first": lambda x: (x, x.repeat(2).sin()),
            "second": lambda residual, made: residual + made.view(2, -1).sum(0).cos(),
        }
        y = self.layers(x, 2, **widened)
        z = x
        for _ in range(2):
            z = widened["second"](*widened["first"](z))
        self.assertTrue(torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (y, z))))

    def test_an_input_that_stays_on_the_device(self):
        x = torch.randn(8, requires_grad=True)
        output = self.layers(x, 2)
        self.check(x, output, 2)
        # Buffers for outputs are free, and none for inputs, nor may there be more.
        self.copies.free.clear()
        self.copies.new = lambda size: None
        output = self.layers(x, 2)
        self.check(x, output, 2)
        self.assertEqual(self.ran, [True] * 4)

    def test_aliases(self):
        x = torch.randn(4, 4)
        self.assertTrue(is_alias(x.detach(), x))
        for other in (x.clone(), x.t(), x[:2], x.view(16), x.view(torch.int32)):
            self.assertFalse(is_alias(other, x))


class RoomTest(HalvesTestCase):
    """Layers run as a whole where the host has no room, or inputs need it."""

    def step(self, size: int = 8) -> list[bool]:
        self.ran.clear()
        x = torch.randn(size, requires_grad=True)
        with mock.patch.object(offload, "SMALLEST_UNASKED", 1):
            self.check(x, self.layers(x))
        gc.collect()
        return list(self.ran)

    def test_inputs_have_the_memory_first(self):
        """Rows that are longer than those before run as a whole once."""
        steps = [self.step(size) for size in (8, 8, 1 << 16, 1 << 16, 8)]
        self.assertEqual([all(step) for step in steps], [False, True, False, True, True])
        self.assertEqual([any(step) for step in steps], [False, True, False, True, True])

    def test_room_for_a_whole_row(self):
        """Rows of a length that is new run in halves too if the host has room for all of their tensors."""
        self.host.layers = 4
        for free, expected in ((2 * 8 << 16, [4, 4, 0, 0]), (2 * 40 << 18, [4, 4, 4, 4])):
            with mock.patch.object(host_memory, "free_host_memory", lambda free=free: free):
                self.host = offload.HostCheckpoints(lambda: 0)
                self.host.layers = 4
                self.assertEqual([sum(self.step(size)) for size in (8, 8, 1 << 18, 1 << 18)], expected)

    def test_two_rows_before_a_backward(self):
        self.step()
        self.ran.clear()
        x = torch.randn(8, requires_grad=True)
        outputs = [self.layers(x) for _ in range(2)]
        # The inputs of the second row have no buffers yet.
        self.assertEqual(self.ran, [True] * 4 + [False] * 4)
        for output in outputs:
            self.check(x, output)

    @parameterized.expand([(4,), (6,)])
    def test_limits(self, buffers):
        """Halves take what is left."""
        free = 2 * buffers << 16
        with mock.patch.object(host_memory, "free_host_memory", lambda: free):
            self.host = offload.HostCheckpoints(lambda: 0)
            found = [self.step() for _ in range(3)]
        self.assertEqual([sum(step) for step in found], [0, buffers - 4, buffers - 4])
        self.assertEqual((self.copies.allocated, len(self.copies.free)), (buffers, 4))

    def test_small_tensors(self):
        self.assertEqual(self.step(), [False] * 4)
        self.assertEqual(self.step(4), [False] * 4)

    @parameterized.expand(
        [
            (True, 0.9, 1 << 40, [7, *[14] * 7]),
            # Halves end first. The copies that nobody asked for end too if they still take too long.
            (True, 1.2, 1 << 40, [7, 14, 13, 7, 7, 6, 0, 0]),
            (False, 1.2, 1 << 40, [7, 14, 13, 7, 7, 7, 7, 7]),
            (True, 1.2, 1 << 10, [7, *[14] * 7]),
        ]
    )
    def test_copies_that_take_longer_than_halves(self, automatic, ms, room, expected):
        if automatic:
            self.host = offload.HostCheckpoints(lambda: 0)
        found, before = [], 0
        with mock.patch.multiple(LateCopies, copy_ms=ms, has_room=room), mock.patch.object(offload, "_LAYERS", 6):
            for _ in range(8):
                self.step()
                found.append(self.copies.copies - before)
                before = self.copies.copies
        self.assertEqual(found, expected)
