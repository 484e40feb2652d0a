"""The variants of an autotuned kernel are compiled together. A GPU compiles real ones."""

import logging
import os
import sys
import tempfile
import threading
import unittest
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
import triton
from parameterized import parameterized
from triton.runtime.autotuner import Autotuner

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import compilations
from transformers_packed.ops.backends import fla
from transformers_packed.ops.gated_delta_rule import reference


class Config:
    def __init__(self, block):
        self.block = block

    def all_kwargs(self):
        return {"BLOCK": self.block, "num_warps": 4}


class AutotuningTest(unittest.TestCase):
    def tuner(self, configs, run):
        return SimpleNamespace(
            configs=configs,
            early_config_prune=None,
            perf_model=None,
            nargs={"x": "a tensor"},
            cache_results=False,
            fn=SimpleNamespace(run=run),
        )

    def test_all_variants_are_compiled_at_once(self):
        calls, barrier = [], threading.Barrier(3)

        class Mode:
            """As `triton.AsyncCompileMode`: what `run` compiles goes to the threads, and the end waits for it."""

            def __init__(self, pool):
                self.pool, self.futures = pool, []

            def __enter__(self):
                modes.append(self)

            def __exit__(self, *error):
                [future.result() for future in self.futures]
                calls.append("done")

        def run(*args, **kwargs):
            calls.append((args, kwargs))
            modes[-1].futures.append(modes[-1].pool.submit(barrier.wait, 20))

        modes, before = [], Autotuner.prune_configs
        configs = [Config(16), Config(32), Config(64)]
        with (
            mock.patch.object(triton, "AsyncCompileMode", Mode),
            mock.patch.object(compilations, "threads_of_this_process", lambda: 3),
        ):
            with compilations.tuned_in_threads():
                found = Autotuner.prune_configs(self.tuner(configs, run), {"grid": (1,), "warmup": False, "EPS": 1})
                self.assertEqual(Autotuner.prune_configs(self.tuner(configs[:1], None), {}), configs[:1])
        self.assertEqual(found, configs)
        self.assertEqual(calls.pop(), "done")
        self.assertEqual(calls.pop(), "done")
        options = {"grid": (1,), "warmup": True, "EPS": 1, "num_warps": 4}
        self.assertEqual(calls, [(("a tensor",), options | {"BLOCK": block}) for block in (16, 32, 64)])
        self.assertIs(Autotuner.prune_configs, before)

    @parameterized.expand([True, False])
    def test_measurements_on_disk(self, found):
        """Of an earlier process: no variant is compiled but the fastest one, by the autotuner."""
        compiled, measured = [], []

        def look_up(self, key, configs, measure_all):
            if not found:
                measure_all()
            return found

        class Tuner(SimpleNamespace):
            __hash__ = object.__hash__

        plain = self.tuner([Config(16), Config(32)], lambda *args, **kwargs: compiled.append(kwargs["BLOCK"]))
        tuner = Tuner(**vars(plain) | {"cache_results": True})
        with mock.patch.object(Autotuner, "check_disk_cache", look_up), compilations.tuned_in_threads():
            configs = Autotuner.prune_configs(tuner, {"EPS": 1})
            self.assertEqual(compiled, [])
            got = Autotuner.check_disk_cache(tuner, ("key",), configs, lambda: measured.append(list(compiled)))
        self.assertEqual((got, measured), (found, [] if found else [[16, 32]]))

    def test_measures_are_short(self):
        tuner, own = (Autotuner.__new__(Autotuner) for _ in range(2))
        tuner._do_bench, own._do_bench = None, len
        driver = mock.Mock(**{"get_benchmarker.return_value": triton.testing.do_bench})
        with mock.patch.object(triton.runtime.driver, "_active", driver):
            before = tuner.do_bench
            with compilations.tuned_in_threads():
                self.assertEqual((tuner.do_bench.func, own.do_bench), (triton.testing.do_bench, len))
                self.assertLess(sum(tuner.do_bench.keywords.values()), 50)
            self.assertIs(tuner.do_bench, before)

    def test_other_releases_of_triton(self):
        with (
            mock.patch.object(triton, "AsyncCompileMode", None),
            self.assertLogs("transformers_packed", "INFO") as logs,
        ):
            with compilations.tuned_in_threads():
                pass
        self.assertIn("one after the other", logs.output[0])


class FirstCallTest(unittest.TestCase):
    """A stand-in for flash-linear-attention runs the reference on the CPU, which counts as a GPU."""

    def setUp(self):
        self.calls, self.threads = [], []

        def chunk_kda(query, key, value, g, beta, *, safe_gate, cu_seqlens=None, use_graph=None, **options):
            self.threads.append(threading.current_thread())
            active = Autotuner.prune_configs is not before
            self.calls.append((query.shape[1], value.requires_grad, active, None if cu_seqlens is None else "packed"))
            row = None if cu_seqlens is None else SequenceBoundaries.from_cu_seqlens(cu_seqlens)
            output, state = reference(query, key, value, g, beta, boundaries=row, **options)
            if output.requires_grad:
                output.register_hook(lambda gradient: self.calls.append("backward"))
            return output, state

        before = Autotuner.prune_configs
        package, chunk = ModuleType("fla.ops.kda"), ModuleType("fla.ops.kda.chunk")
        package.chunk_kda, package.fused_recurrent_kda = chunk_kda, None
        self.enterContext(mock.patch.dict(sys.modules, {package.__name__: package, chunk.__name__: chunk}))
        self.enterContext(mock.patch.object(fla, "_is_compiled_for", lambda x: True))
        self.enterContext(mock.patch.object(compilations, "_TUNED", set()))
        folder = self.enterContext(tempfile.TemporaryDirectory())
        self.enterContext(mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder))
        self.enterContext(mock.patch.object(fla, "_MEASURED", 8))

    def call(self, lengths=(7, 5), requires_grad=True, state=None, **options):
        row = None if lengths is None else SequenceBoundaries.from_lengths(lengths)
        length = 12 if lengths is None else row.total_length
        torch.manual_seed(0)
        tensors = [torch.randn(1, length, 2, 4, requires_grad=requires_grad) for _ in range(4)]
        gate, beta = -tensors.pop().abs(), torch.rand(1, length, 2)
        options = {"initial_state": state, "output_final_state": state is not None} | options
        options |= {"use_qk_l2norm_in_kernel": True, "a_log": None, "dt_bias": None, "lower_bound": None}
        return fla.kimi_delta_rule(*tensors, gate, beta, boundaries=row, **options)[0]

    def test_all_kernels_are_tuned_by_the_first_call(self):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            output = self.call()
        # A row of its own, forward and backward, with variants in threads.
        self.assertEqual(self.calls, [(8, True, True, "packed"), "backward", (12, True, False, "packed")])
        self.assertIsNot(self.threads[0], self.threads[1])
        output.sum().backward()
        # Checkpointing counts what a call saves, and sees no more than in a later one.
        del self.calls[:]
        counted = len(saved)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
            self.call()
        self.assertEqual(len(saved), 2 * counted)
        self.call((2, 3, 9))
        self.assertEqual(self.calls, [(12, True, False, "packed"), (14, True, False, "packed")])

    def test_each_kind_of_call(self):
        state = torch.zeros(2, 2, 4, 4)
        for options in ({}, {"requires_grad": False}, {"state": state}, {"lengths": None}):
            for expected in (2, 1):
                del self.calls[:]
                with self.assertLogs("transformers_packed", "INFO") as logs:
                    logging.getLogger("transformers_packed").info("at least one line")
                    self.call(**options)
                self.assertNotIn("one after the other", " ".join(logs.output))
                self.assertEqual(len([x for x in self.calls if x != "backward"]), expected, options)
                self.assertEqual("backward" in self.calls, expected == 2 and options.get("requires_grad", True))

    def test_an_error_leaves_it_to_the_call(self):
        with (
            mock.patch.object(compilations, "tuned_in_threads", side_effect=RuntimeError("no threads")),
            self.assertLogs("transformers_packed", "INFO") as logs,
        ):
            self.call()
        self.assertEqual(self.calls, [(12, True, False, "packed")])
        self.assertIn("one after the other: no threads", " ".join(logs.output))
        self.assertIn("0 kernels compiled and 0 loaded", logs.output[-1])

    @parameterized.expand([("done", True), ("failed", False)])
    def test_one_process_tunes(self, _, is_done):
        """It waits for its turn, has the threads of all processes, and ends the turn in any case."""
        turns, order, tuned = [], [], compilations.tuned_in_threads

        def make(*name):
            turn = mock.Mock(threads=3)
            turn.wait.side_effect = lambda: order.append(threading.current_thread())
            turn.end.side_effect = lambda is_done: order.append((len(self.calls), is_done))
            turns.append(name)
            return turn

        def in_threads(threads):
            order.append(threads)
            if not is_done:
                raise RuntimeError("no threads")
            return tuned(threads)

        with (
            mock.patch.object(compilations, "Turn", make),
            mock.patch.object(compilations, "tuned_in_threads", in_threads),
        ):
            self.call()
            self.call((2, 3, 9))
        # It waits in the caller's thread, which Ctrl-C interrupts.
        self.assertEqual(order, [threading.current_thread(), 3, (2 * is_done, is_done)])
        # No number of a device, and no length of a row, which differ between processes.
        ((cache, author, device, op, *kind),) = turns
        self.assertEqual((cache, author, device, op), ("triton", "flash-linear-attention", "cpu", "kimi_delta_rule"))
        self.assertNotIn("12", "".join(kind))
