import gc
import os
import sys
from importlib.util import find_spec


# The models are tiny and test processes run side by side: more threads would only wait for one another.
if not os.environ.get("TRANSFORMERS_PACKED_GPU_SUMMARY"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


# Before triton is imported: without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton"):
        from common import interpreter  # noqa: F401


# The built-in classes take flash-linear-attention whenever it can be imported, also for CPU tensors, where it crashes.
# They are the oracle of these tests, so it is hidden from them; what runs with it visible runs in a subprocess. On a
# GPU the variable lets one machine stand for several environments.
HIDDEN = os.environ.get("TRANSFORMERS_PACKED_TEST_WITHOUT", "").split() if torch.cuda.is_available() else []
for package in HIDDEN if torch.cuda.is_available() else ("fla", "causal_conv1d"):
    sys.modules.setdefault(package, None)


# Files whose tests take longest, each of them or in its set-up: they start first, or one worker ends a minute late.
LONGEST = (
    "tests/models/test_compile.py",
    "tests/training/test_sequence_parallel.py",
    "tests/parallel/test_layers.py",
    "tests/parallel/test_models.py",
    "tests/test_example_scripts.py",
    "tests/models/test_fused_layers.py",
    "tests/utils/test_upstream_patch.py",
    "tests/cli/test_demo.py",
)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.fixture(autouse=True, scope="module")
def frozen_heap():
    """Trainer collects garbage whenever it starts: let it not look at every object of the imported packages."""
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
