"""Run a function in several processes that form a gloo group, and hand back what each of them returned."""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


# Longer than any test takes on a busy machine, and less than a minute.
TIMEOUT = timedelta(seconds=45)


def run_processes(function, processes: int, *args) -> list:
    """`function(*args)` of a module in each process; a failure in any of them is raised here, with its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (function, processes, folder, args), nprocs=processes)
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(processes)]


def _run(rank: int, function, processes: int, folder: str, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes, timeout=TIMEOUT
    )
    torch.save(function(*args), Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()
