"""Tensors in host memory: the order in which they are copied, their values, and the memory of their copies.

`tests/gpu` has the streams of a GPU.
"""

import copy
import gc
import unittest
import weakref
from contextlib import nullcontext
from unittest import mock

import torch
from common.late_experts import copied_on_a_cpu, without_memory
from mixins.triton import InterpretedKernelsTest
from torch.multiprocessing.reductions import StorageWeakRef

from transformers_packed.ops import experts, host_weights, offload
from transformers_packed.ops.host_weights import DeviceCopies, HostTensors
from transformers_packed.ops.terms import DequantizedExperts


CPU = torch.device("cpu")
FORWARD, BACKWARD = [0, 1, 2, 3], [3, 2, 1, 0]


def numbers(layer: int) -> list[list[torch.Tensor]]:
    """Two lists of tensors in several dtypes, whose values differ from layer to layer."""
    weights = torch.arange(24.0).view(2, 3, 4) + 100 * layer
    return [[weights, torch.tensor(0.5 + layer)], [weights.bfloat16(), weights[0, :1].to(torch.uint8), torch.zeros(0)]]


def layer_of(lists) -> HostTensors:
    tensors = HostTensors()
    for at, each in enumerate(lists):
        tensors.keep(at, each)
    return tensors


class CopiesTest(unittest.TestCase):
    def setUp(self):
        self.copies = self.enterContext(copied_on_a_cpu())
        self.layers = [layer_of(numbers(i)) for i in range(4)]
        self.started = []
        start = self.copies._start

        def noted(tensors):
            self.started += [number for number, layer in enumerate(self.layers) if layer is tensors]
            return start(tensors)

        self.enterContext(mock.patch.object(self.copies, "_start", noted))

    def use(self, *order: int) -> list[int]:
        """Use layers in this order, and return those whose copies have started."""
        self.started.clear()
        for number in order:
            # The second product of a backward comes first.
            for at in (1, 0):
                found = self.layers[number].on(CPU, at)
                self.assertTrue(all(map(torch.equal, found, numbers(number)[at])))
                del found
        return self.started.copy()

    def misses(self, *order: int) -> int:
        before = self.copies.misses
        self.use(*order)
        return self.copies.misses - before

    def test_values(self):
        self.use(*FORWARD)
        for layer, tensors in enumerate(self.layers):
            for at, expected in enumerate(numbers(layer)):
                self.assertEqual(
                    [(x.dtype, x.shape) for x in tensors.lists[at]], [(x.dtype, x.shape) for x in expected]
                )
                self.assertTrue(all(x.data_ptr() % 16 == 0 for x in tensors.lists[at] if x.numel()))
                self.assertTrue(tensors.holds(at, tensors.lists[at]))
                self.assertFalse(tensors.holds(at, expected))
        self.assertFalse(tensors.holds(2, []))
        # Pinned once.
        self.use(*BACKWARD)
        self.assertEqual(self.copies.copies.pinned, 8)

    def test_forward_and_backward(self):
        """After a step, each copy starts beside the layer before, and the turns need none."""
        self.assertEqual(self.use(*FORWARD), FORWARD)
        self.assertEqual(self.use(*BACKWARD), [1, 0])
        # The layer after 0 was that of the forward.
        self.misses(*FORWARD, *BACKWARD)
        self.assertEqual(self.misses(*FORWARD, *BACKWARD), 0)
        self.assertEqual(self.use(*FORWARD), [2, 3])
        self.assertEqual(self.use(*BACKWARD), [1, 0])

    def test_the_next_one_is_on_its_way(self):
        self.use(*2 * [*FORWARD, *BACKWARD])
        for number, following in ((0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)):
            self.use(number)
            resident = [self.layers.index(x.of()) for x in self.copies.layers]
            self.assertEqual(resident, [following, number])

    def test_layers_that_are_computed_again(self):
        step = [*FORWARD, *(x for number in BACKWARD for x in (number, number))]
        self.use(*2 * step)
        self.assertEqual(self.misses(*step), 0)

    def test_rows_without_backward(self):
        self.use(*2 * [*FORWARD, *BACKWARD])
        # The order of training is expected once more.
        self.assertEqual(self.misses(*FORWARD), 0)
        # The first layer after the last one is new, and so is what comes after both.
        self.assertEqual(self.misses(*FORWARD), 2)
        self.assertEqual(self.misses(*FORWARD), 0)
        self.use(*FORWARD, *BACKWARD)
        self.assertEqual(self.misses(*FORWARD, *BACKWARD), 0)

    def test_another_order_and_skipped_layers(self):
        self.use(*2 * [*FORWARD, *BACKWARD])
        for order in ([2, 0, 3, 1, 1, 3, 0, 2], [0, 2, 3, 3, 2, 0], [1], [3, 3, 0]):
            self.use(*2 * order)
            self.assertEqual(self.misses(*order), 0, order)

    def test_an_expected_layer_that_does_not_come(self):
        self.use(*2 * [*FORWARD, *BACKWARD])
        self.use(0)
        started = self.use(2)
        # The one that was on its way made room, not the one in use.
        self.assertEqual(started, [2])
        self.assertEqual([self.layers.index(x.of()) for x in self.copies.layers], [0, 2])
        # Nothing is left that would write into memory which has been given up.
        self.assertEqual(self.copies.copies.queue, [])

    def test_two_layers_at_most(self):
        filled = []
        start = self.copies._start

        def counted(tensors):
            found = start(tensors)
            copies = [copy for layer in self.layers for copy in layer.copies.values()]
            sizes = [[x.untyped_storage().nbytes() for x in copy.buffers.values()] for copy in copies]
            filled.append(sum(map(any, sizes)))
            self.assertTrue(all(all(x) or not any(x) for x in sizes))
            return found

        with mock.patch.object(self.copies, "_start", counted):
            self.use(*2 * [*FORWARD, *BACKWARD], 2, 0, 3)
        self.assertGreater(len(filled), 10)
        self.assertEqual(max(filled), 2)

    def test_a_copy_keeps_its_storage(self):
        """Who refers to a copy holds no memory after two other layers, and finds the values when the layer is asked again."""
        views = [self.layers[0].on(CPU, at)[0][-1:] for at in (0, 1)]
        versions = [x._version for x in views]
        self.use(*2 * [1, 2, 3, 2, 1])
        self.assertEqual([x.untyped_storage().nbytes() for x in views], [0, 0])
        self.layers[0].changes += 1
        self.use(0)
        self.assertTrue(all(torch.equal(x, numbers(0)[at][0][-1:]) for at, x in enumerate(views)))
        # Autograd would refuse to read tensors that have changed since it saved them.
        self.assertEqual([x._version for x in views], versions)

    def test_other_sizes(self):
        self.use(*FORWARD)
        self.layers[0].keep(0, [torch.ones(100), torch.zeros(3)])
        self.layers[0].keep("more", [torch.full((5,), 7)])
        self.assertEqual(self.layers[0].keep("none", []), [])
        self.assertEqual([x.tolist() for x in self.layers[0].on(CPU, 0)], [[1.0] * 100, [0.0] * 3])
        self.assertEqual(self.layers[0].on(CPU, "more")[0].tolist(), [7] * 5)
        self.assertEqual(self.layers[0].on(CPU, "none"), [])

    def test_changed_values(self):
        self.use(*FORWARD)
        weights = self.layers[3].lists[0][0]
        with torch.no_grad():
            weights.add_(1)
        self.assertTrue(torch.equal(self.layers[3].on(CPU, 0)[0], numbers(3)[0][0] + 1))
        weights.data.add_(1)
        self.layers[3].changes += 1
        self.assertTrue(torch.equal(self.layers[3].on(CPU, 0)[0], numbers(3)[0][0] + 2))
        self.layers[3].keep(1, numbers(0)[1])
        self.assertTrue(torch.equal(self.layers[3].on(CPU, 1)[0], numbers(0)[1][0]))
        self.assertTrue(torch.equal(self.layers[3].on(CPU, 0)[0], numbers(3)[0][0] + 2))

    def test_another_device(self):
        """Each has copies of its own, to which graphs refer, and the pages outlive the copies of both."""
        second = torch.device("cpu", 1)
        (first, _), (other, _) = (self.layers[0].on(device, 0) for device in (CPU, second))
        self.assertTrue(torch.equal(first, other))
        copies = [self.copies, host_weights._COPIES[second]]
        self.assertEqual([(x.copies.pinned, len(x.layers)) for x in copies], [(2, 1), (0, 1)])
        self.layers[0].give_up()
        self.assertEqual([x.untyped_storage().nbytes() for x in (first, other)], [0, 0])
        self.assertEqual([x.layers for x in copies], [[], []])
        self.use(0)
        self.assertTrue(torch.equal(first, numbers(0)[0][0]))
        waits = copies[1].copies.stream.synchronize
        waits.assert_not_called()
        self.layers.clear()
        gc.collect()
        self.assertEqual(waits.call_count, 2)

    def test_lists_that_nobody_has_asked_for(self):
        tensors = layer_of([[torch.ones(3)]])
        tensors.keep("seldom", [torch.zeros(5)])
        tensors.unread.add("seldom")
        tensors.on(CPU, 0)
        (made,) = tensors.copies.values()
        self.assertEqual([*made.buffers], [0])
        self.assertTrue(torch.equal(tensors.on(CPU, "seldom")[0], torch.zeros(5)))
        self.assertTrue(torch.equal(tensors.on(CPU, 0)[0], torch.ones(3)))
        self.use(1, 2)
        tensors.on(CPU, 0)
        self.assertEqual([x.untyped_storage().nbytes() > 0 for x in made.buffers.values()], [True, True])

    def test_a_copy_is_empty(self):
        self.assertEqual(copy.deepcopy(self.layers[0]).lists, {})

    def test_layers_that_are_gone(self):
        self.use(*FORWARD, *BACKWARD)
        pages = [weakref.ref(layer.pages[0]) for layer in self.layers]
        self.layers.clear()
        gc.collect()
        self.assertEqual([x() for x in pages], [None] * 4)
        self.assertEqual([x.of() for x in self.copies.layers], [None] * 2)
        others = [layer_of(numbers(i)) for i in (7, 8)]
        for tensors, number in zip(others, (7, 8), strict=True):
            self.assertTrue(torch.equal(tensors.on(CPU, 0)[0], numbers(number)[0][0]))

    def test_pages_that_cannot_be_pinned_at_once(self):
        """What was pinned before an error is not pinned again."""
        tensors, pinned = layer_of([[torch.ones(3)], [torch.ones(5)]]), []

        def pin(pages, *_):
            if len(pinned) == 1 and not failed:
                failed.append(pages)
                raise MemoryError
            pinned.append(pages)

        copies, failed = mock.Mock(pin=pin), []
        with self.assertRaises(MemoryError):
            tensors.pin(copies)
        for _ in range(2):
            tensors.pin(copies)
        self.assertEqual([x.data_ptr() for x in pinned], [x.data_ptr() for x in tensors.pages.values()])

    def test_inference(self):
        with torch.inference_mode():
            found = self.layers[0].on(CPU, 0)[0]
        self.assertFalse(found.is_inference())


class ExpertsTest(InterpretedKernelsTest):
    def test_saves_no_copy_for_backward(self):
        """The op reads the weights again in backward."""
        copies = self.enterContext(copied_on_a_cpu())
        weights = [torch.randn(3, *size).bfloat16() for size in ((128, 64), (64, 64))]
        tensors = layer_of([[x] for x in weights])
        index, x = torch.tensor([[0, 1], [2, 0], [1, 2]]), torch.randn(3, 64).bfloat16().requires_grad_()
        for impl in ("reference", "triton"):
            expected = experts(x, index, torch.ones(3, 2), *weights, impl=impl)
            stored = [
                DequantizedExperts(w.shape, w.dtype, lambda first, last, at=at: tensors.on(CPU, at)[0][first:last])
                for at, w in enumerate(weights)
            ]
            y = experts(x, index, torch.ones(3, 2), *stored, impl=impl)
            self.assertTrue(torch.equal(y, expected))
            buffers = [StorageWeakRef(x.untyped_storage()) for x in copies.layers[0].buffers.values()]
            without_memory(copies)
            gc.collect()
            self.assertEqual([x.expired() for x in buffers], [True, True])
            upstream = torch.randn_like(y)
            found, want = (torch.autograd.grad(y, x, upstream)[0] for y in (y, expected))
            self.assertTrue(torch.equal(found, want))


class StreamsTest(unittest.TestCase):
    """What waits for what on a GPU, by the calls."""

    def test_a_copy_waits_for_the_products_before_it_and_products_for_the_copy(self):
        log, compute, copying = [], mock.Mock(), mock.Mock()
        compute.wait_event.side_effect = lambda event: log.append(f"compute waits for {event}")
        copying.wait_stream.side_effect = lambda stream: log.append("copy waits for compute")
        events = iter("abcdefgh")
        copying.record_event.side_effect = lambda timer: log[-1:] == ["copied"] and next(events)
        with (
            mock.patch("torch.cuda.Stream", lambda device: copying),
            mock.patch("torch.cuda.stream", lambda stream: nullcontext(log.append("copied"))),
            mock.patch("torch.cuda.current_stream", lambda device: compute),
            mock.patch.object(offload.Copies, "pin"),
            mock.patch.object(host_weights, "_COPIES", {}),
        ):
            copies = DeviceCopies(CPU)
            layers = [layer_of([[torch.ones(3)]]) for _ in range(3)]
            one = ["copy waits for compute", "copied"]
            for layer in layers[:2]:
                copies.get(layer, 0)
            self.assertEqual(log, [*one, "compute waits for a", *one, "compute waits for b"])
            log.clear()
            copies.get(layers[2], 0)
            # The first layer gave up its memory, which nothing may write to before its copy has ended.
            self.assertEqual(log, ["compute waits for a", *one, "compute waits for c"])
            # A product on another stream.
            other, buffer = mock.Mock(), mock.Mock()
            copies.layers[-1].buffers = {0: buffer}
            with mock.patch("torch.cuda.current_stream", lambda device: other):
                copies.get(layers[2], 0)
            other.wait_event.assert_called_once_with("c")
            buffer.record_stream.assert_called_once_with(other)
            copies.layers.clear()
