"""Pages of host memory that processes of a machine share: what is there once, what stays apart, and what a kill leaves."""

import json
import multiprocessing.connection
import os
import signal
import tempfile
import time
import unittest
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from common.processes import TIMEOUT, error_of, run_processes, start_process
from torch import distributed

from transformers_packed.ops import host_memory
from transformers_packed.ops.host_weights import HostTensors
from transformers_packed.parallel import host_pages
from transformers_packed.parallel.host_pages import shared_pages


MIB = 2**20
# Lists of tensors, and bytes of each list.
LISTS, SIZE = 8, 16 * MIB


def tensors_of(number: int, size: int = MIB) -> list[torch.Tensor]:
    """Tensors of `size` and of 4 bytes, in pages which the system gets back as soon as they are freed."""
    large = host_memory.new_pages(size).view(torch.bfloat16)
    return [large.fill_(number + 0.5), torch.tensor([number, -1], dtype=torch.int16)]


def values_of(tensors) -> list[float]:
    return [float(x.float().mean()) for x in tensors]


def own_memory() -> int:
    """Bytes of this process, of shared pages its part."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def file_at(address: int) -> tuple[str, str]:
    """The inode and the name of what is mapped at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(x, 16) for x in line.split()[0].split("-"))
        if first <= address < last:
            inode, *name = line.split()[4:]
            return inode, " ".join(name)
    raise AssertionError("nothing is mapped there")


@contextmanager
def warnings_of(found: list):
    with mock.patch.object(host_pages.logger, "warning_once", found.append):
        yield


def keep(lists, found=None) -> list[HostTensors]:
    """Keep lists of tensors as layers of a model do. `lists` has no tensor afterwards."""
    hosts = [HostTensors() for _ in lists]
    with shared_pages([x.nbytes for tensors in lists for x in tensors]) as place:
        for host in hosts:
            host.keep("key", lists.pop(0), place)
            if found is not None:
                found.append(own_memory())
    return hosts


def of_one_size():
    # What the first call loads.
    keep([tensors_of(0)])
    distributed.barrier()
    before, peaks = own_memory(), []
    lists = [tensors_of(i, SIZE) for i in range(LISTS)]
    distributed.barrier()
    loaded = own_memory() - before
    hosts = keep(lists, peaks)
    distributed.barrier()
    files = {file_at(x.data_ptr()) for host in hosts for x in (*host.pages.values(), *host.lists["key"])}
    found = {"loaded": loaded, "peak": max(peaks) - before, "kept": own_memory() - before, "files": files}
    shared = [host.shared_bytes for host in hosts]
    distributed.barrier()
    return found | {"values": [values_of(host.lists["key"]) for host in hosts], "shared": shared}


def with_(case: str):
    """Share four lists where something is different. Return what is shared, the values, and what the processes say."""
    rank = distributed.get_rank()
    lists = [tensors_of(i) for i in range(4)]
    said: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(warnings_of(said))
        CASES[case](rank, lists, stack)
        expected = [values_of(tensors) for tensors in lists]
        hosts = keep(lists)
    found = [values_of(host.lists["key"]) for host in hosts]
    pages = [values_of(x for x in host.pages.values()) for host in hosts]
    distributed.barrier()
    return {"shared": [bool(host.shared_bytes) for host in hosts], "said": said, "pages": pages} | {
        "as_loaded": found == expected
    }


def other_values(rank, lists, stack):
    if rank == 1:
        # The last bits of a list.
        lists[2][1][-1] -= 1


def other_shapes(rank, lists, stack):
    if rank == 1:
        lists[1][0] = lists[1][0].view(-1, 2)


def fewer_lists(rank, lists, stack):
    if rank == 1:
        del lists[3]


def more_lists(rank, lists, stack):
    if rank == 1:
        lists.append(tensors_of(4))


def not_a_number(rank, lists, stack):
    for tensors in lists:
        tensors[0][7] = float("nan")


def nothing_to_keep(rank, lists, stack):
    lists[:] = [[], []]


def too_little_memory(rank, lists, stack):
    """As where the limit of a container is reached."""
    left, allocate = [2], os.posix_fallocate

    def limited(*args):
        if not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= 1
        return allocate(*args)

    stack.enter_context(mock.patch.object(os, "posix_fallocate", limited))


def no_files(rank, lists, stack):
    stack.enter_context(mock.patch.object(os, "memfd_create", side_effect=OSError(38, "Function not implemented")))


def other_system(rank, lists, stack):
    stack.enter_context(mock.patch.object(os, "memfd_create", side_effect=AttributeError))


def other_user(rank, lists, stack):
    if rank == 1:
        stack.enter_context(mock.patch.object(os, "open", side_effect=PermissionError(13, "Permission denied")))


def another_file(rank, lists, stack):
    if rank == 1:
        stack.enter_context(mock.patch.object(host_pages, "_identity", lambda file: [0, 0]))


def other_container(rank, lists, stack):
    stack.enter_context(mock.patch.object(host_pages, "_machine", lambda: [rank]))


def alone_in_its_group(rank, lists, stack):
    """The launcher has started others, which are in no group with this process."""
    stack.enter_context(mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="8"))


def other_machine(rank, lists, stack):
    stack.enter_context(mock.patch.dict(os.environ, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1"))


def no_variables(rank, lists, stack):
    stack.enter_context(mock.patch.dict(os.environ))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]


CASES = {
    function.__name__: function
    for function in (
        other_values,
        other_shapes,
        fewer_lists,
        more_lists,
        not_a_number,
        nothing_to_keep,
        too_little_memory,
        no_files,
        other_system,
        other_user,
        another_file,
        other_container,
        alone_in_its_group,
        other_machine,
        no_variables,
    )
}


def all_cases():
    return {case: with_(case) for case in CASES}


def changed_in_one():
    """What a process writes is seen there alone, and its weights move to pages of their own."""
    rank = distributed.get_rank()
    (host,) = keep([tensors_of(3)])
    tensors = host.lists["key"]
    found = {"before": host.holds("key", tensors), "file": file_at(host.pages["key"].data_ptr())}
    distributed.barrier()
    if rank == 1:
        tensors[0].mul_(2)
    distributed.barrier()
    found["values"], found["pages"] = values_of(tensors), values_of([host.pages["key"][:2].view(torch.bfloat16)])
    # A second question has the same answer.
    found["holds"] = [host.holds("key", tensors) for _ in range(2)]
    # Others may count changes where nothing has changed.
    host.changes += 1
    found["holds"] += [host.holds("key", tensors) for _ in range(2)]
    if rank == 1:
        host.keep("key", tensors)
    found["kept"] = values_of(host.lists["key"]), host.shared_bytes, host.holds("key", host.lists["key"])
    return found


def twice():
    """Weights that have moved move again, and the group may be another one."""
    lists = [tensors_of(1)]
    hosts = keep([*lists])
    again = keep([hosts[0].lists["key"]])
    distributed.barrier()
    files = [file_at(x[0].pages["key"].data_ptr()) for x in (hosts, again)]
    found = [values_of(again[0].lists["key"]), again[0].shared_bytes, files]
    distributed.barrier()
    return found


def with_an_error():
    """One process raises an error while it moves weights, and another one does not move any."""
    rank, found = distributed.get_rank(), []
    for fails in range(2):
        open_files = len(os.listdir("/proc/self/fd"))
        try:
            with shared_pages([4]) as place:
                HostTensors().keep("key", [torch.ones(1)], place)
                if rank == fails:
                    raise MemoryError("no memory here")
        except (MemoryError, RuntimeError) as error:
            found.append(str(error))
        # Mappings have the file too.
        place = None
        found.append(len(os.listdir("/proc/self/fd")) - open_files)
        distributed.barrier()
    if rank == 1:
        store = distributed.group.WORLD.get_group_store()
        with mock.patch.object(type(store), "get", side_effect=distributed.DistStoreError("timeout")):
            found.append(error_of(keep, [tensors_of(1)]))
    return found


def killed(rank: int, folder: str, when: str) -> None:
    """Share four lists. The first process ends by itself, the second one says what it finds afterwards."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=TIMEOUT
    )
    lists, hosts = [tensors_of(i) for i in range(4)], [HostTensors() for _ in range(4)]
    with shared_pages([x.nbytes for tensors in lists for x in tensors]) as place:
        for number, host in enumerate(hosts):
            host.keep("key", lists[number], place)
            if number == 1 and when == "written" and rank == 0:
                (Path(folder) / "file").write_text(json.dumps(file_at(host.pages["key"].data_ptr())))
                os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while not (Path(folder) / "dead").exists():
        time.sleep(0.01)
    # There is no copy of its own any more.
    lists.clear()
    found = {"shared": [bool(x.shared_bytes) for x in hosts], "values": [values_of(x.lists["key"]) for x in hosts]}
    found["file"] = file_at(hosts[0].pages["key"].data_ptr())
    (Path(folder) / "found").write_text(json.dumps(found))


def maps_of_others(inode: str) -> list[str]:
    """The processes that have mapped one of our files."""
    found = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        if any(host_pages._PREFIX in line and line.split()[4] == inode for line in lines):
            found.append(path.parent.name)
    return found


def in_shared_memory() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if host_pages._PREFIX in name]


class SharedTest(unittest.TestCase):
    def test_one_set_of_pages(self):
        """Two processes load 128 MiB each. They never have more than that and a list each, and keep 128 MiB together."""
        found = run_processes(of_one_size, 2)
        self.assertEqual(len(set.union(*(x["files"] for x in found))), 1)
        ((inode, name),) = found[0]["files"]
        self.assertIn(f"/memfd:{host_pages._PREFIX}", name)
        loaded, peak, kept = (sum(x[key] for x in found) for key in ("loaded", "peak", "kept"))
        one = LISTS * SIZE
        self.assertLess(abs(loaded - 2 * one), one / 8)
        self.assertLess(peak, 2 * one + 3 * SIZE + one / 8)
        self.assertLess(abs(kept - one), one / 8)
        for x in found:
            self.assertEqual(x["values"], [[i + 0.5, (i - 1) / 2] for i in range(LISTS)])
            self.assertEqual(x["shared"], [SIZE + 4] * LISTS)

    def test_what_differs(self):
        first, second = run_processes(all_cases, 2)
        for case in CASES:
            # Each process has the values that it has loaded.
            self.assertTrue(first[case]["as_loaded"] or case == "not_a_number", case)
            self.assertTrue(second[case]["as_loaded"] or case == "not_a_number", case)
            self.assertEqual(second[case]["said"], [], case)

        def check(case, shared, message=None, of_first=None):
            self.assertEqual(second[case]["shared"], shared, case)
            self.assertEqual(first[case]["shared"], of_first or shared, case)
            self.assertEqual(len(first[case]["said"]), message is not None, first[case]["said"])
            if message is not None:
                self.assertRegex(first[case]["said"][0], message)

        every, whole, half = [True] * 4, [False] * 4, [True, True, False, False]
        begin = "Processes of this machine do not share all of their weights in host memory, 0.0 GiB each. "
        differ = f"{begin}process 1: its weights are not those of process 0, and DDP leaves both as they are, so load the same"
        check("other_values", [True, True, False, True], differ, every)
        check("other_shapes", [True, False, True, True], differ, every)
        check("more_lists", [*every, False], differ, every)
        check("fewer_lists", every[:3], differ, every)
        check("not_a_number", every)
        check("nothing_to_keep", [False, False])
        no_memory = f"{begin}process 0: the system gives no memory that it could share "
        check("too_little_memory", half, no_memory + r"\(No space left on device\), so free some or raise")
        check("no_files", whole, no_memory + r"\(Function not implemented\)")
        check("other_system", whole, no_memory + r"\(no files in memory\)")
        denied = f"{begin}process 1: it cannot open the memory of process 0 "
        check("other_user", whole, denied + r"\(Permission denied\), so run all as one user", every)
        check("another_file", whole, denied + r"\(it is another file\)", every)
        check(
            "other_container", whole, "Only 1 of 2 processes of this machine can share weights in host memory, 0.0 GiB"
        )
        check("other_machine", whole)
        check("alone_in_its_group", every)
        check("no_variables", every)

    def test_a_change_stays_in_its_process(self):
        first, second = run_processes(changed_in_one, 2)
        self.assertEqual(first["file"], second["file"])
        self.assertTrue(first["before"] and second["before"])
        self.assertEqual((first["values"][0], second["values"][0]), (3.5, 7.0))
        # What devices have copies of.
        self.assertEqual((first["pages"], second["pages"]), ([3.5], [3.5]))
        self.assertEqual((first["holds"], second["holds"]), ([True] * 4, [False] * 4))
        self.assertEqual((first["kept"][0][0], first["kept"][1] > 0, first["kept"][2]), (3.5, True, True))
        self.assertEqual((second["kept"][0][0], *second["kept"][1:]), (7.0, 0, True))

    def test_twice(self):
        first, second = run_processes(twice, 2)
        self.assertEqual(first, second)
        self.assertEqual((first[0], first[1] > 0, first[2][0] == first[2][1]), ([1.5, 0.0], True, False))

    def test_without_a_group(self):
        tensors, said = tensors_of(2), []
        with warnings_of(said):
            (host,) = keep([tensors])
            self.assertEqual(said, [])
            with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="8", LOCAL_RANK="0"):
                keep([tensors])
            with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="8", LOCAL_RANK="3"):
                keep([tensors])
        self.assertEqual(len(said), 1)
        self.assertRegex(
            said[0], "^Each of 8 processes .* its own weights in host memory, 0.0 GiB. To share them, call"
        )
        self.assertEqual((host.shared_bytes, host.holds("key", host.lists["key"])), (0, True))
        self.assertEqual(host.lists["key"][0].data_ptr(), host.pages["key"].data_ptr())

    def test_an_error_in_one_process(self):
        """The other one does not wait for it."""
        begin = "expected all processes of a machine to keep their weights in host memory together, got"
        errors = [f"{begin} an error in process {rank}. It says why." for rank in range(2)]
        first, (*second, nothing) = run_processes(with_an_error, 2)
        self.assertEqual(first, ["no memory here", 0, errors[1], 0])
        self.assertEqual(second, [errors[0], 0, "no memory here", 0])
        fix = "Call it in all processes of the group, or before the group exists."
        self.assertEqual(nothing, f"{begin} nothing of process 0. {fix}")

    def test_a_killed_process(self):
        """The other one keeps the weights, and nothing is left after both."""
        with tempfile.TemporaryDirectory() as folder:
            first, second = (start_process(killed, rank, folder, "shared") for rank in range(2))
            multiprocessing.connection.wait([first.sentinel], TIMEOUT.total_seconds())
            self.assertEqual(first.exitcode, -signal.SIGKILL)
            (Path(folder) / "dead").touch()
            second.join(TIMEOUT.total_seconds())
            found = json.loads((Path(folder) / "found").read_text())
        self.assertEqual(found["shared"], [True] * 4)
        self.assertEqual(found["values"], [[i + 0.5, (i - 1) / 2] for i in range(4)])
        self.assertEqual(maps_of_others(found["file"][0]), [])
        self.assertEqual(in_shared_memory(), [])

    def test_a_process_that_is_killed_while_it_writes(self):
        with tempfile.TemporaryDirectory() as folder:
            first, second = (start_process(killed, rank, folder, "written") for rank in range(2))
            multiprocessing.connection.wait([first.sentinel], TIMEOUT.total_seconds())
            self.assertEqual(first.exitcode, -signal.SIGKILL)
            inode, name = json.loads((Path(folder) / "file").read_text())
            self.assertIn(host_pages._PREFIX, name)
            # It waits for the first one.
            second.kill()
            second.join()
        self.assertEqual(maps_of_others(inode), [])
        self.assertEqual(in_shared_memory(), [])


if __name__ == "__main__":
    unittest.main()
