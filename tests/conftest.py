import gc
import os
import sys
from importlib.util import find_spec


# The models are tiny and test processes run in parallel, so more threads would only contend.
if not os.environ.get("TRANSFORMERS_PACKED_GPU_SUMMARY"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Without a network, requests to the Hub are repeated for 45 seconds.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch


# Set before triton is imported. Without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        from common import interpreter  # noqa: F401
    # Each seed would note the stack of its caller for devices that may be used later, which takes milliseconds.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None


# Stock classes use flash-linear-attention whenever it can be imported, even for CPU tensors, where it crashes. They
# are the oracle of these tests, so the package is hidden. Tests with the package visible run in a subprocess. On a GPU
# the variable simulates several environments on one machine.
HIDDEN = os.environ.get("TRANSFORMERS_PACKED_TEST_WITHOUT", "").split() if torch.cuda.is_available() else []
for package in HIDDEN if torch.cuda.is_available() else ("fla", "causal_conv1d"):
    sys.modules.setdefault(package, None)


# Files with the longest tests or set-up. They start first, so that no worker finishes a minute after the others.
LONGEST = (
    "tests/models/test_compile.py",
    "tests/training/test_sequence_parallel.py",
    "tests/parallel/test_layers.py",
    "tests/parallel/test_models.py",
    "tests/test_example_scripts.py",
    "tests/models/test_fused_layers.py",
    "tests/audit/test_probe.py",
    "tests/cli/test_demo.py",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_collection_finish(session):
    """Start the server of processes while nothing is registered or patched yet."""
    if "common.processes" in sys.modules and not session.config.option.collectonly:
        sys.modules["common.processes"].start_server()


@pytest.fixture(autouse=True, scope="module")
def frozen_heap():
    """Exclude the objects of imported packages from the garbage collection at each start of Trainer."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter):
    from common import gpu

    if gpu.FIGURES:
        outcome = {name: len(terminalreporter.stats.get(name, [])) for name in ("passed", "failed", "skipped")}
        terminalreporter.section("GPU figures")
        gpu.write_summary(terminalreporter.write_line, outcome)
