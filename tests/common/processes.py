"""Run a function in several processes that form a group, and hand back what each of them returned. Rows to cut."""

import multiprocessing
import os
import tempfile
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


# Longer than any test takes on a busy machine, and less than a minute.
TIMEOUT = timedelta(seconds=45)
# Where one process may compile kernels while the others wait.
GPU_TIMEOUT = timedelta(seconds=240)

# Processes come from one that has imported these: most of what a test takes would be imports otherwise.
multiprocessing.set_forkserver_preload(["torch", "transformers", "transformers_packed.training.trainer"])

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
    torch.set_num_threads(1)
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
