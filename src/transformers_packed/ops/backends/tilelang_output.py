"""Leave out what TileLang prints while it compiles kernels of others: lines of its logger, and warnings about their code.

TileLang's compiler writes its warnings to the file descriptor of errors. While kernels are compiled, a pipe takes its place,
and a thread writes everything else to where it was going.
"""

import logging
import os
import re
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager


_ERRORS = 2
# The first line of a warning, and the lines that follow the one about buffers.
_WARNING = re.compile(
    rb"\[\d\d:\d\d:\d\d\] [^ ]*: Warning: |  \[\d+\] `|  --> /|Initialize the buffer before its first read"
)
# Seconds after which a line without an end, such as a question or a progress bar, is passed on.
_PATIENCE = 0.1
# A signal may interrupt the thread that holds it.
_lock = threading.RLock()
_opened: list["_Filter"] = []
_users = 0


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out TileLang's lines while this block runs in any thread."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            _opened.append(_Filter())
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _opened.pop().close()


def errors_are_shown() -> bool:
    """Whether the output of errors is a terminal, be it behind the pipe."""
    with _lock:
        return os.isatty(_opened[0].errors if _opened else _ERRORS)


def flush() -> None:
    """Write what is in the pipe. Nothing is left out from now on: this is for the end of the process."""
    global _users
    with _lock:
        # Nobody opens or closes a pipe any more.
        _users += 1
        for opened in _opened:
            opened.close()


class _Filter:
    def __init__(self):
        self.logger = logging.getLogger("tilelang")
        self.level = self.logger.level
        self.logger.setLevel(max(self.level, logging.WARNING))
        self.errors = os.dup(_ERRORS)
        self.pipe, end = os.pipe()
        os.dup2(end, _ERRORS)
        os.close(end)
        self.is_closed = False
        self.thread = threading.Thread(target=self.pass_on, daemon=True)
        self.thread.start()

    def close(self) -> None:
        # The pipe ends when nothing else writes to it, and the thread with it. A compiler may hold it longer.
        os.dup2(self.errors, _ERRORS)
        self.is_closed = True
        self.logger.setLevel(self.level)
        self.thread.join()
        os.close(self.errors)
        os.close(self.pipe)

    def pass_on(self) -> None:
        rest, is_open = b"", True
        while is_open:
            # Everything was written before.
            is_closed = self.is_closed
            if select.select([self.pipe], [], [], _PATIENCE)[0]:
                data = os.read(self.pipe, 65536)
                is_open = bool(data)
                *lines, rest = re.split(rb"(?<=[\n\r])", rest + data)
            else:
                lines, rest, is_open = [rest], b"", not is_closed
            for line in lines:
                if not _WARNING.match(line):
                    os.write(self.errors, line)
        os.write(self.errors, rest)
