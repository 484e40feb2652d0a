"""One set of host pages for frozen weights that several processes of a machine have in common.

The first process of a machine copies its weights to a file in memory, one layer after the other, and frees its own copy
of each. The others map the file, compare each layer with their own bit by bit, and free theirs. What differs stays in pages
of their own. So the machine never has more than what the processes have loaded, and one layer.

The file is a memfd. It is in no folder, so nothing is left of it after the last process, however that ends, and the size of
/dev/shm does not limit it. Others open it by the numbers of the process and of the file, which the store of the process group
passes on. No backend has to send anything.

Each process maps the file twice. A device has copies of the mapping that nobody writes to, which can be pinned. Parameters are
in the other one, which is private: the system copies a page that a process writes to, so a merge stays in this process.
[`HostTensors`] finds such changes, and moves these weights to pages of their own.
"""

import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.utils import logging

from ..ops.host_weights import Place, are_equal, bytes_of, filled, own_pages, sizes_of


logger = logging.get_logger(__name__)

# What names a running system, and the numbers of processes in it, which each container may have of its own.
_SYSTEM, _NUMBERS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_PREFIX = "transformers_packed.host_pages"
# How often processes exchange something: who is where, where the pages are, and what is not shared.
_EXCHANGES = 3
# What a process says after an error.
_FAILED = "false"


@contextmanager
def shared_pages(sizes: Iterable[int]) -> Iterator[Place]:
    """Return what copies tensors into pages that the processes of a machine share, while the block runs.

    All processes of the group enter the block, and place the same lists of tensors in the same order. Lists that differ from
    those of the first process, or that cannot be shared, are in pages of their own. A warning says so.

    Args:
        sizes (`Iterable[int]`):
            Bytes of each tensor.

    Raises:
        `RuntimeError`: another process of this machine does not enter the block within the group's timeout, or leaves it with
            an error.

    Example:

    ```python
    >>> import torch
    >>> from transformers_packed.parallel.host_pages import shared_pages
    >>> weight = torch.ones(2, 3)
    >>> with shared_pages([weight.nbytes]) as place:
    ...     pages, values = place([weight])
    >>> pages.nbytes
    24

    ```
    """
    most = sum(map(_in_whole_pages, sizes))
    if not (dist.is_available() and dist.is_initialized()):
        _warn_without_group(most)
        yield own_pages
        return
    processes = _Processes()
    if len(processes.ranks) == 1:
        yield own_pages
    else:
        first, *_ = processes.ranks
        is_first = processes.rank == first
        pages: Any = _Written(most) if is_first else _Found(first, processes.exchange(None)[first])
        try:
            yield pages.place
            if is_first:
                processes.exchange(pages.description())
            reasons = processes.exchange(pages.why())
        except BaseException:
            processes.give_up()
            raise
        finally:
            pages.close()
        _warn(most, is_first, reasons)
    processes.warn_if_apart(most)


class _Processes:
    """The processes of the group on this machine, and what they tell each other."""

    def __init__(self) -> None:
        world = dist.get_world_size()
        group: Any = dist.group.WORLD
        self.rank, self.step = dist.get_rank(), 0
        self.store = dist.PrefixStore(_PREFIX, group.get_group_store())
        # All processes make the same calls.
        self.call = self.store.add(f"{self.rank}", 1)
        # Launchers number the processes of a machine in a row. Others may be in containers of their own.
        first = max(self.rank - int(os.environ.get("LOCAL_RANK", self.rank)), 0)
        self.launched = min(int(os.environ.get("LOCAL_WORLD_SIZE", world)), world)
        self.ranks = list(range(first, min(first + self.launched, world)))
        machines = self.exchange(_machine())
        self.ranks = [rank for rank, machine in machines.items() if machine == machines[self.rank]]

    def exchange(self, value: Any) -> dict[int, Any]:
        """Return the values of all processes here, each by its rank."""
        self.step += 1
        self.store.set(f"{self.call}/{self.step}/{self.rank}", json.dumps(value))
        return {rank: self._hear(rank) for rank in self.ranks}

    def give_up(self) -> None:
        """Let the others raise an error instead of waiting for this process."""
        for step in range(self.step + 1, _EXCHANGES + 1):
            # The store may be gone with another process.
            with suppress(RuntimeError):
                self.store.set(f"{self.call}/{step}/{self.rank}", _FAILED)

    def _hear(self, rank: int) -> Any:
        what = "to keep their weights in host memory together, got"
        try:
            said = self.store.get(f"{self.call}/{self.step}/{rank}").decode()
        except dist.DistError as error:
            fix = "Call it in all processes of the group, or before the group exists."
            raise RuntimeError(
                f"expected all processes of a machine {what} nothing of process {rank}. {fix}"
            ) from error
        if said == _FAILED:
            raise RuntimeError(f"expected all processes of a machine {what} an error in process {rank}. It says why.")
        return json.loads(said)

    def warn_if_apart(self, most: int) -> None:
        """Say once which processes of the launcher are in other containers."""
        if len(self.ranks) < self.launched and os.environ.get("LOCAL_RANK", "0") == "0":
            logger.warning_once(
                f"Only {len(self.ranks)} of {self.launched} processes of this machine can share weights in host memory, "
                f"{_gib(most)} GiB, because the others are in other containers. Start all in one."
            )


class _Mapped:
    """A file in memory, mapped for copies to devices and privately for parameters."""

    def __init__(self, file: int, size: int):
        self.shared, self.private = mmap.mmap(file, size), mmap.mmap(file, size, flags=mmap.MAP_PRIVATE)

    def at(self, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        shared, private = (
            torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
            for memory in (self.shared, self.private)
        )
        return shared, private


class _Written:
    """Pages that this process writes for the others."""

    def __init__(self, most: int):
        self.reason, self.end, self.size = "", 0, max(most, mmap.PAGESIZE)
        self.file: int | None = None
        self.mapped: _Mapped | None = None
        self.lists: list[tuple[int, str] | None] = []
        try:
            self.file = os.memfd_create(_PREFIX)
            # Its pages get memory when they are written.
            os.ftruncate(self.file, self.size)
            self.mapped = _Mapped(self.file, self.size)
        except (OSError, AttributeError) as error:
            self._refuse(error)

    def place(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        size = bytes_of(tensors)
        if not size or not self._has_memory(size):
            self.lists.append(None)
            return own_pages(tensors)
        assert self.mapped is not None
        pages, values = self.mapped.at(self.end, size)
        self.lists.append((self.end, str(sizes_of(tensors))))
        self.end += _in_whole_pages(size)
        return filled(pages, tensors), values

    def _has_memory(self, size: int) -> bool:
        """Give the next pages memory, without which a write would end the process."""
        if not self.reason:
            assert self.file is not None
            try:
                os.posix_fallocate(self.file, self.end, size)
            except OSError as error:
                self._refuse(error)
        return not self.reason

    def description(self) -> dict[str, Any] | None:
        """What others need to find the pages."""
        if self.file is None or self.mapped is None:
            return None
        place = {"process": os.getpid(), "file": self.file, "identity": _identity(self.file)}
        return place | {"size": self.size, "lists": self.lists}

    def why(self) -> str:
        """Why not all lists are shared."""
        return self.reason

    def close(self) -> None:
        """Close the file. Mappings keep it."""
        if self.file is not None:
            os.close(self.file)

    def _refuse(self, error: Exception) -> None:
        why = getattr(error, "strerror", None) or "no files in memory"
        self.reason = (
            f"the system gives no memory that it could share ({why}), so free some or raise the container's limit"
        )


class _Found:
    """Pages that another process has written."""

    def __init__(self, first: int, found: dict[str, Any] | None):
        self.first, self.reason = first, ""
        # Where the first process has put its lists that have not been asked for.
        self.left: list[tuple[int, str] | None] = []
        self.mapped: _Mapped | None = None
        if found is None:
            return
        try:
            file = os.open(f"/proc/{found['process']}/fd/{found['file']}", os.O_RDWR)
            try:
                if _identity(file) != found["identity"]:
                    raise OSError(0, "it is another file")
                self.mapped, self.left = _Mapped(file, found["size"]), found["lists"]
            finally:
                os.close(file)
        except OSError as error:
            self.reason = f"it cannot open the memory of process {first} ({error.strerror}), so run all as one user"

    def place(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        own = own_pages(tensors)
        if self.mapped is None:
            return own
        if self.left:
            place = self.left.pop(0)
            if place is None:
                # The first process has it in pages of its own too, and says why.
                return own
            start, sizes = place
            if sizes == str(sizes_of(tensors)):
                shared, private = self.mapped.at(start, bytes_of(tensors))
                if are_equal(shared, own[0]):
                    return shared, private
        self._differs()
        return own

    def why(self) -> str:
        """Why not all lists are shared."""
        if self.left:
            self._differs()
        return self.reason

    def _differs(self) -> None:
        self.reason = (
            f"its weights are not those of process {self.first}, and DDP leaves both as they are, so load the same "
            "checkpoint in each"
        )

    def close(self) -> None:
        """Do nothing: mappings are all that is left."""


def _warn(most: int, is_first: bool, reasons: dict[int, str]) -> None:
    """Let the first process say once who does not share, and why."""
    if is_first and any(reasons.values()):
        each = "; ".join(f"process {rank}: {reason}" for rank, reason in reasons.items() if reason)
        logger.warning_once(
            f"Processes of this machine do not share all of their weights in host memory, {_gib(most)} GiB each. {each}."
        )


def _warn_without_group(most: int) -> None:
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes > 1 and os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning_once(
            f"Each of {processes} processes of this machine keeps its own weights in host memory, {_gib(most)} GiB. To share "
            "them, call it after torch.distributed.init_process_group, or after TrainingArguments, which calls that."
        )


def _machine() -> list[Any]:
    """What is equal for processes that can open each other's files."""
    found: list[Any] = []
    with suppress(OSError):
        found = [_SYSTEM.read_text(), _NUMBERS.stat().st_ino]
    return found


def _identity(file: int) -> list[int]:
    found = os.fstat(file)
    return [found.st_dev, found.st_ino]


def _in_whole_pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f}"
