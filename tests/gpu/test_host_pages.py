"""Weights in host memory that two processes share, which copy them to GPUs: `make test-gpu`.

With one GPU, both processes use it.
"""

import copy
import time
import unittest

import torch
from common.gpu import needs_gpu, report
from common.processes import run_processes
from gpu.test_host_experts import SIZES, experts_of, mixture
from mixins.on_host_gpu import LENGTHS, step
from parallel.test_host_pages import file_at, tensors_of
from torch import distributed

from transformers_packed import keep_experts_in_host_memory
from transformers_packed.models.host_experts import bytes_in_host_memory, shared_bytes
from transformers_packed.models.host_parameters import host_of
from transformers_packed.ops.host_weights import HostTensors
from transformers_packed.parallel.host_pages import shared_pages


BACKEND = "nccl" if torch.cuda.device_count() > 1 else "gloo"
# Bytes of each of four lists.
LARGE = 512 * 2**20


def begin() -> torch.device:
    device = torch.device("cuda", distributed.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.use_deterministic_algorithms(True)
    return device


def trained(kind: str):
    """Steps on experts on the GPU and in host memory, before and after one process has merged its adapters."""
    device = begin()
    model = mixture(kind)
    other = keep_experts_in_host_memory(copy.deepcopy(model))
    for x in (model, other):
        x.to(device)
        x.gradient_checkpointing_enable({"use_reentrant": False})
    found = {"same": [], "shared": [shared_bytes(other), bytes_in_host_memory(other)]}

    def compare():
        for lengths in (LENGTHS, (300, 900), LENGTHS):
            actual, expected = step(other, lengths), step(model, lengths)
            found["same"].append(all(torch.equal(actual[name], x) for name, x in expected.items()))
            found["trained"] = any("experts" in name and x.any().item() for name, x in expected.items())

    compare()
    pages = [x for module in experts_of(other) for x in host_of(module).pages.values()]
    found["pinned"] = all(x.is_pinned() for x in pages)
    found["files"] = {file_at(x.data_ptr()) for x in pages}
    distributed.barrier()
    if distributed.get_rank() == 1 and kind == "bfloat16":
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            for x in (model, other):
                x.merge_adapter()
                x.unmerge_adapter()
    distributed.barrier()
    compare()
    found["after"] = shared_bytes(other)
    distributed.barrier()
    return found


def copied(shares: bool):
    """Bytes per second that both processes copy to their GPUs at the same time, and the seconds to pin 2 GiB."""
    device = begin()
    lists = [tensors_of(i, LARGE) for i in range(4)]
    hosts = [HostTensors() for _ in lists]
    with shared_pages([x.nbytes for tensors in lists for x in tensors]) as place:
        for host in hosts:
            host.keep("key", lists.pop(0), place if shares else None)
    torch.cuda.synchronize()
    before = time.perf_counter()
    for number, host in enumerate(hosts):
        found = host.on(device, "key")
        assert [float(x[-1]) for x in found] == [number + 0.5, -1]
    torch.cuda.synchronize()
    first = time.perf_counter() - before
    distributed.barrier()
    before = time.perf_counter()
    for _ in range(3):
        for host in hosts:
            host.on(device, "key")
    torch.cuda.synchronize()
    each = (time.perf_counter() - before) / 3
    distributed.barrier()
    return {"GiB_per_s": 4 * LARGE / each / 2**30, "pin_2_GiB_s": first - each}


@needs_gpu
class HostPagesTest(unittest.TestCase):
    def test_changes_no_bit(self):
        for kind in ("bfloat16", "nvfp4"):
            first, second = run_processes(trained, 2, kind, backend=BACKEND)
            for found in (first, second):
                self.assertEqual(found["same"], [True] * 6)
                self.assertTrue(found["trained"])
                self.assertTrue(found["pinned"])
                self.assertEqual(*found["shared"])
                self.assertGreater(found["shared"][0], SIZES["num_hidden_layers"] * 2**20)
            self.assertEqual(len(first["files"] | second["files"]), 1)
            self.assertEqual(first["after"], first["shared"][0])
            # Weights in bfloat16 are rounded in a merge, and differ afterwards.
            self.assertEqual(second["after"], 0 if kind == "bfloat16" else second["shared"][0])

    def test_copies(self):
        figures = {shares: run_processes(copied, 2, shares, backend=BACKEND) for shares in (False, True)}
        for shares, found in figures.items():
            means = {name: sum(x[name] for x in found) / 2 for name in found[0]}
            report(
                f"two processes copy {'shared' if shares else 'own'} pages", gpus=torch.cuda.device_count(), **means
            )
        # Copies of pages that are not pinned would take several times as long.
        own, shared = (min(x["GiB_per_s"] for x in figures[shares]) for shares in (False, True))
        self.assertGreater(shared, own / 2)
