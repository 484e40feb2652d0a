"""FlashQLA's kernels are compiled together, and TileLang's lines are left out. tests/gpu compiles the real ones."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import unittest
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

from transformers_packed.ops.backends import caches, flash_qla_kernels, tilelang_output
from transformers_packed.ops.backends.flash_qla_kernels import CUT, TREES, WHOLE


BFLOAT16 = torch.bfloat16


class FlashQLACompilationTest(unittest.TestCase):
    """FlashQLA's functions are replaced by some that wait for each other, so they only return if all of them run."""

    def setUp(self):
        self.calls, self.barrier = {}, threading.Barrier(7)
        chunk = ModuleType("flash_qla.ops.gated_delta_rule.chunk")
        for name in ("kkt_solve", "fused_gdr_fwd", "fused_gdr_h", "fused_gdr_bwd", "group_reduce_vector"):
            setattr(chunk, name, partial(self.run_kernel, name))
        chunk.chunk_local_cumsum = lambda reverse=False, **kwargs: self.run_kernel("reverse" if reverse else "sum")
        parent, index = ModuleType("flash_qla.ops.gated_delta_rule"), ModuleType("flash_qla.utils.index")
        parent.chunk, index.prepare_varlen_metadata = chunk, lambda on_device, on_host: on_device
        modules = {"flash_qla": ModuleType("flash_qla"), parent.__name__: parent, index.__name__: index}
        progress = mock.patch.object(flash_qla_kernels, "_PROGRESS", flash_qla_kernels._Progress())
        patchers = mock.patch.dict(sys.modules, modules), mock.patch.object(flash_qla_kernels, "_GROUPS", {}), progress
        for patcher in (*patchers, mock.patch.object(os, "sched_getaffinity", lambda _: range(16))):
            patcher.start()
            self.addCleanup(patcher.stop)

    def run_kernel(self, name, *args, **kwargs):
        self.barrier.wait(20)
        self.calls[name] = args, kwargs

    def call(self, documents=3, rows=1, heads=(2, 4), requires_grad=True, function=None, states=(False, False)):
        shape = rows, 9
        query, key = (torch.zeros(*shape, heads[0], 128, dtype=BFLOAT16) for _ in range(2))
        value = torch.zeros(*shape, heads[1], 128, dtype=BFLOAT16, requires_grad=requires_grad)
        gates = [torch.zeros(*shape, heads[1], dtype=torch.float32) for _ in range(2)]
        cu_seqlens = None if documents is None else torch.arange(documents + 1)
        return (function or flash_qla_kernels.compile_together)(query, key, value, *gates, cu_seqlens, states)

    def test_all_kernels_of_a_row(self):
        with self.assertLogs("transformers_packed", "INFO") as logs:
            for kernels in self.call():
                kernels.wait()
        self.assertEqual(len(logs.output), 8)
        self.assertIn("FlashQLA: threads compile 7 kernels", "".join(logs.output))
        self.assertRegex("".join(logs.output), r"FlashQLA: 7 of 7 compilations have ended after \d+\.\d s")
        names = {"sum", "reverse", "kkt_solve", "fused_gdr_fwd", "fused_gdr_h", "fused_gdr_bwd", "group_reduce_vector"}
        self.assertEqual(set(self.calls), names)
        given = self.calls["fused_gdr_bwd"][1]
        self.assertEqual(given["cu_seqlens"].tolist(), [0, 1, 2, 3])
        self.assertEqual([tuple(given[x].shape) for x in "qvh"], [(1, 3, 2, 128), (1, 3, 4, 128), (1, 3, 4, 128, 128)])
        self.assertEqual(given["g"].dtype, torch.float32)
        # Once for all rows of this kind, whatever their number of documents.
        self.calls.clear()
        self.assertEqual(self.call(documents=1000), [])
        self.assertEqual(self.calls, {})

    def test_all_kernels_with_states(self):
        """Those of calls that begin with states, end with them, or both, beside those of plain rows."""
        # Four forwards, and two of each kernel of the backward that differs.
        forwards, self.barrier, lock = [], threading.Barrier(12), threading.Lock()

        def forward(**given):
            self.barrier.wait(20)
            with lock:
                forwards.append(given)

        def run(name, **given):
            self.barrier.wait(20)
            with lock:
                self.calls.setdefault(name, []).append(given)

        chunk = sys.modules["flash_qla.ops.gated_delta_rule"].chunk
        chunk.fused_gdr_fwd = forward
        chunk.fused_gdr_h, chunk.fused_gdr_bwd = partial(run, "h"), partial(run, "bwd")
        with self.assertLogs("transformers_packed", "INFO") as logs:
            for kernels in self.call(states=TREES, function=flash_qla_kernels.start_threads):
                kernels.wait()
        self.assertNotIn("one after the other", " ".join(logs.output))
        kinds = sorted((x.get("initial_state") is not None, x["output_final_state"]) for x in forwards)
        self.assertEqual(kinds, [(False, False), (False, True), (True, False), (True, True)])
        state = next(x["initial_state"] for x in forwards if x.get("initial_state") is not None)
        self.assertEqual((state.shape, state.dtype), ((3, 4, 128, 128), torch.float32))
        self.assertEqual(sorted(x["dht"] is None for x in self.calls["bwd"]), [False, True])
        self.assertEqual({tuple(x["h"].shape) for x in self.calls["bwd"]}, {(1, 3, 4, 128, 128)})
        self.assertEqual({x["h"].dtype for x in self.calls["bwd"]}, {BFLOAT16})
        self.assertEqual(sorted("initial_state" in x for x in self.calls["h"]), [False, True])
        # Plain rows find theirs, and so do later calls with states.
        for states in ((False, False), (False, True), (True, False), (True, True)):
            self.assertEqual(self.call(documents=1000, states=states), [])
        self.assertEqual(len(forwards), 4)

    def test_a_forward_waits_for_its_own_kernels(self):
        self.barrier, goes_on = mock.Mock(), threading.Event()
        chunk = sys.modules["flash_qla.ops.gated_delta_rule"].chunk
        chunk.fused_gdr_bwd = lambda **kwargs: (goes_on.wait(20), self.calls.update(fused_gdr_bwd=kwargs))
        (first,) = self.call()
        self.assertLessEqual({"sum", "kkt_solve", "fused_gdr_fwd"}, set(self.calls))
        self.assertNotIn("fused_gdr_bwd", self.calls)
        # The same row in the next layer waits for the same kernels.
        self.assertEqual(self.call(), [first])
        x = torch.zeros(2, requires_grad=True)
        output = x.exp()
        output.grad_fn.register_prehook(first.wait)
        goes_on.set()
        output.sum().backward()
        self.assertIn("fused_gdr_bwd", self.calls)

    def test_a_forward_with_states_waits_for_its_own_kernels(self):
        self.barrier, goes_on, forwards = mock.Mock(), threading.Event(), []

        def forward(initial_state=None, output_final_state=False, **others):
            kind = initial_state is not None, output_final_state
            if kind in ((True, False), (True, True)):
                goes_on.wait(20)
            forwards.append(kind)

        sys.modules["flash_qla.ops.gated_delta_rule"].chunk.fused_gdr_fwd = forward
        waiting = self.call(states=(False, True))
        # Threads compile the other kinds meanwhile.
        self.assertEqual(len(flash_qla_kernels._GROUPS), 5)
        for kernels in waiting:
            kernels.wait()
        # Neither this forward nor its backward needs the others.
        self.assertEqual({*forwards}, {(False, False), (False, True)})
        self.assertIn("fused_gdr_bwd", self.calls)
        goes_on.set()
        self.assertEqual(self.call(states=(True, True)), [])
        self.assertIn((True, True), forwards)

    def test_a_training_has_kernels_of_its_calls_only(self):
        """The first call tells what the training is: documents that are cut, or trees."""
        self.barrier = mock.Mock()

        def kinds(states):
            with mock.patch.object(flash_qla_kernels, "_GROUPS", {}) as groups:
                for kernels in self.call(states=states):
                    kernels.wait()
                return {key[-2] for key in groups}

        for states, calls in (((False, False), WHOLE), ((True, True), CUT), ((False, True), TREES)):
            backward = set() if calls is WHOLE else {"backward"}
            self.assertEqual(kinds(states), {*calls} | backward)
        with mock.patch.object(flash_qla_kernels, "_GROUPS", {}) as groups:
            for kernels in self.call(states=CUT, function=flash_qla_kernels.start_threads):
                kernels.wait()
            self.assertEqual({key[-2] for key in groups}, {*CUT, "backward"})

    def test_errors_of_threads_are_told_once(self):
        self.barrier, chunk = mock.Mock(), sys.modules["flash_qla.ops.gated_delta_rule"].chunk
        error = mock.Mock(side_effect=RuntimeError("nvcc was killed"))
        chunk.kkt_solve = chunk.fused_gdr_bwd = chunk.fused_gdr_h = error
        with self.assertLogs("transformers_packed", "INFO") as logs:
            for _ in range(2):
                for kernels in self.call():
                    kernels.wait()
        self.assertEqual(error.call_count, 3)
        self.assertEqual("".join(logs.output).count("one after the other: nvcc was killed"), 1)
        self.assertIn("7 of 7 compilations have ended", "".join(logs.output))

    def test_the_turn_ends_with_the_last_kernel(self):
        """They wait for another process before they compile, and count as done without an error."""
        for fails in (False, True):
            turn, order = mock.Mock(threads=3), []
            turn.wait.side_effect = lambda order=order: order.append("wait")
            turn.end.side_effect = lambda is_done, order=order: order.append(is_done)
            compile = mock.Mock(
                side_effect=RuntimeError("no memory") if fails else lambda order=order: order.append("run")
            )
            kernels = flash_qla_kernels.Kernels(torch.device("cpu"), [compile], [compile], turn)
            kernels.wait()
            self.assertEqual(order, ["wait", False] if fails else ["wait", "run", "run", True])

    def test_threads_after_a_turn(self):
        """The wait decides how many there may be. Without threads, the call compiles what it needs."""
        pool, sizes = flash_qla_kernels.ThreadPoolExecutor, []
        turn = mock.Mock(threads=16)
        turn.wait.side_effect = lambda: setattr(turn, "threads", 2)
        with mock.patch.object(flash_qla_kernels, "ThreadPoolExecutor", lambda size: sizes.append(size) or pool(size)):
            flash_qla_kernels.Kernels(torch.device("cpu"), [mock.Mock()] * 5, [], turn).wait()
        self.assertEqual(sizes, [2])
        turn = mock.Mock(threads=0)
        with self.assertLogs("transformers_packed", "INFO") as logs:
            flash_qla_kernels.Kernels(torch.device("cpu"), [mock.Mock()], [], turn).wait()
        self.assertIn("one after the other: max_workers must be", logs.output[0])
        turn.end.assert_called_once_with(False)

    def test_a_process_that_waits_for_its_turn_can_end(self):
        folder, compile = self.enterContext(tempfile.TemporaryDirectory()), mock.Mock()
        self.enterContext(mock.patch.object(caches, "caches", lambda: {"tilelang": (folder, "")}))
        first, second = (caches.Turn("tilelang", "flash-qla") for _ in range(2))
        first.wait()
        train = partial(flash_qla_kernels.Kernels, torch.device("cpu"), [compile], [])
        process = multiprocessing.get_context("fork").Process(target=train, args=(second,))
        process.start()
        self.addCleanup(process.kill)
        process.join(10)
        self.assertEqual(process.exitcode, 0)
        # This process has waited as that one did.
        kernels = train(second)
        self.assertEqual((kernels.starter.join(0.3), compile.call_count), (None, 0))
        first.end(True)
        kernels.wait()
        self.assertEqual(compile.call_count, 1)

    def test_turns_of_different_kernels(self):
        self.barrier, made = mock.Mock(), mock.Mock(return_value=mock.Mock(threads=3))
        with mock.patch.object(flash_qla_kernels, "Turn", made):
            for options in (
                {},
                {"requires_grad": False, "heads": (4, 4)},
                {"heads": (4, 4)},
                {"heads": (2, 2)},
                {"documents": None},
                {"states": (True, True)},
            ):
                for _ in range(2):
                    for kernels in self.call(**options):
                        kernels.wait()
        names = [given.args for given in made.call_args_list]
        self.assertEqual({name[:3] for name in names}, {("tilelang", "flash-qla", "cpu")})
        # The last call has kernels of a backward and of a forward that begins and ends with states.
        self.assertEqual((len(names), len(set(names))), (7, 7))

    def test_no_turn_without_kernels(self):
        turn = mock.Mock(threads=3)
        flash_qla_kernels.Kernels(torch.device("cpu"), [], [], turn).wait()
        turn.wait.assert_not_called()

    def test_started_before_there_is_a_row(self):
        goes_on = threading.Event()
        self.barrier = SimpleNamespace(wait=goes_on.wait)
        (started,) = self.call(documents=1, function=flash_qla_kernels.start_threads, states=WHOLE)
        self.assertEqual(self.calls, {})
        goes_on.set()
        # A row finds them, and so does one without gradients.
        self.assertEqual(self.call(documents=100), [started])
        started.wait()
        self.assertEqual(len(self.calls), 7)
        self.calls.clear()
        self.assertEqual(self.call(requires_grad=False), [])
        self.assertEqual(self.calls, {})
        # Without gradients, only the forward's are compiled.
        self.barrier = threading.Barrier(3)
        self.assertEqual(self.call(heads=(4, 4), requires_grad=False), [])
        self.assertEqual(set(self.calls), {"sum", "kkt_solve", "fused_gdr_fwd"})

    def test_the_prover_of_tilelang_leaves_ctrl_c_to_python(self):
        self.barrier, z3 = mock.Mock(), ModuleType("z3")
        z3.set_param = lambda *given: self.calls.update(z3=given)
        seen = []
        sys.modules["flash_qla.ops.gated_delta_rule"].chunk.kkt_solve = lambda **kwargs: seen.append(self.calls["z3"])
        with mock.patch.dict(sys.modules, {"z3": z3}):
            (kernels,) = self.call()
            kernels.wait()
        self.assertEqual(seen, [("ctrl_c", False)])


class QuietTest(unittest.TestCase):
    LINES = (
        "[13:49:37] : Warning: Buffer read before initialization: 1 buffer(s) read before anything writes them\n"
        "  [1] `dk_fragment` is read before anything writes it\n"
        "  --> /site/flash_qla/ops/gated_delta_rule/chunk/hopper/fused_bwd.py:466:1\n"
        "Initialize the buffer before its first read (for example with `T.clear`).\n"
        "[13:49:56] : Warning: T.vectorized loop over `j_t_vec` with extent 2 is lowered as a serial loop\n"
    )

    def test_only_lines_of_tilelang_are_left_out(self):
        code = f"""
import logging, os, runpy, sys, threading
logging.basicConfig(level="INFO")
quiet = runpy.run_path({tilelang_output.__file__!r})["quiet"]
before = os.fstat(2)
with quiet():
    os.write(2, b"\\rhalf a bar")
    threading.Event().wait(0.3)
    with quiet():
        os.write(2, {self.LINES.encode()!r})
        logging.getLogger("tilelang.jit").info("TileLang begins to compile")
        logging.getLogger("other").info("not of TileLang")
    os.system("echo of a child >&2")
    os.write(2, b"[12 files] : Warnings: mine\\nno end")
print("after", file=sys.stderr)
logging.getLogger("tilelang.jit").info("no longer")
assert (before.st_dev, before.st_ino) == (os.fstat(2).st_dev, os.fstat(2).st_ino)
"""
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        expected = "half a barINFO:other:not of TileLang\nof a child\n[12 files] : Warnings: mine\nno endafter\n"
        self.assertEqual(run.stderr.lstrip(), expected + "INFO:tilelang.jit:no longer\n")

    def test_an_error_passes(self):
        with self.assertRaises(KeyError), tilelang_output.quiet():
            raise KeyError
        self.assertEqual((tilelang_output._users, tilelang_output._opened), (0, []))
