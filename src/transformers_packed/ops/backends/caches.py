"""The caches on disk of compiled kernels, and which of the processes of a machine fills them.

The caches of Triton and TileLang put whole files or folders in place, so a process that is killed leaves nothing that
another one would load. They have no locks: processes that start together would all compile the same kernels, each with
its share of the cores. A [`Turn`] lets the first one compile with all cores. The others wait for it, and load the result.
"""

import hashlib
import os
import threading
import time
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from ..dispatch import logger
from . import threads_of_this_process


# Seconds that a process waits for the one that compiles, and between two looks.
_LIMIT, _PAUSE = 300.0, 0.1
# Archives of kernels leave out folders with such names.
_FOLDER = ".turns"


def caches() -> dict[str, tuple[str, str]]:
    """Return the directory of each disk cache of compiled kernels, and the environment variable that moves it."""
    found = {}
    if find_spec("triton") is not None:
        from triton import knobs

        found["triton"] = knobs.cache.dir, "TRITON_CACHE_DIR"
    if find_spec("tilelang") is not None:
        # Without its import, which needs a GPU or a compiler.
        folder = os.environ.get("TILELANG_CACHE_DIR") or os.path.expanduser("~/.tilelang/cache")
        found["tilelang"] = folder, "TILELANG_CACHE_DIR"
    return found


def version_of(package: str) -> str:
    """Return the installed version of a package, or `"missing"`."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


class Turn:
    """The turn to compile some kernels, which the first process of a machine has. The others wait until it ends.

    It ends with the process, too. Nobody waits where the cache can have no lock, or where the kernels are in it since an
    earlier turn. If they have been deleted since, all processes compile them.

    Args:
        cache (`str`):
            The package in whose cache the kernels are: `"triton"` or `"tilelang"`.
        author (`str`):
            The package that they are part of.
        kernels:
            What selects them, with the same `repr` in all processes.
    """

    def __init__(self, cache: str, author: str, *kernels: Any):
        self._waits, self._file, self._is_first = threading.Lock(), None, True
        if (known := caches().get(cache)) is None:
            return
        parts = kernels, *map(version_of, ("torch", cache, author))
        name = hashlib.sha256(repr(parts).encode()).hexdigest()
        file: IO[bytes] | None = None
        try:
            folder = Path(known[0]) / _FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            # Its position is the end of the file.
            file = (folder / name).open("ab")
            if not file.tell():
                self._is_first, self._file = _lock(file), file
        except (OSError, ImportError) as error:
            logger.info(f"{cache}: each process compiles its kernels, because the cache has no locks: {error}.")
        if file is not self._file and file is not None:
            file.close()

    @property
    def threads(self) -> int:
        """Threads that may compile: one for each core if the other processes wait."""
        return threads_of_this_process() if self._file is None else len(os.sched_getaffinity(0))

    def wait(self) -> None:
        """Wait until no other process has the turn, for 5 minutes at most. Any number of threads may call this."""
        with self._waits:
            if self._is_first or self._file is None:
                return
            start = time.monotonic()
            logger.info("Another process compiles the same kernels. This one waits for it, and loads them.")
            while not _lock(self._file, shared=True):
                if time.monotonic() - start > _LIMIT:
                    logger.info(
                        f"Another process has compiled kernels for {_LIMIT:.0f} s. This one compiles them too."
                    )
                    break
                time.sleep(_PAUSE)
            self._close()

    def end(self, is_done: bool) -> None:
        """Let the other processes go on. `is_done` is whether the kernels are in the cache."""
        if self._is_first and self._file is not None:
            with suppress(OSError):
                self._file.write(b"1" * is_done)
                self._file.flush()
            self._close()

    def _close(self) -> None:
        assert self._file is not None
        # A process that was forked meanwhile has the file open, too, and with it the lock.
        _lock(self._file, unlock=True)
        self._file.close()
        self._file = None


def _lock(file: IO[bytes], shared: bool = False, unlock: bool = False) -> bool:
    """Lock or unlock a file, and return whether no other process has a lock that excludes it."""
    import fcntl

    kind = fcntl.LOCK_UN if unlock else (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
    try:
        fcntl.flock(file, kind)
    except BlockingIOError:
        return False
    return True
