"""Run functions in several processes that form a group, and scripts in one or more processes. Also rows to shard.

The processes are forks of a server with all imports done, so they pay no import time. The server is itself a fork of the
tests' process, as it is between the imports and the first test.
"""

import faulthandler
import gc
import itertools
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from accelerate import DistributedType, PartialState


# Longer than any test takes on a busy machine, and less than a minute.
TIMEOUT = timedelta(seconds=45)
# For runs in which one process may compile kernels while the others wait.
GPU_TIMEOUT = timedelta(seconds=240)
# A process that hangs ends after this, with the stacks of its threads. No process takes as long on a busy machine.
HANGS = timedelta(minutes=15)

TESTS = Path(__file__).resolve().parents[1]
# What the processes import, besides what the files with the tests do.
IMPORTS = (
    "mixins.vision",
    "transformers_packed.models.qwen3_5_moe.modeling_qwen3_5_moe",
    "transformers_packed.training.trainer",
    "torch.distributed.tensor",
    "torch.testing",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.sft_trainer",
    "common.modeling_files",
)
# A fork of a process that has found a GPU cannot use it, so there the server imports everything anew.
# conftest.py is first, because it hides packages from the modeling files.
multiprocessing.set_forkserver_preload(["conftest", *IMPORTS] if torch.cuda.is_available() else [])

# Environment variables that make accelerate shard without GPUs.
FSDP_ON_CPU = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_CPU": "false",
    "ACCELERATE_TORCH_DEVICE": "cpu",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3_5DecoderLayer",
}
# A tiny mixture of experts with a router loss.
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "router_aux_loss_coef": 0.5,
    "output_router_logits": True,
}
# Rows of 24 tokens. Two ranks cut them at 12, four ranks at 6, 12 and 18.
ROWS = {
    "aligned": [12, 6, 6],
    "cut": [5, 9, 3, 7],
    "one long": [24],
    "long behind short": [2, 22],
    "long before short": [23, 1],
    "many short": [2, 3, 1, 2, 1, 1, 3, 2, 1, 4, 1, 3],
    "shorter than the halo around the cuts": [5, 2, 4, 2, 4, 2, 5],
    "tail padding": [10, 9, 5],
}


def error_of(function, *args, **kwargs) -> str | None:
    """The message of the error of a call, `None` if there is none."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return str(error)


def run_processes(function, processes: int, *args, backend: str = "gloo") -> list:
    """Run `function(*args)` of a module in each process. An error in any of them is raised here with its traceback.

    With the backend `"nccl"` each process has its own GPU.
    """
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        # Imports before a fork may have initialized CUDA, which then fails in the child.
        start = "spawn" if backend == "nccl" else "forkserver"
        mp.start_processes(_run, (function, processes, folder, args, backend), processes, start_method=start)
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(processes)]


def errors_of(calls: Iterable[Callable]) -> list:
    """The messages of the `ValueError` that each call raises, or what it returns, for checks in the test's process."""
    found = []
    for call in calls:
        try:
            found.append(call())
        except ValueError as error:
            found.append(str(error))
    return found


def start_process(function, *args) -> multiprocessing.process.BaseProcess:
    """Start `function(*args)` of a module in a process of its own."""
    start_server()
    process = multiprocessing.get_context("forkserver").Process(target=_call, args=(function, *args))
    process.start()
    return process


def _call(function, *args) -> None:
    _begin()
    function(*args)


def run_once(function, processes: int, *args, backend: str = "gloo") -> list:
    """Like [`run_processes`], but cached, for tests of different parts of one result. Errors are raised again."""
    found = _kept(function, processes, *args, backend=backend)
    if isinstance(found, Exception):
        raise found
    return found


@cache
def _kept(*call, backend):
    try:
        return run_processes(*call, backend=backend)
    except Exception as error:
        return error


def _run(rank: int, function, processes: int, folder: str, args: tuple, backend: str) -> None:
    _begin()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    options = {"timeout": TIMEOUT}
    if backend == "nccl":
        torch.cuda.set_device(rank)
        options["timeout"] = GPU_TIMEOUT
    # accelerate reads these variables.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=processes, **options)
    torch.save(function(*args), Path(folder) / str(rank))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


class Finished(NamedTuple):
    """The exit status and the output of a process."""

    status: int
    stdout: str
    stderr: str


def run_script(
    path: Path | str, *arguments: str, processes: int = 1, folder: Path | str | None = None, **variables: str
):
    """Run `path` as with `python`, or with several `processes` as with torchrun. Return a [`Finished`] for each.

    `folder` is the working directory, `variables` are environment variables. Processes start with the imports of the
    server, and with nothing registered or patched.
    """
    start_server()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")} | variables
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_PORT": port}
        environment |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as written:
        running = []
        for rank in range(processes):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
            call = (str(path), arguments, folder or os.getcwd(), environment | ranks, f"{written}/{rank}")
            running.append(context.Process(target=_run_as_main, args=call))
            running[-1].start()
        # If one process fails, the others wait for it.
        while (alive := [x for x in running if x.exitcode is None]) and not any(x.exitcode for x in running):
            multiprocessing.connection.wait([x.sentinel for x in alive])
        failed = any(process.exitcode for process in running)
        for process in running:
            process.join(TIMEOUT.total_seconds() if failed else None)
            process.kill()
            process.join()
        return [
            Finished(process.exitcode, *(Path(f"{written}/{rank}.{end}").read_text() for end in ("out", "err")))
            for rank, process in enumerate(running)
        ]


def run_cli_module(module: str, *arguments: str, limit: float | None = None) -> None:
    """Do what `run_module` of the commands does, in a process that need not import anything."""
    (done,) = run_script(TESTS / "scripts" / "cli_module.py", module, *arguments)
    print(done.stdout)
    if done.status:
        raise ChildProcessError(done.stderr)


class CliModule:
    """What `start_module` of the commands returns, for a process that need not import anything."""

    def __init__(self, *command: str):
        self._status: int | None = None
        self._thread = threading.Thread(target=self._run, args=command)
        self._thread.start()

    def _run(self, *command: str) -> None:
        try:
            run_cli_module(*command)
            self._status = 0
        except ChildProcessError as error:
            print(error, file=sys.stderr)
            self._status = 1

    def poll(self) -> int | None:
        """The exit status, or `None` while the process runs."""
        return self._status

    def wait(self) -> None:
        """Wait for its end."""
        self._thread.join()

    def kill(self) -> None:
        """Do nothing: in these tests, nobody kills a process that runs."""


def _run_as_main(path: str, arguments: tuple, folder: str, environment: dict, written: str) -> None:
    for stream, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{written}.{end}", os.O_WRONLY | os.O_CREAT), stream)
    _begin()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[:0] = [path, *arguments], [str(Path(path).parent)]
    # Modules of the tests may have the same names as modules beside the script.
    for name in [x.stem for x in Path(path).parent.glob("*.py")]:
        sys.modules.pop(name, None)
    runpy.run_path(path, run_name="__main__")


def pretend_gpus() -> None:
    """Let accelerate take the group's processes on a CPU for processes with GPUs, on which alone it shards."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)


def _begin() -> None:
    faulthandler.dump_traceback_later(HANGS.total_seconds(), exit=True, file=sys.__stderr__)
    torch.set_num_threads(1)
    # Child processes start by the default method, not from another server.
    multiprocessing.set_start_method(None, force=True)
    # Exclude the objects of imported packages from the garbage collection at each start of Trainer.
    gc.freeze()


def start_server() -> None:
    """Start the server without network access, if it does not run. conftest.py calls this before the first test."""
    if torch.cuda.is_available():
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}):
            forkserver.ensure_running()
        return
    for name in IMPORTS:
        import_module(name)
    with mock.patch.object(multiprocessing.util, "spawnv_passfds", _fork):
        forkserver.ensure_running()


def _fork(path, arguments: list[str], files: list[int]) -> int:
    """Run the Python code that ends `arguments` in a fork that keeps only these open files. Return its process id."""
    process = os.fork()
    if process:
        return process
    try:
        # pytest captures what goes to its own streams, in files that are closed here.
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        for handler in [reference() for reference in logging._handlerList]:
            # That of torch's traces has no stream yet, and closes the one that it has.
            if isinstance(handler, logging.StreamHandler) and handler.stream is not None:
                handler.setStream(sys.stderr)
        bounds = [2, *sorted(files), os.sysconf("SC_OPEN_MAX")]
        for before, after in itertools.pairwise(bounds):
            os.closerange(before + 1, after)
        exec(arguments[-1], {})
    finally:
        os._exit(0)
