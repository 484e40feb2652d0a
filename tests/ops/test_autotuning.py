"""The variants of an autotuned kernel are compiled together. A GPU compiles real ones."""

import threading
import unittest
from types import SimpleNamespace
from unittest import mock

import triton
from triton.runtime.autotuner import Autotuner

from transformers_packed.ops import compilations


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
