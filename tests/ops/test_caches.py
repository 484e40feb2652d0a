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
CACHES = module.caches


class TurnTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.use(self.folder)
        self.enterContext(mock.patch.object(module, "_PAUSE", 0.01))
        self.threads = {}

    def use(self, folder):
        self.enterContext(mock.patch.object(module, "caches", lambda: {"triton": (str(folder), "")}))

    def turn(self, *kernels):
        return Turn("triton", "flash-linear-attention", *kernels)

    def first(self):
        turn = self.turn("forward")
        turn.wait()
        return turn

    def goes_on(self, turn, seconds=0.3):
        """Whether a process does not wait for another one."""
        if turn not in self.threads:
            self.threads[turn] = threading.Thread(target=turn.wait, daemon=True)
            self.threads[turn].start()
        self.threads[turn].join(seconds)
        return not self.threads[turn].is_alive()

    def keep_a_turn(self, then=lambda: None):
        """Start a process that has the turn until it is killed."""
        ready = FORK.Event()

        def keep():
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            turn = self.first()
            then()
            ready.set()
            time.sleep(60)
            turn.end(True)

        process = FORK.Process(target=keep)
        process.start()
        self.addCleanup(process.kill)
        self.assertTrue(ready.wait(30))
        return process

    @parameterized.expand([("at once", False), ("after the first one was killed", True)])
    def test_four_processes_compile_once(self, _, is_killed):
        barrier, kernel, compiled = FORK.Barrier(5), self.folder / "kernel", self.folder / "compiled"

        def train():
            barrier.wait()
            turn = self.first()
            if not kernel.exists():
                with compiled.open("a") as file:
                    file.write(f"{os.getpid()}\n")
                time.sleep(0.3)
                kernel.touch()
            turn.end(True)

        killed = self.keep_a_turn() if is_killed else None
        processes = [FORK.Process(target=train) for _ in range(4)]
        for process in processes:
            process.start()
        barrier.wait(30)
        if killed is not None:
            # All of them wait.
            time.sleep(0.3)
            killed.kill()
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
        third = self.turn("forward")
        third.end(True)
        self.assertFalse(self.goes_on(third))
        self.assertFalse(self.goes_on(second))
        first.end(is_done)
        # One of them compiles what the first one could not.
        ends = [self.goes_on(turn, 1) for turn in (second, third)]
        self.assertEqual(sorted(ends), [is_done, True])
        (second if ends[0] else third).end(False)
        for turn in (second, third):
            self.assertTrue(self.goes_on(turn, 5))
            turn.end(False)
        # Nobody waits for kernels that are in the cache, and nobody compiles them alone.
        turns = [self.turn("forward") for _ in range(2)]
        self.assertTrue(self.goes_on(turns[0]))
        self.assertEqual(self.goes_on(turns[1]), is_done)
        turns[0].end(True)

    @parameterized.expand([("killed", signal.SIGKILL), ("interrupted", signal.SIGINT)])
    def test_a_process_that_ends_while_it_compiles(self, _, number):
        process, turn = self.keep_a_turn(), self.turn("forward")
        self.assertFalse(self.goes_on(turn))
        os.kill(process.pid, number)
        process.join(30)
        self.assertTrue(self.goes_on(turn, 5))
        # It has left no mark that its kernels were done.
        self.assertEqual([x.stat().st_size for x in (self.folder / module._FOLDER).iterdir()], [0])

    def test_nobody_waits_forever(self):
        first, second = self.first(), self.turn("forward")
        with mock.patch.object(module, "_LIMIT", 0.05), self.assertLogs("transformers_packed", "INFO") as logs:
            self.assertTrue(self.goes_on(second, 5))
        self.assertIn("compiles its kernels itself: another one has compiled them for 0 s.", logs.output[-1])
        first.end(True)

    @parameterized.expand([("ended", False), ("killed", True)])
    def test_a_process_that_was_forked_meanwhile_holds_nothing_up(self, _, is_killed):
        def fork():
            worker = FORK.Process(target=lambda: (forked.put(os.getpid()), time.sleep(60)))
            worker.start()

        forked = FORK.SimpleQueue()
        if is_killed:
            process, second = self.keep_a_turn(fork), self.turn("forward")
        else:
            first, second = self.first(), self.turn("forward")
            self.assertFalse(self.goes_on(second, 0.1))
            fork()
        self.addCleanup(os.kill, forked.get(), signal.SIGKILL)
        # The fork has let go of the file, but not of the turn of its parent.
        self.assertFalse(self.goes_on(second))
        process.kill() if is_killed else first.end(True)
        self.assertTrue(self.goes_on(second, 5))
        second.end(True)

    def test_a_file_system_that_locks_by_how_a_file_is_open(self):
        """As NFSv4, which makes `flock` a lock of the bytes of the file."""
        flock, needed = fcntl.flock, {fcntl.LOCK_SH: os.O_WRONLY, fcntl.LOCK_EX: os.O_RDONLY}

        def lock(file, kind):
            if needed.get(kind & ~fcntl.LOCK_NB) == fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE:
                raise OSError(errno.EBADF, "Bad file descriptor")
            flock(file, kind)

        with mock.patch.object(fcntl, "flock", lock):
            first, second = self.first(), self.turn("forward")
            self.assertFalse(self.goes_on(second))
            first.end(True)
            self.assertTrue(self.goes_on(second, 5))
        self.assertIsNone(second._file)

    def test_a_lock_that_fails_while_a_process_waits(self):
        first, second, error = self.first(), self.turn("forward"), OSError(errno.EIO, "Input/output error")
        with (
            mock.patch.object(fcntl, "flock", side_effect=[BlockingIOError, BlockingIOError, error]),
            self.assertLogs("transformers_packed", "INFO") as logs,
        ):
            second.wait()
        self.assertIn("this process compiles its kernels itself: [Errno 5] Input/output error.", logs.output[-1])
        self.assertIsNone(second._file)
        first.end(True)
        # Kernels that are in the cache need no lock.
        with mock.patch.object(fcntl, "flock") as lock:
            self.assertTrue(self.goes_on(self.turn("forward")))
        lock.assert_not_called()

    def test_a_cache_without_locks(self):
        refuse = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
        with mock.patch.object(fcntl, "flock", refuse), self.assertLogs("transformers_packed", "INFO") as logs:
            turns = [self.turn("forward") for _ in range(2)]
            self.assertTrue(all(map(self.goes_on, turns)))
            turns[0].end(True)
        self.assertIn("this process compiles its kernels itself: [Errno", logs.output[0])
        # Nor where it is of no package, or cannot be written.
        self.assertTrue(all(self.goes_on(turn) for turn in (Turn("tilelang", "flash-qla"), Turn("", ""))))
        self.use(self.folder / "file")
        (self.folder / "file").touch()
        self.assertTrue(all(self.goes_on(self.turn("forward")) for _ in range(2)))

    def test_processes_with_caches_of_their_own(self):
        turns = []
        for name in "ab":
            self.use(self.folder / name)
            turns.append(self.turn("forward"))
            self.assertTrue(self.goes_on(turns[-1]))

    def test_the_only_process_that_compiles_has_all_cores(self):
        with (
            mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="4"),
            mock.patch.object(os, "sched_getaffinity", lambda _: range(16)),
        ):
            first, second, third, last = self.first(), *(self.turn("forward") for _ in range(3))
            self.assertEqual((threads_of_this_process(), first.threads), (4, 16))
            with mock.patch.object(module, "_LIMIT", 0.05):
                third.wait()
            first.end(False)
            second.wait()
            self.assertEqual((second.threads, third.threads), (16, 4))
            second.end(True)
            last.wait()
            self.assertEqual(last.threads, 4)

    def test_no_caches_without_packages(self):
        with mock.patch.object(module, "find_spec", lambda name: None):
            self.assertEqual(CACHES(), {})

    def test_an_archive_leaves_them_out(self):
        self.first().end(True)
        self.assertEqual(len(list(self.folder.rglob("*"))), 2)
        self.assertEqual(list(kernel_archive._folders(self.folder)), [])
