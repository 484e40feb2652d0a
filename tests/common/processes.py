"""Functions in several processes that form a group, and scripts in one process or several. Rows to cut.

The processes are forks of a server that has imported what they need, so that they cost their work and no imports.
"""

import gc
import multiprocessing
import multiprocessing.connection
import os
import runpy
import socket
import sys
import tempfile
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


# Longer than any test takes on a busy machine, and less than a minute.
TIMEOUT = timedelta(seconds=45)
# Where one process may compile kernels while the others wait.
GPU_TIMEOUT = timedelta(seconds=240)

TESTS = Path(__file__).resolve().parents[1]
# What the server imports. First of all conftest.py, which hides packages from the modeling files.
multiprocessing.set_forkserver_preload(
    [
        "conftest",
        "mixins.vision",
        "transformers_packed.models.qwen3_5_moe.modeling_qwen3_5_moe",
        "transformers_packed.training.trainer",
        "torch.distributed.tensor",
        "torch.testing",
        "common.modeling_files",
    ]
)

# The environment in which accelerate shards without GPUs.
FSDP_ON_CPU = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_CPU": "false",
    "ACCELERATE_TORCH_DEVICE": "cpu",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Qwen3_5DecoderLayer",
}
# Of a tiny model whose routers count in the loss.
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "router_aux_loss_coef": 0.5,
    "output_router_logits": True,
}
# Rows of 24 tokens; with two ranks they are cut at 12, with four at 6, 12 and 18.
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


def run_processes(function, processes: int, *args, backend: str = "gloo") -> list:
    """`function(*args)` of a module in each process; a failure in any of them is raised here, with its traceback.

    With the backend `"nccl"` each process has a GPU of its own.
    """
    _start_server()
    with tempfile.TemporaryDirectory() as folder:
        # What was imported before a fork may have asked CUDA something, and then it does not work in the child.
        start = "spawn" if backend == "nccl" else "forkserver"
        mp.start_processes(_run, (function, processes, folder, args, backend), processes, start_method=start)
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(processes)]


def run_once(function, processes: int, *args, backend: str = "gloo") -> list:
    """As [`run_processes`], for tests that look at different parts of what one run returned, or fail as it did."""
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
    # How accelerate knows of them.
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=processes, **options)
    torch.save(function(*args), Path(folder) / str(rank))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


class Finished(NamedTuple):
    """How a process ended: its exit status, and what it wrote."""

    status: int
    stdout: str
    stderr: str


def run_script(
    path: Path | str, *arguments: str, processes: int = 1, folder: Path | str | None = None, **variables: str
):
    """`path` as `python` runs it, or as torchrun does with several `processes`: a [`Finished`] of each.

    `folder` is the working directory, `variables` are of the environment. A process begins with nothing registered or
    patched, but with the modules imported that the server has.
    """
    _start_server()
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
        # One that fails leaves the others waiting for it.
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


def _run_as_main(path: str, arguments: tuple, folder: str, environment: dict, written: str) -> None:
    for stream, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{written}.{end}", os.O_WRONLY | os.O_CREAT), stream)
    _begin()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[:0] = [path, *arguments], [str(Path(path).parent)]
    # Of the tests there may be modules with the names of those beside the script.
    for name in [x.stem for x in Path(path).parent.glob("*.py")]:
        sys.modules.pop(name, None)
    runpy.run_path(path, run_name="__main__")


def _begin() -> None:
    torch.set_num_threads(1)
    # Its own processes start as anyone's do, and not from another server.
    multiprocessing.set_start_method(None, force=True)
    # Trainer collects garbage whenever it starts: let it not look at every object of the imported packages.
    gc.freeze()


def _start_server() -> None:
    """Start it where it can import modules of the tests, and without a network."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}):
        forkserver.ensure_running()
