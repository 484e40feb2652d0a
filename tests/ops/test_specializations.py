"""A row of another length compiles no kernel. tests/gpu/test_fused.py counts compilations on a GPU.

Triton compiles a kernel for each combination of constants, dtypes, and classes of its other arguments: an integer is 1, a
multiple of 16 or another one, and a pointer is a multiple of 16 or not. Integers in `do_not_specialize` have no class.
"""

import torch
from common.fused import CASES, HEAD_CASES, boundaries_of, named
from common.launches import specializations
from mixins.triton import InterpretedKernelsTest
from parameterized import parameterized

from transformers_packed.ops import choose_experts, experts, float8, gated_rms_norm, glu, selective_scan, ssd
from transformers_packed.ops.linear import shared_input_linears
from transformers_packed.ops.terms import Adapter, Float8Experts, Float8Weight, Projection


# An odd number, whose products with widths are multiples of 16 only if the widths are.
BASE = 1001
TOKENS = (1, 16, 17, 4096)


def trained(*shapes, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def backward(outputs, leaves):
    torch.autograd.grad(outputs, leaves, [torch.empty_like(y) for y in outputs])


def run_case(case, size, tokens):
    """Launch the kernels of a case on memory that nothing has written."""
    leaves = case.leaves(case.make(torch.empty, tokens, **size))
    backward(case.outputs(case.fused, leaves), leaves[: len(leaves) - case.constants])


def run_router(tokens):
    choose_experts(torch.zeros(tokens, 60), 8, impl="triton")


def run_experts(tokens, adapted=False):
    shapes = (tokens, 64), (tokens, 2), (4, 128, 64), (4, 64, 64), (tokens, 64), (tokens, 1)
    x, weights, gate_up, down, *shared = leaves = trained(*shapes, dtype=torch.bfloat16)
    factors = trained((4, 5, 64), (4, 128, 5), (4, 5, 64), (4, 64, 5)) if adapted else []
    adapters = {}
    if adapted:
        adapters = {"gate_up_adapter": Adapter(*factors[:2]), "down_adapter": Adapter(*factors[2:])}
    index = torch.arange(2 * tokens).view(tokens, 2) % 4
    y = experts(x, index, weights, gate_up, down, shared=tuple(shared), **adapters, impl="triton")
    torch.autograd.grad(y, [*leaves, *factors], torch.zeros_like(y))


def run_ssd(tokens):
    x, *row = trained((1, tokens, 8, 64), (1, tokens, 8), (1, tokens, 1, 16), (1, tokens, 1, 16))
    run_scan(ssd, x, *row, *trained((8,), (8,), (8,)))


def run_selective_scan(tokens):
    x, *row = trained((1, tokens, 64), (1, tokens, 64), (1, tokens, 1, 16), (1, tokens, 1, 16))
    run_scan(selective_scan, x, *row, *trained((64, 16), (64,), (64,)))


def run_scan(op, x, dt, b, c, a, d, bias):
    boundaries = boundaries_of(x.shape[1], x.device)
    y = op(x, dt, a, b, c, d, dt_bias=bias, boundaries=boundaries, impl="triton")
    backward([y], [x, dt, b, c, a, d, bias])


def run_dropout(tokens):
    x, weight, down, up = leaves = trained((1, tokens, 64), (48, 64), (4, 64), (48, 4))
    layer = Projection(weight, None, (Adapter(down, up, dropout=0.1),))
    backward(shared_input_linears(x, layer, impl="fused"), leaves)


def run_float8(tokens):
    """The casts of an input and of gradients. On a CPU, layers alone cast without kernels."""
    from transformers_packed.ops.backends.triton import float8 as kernels

    x, padded = torch.zeros(tokens, 64), -(-tokens // 16) * 16
    cast, scale = kernels.cast_rows(x, factor=None)
    by_column = torch.empty(64, padded, dtype=float8.DTYPE)
    for values, scales in ((cast, None), (x, scale)):
        kernels.transposed(values, scales, by_column)
    factors = torch.ones(tokens), torch.ones(64)
    maxima = torch.zeros(tokens, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    kernels.add_maxima(x, *factors, *maxima)
    kernels.cast_both(x, *factors, *maxima, cast, scale, by_column, torch.empty(64))


def run_float8_after_glu(tokens):
    gate, x, weight = leaves = trained((tokens, 64), (tokens, 64), (32, 64))
    backward([glu(gate, x, Projection(Float8Weight(weight)), impl="triton")], leaves)


def run_float8_after_norm(tokens):
    x, gate, scale, weight = leaves = trained((tokens, 2, 32), (tokens, 2, 32), (32,), (32, 64))
    layer = Projection(Float8Weight(weight))
    backward([gated_rms_norm(x, gate, scale, linear_weight=layer, impl="triton")], leaves)


def run_experts_in_float8(tokens):
    x, weights, *factors = leaves = trained((tokens, 256), (tokens, 2), (4, 5, 256), (4, 256, 5), dtype=torch.bfloat16)
    stored = []
    for shape in ((4, 256, 256), (4, 256, 128)):
        both = torch.zeros(shape).to(float8.DTYPE), torch.ones(4, shape[1] // 128, shape[2] // 128)
        stored.append(Float8Experts(torch.Size(shape), torch.bfloat16, lambda both=both: both))
    index = torch.arange(2 * tokens).view(tokens, 2) % 4
    y = experts(x, index, weights, *stored, gate_up_adapter=Adapter(*factors), impl="triton")
    torch.autograd.grad(y, leaves, torch.zeros_like(y))


def run_linear_in_blocks(tokens):
    """On a CPU, layers alone cast without kernels."""
    from transformers_packed.ops.backends.triton import float8_blocks as kernels

    weight, scale = torch.zeros(256, 128).to(float8.DTYPE), torch.ones(2, 1)
    for forward, width in ((True, 128), (False, 256)):
        rows = kernels.cast_in_blocks(torch.zeros(tokens, width, dtype=torch.bfloat16))
        kernels.rows_times_weight(rows, weight, scale, forward)


OTHERS = [
    run_linear_in_blocks,
    run_router,
    run_ssd,
    run_selective_scan,
    run_dropout,
    run_float8,
    run_float8_after_glu,
    run_float8_after_norm,
]


class SpecializationsTest(InterpretedKernelsTest):
    def check(self, run, base=BASE, others=TOKENS, **options):
        with specializations(**options) as expected:
            run(base)
        self.assertTrue(expected, "no kernel was launched")
        for tokens in others:
            with specializations(**options) as found:
                run(tokens)
            self.assertEqual(found - expected, set(), f"compiled again for {tokens} tokens")

    @parameterized.expand(
        named(
            # Widths of released models are multiples of 16, and so are numbers of elements. With their heads, the
            # products, which do run, would take minutes.
            [(case, size) for case in CASES for size in case.released if case.fused == "triton"]
            + [(case, size) for case in HEAD_CASES for size in case.small]
        )
    )
    def test_fused(self, _, case, size):
        self.check(lambda tokens: run_case(case, size, tokens))

    @parameterized.expand([(run.__name__, run) for run in OTHERS])
    def test_others(self, _, run):
        self.check(run)

    @parameterized.expand([(False,), (True,)])
    def test_experts(self, adapted):
        """The products read what the first kernel writes, so these run."""
        self.check(lambda tokens: run_experts(tokens, adapted), 33, (1, 16), compute=True)

    def test_experts_in_float8(self):
        self.check(run_experts_in_float8, 33, (1, 16), compute=True)
