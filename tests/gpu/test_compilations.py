"""Kernels of the delta rules are compiled in the first forward, and in threads as far as they are FlashQLA's."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

import torch
from common.gpu import needs_gpu, report

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import compilations, gated_delta_rule, kimi_delta_rule
from transformers_packed.ops.backends import flash_qla, flash_qla_kernels
from transformers_packed.shared_prompts import SharedPrompts


def inputs(rule, tokens, heads):
    """Query, key, value, gate and rate in bfloat16, with another number of heads than other tests have."""
    torch.manual_seed(0)
    shapes = [(heads[0], 128), (heads[0], 128), (heads[1], 128)]
    tensors = [torch.randn(1, tokens, *shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    by_channel = (128,) if rule is kimi_delta_rule else ()
    gate = -torch.rand(1, tokens, heads[1], *by_channel, device="cuda")
    return [*(x.requires_grad_() for x in tensors), gate, torch.rand(1, tokens, heads[1], device="cuda")]


# The forward of a row, whose kernels are compiled or loaded. The last line tells how many, and whether all is well.
FORWARD = """
import logging, sys, torch
from transformers_packed import SequenceBoundaries
from transformers_packed.ops import gated_delta_rule
from transformers_packed.ops.compilations import compilations

logging.basicConfig(stream=sys.stdout, format="%(message)s")
logging.getLogger("transformers_packed").setLevel("INFO")
torch.manual_seed(0)
shapes = [(1, 192, heads, 128) for heads in (3, 3, 6)]
tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
gate, rate = -torch.rand(1, 192, 6, device="cuda"), torch.rand(1, 192, 6, device="cuda", dtype=torch.bfloat16)
row, found = SequenceBoundaries.from_lengths([100, 30, 62], device="cuda"), []
sys.stdin.readline()
with compilations(found.append), torch.no_grad():
    output, _ = gated_delta_rule(*tensors, gate, rate, boundaries=row, impl="flash_qla", use_qk_l2norm_in_kernel=True)
kernels = [one for one in found if one.package == "tilelang"]
print(sum(not one.from_disk for one in kernels), len(kernels), output.isfinite().all().item(), flush=True)
"""


@needs_gpu
@unittest.skipUnless(torch.cuda.is_available() and flash_qla.is_usable(), "needs FlashQLA")
class ProcessesTest(unittest.TestCase):
    def start(self, folder):
        environment = os.environ | {"TILELANG_CACHE_DIR": folder}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen([sys.executable, "-c", FORWARD], text=True, env=environment, **pipes)
        self.addCleanup(process.kill)
        return process

    def go_on(self, process, until):
        """Let a process run, and wait for this line of it."""
        process.stdin.write("\n")
        process.stdin.flush()
        self.assertTrue(any(until in line for line in iter(process.stdout.readline, "")), until)

    def test_one_of_two_compiles_after_a_third_was_killed(self):
        with tempfile.TemporaryDirectory() as folder:
            processes = [self.start(folder) for _ in range(3)]
            killed, *others = processes
            self.go_on(killed, "threads compile")
            # Its compilers are at work.
            time.sleep(2)
            start = time.perf_counter()
            for process in others:
                self.go_on(process, "Another process compiles the same kernels")
            # All others wait for it.
            killed.send_signal(signal.SIGKILL)
            said = [process.communicate(timeout=120)[0] for process in others]
            killed.communicate()
            seconds = time.perf_counter() - start
        results = [text.splitlines()[-1].split() for text in said]
        built = sorted(int(result[0]) for result in results)
        report("kernels of two processes", built=built, seconds=seconds)
        self.assertEqual([result[2] for result in results], ["True", "True"], said)
        self.assertEqual(len({result[1] for result in results}), 1, said)
        # What the first one did not save is compiled by one process, and loaded by the other one.
        self.assertEqual(built[0], 0, said)
        self.assertGreater(built[1], 0, said)


@needs_gpu
class CompilationTest(unittest.TestCase):
    def setUp(self):
        self.found = []
        self.enterContext(mock.patch.object(flash_qla_kernels, "_GROUPS", {}))
        self.enterContext(mock.patch.object(flash_qla_kernels, "_PROGRESS", flash_qla_kernels._Progress()))
        self.enterContext(mock.patch.object(compilations, "_TUNED", set()))
        self.enterContext(compilations.compilations(self.tell))

    def tell(self, compilation):
        self.found.append((compilation.package, threading.current_thread().name, compilation.kernel))

    @unittest.skipUnless(torch.cuda.is_available() and flash_qla.is_usable(), "needs FlashQLA")
    def test_trees(self):
        row = SharedPrompts.of(SequenceBoundaries.from_lengths([70, 64, 3, 9, 5]), [-1, 0, 0, 2, 2]).to("cuda")
        tensors = inputs(gated_delta_rule, row.total_length, (3, 6))
        output, _ = gated_delta_rule(*tensors, boundaries=row, impl="flash_qla", use_qk_l2norm_in_kernel=True)
        output.float().sum().backward()
        threads = [name for package, name, _ in self.found if package == "tilelang"]
        report("kernels of a tree", tilelang=len(threads))
        # Forwards by the states that they begin and end with, and each kernel of the backward with and without them.
        self.assertGreaterEqual(len(threads), 8)
        self.assertEqual([name for name in threads if not name.startswith("ThreadPoolExecutor")], [])

    def test_nothing_is_left_for_the_backward(self):
        for rule, impl in ((gated_delta_rule, "fla"), (kimi_delta_rule, "fla")):
            with self.subTest(rule.__name__):
                row = SequenceBoundaries.from_lengths([100, 30, 62], device="cuda")
                output, _ = rule(*inputs(rule, 192, (3, 3)), boundaries=row, impl=impl, use_qk_l2norm_in_kernel=True)
                self.assertTrue(self.found)
                loss = output.float().sum()
                self.found.clear()
                loss.backward()
                self.assertEqual([x for x in self.found if x[0] in ("triton", "autotune", "tilelang")], [])
