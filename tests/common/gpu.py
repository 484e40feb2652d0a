"""Shared helpers of the GPU tests. `make test-gpu` prints their measured figures and writes them to a file."""

import json
import os
import platform
import shlex
import sys
import unittest
from collections.abc import Callable
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch


# Required for deterministic matrix products.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

PACKAGES = ("flash-linear-attention", "flash-qla", "tilelang", "causal-conv1d", "flash-attn", "triton")
MODULES = {"flash-linear-attention": "fla", "flash-qla": "flash_qla"}
TOTAL = 65536
FIGURES: list[dict] = []


def needs_gpu(test):
    """Mark a test or a class of tests that needs a CUDA device."""
    return pytest.mark.gpu(unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")(test))


def report(test: str, **figures) -> None:
    """Record the figures of one check."""
    FIGURES.append({"test": test, **figures})


def hidden(package: str) -> bool:
    module = MODULES.get(package, package.replace("-", "_"))
    return module in sys.modules and sys.modules[module] is None


def environment() -> dict[str, str]:
    """Return the machine and the versions of the packages that can be imported."""
    versions = {}
    for package in ("torch", "transformers", *PACKAGES):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if hidden(package):
            del versions[package]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "python": platform.python_version(), **versions}


def write_summary(write_line, outcome: dict[str, int]) -> None:
    """Print the figures, and write them to the JSON file in the environment variable, if it is set."""
    machine = environment()
    write_line(", ".join(f"{name} {version}" for name, version in machine.items()))
    for figure in FIGURES:
        rest = ", ".join(
            f"{name} {value:.1e}" if isinstance(value, float) else f"{name} {value}"
            for name, value in figure.items()
            if name != "test"
        )
        write_line(f"  {figure['test']:<52} {rest}")
    target = os.environ.get("TRANSFORMERS_PACKED_GPU_SUMMARY")
    if target:
        # A run replaces the previous one with the same set of packages and the same command.
        path = Path(target)
        label = "+".join(package for package in PACKAGES if package in machine)
        entries = json.loads(path.read_text()) if path.exists() else {}
        command = f"python -m pytest {shlex.join(sys.argv[1:])}"
        entries.setdefault(label, {})[command] = {"machine": machine, "outcome": outcome, "figures": FIGURES}
        path.write_text(json.dumps(entries, indent=1) + "\n")


def kept(name: str, make: Callable[[], Any]) -> Any:
    """Return `make()`, cached on disk, for references that take minutes on a CPU.

    `TRANSFORMERS_PACKED_TEST_CACHE` is the folder of the cache. Runs in several environments on one machine share it.
    Delete it when the tests change.
    """
    folder = os.environ.get("TRANSFORMERS_PACKED_TEST_CACHE")
    if not folder:
        return make()
    path = Path(folder) / f"{name}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(make(), path)
    return torch.load(path)


def lengths_of(documents: int) -> list[int]:
    """Draw `documents` lengths of at least 1 with the sum `TOTAL`."""
    generator = torch.Generator().manual_seed(documents)
    cuts = torch.randperm(TOTAL - 1, generator=generator)[: documents - 1].sort().values + 1
    if documents > 1:
        cuts[0] = 1
    return torch.cat([torch.tensor([0]), cuts.unique(), torch.tensor([TOTAL])]).diff().tolist()


def compile_one_configuration() -> None:
    """Restrict each flash-linear-attention kernel to its configuration with the fewest stages.

    Otherwise autotuning compiles up to a dozen configurations for each set of types and shapes. Call this before any
    computation.
    """
    from importlib import import_module

    from triton.runtime.autotuner import Autotuner, Heuristics

    for module in ("fla.ops.gated_delta_rule", "fla.ops.cp", "fla.modules.causal_conv1d.ops"):
        import_module(module)
    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for kernel in list(vars(module).values()):
            while isinstance(kernel, Heuristics | Autotuner):
                if isinstance(kernel, Autotuner):
                    kernel.configs = [min(kernel.configs, key=lambda x: (x.num_stages, abs(x.num_warps - 4)))]
                kernel = kernel.fn


@contextmanager
def compiled_kernels():
    """Collect the names of this package's kernels that Triton compiles, or loads from its file cache."""
    import triton

    names = []

    def hook(*args, **kwargs):
        names.append(kwargs["fn"].name)

    knobs = triton.knobs.runtime
    before, knobs.jit_post_compile_hook = knobs.jit_post_compile_hook, hook
    try:
        yield names
    finally:
        knobs.jit_post_compile_hook = before


@contextmanager
def synchronising_is_an_error():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
