"""Copies of checkpoints to host memory and back, beside the computation: `make test-gpu`."""

import unittest
from functools import partial
from unittest import mock

import pytest
import torch
from common.gpu import report, synchronising_is_an_error
from common.real_heads import REAL_HEADS, model_on_gpu, on_gpu, random_documents
from mixins.model import gradients, packed_batch
from parameterized import parameterized
from torch.utils.checkpoint import checkpoint

from transformers_packed.models.versions import can_select_checkpoints
from transformers_packed.ops import offload
from transformers_packed.ops.kept_outputs import Layer
from transformers_packed.ops.offload import Copies, HostCheckpoints


LENGTHS = (5000, 1, 2500, 691)
CHECKPOINT = sum(LENGTHS) * REAL_HEADS["hidden_size"] * 2
LAYERS = REAL_HEADS["num_hidden_layers"]


def row(*lengths: int) -> dict:
    return on_gpu(packed_batch(random_documents(lengths, seed=sum(lengths))))


@pytest.mark.gpu
@unittest.skipUnless(
    torch.cuda.is_available() and can_select_checkpoints(), "needs a CUDA device and Transformers 5.23"
)
class OffloadTest(unittest.TestCase):
    def setUp(self):
        torch.use_deterministic_algorithms(True)
        self.addCleanup(torch.use_deterministic_algorithms, False)
        # Inputs of layers are 4 MiB.
        self.enterContext(mock.patch.object(offload, "SMALLEST_UNASKED", 1 << 20))
        self.model = model_on_gpu()
        self.batch = row(*LENGTHS)
        self.enable(False)

    def enable(self, on_host: bool | str, reentrant: bool = False, **options) -> None:
        self.model.activation_checkpointing_enable({"use_reentrant": reentrant}, offload=on_host, **options)

    @property
    def copies(self) -> Copies:
        (copies,) = self.model.host_checkpoints._copies.values()
        return copies

    def slow_down(self) -> None:
        """Let each copy begin some 10 ms later."""
        begin = self.copies.start

        def start(target, source):
            with torch.cuda.stream(self.copies.stream):
                torch.cuda._sleep(20_000_000)
            return begin(target, source)

        self.copies.start = start

    def gradients(self, batch=None):
        return gradients(self.model, self.model(**(batch or self.batch)).loss)

    def assert_same(self, actual, expected):
        self.assertEqual([name for name in expected if not torch.equal(actual[name], expected[name])], [])

    @parameterized.expand([(*which, n) for which in ((False, True), (True, True), (False, "auto")) for n in (1, 2)])
    def test_changes_no_bit(self, reentrant, on_host, every):
        expected = self.gradients()
        self.enable(on_host, reentrant, every_n_layers=every)
        for _ in range(3):
            self.assert_same(self.gradients(), expected)
        self.assertGreaterEqual(self.copies.bytes, LAYERS // every * CHECKPOINT)

    @parameterized.expand([("slow", 1), ("slow", 0), ("fast", 1)])
    def test_automatic_copies_that_take_longer_than_layers(self, which, room):
        expected = self.gradients()
        self.enable("auto")
        self.gradients()
        if which == "slow":
            self.slow_down()
        self.copies.room = lambda allocated=None: room << 40
        with mock.patch.object(offload, "_LAYERS", 3 * (LAYERS - 1)):
            # Only rows without outputs of linear layers tell. Of slow copies, there are none after some rows.
            for _ in range(12):
                self.assert_same(self.gradients(), expected)
        stopped = which == "slow" and room > 0
        self.assertEqual(self.copies.bytes == 0, stopped)
        if which == "slow":
            self.assertIsNone(self.copies.layers)
        report(f"automatic copies, {which}", stopped=stopped)

    def test_outputs_of_linear_layers(self):
        """They change no bit, however many there are, and copies that are slow let there be fewer."""
        expected = self.gradients()
        self.enable("auto")
        found: list[int] = []
        known = Layer.known

        def count(layer):
            outputs = known(layer)
            found.append(len(outputs))
            return outputs

        for _ in range(20):
            self.assert_same(self.gradients(), expected)
        before = self.copies.outputs.quota.value
        with mock.patch.object(Layer, "known", count):
            self.assert_same(self.gradients(), expected)
        self.assertGreater(sum(found), 0)
        self.assertGreater(self.copies.bytes_unasked, 0)
        self.slow_down()
        for _ in range(8):
            self.assert_same(self.gradients(), expected)
        # Of the calls, half are in the forward.
        report("outputs of linear layers", kept=sum(found), calls=len(found) // 2, quota=before)
        self.assertLess(self.copies.outputs.quota.value, before)

    @parameterized.expand(["copies", "computation"])
    def test_slow_streams(self, which):
        """Each side waits for the other where it must."""
        expected = self.gradients()
        self.enable(True)
        self.gradients()
        stream = self.copies.stream if which == "copies" else torch.cuda.current_stream()

        def delay(*_):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)

        for layer in self.model.model.layers:
            layer.register_forward_pre_hook(delay)
            layer.register_full_backward_hook(delay)
        for _ in range(3):
            self.assert_same(self.gradients(), expected)

    def test_several_graphs(self):
        """Two forwards before a backward, a graph that is used twice, and one that is never used."""
        rows = [self.batch, row(300, 4000)]
        expected = gradients(self.model, sum(self.model(**batch).loss for batch in rows))
        twice = {name: 2 * x for name, x in self.gradients().items()}
        self.enable(True)
        self.assert_same(gradients(self.model, sum(self.model(**batch).loss for batch in rows)), expected)
        self.model(**self.batch)
        loss = self.model(**self.batch).loss
        self.model.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        self.assert_same({name: x.grad for name, x in self.model.named_parameters()}, twice)

    def test_memory(self):
        def after_forward():
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = self.model(**self.batch).loss
            found = torch.cuda.memory_allocated() - before
            loss.backward()
            self.model.zero_grad()
            torch.cuda.reset_peak_memory_stats()
            return found

        without = [after_forward() for _ in range(2)][1]
        self.enable(True)
        with_it = [after_forward() for _ in range(2)][1]
        report("checkpoints in host memory", MiB=(without - with_it) / 2**20)
        self.assertGreaterEqual(without - with_it, (LAYERS - 1) * CHECKPOINT * 0.99)
        # Nothing stays behind.
        self.assertEqual([after_forward() for _ in range(3)], [with_it] * 3)

    def test_buffers_are_used_again(self):
        self.enable(True)
        for lengths in (LENGTHS, (3000, 1000), (9000, 2), (100, 4000), (9100,)):
            self.gradients(row(*lengths))
            self.assertEqual(len(self.copies.free), LAYERS)
        self.assertTrue(all(buffer.is_pinned() for buffer in self.copies.free))
        self.assertGreaterEqual(
            min(buffer.nbytes for buffer in self.copies.free), 9100 * REAL_HEADS["hidden_size"] * 2
        )

    def test_does_not_wait_for_the_gpu(self):
        self.enable(True)
        for n in (0, 1):
            lengths = (LENGTHS[0] + n, *LENGTHS[1:-1], LENGTHS[-1] - n)
            batch = row(*lengths) | {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
            batch = {name: batch[name] for name in ("input_ids", "labels", "cu_seqlens")}
            if n == 0:
                self.model(**batch).loss.backward()
                continue
            with synchronising_is_an_error():
                self.model(**batch).loss.backward()

    def test_pages_that_cannot_be_pinned(self):
        """The error does not reach the next kernel."""
        copies = Copies(torch.device("cuda"))
        pages = copies.allocate(1 << 16)
        with self.assertRaisesRegex(MemoryError, "expected 1 MiB more of host memory that CUDA can pin"):
            copies.pin(pages, "offload", "")
        self.assertEqual(float(torch.ones(3, device="cuda").sum()), 3)

    def test_a_layer_that_writes_into_its_input(self):
        first, then = (torch.ones(1 << 20, device="cuda", requires_grad=True) for _ in range(2))
        run = partial(HostCheckpoints(), partial(checkpoint, use_reentrant=False))
        given = first * 2
        output = run(lambda x: x.sin(), given)
        with torch.no_grad():
            given.add_(1)
        with self.assertRaisesRegex(ValueError, "layers that leave their input as it is"):
            run(lambda x: x.sin(), then * 2)
        with self.assertRaisesRegex(ValueError, "layers that leave their input as it is"):
            output.sum().backward()
