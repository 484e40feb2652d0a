"""Two runs give the same bits under `torch.use_deterministic_algorithms`: `make test-gpu`.

Each op is repeated on the same inputs, every other time beside other work on the GPU, which changes the order of its programs.
The cases run on a CPU too, for few tokens.
"""

import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from common.fused import CASES, HEAD_CASES
from common.gpu import needs_gpu, report
from common.mixing_ops import AttentionCase, ConvCase, KimiCase, QkvCase, RuleCase
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import choose_experts, experts, selective_scan, ssd
from transformers_packed.ops.attention import IMPLEMENTATIONS as ATTENTION
from transformers_packed.ops.convolution import IMPLEMENTATIONS as CONV
from transformers_packed.ops.convolution import QUERY_KEY_VALUE
from transformers_packed.ops.dispatch import Setting, availability, observed
from transformers_packed.ops.gated_delta_rule import IMPLEMENTATIONS as RULE
from transformers_packed.ops.kimi_delta_rule import IMPLEMENTATIONS as KIMI
from transformers_packed.ops.linear import shared_input_linears
from transformers_packed.ops.moe import EXPERTS
from transformers_packed.ops.selective_scan import IMPLEMENTATIONS as SCAN
from transformers_packed.ops.ssd import IMPLEMENTATIONS as SSD
from transformers_packed.ops.terms import Adapter, Float8Weight, Projection


TIMES = 10
# Documents of a row on a GPU and on a CPU. Those of 5,000 tokens are long enough for cuDNN.
LONG = [5000, 130, 1, 1024, 1024, 63, 5000, 64, 300]
SHORT = [5, 1, 70]
# Ops with a case for another implementation of Transformers, or whose other activations have the same kernel.
SAME = {"attention eager", *(f"attention flash_attention_{i}" for i in (2, 3, 4))}


class Op(NamedTuple):
    """`run(impl, inputs, lengths)` returns the results of an op for `make(lengths, device)`."""

    name: str
    impls: list[str]
    make: Callable[..., list[torch.Tensor]]
    run: Callable[..., tuple[torch.Tensor, ...]]


def row_of(lengths, x):
    return SequenceBoundaries.from_lengths(lengths, device=x.device)


def of_fused(case) -> Iterator[Op]:
    """The cases of an op of each token, for the sizes of released models. The heads take time for each token."""

    def make(size, lengths, device):
        tokens = min(sum(lengths), 1000) if case in HEAD_CASES else sum(lengths)
        return case.inputs(tokens, device, torch.bfloat16, **(size if device == "cuda" else (case.small or [size])[0]))

    def run(impl, inputs, _):
        count = len(inputs) - case.constants
        return case.outputs(impl, [*inputs[:count], *(x.detach() for x in inputs[count:])])

    for size in case.released[-1:]:
        yield Op(case.name, [case.fused, "reference"], partial(make, size), run)


def of_mixer(case, table) -> Op:
    return Op(
        case.name,
        list(table),
        lambda lengths, device: case.cast(case.make(sum(lengths)), device, torch.bfloat16),
        lambda impl, inputs, lengths: (case.run(impl, inputs, row_of(lengths, inputs[0])),),
    )


def drawn(device, *shapes) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes]


def of_experts(rank: int) -> Op:
    number, top_k, hidden, width = 32, 4, 256, 256

    def make(lengths, device):
        size = 64 if device == "cpu" else hidden
        inside = 64 if device == "cpu" else width
        shapes = [(sum(lengths), number), (sum(lengths), size), (sum(lengths), size), (sum(lengths), 1)]
        shapes += [(number, 2 * inside, size), (number, size, inside)]
        if rank:
            shapes += [(number, rank, size), (number, 2 * inside, rank), (number, rank, inside), (number, size, rank)]
        return [x / x.shape[-1] ** 0.5 if x.ndim == 3 else x for x in drawn(device, *shapes)]

    def run(impl, inputs, _):
        logits, x, shared, gate, gate_up, down, *factors = inputs
        weights, index = choose_experts(logits, top_k)
        pairs = zip(("gate_up_adapter", "down_adapter"), (factors[:2], factors[2:]), strict=True)
        adapters = {name: Adapter(*pair, 2.0) for name, pair in pairs if pair}
        return (experts(x, index, weights, gate_up, down, shared=(shared, gate), impl=impl, **adapters),)

    return Op(f"experts of rank {rank}", list(EXPERTS), make, run)


def of_scan(name: str) -> Op:
    op, states = (ssd, (4, 64, 2, 32)) if name == "ssd" else (selective_scan, (96, 1, 16))

    def make(lengths, device):
        tokens, (*channels, groups, size) = sum(lengths), states
        heads = channels[:1]
        shapes = [(1, tokens, *channels), (1, tokens, *heads), (1, tokens, groups, size), (1, tokens, groups, size)]
        x, dt, b, c, decay, d, bias = drawn(device, *shapes, heads if name == "ssd" else (*heads, size), heads, heads)
        return [x, dt, -decay.float().abs() - 0.125, b, c, d.float(), bias.float() - 3]

    def run(impl, inputs, lengths):
        *given, bias = inputs
        return (op(*given, dt_bias=bias, boundaries=row_of(lengths, bias), impl=impl),)

    return Op(name, list(SSD if name == "ssd" else SCAN), make, run)


def of_linear(name: str) -> Op:
    def make(lengths, device):
        return [x / 16 for x in drawn(device, (1, sum(lengths), 256), (512, 256), (16, 256), (512, 16))]

    def run(impl, inputs, _):
        x, weight, *factors = inputs
        adapters = (Adapter(*factors),) if "lora" in name else ()
        weight = Float8Weight(weight) if "float8" in name else weight
        return shared_input_linears(x, Projection(weight, None, adapters), impl=impl)

    return Op(name, ["auto"], make, run)


OPS = [
    *(op for case in (*CASES, *HEAD_CASES) for op in of_fused(case)),
    of_mixer(RuleCase(), RULE),
    *(of_mixer(KimiCase(bound), KIMI) for bound in (None, -5.0)),
    of_mixer(ConvCase(), CONV),
    of_mixer(QkvCase(), QUERY_KEY_VALUE),
    of_mixer(AttentionCase("sdpa"), ATTENTION["sdpa"]),
    of_mixer(AttentionCase("flex_attention"), ATTENTION["flex_attention"]),
    *map(of_experts, (0, 16)),
    *map(of_scan, ("ssd", "selective_scan")),
    *map(of_linear, ("linear", "linear_float8", "linear_float8_lora")),
]


def run_once(op: Op, impl: str, inputs, lengths) -> list[torch.Tensor]:
    """Return the results, and the gradients of all inputs that have any."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    results = op.run(impl, leaves, lengths)
    generator = torch.Generator(results[0].device).manual_seed(1)
    upstream = [torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in results]
    wanted = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(results, wanted, upstream, allow_unused=True)
    return [*(x.detach() for x in results), *(x for x in gradients if x is not None)]


@contextmanager
def deterministic(active: bool = True) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(active)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def what_differs(op: Op, impl: str, lengths, device: str) -> list[str]:
    """Repeat an op, and list its results and gradients with other bits than in the first run, and how often."""
    inputs = op.make(lengths, device)
    first = run_once(op, impl, inputs, lengths)
    different = [0] * len(first)
    stream = torch.cuda.Stream() if device == "cuda" else None
    factor = torch.zeros(4096 if device == "cuda" else 1, 1024, device=device)
    for time in range(TIMES - 1):
        if stream is not None and time % 2:
            with torch.cuda.stream(stream):
                for _ in range(20):
                    factor @ factor.T
        for k, (x, y) in enumerate(zip(run_once(op, impl, inputs, lengths), first, strict=True)):
            different[k] += not torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
    return [
        f"tensor {k} {list(x.shape)}: {n} of {TIMES - 1}"
        for k, (x, n) in enumerate(zip(first, different, strict=True))
        if n
    ]


class DeterministicOpsTest(unittest.TestCase):
    def test_every_op_has_a_case(self):
        """Each is the same twice on a CPU, and all of them are those of the ops' examples."""
        ran = set()

        def observe(op, name, function):
            ran.add(f"attention {name.removeprefix('per_document(').rstrip(')')}" if op == "attention" else op)
            return function

        with deterministic(), observed(observe):
            for op in OPS:
                inputs = op.make(SHORT, "cpu")
                try:
                    first, again = (run_once(op, "auto", inputs, SHORT) for _ in range(2))
                except ValueError as error:
                    # It has no backward on a CPU.
                    self.assertIn("flex_attention", str(error))
                    ran.add("attention flex_attention")
                    continue
                self.assertTrue(all(map(torch.equal, first, again)), op.name)
        expected = {op.removesuffix(" of long documents") for op in availability(Setting("cpu", torch.bfloat16))}
        self.assertEqual(expected - SAME - ran, set())


@needs_gpu
class CudaDeterministicOpsTest(unittest.TestCase):
    @parameterized.expand([(f"{op.name} {impl}", op, impl) for op in OPS for impl in op.impls])
    def test_same_bits(self, _, op, impl):
        with deterministic():
            try:
                found = what_differs(op, impl, LONG, "cuda")
            except (ValueError, RuntimeError) as error:
                # A package is missing, or either this package or torch has nothing deterministic.
                if not any(words in str(error) for words in ("is not installed", "deterministic")):
                    raise
                self.skipTest(str(error))
        report(f"{op.name}: {impl}", different="; ".join(found) or "none")
        self.assertEqual(found, [])

    def test_the_comparison_can_fail(self):
        """Without deterministic algorithms, the backward of FlashAttention adds up in any order."""
        op = next(op for op in OPS if op.name == "attention (sdpa)")
        with deterministic(False):
            self.assertNotEqual(what_differs(op, "varlen_attn", LONG, "cuda"), [])


if __name__ == "__main__":
    unittest.main()
