"""Of processes that need the same kernels, one compiles them and the others wait for it. The compiler is a stand-in."""

import errno
import fcntl
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

from parameterized import parameterized

from transformers_packed.ops import kernel_archive
from transformers_packed.ops.backends import caches as module
from transformers_packed.ops.backends import threads_of_this_process
from transformers_packed.ops.backends.caches import Turn


FORK = multiprocessing.get_context("fork")


class TurnTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.use(self.folder)
        self.enterContext(mock.patch.object(module, "_PAUSE", 0.01))

    def use(self, folder):
        self.enterContext(mock.patch.object(module, "caches", lambda: {"triton": (str(folder), "")}))

    def turn(self, *kernels):
        return Turn("triton", "flash-linear-attention", *kernels)

    def goes_on(self, turn, seconds=0.3):
        """Whether several threads of a process do not wait for another one."""
        threads = [threading.Thread(target=turn.wait, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in threads)

    def test_four_processes_compile_once(self):
        barrier, kernel, compiled = FORK.Barrier(4), self.folder / "kernel", self.folder / "compiled"

        def train():
            barrier.wait()
            turn = self.turn("forward", 16)
            turn.wait()
            if not kernel.exists():
                with compiled.open("a") as file:
                    file.write(f"{os.getpid()}\n")
                time.sleep(0.3)
                kernel.touch()
            turn.end(True)

        processes = [FORK.Process(target=train) for _ in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)
        self.assertEqual([process.exitcode for process in processes], [0] * 4)
        self.assertEqual(len(compiled.read_text().split()), 1)

    @parameterized.expand([("done", True), ("failed", False)])
    def test_the_others_go_on_when_a_turn_ends(self, _, is_done):
        first, second = self.turn("forward"), self.turn("forward")
        self.assertTrue(self.goes_on(first))
        with self.assertLogs("transformers_packed", "INFO") as logs:
            self.assertFalse(self.goes_on(second))
        self.assertEqual(len(logs.output), 1)
        self.assertIn("Another process compiles the same kernels", logs.output[0])
        self.assertTrue(self.goes_on(self.turn("backward")))
        # Only the process that compiles may end it.
        second.end(True)
        first.end(is_done)
        self.assertTrue(self.goes_on(second, 5))
        # Nobody waits for kernels that are in the cache, and nobody compiles them alone.
        turns = [self.turn("forward") for _ in range(2)]
        self.assertTrue(self.goes_on(turns[0]))
        self.assertEqual(self.goes_on(turns[1]), is_done)
        turns[0].end(True)

    @parameterized.expand([("killed", signal.SIGKILL), ("interrupted", signal.SIGINT)])
    def test_a_process_that_ends_while_it_compiles(self, _, number):
        ready = FORK.Event()

        def keep():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            turn = self.turn("forward")
            ready.set()
            time.sleep(60)
            turn.end(True)

        process = FORK.Process(target=keep)
        process.start()
        self.assertTrue(ready.wait(30))
        turn = self.turn("forward")
        self.assertFalse(self.goes_on(turn))
        os.kill(process.pid, number)
        process.join(30)
        self.assertTrue(self.goes_on(turn, 5))
        # It has left no mark that its kernels were done.
        self.assertEqual([x.stat().st_size for x in (self.folder / module._FOLDER).iterdir()], [0])

    def test_nobody_waits_forever(self):
        first, second = self.turn("forward"), self.turn("forward")
        with mock.patch.object(module, "_LIMIT", 0.05), self.assertLogs("transformers_packed", "INFO") as logs:
            self.assertTrue(self.goes_on(second, 5))
        self.assertIn("This one compiles them too.", logs.output[-1])
        first.end(True)

    def test_a_process_that_was_forked_meanwhile_holds_nothing_up(self):
        first, second = self.turn("forward"), self.turn("forward")
        worker = FORK.Process(target=time.sleep, args=(60,))
        worker.start()
        first.end(True)
        self.assertTrue(self.goes_on(second, 5))
        worker.kill()
        worker.join()

    def test_a_cache_without_locks(self):
        refuse = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
        with mock.patch.object(fcntl, "flock", refuse), self.assertLogs("transformers_packed", "INFO") as logs:
            turns = [self.turn("forward") for _ in range(2)]
            self.assertTrue(all(map(self.goes_on, turns)))
            turns[0].end(True)
        self.assertIn("each process compiles its kernels, because the cache has no locks: [Errno", logs.output[0])
        # Nor where it is of no package, or cannot be written.
        self.assertTrue(self.goes_on(Turn("tilelang", "flash-qla", "forward")))
        self.use(self.folder / "file")
        (self.folder / "file").touch()
        self.assertTrue(all(self.goes_on(self.turn("forward")) for _ in range(2)))

    def test_processes_with_caches_of_their_own(self):
        turns = []
        for name in "ab":
            self.use(self.folder / name)
            turns.append(self.turn("forward"))
        self.assertTrue(all(map(self.goes_on, turns)))

    def test_the_only_process_that_compiles_has_all_cores(self):
        with (
            mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="4"),
            mock.patch.object(os, "sched_getaffinity", lambda _: range(16)),
        ):
            turn = self.turn("forward")
            self.assertEqual((threads_of_this_process(), turn.threads), (4, 16))
            turn.end(True)
            self.assertEqual(self.turn("forward").threads, 4)

    def test_an_archive_leaves_them_out(self):
        self.turn("forward").end(True)
        self.assertEqual(list(kernel_archive._folders(self.folder)), [])
