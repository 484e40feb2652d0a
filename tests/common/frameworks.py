"""What the tests of both integrations share: changed forwards, the environment of their runs, and the comparison of runs."""

import os
import sys
from pathlib import Path

import torch


ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent


def function_of(module: str):
    """A forward that looks as if `module` had defined it."""

    def forward(self, hidden_states, position_ids=None):
        raise AssertionError("not the stock forward")

    forward.__module__ = module
    return forward


def environment(*paths: Path) -> dict[str, str]:
    """The environment of a process that imports this package and modules in `paths`, without a GPU and a network."""
    found = os.environ | {
        "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT / "src"])),
        "AXOLOTL_DO_NOT_TRACK": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    # Other tests interpret the kernels of this package.
    found.pop("TRITON_INTERPRET", None)
    return found


def assert_same_training(test, packed, padded, steps: int) -> None:
    """Compare losses, norms of gradients and trained weights of two runs."""
    for got, expected in zip(packed[:2], padded[:2], strict=True):
        test.assertEqual(len(got), steps)
        torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=2e-4, atol=0)
    test.assertEqual(packed[2].keys(), padded[2].keys())
    for name, weight in padded[2].items():
        torch.testing.assert_close(packed[2][name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
