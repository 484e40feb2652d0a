"""flash-linear-attention's kernels of the delta rule of Kimi-Linear, in Triton's interpreter on a CPU.

Prints the number of tests of this file that passed: rows whose lengths are on the device alone, against rows with lengths
on the host and the reference, and what a backward leaves behind.
"""

import os


os.environ["TRITON_INTERPRET"] = "1"

import importlib
import sys
from pathlib import Path

import torch
import triton.language as tl


# The tests hide it in the process from which this one may be forked.
if sys.modules.get("fla", ...) is None:
    del sys.modules["fla"]

from fla.ops.utils import graph
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner


sys.path.insert(0, str(Path(__file__).parents[1]))

import common.interpreter  # noqa: F401

from transformers_packed import SequenceBoundaries
from transformers_packed.device_boundaries import DeviceBoundaries
from transformers_packed.ops import kimi_delta_rule
from transformers_packed.ops.backends import fla


LENGTHS = [3, 67, 10]


def tensors(*bounds):
    """Count in tensors, as compiled kernels do. The interpreter counts in Python's integers."""
    values = (int(x.handle.data[0]) if isinstance(x, tl.tensor) else int(getattr(x, "value", x)) for x in bounds)
    for i in range(*values):
        yield tl.core.to_tensor(i, _semantic=interpreter.interpreter_semantic)


# There is nothing to measure.
Autotuner.prune_configs = lambda self, arguments: self.configs[:1]
Autotuner._bench = lambda self, *args, **kwargs: [0.0]
importlib.import_module("fla.ops.common.chunk_delta_h").range = tensors
# What the interpreter lacks.
kernels = importlib.import_module("fla.ops.kda.chunk_intra")
kernels.IS_GATHER_SUPPORTED, kernels.SAFE_GATE_DOT_PRECISION = False, tl.constexpr("ieee")


def make_inputs(length):
    generator = torch.Generator().manual_seed(length)
    rows = [torch.randn(1, length, 2, 16, generator=generator) for _ in range(4)]
    beta, a_log = torch.rand(1, length, 2, generator=generator), torch.rand(2, generator=generator)
    dt_bias = torch.randn(32, generator=generator) - 3
    return [x.requires_grad_() for x in (*rows, beta, a_log, dt_bias)]


def run(rule, inputs, boundaries, lower_bound):
    *rows, a_log, dt_bias = inputs
    options = {"a_log": a_log, "dt_bias": dt_bias, "lower_bound": lower_bound, "boundaries": boundaries}
    options |= {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": True}
    output = rule(*rows, **options)[0]
    return [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]


def test_lengths_on_the_device():
    """A graph's row: documents, the padding as one more, and empty documents up to a fixed number."""
    for lower_bound in (None, -5.0):
        inputs, whole = make_inputs(sum(LENGTHS)), SequenceBoundaries.from_lengths(LENGTHS)
        expected = run(fla.kimi_delta_rule, inputs, whole, lower_bound)
        ends = torch.nn.functional.pad(whole.cu_seqlens, (0, 4), value=sum(LENGTHS))
        found = run(fla.kimi_delta_rule, inputs, DeviceBoundaries(ends, length=sum(LENGTHS)), lower_bound)
        assert all(map(torch.equal, found, expected))
        for a, b in zip(found, run(kimi_delta_rule, inputs, whole, lower_bound), strict=True):
            assert (a - b).norm() < 1e-5 * b.norm(), (a - b).norm() / b.norm()


def test_gradients_are_the_callers():
    """Those of two calls on rows of one length wait for each other, as in the pieces of a segment."""
    inputs, row = make_inputs(20), SequenceBoundaries.from_lengths([10])
    expected = run(kimi_delta_rule, inputs, SequenceBoundaries.from_lengths([10, 10]), -5.0)

    def by_pieces(*rows, boundaries, **options):
        pieces = zip(*(x.split(10, dim=1) for x in rows), strict=True)
        return torch.cat([fla.kimi_delta_rule(*x, boundaries=row, **options)[0] for x in pieces], dim=1), None

    for a, b in zip(run(by_pieces, inputs, row, -5.0), expected, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm(), (a - b).norm() / b.norm()


def test_nothing_stays():
    """Neither of a backward, nor of one that failed."""
    assert graph._BUFFERS == {}
    inputs, row = make_inputs(9), SequenceBoundaries.from_lengths([9])
    graph.get_static_buffer("wy_dq", (1, 9, 2, 16), torch.float32, torch.device("cpu")).fill_(torch.nan)
    (left,) = graph._BUFFERS.values()
    run(fla.kimi_delta_rule, inputs, row, -5.0)
    assert graph._BUFFERS == {}
    assert left.isnan().all()


if __name__ == "__main__":
    tests = [function for name, function in list(globals().items()) if name.startswith("test_")]
    for test in tests:
        test()
    print(len(tests))
