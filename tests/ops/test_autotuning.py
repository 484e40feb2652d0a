"""The variants of an autotuned kernel are compiled together. A GPU compiles real ones."""

import threading
import unittest
from types import SimpleNamespace
from unittest import mock

import triton
from parameterized import parameterized
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
