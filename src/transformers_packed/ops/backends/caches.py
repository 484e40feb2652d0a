"""The caches on disk of compiled kernels, and which of the processes of a machine fills them.

The caches of Triton and TileLang put whole files or folders in place, so a process that is killed leaves nothing that
another one would load. They have no locks: processes that start together would all compile the same kernels, each with
its share of the cores. A [`Turn`] lets the first one compile with all cores. The others wait for it, and load the result.
"""

import hashlib
import os
import time
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

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

    If its process failed or was killed, the next one has the turn. Nobody waits where a cache has no locks. All processes
    compile kernels that have been deleted since a turn.

    Args:
        cache (`str`):
            The package in whose cache the kernels are: `"triton"` or `"tilelang"`.
        author (`str`):
            The package that they are part of.
        kernels:
            What selects them, with the same `repr` in all processes.
    """

    def __init__(self, cache: str, author: str, *kernels: Any):
        self._cache, self._author, self._kernels = cache, author, kernels
        # Open while this process waits, or has the turn.
        self._file: IO[bytes] | None = None

    @property
    def threads(self) -> int:
        """Threads that may compile after the wait: one for each core if the other processes wait."""
        return threads_of_this_process() if self._file is None else len(os.sched_getaffinity(0))

    def wait(self) -> None:
        """Wait until this process has the turn, or the kernels are in the cache, for 5 minutes at most."""
        if (known := caches().get(self._cache)) is None:
            return
        start = time.monotonic()
        parts = self._kernels, *map(version_of, ("torch", self._cache, self._author))
        try:
            folder = Path(known[0]) / _FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            # NFS locks only a file that can be written.
            file = self._file = (folder / hashlib.sha256(repr(parts).encode()).hexdigest()).open("a+b", buffering=0)
            _TURNS.add(self)
            if not _goes_on(file):
                logger.info("Another process compiles the same kernels. This one waits for it, and loads them.")
            while not _goes_on(file):
                if time.monotonic() - start > _LIMIT:
                    raise TimeoutError(f"another one has compiled them for {_LIMIT:.0f} s")
                time.sleep(_PAUSE)
            # The process before has left a byte: the kernels are in the cache.
            if os.fstat(file.fileno()).st_size:
                self._close()
        except (OSError, ImportError) as error:
            logger.info(f"{self._cache}: this process compiles its kernels itself: {error}.")
            self._close()

    def end(self, is_done: bool) -> None:
        """Let the other processes go on. `is_done` is whether the kernels are in the cache."""
        if self._file is not None:
            if is_done:
                with suppress(OSError):
                    self._file.write(b"1")
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


def _goes_on(file: IO[bytes]) -> bool:
    """Lock a file if it is empty, and return whether no other process has the lock."""
    import fcntl

    with suppress(BlockingIOError):
        if not os.fstat(file.fileno()).st_size:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


# A forked process, such as a worker of a DataLoader, would keep the locks of its parent.
_TURNS: WeakSet[Turn] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [*map(Turn._close, _TURNS)])
