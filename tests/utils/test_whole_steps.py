"""What the benchmark of whole steps reads from a profile."""

import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

from torch.autograd import DeviceType


sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from whole_steps import summary


def event(name: str, start: int, end: int, device=DeviceType.CUDA, annotation: bool = False) -> SimpleNamespace:
    span = SimpleNamespace(start=1000 * start, end=1000 * end)
    return SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=annotation)


class SummaryTest(unittest.TestCase):
    def test_kernels_communication_and_waits(self):
        events = [
            event("gemm", 0, 10),
            event("norm", 5, 12),
            event("ncclDevKernel_AllReduce", 8, 20),
            event("DistributedDataParallel.forward", 0, 100, annotation=True),
            event("nccl:all_reduce", 0, 100, annotation=True),
            event("Memset (Device)", 30, 40),
            event("Memcpy HtoD (Pageable -> Device)", 50, 60),
            event("cudaStreamSynchronize", 0, 90, DeviceType.CPU),
        ]
        found = summary(SimpleNamespace(events=lambda: events))
        self.assertEqual(found["computation_ms"], 12)
        self.assertEqual(found["communication_ms"], 12)
        self.assertEqual(found["uncovered_communication_ms"], 8)
        self.assertEqual(found["kernels"], 2)
        self.assertEqual((found["idle_ms"], found["host_waits_ms"]), (0, 90))
        self.assertEqual(found["longest_ms"], {"ncclDevKernel_AllReduce": 12, "gemm": 10, "norm": 7})
        self.assertEqual(found["waits"], {"cudaStreamSynchronize": 1})
        self.assertEqual(found["copies"], {"Memcpy HtoD (Pageable -> Device)": 1})
