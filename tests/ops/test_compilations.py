"""Compiled kernels are recorded with what selects them. Triton compiles for a GPU on a CPU; TileLang is a stand-in."""

import os
import signal
import subprocess
import sys
import tempfile
import types
import unittest
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from transformers_packed.ops import compilations as module
from transformers_packed.ops.backends import flash_qla
from transformers_packed.ops.compilations import compilations


TRITON = """
import sys
sys.modules["fla"] = sys.modules["causal_conv1d"] = None
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton import knobs
from transformers_packed.ops.backends.triton.cross_entropy import _scaled
from transformers_packed.ops.backends.caches import caches
from transformers_packed.ops.compilations import compilations

found, heard = [], []
knobs.compilation.listener = lambda **event: heard.append(event["cache_hit"])
signature = {"x_ptr": "*bf16", "factor_ptr": "*fp32", "y_ptr": "*bf16", "count": "i32", "BLOCK": "constexpr"}
with compilations(found.append):
    for multiples in ({}, {(3,): [["tt.divisibility", 16]]}, {}):
        source = ASTSource(_scaled, signature, {"BLOCK": 4096}, multiples)
        compile(source, target=GPUTarget("cuda", 90, 32))
compile(ASTSource(_scaled, signature, {"BLOCK": 2048}, {}), target=GPUTarget("cuda", 90, 32))
for one in found:
    print(one.package, one.kernel, one.key, one.seconds > 0, one.from_disk, sep="|")
print(heard, caches()["triton"])
"""


# The process is killed between the files of a kernel and the index that makes it valid.
KILLED = """
import os, signal, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from triton.runtime.cache import FileCacheManager
from transformers_packed.ops.backends.triton.cross_entropy import _scaled
from transformers_packed.ops.compilations import compilations

# A shell lets what it runs in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[1] != "0":
    FileCacheManager.put_group = lambda *_: os.kill(os.getpid(), int(sys.argv[1]))
signature = {"x_ptr": "*bf16", "factor_ptr": "*fp32", "y_ptr": "*bf16", "count": "i32", "BLOCK": "constexpr"}
with compilations(lambda one: print(one.from_disk)):
    kernel = compile(ASTSource(_scaled, signature, {"BLOCK": 4096}, {}), target=GPUTarget("cuda", 90, 32))
print(len(kernel.asm["cubin"]) > 0)
"""


class Configured:
    """A stand-in for the classes of TileLang and of Triton's autotuner."""

    def __init__(self, *args, from_database=False, **kwargs):
        self.from_database = from_database


def run_with_cache(folder, code, *arguments):
    """Run code in a process that compiles kernels of Triton into a folder."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": folder}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


class CompilationsTest(unittest.TestCase):
    @unittest.skipUnless(find_spec("triton"), "needs triton")
    @pytest.mark.slow
    def test_kernels_of_triton(self):
        with tempfile.TemporaryDirectory() as folder:
            result = run_with_cache(folder, TRITON)
        self.assertEqual(result.returncode, 0, result.stderr)
        start = "triton|_scaled|x_ptr:*bf16, factor_ptr:*fp32, y_ptr:*bf16, count:i32"
        lines = [
            f"{start}, BLOCK=4096|True|False",
            f"{start}:16, BLOCK=4096|True|False",
            f"{start}, BLOCK=4096|True|True",
            # The listener of the process hears all of them, and is the only one afterwards.
            f"[False, False, True, False] ({folder!r}, 'TRITON_CACHE_DIR')",
        ]
        self.assertEqual(result.stdout.splitlines()[-4:], lines)

    @unittest.skipUnless(find_spec("triton"), "needs triton")
    @pytest.mark.slow
    def test_a_process_that_ends_while_it_compiles(self):
        """It leaves no kernel that another process would load."""
        with tempfile.TemporaryDirectory() as folder:
            found = []
            for number in (signal.SIGKILL, signal.SIGINT, 0, 0):
                result = run_with_cache(folder, KILLED, str(int(number)))
                found.append((result.returncode, result.stdout.split()))
        good = (0, ["False", "True"]), (0, ["True", "True"])
        self.assertEqual(found, [(-signal.SIGKILL, []), (-signal.SIGINT, []), *good])

    @unittest.skipUnless(find_spec("triton"), "needs triton")
    def test_measurements_of_the_autotuner(self):
        from triton.runtime.autotuner import Autotuner

        tuner = Autotuner.__new__(Autotuner)
        tuner.cache, tuner.base_fn = {}, types.SimpleNamespace(__name__="rule")

        def run(self, size, measures):
            if size not in self.cache:
                self.cache[size,] = self._bench() if measures else "from disk"

        found = []
        with mock.patch.object(Autotuner, "run", run), mock.patch.object(Autotuner, "_bench", lambda self: "best"):
            methods = Autotuner.run, Autotuner._bench
            with compilations(found.append):
                for size, measures in ((16, True), (32, False)):
                    tuner.run(size, measures)
            self.assertEqual((Autotuner.run, Autotuner._bench), methods)
        kept = [(one.package, one.kernel, one.key, one.from_disk) for one in found]
        self.assertEqual(kept, [("autotune", "rule", "16", False), ("autotune", "rule", "32", True)])
        with mock.patch("triton.runtime.autotuner.Autotuner", type("Autotuner", (), {})):
            with self.assertLogs("transformers_packed", "INFO") as logs, compilations(found.append):
                pass
        self.assertIn("Kernels of this release of triton are not recorded", logs.output[0])

    def test_kernels_of_tilelang(self):
        class Kernel(Configured):
            pass

        class Impl:
            def __init__(self, name):
                self.func = types.SimpleNamespace(orig_func=types.SimpleNamespace(__name__=name))

            def compile(self, heads, block=128):
                return Kernel(heads, from_database=heads == 32)

        jit, kernel = types.ModuleType("tilelang.jit"), types.ModuleType("tilelang.jit.kernel")
        jit.JITImpl, kernel.JITKernel = Impl, Kernel
        names = {"tilelang": types.ModuleType("tilelang"), "tilelang.jit": jit, "tilelang.jit.kernel": kernel}
        methods, found = (Impl.compile, Kernel.__init__), []
        with mock.patch.dict(sys.modules, names), mock.patch.object(flash_qla, "_problem", lambda: ""):
            with compilations(found.append):
                kernels = [Impl("forward").compile(16, block=64), Impl("forward").compile(32)]
            self.assertEqual([x.from_database for x in kernels], [False, True])
            self.assertEqual((Impl.compile, Kernel.__init__), methods)
            del jit.JITImpl
            with self.assertLogs("transformers_packed", "INFO") as logs, compilations(found.append):
                pass
        self.assertIn("Kernels of this release of tilelang are not recorded", logs.output[0])
        kept = [(one.package, one.kernel, one.key, one.from_disk) for one in found]
        self.assertEqual(kept, [("tilelang", "forward", "16, block=64", False), ("tilelang", "forward", "32", True)])

    def test_graphs_of_the_compiler(self):
        found = []
        function = torch.compile(lambda x: x + 1, backend="eager")
        with compilations(found.append):
            function(torch.ones(2))
            function(torch.ones(2))
        self.assertEqual([(one.package, one.from_disk) for one in found], [("inductor", False)])
        function(torch.ones(2, 2))
        self.assertEqual(len(found), 1)

    def test_without_packages(self):
        with mock.patch.object(module, "find_spec", lambda name: None), compilations(self.fail):
            pass
