"""Experts of a mixture on a GPU, against their definition in float64 and against other routings: `make test-gpu`."""

import unittest

import torch
from common.gpu import needs_gpu, report, synchronising_is_an_error
from common.real_heads import model_on_gpu
from parameterized import parameterized
from transformers import set_seed

from transformers_packed import audit_model
from transformers_packed.ops import choose_experts, experts, implementations_used
from transformers_packed.ops.terms import Adapter


NUMBER, TOP, HIDDEN, WIDTH = 16, 4, 256, 128
ROUTINGS = ("random", "one_expert", "equal_logits", "one_token", "experts_of_other_devices")


def case(routing: str, rank: int = 0, tokens: int = 700):
    """Return the logits, the tensors that get gradients, and the experts that are on another device.

    With a rank, the tensors include the matrices of adapters.
    """
    set_seed(0)
    logits = torch.randn(1 if routing == "one_token" else tokens, NUMBER, device="cuda")
    if routing == "one_expert":
        logits[:, 3] += 100
    if routing == "equal_logits":
        logits = logits.round() * 0
    shapes = [(len(logits), HIDDEN), (NUMBER, 2 * WIDTH, HIDDEN), (NUMBER, HIDDEN, WIDTH)]
    if rank:
        shapes += [(NUMBER, rank, HIDDEN), (NUMBER, 2 * WIDTH, rank), (NUMBER, rank, WIDTH), (NUMBER, HIDDEN, rank)]
    tensors = [torch.randn(shape, device="cuda") / shape[-1] ** (0.5 * (k > 0)) for k, shape in enumerate(shapes)]
    return logits.bfloat16(), [x.bfloat16() for x in tensors], 5 if routing == "experts_of_other_devices" else NUMBER


def compute(leaves, here=NUMBER, impl="auto"):
    """The experts that the router chooses. An index from `here` on is an expert on another device."""
    weights, index = choose_experts(leaves[0], TOP, impl=impl)
    x, gate_up, down, *matrices = leaves[1:]
    adapters = {}
    if matrices:
        adapters = {"gate_up_adapter": Adapter(*matrices[:2], 1.5), "down_adapter": Adapter(*matrices[2:], 0.5)}
    return experts(x, index, weights, gate_up[:here], down[:here], **adapters, impl=impl)


def run(impl, logits, tensors, here, dtype=torch.bfloat16):
    """Return the result and all gradients."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (logits, *tensors)]
    y = compute(leaves, here, impl)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).cuda().to(dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, upstream)]


def worst(found, expected):
    return max(
        ((a.double() - b).norm() / b.norm().clamp_min(1e-9)).item() for a, b in zip(found, expected, strict=True)
    )


@needs_gpu
class CudaExpertsTest(unittest.TestCase):
    @parameterized.expand(
        [(routing, 0) for routing in ROUTINGS]
        + [(routing, 5) for routing in ROUTINGS if "other" not in routing]
        # Shared memory has room for other numbers of steps and parts.
        + [("random", rank) for rank in (32, 64)]
    )
    def test_against_the_reference_in_float64(self, routing, rank):
        inputs = case(routing, rank)
        found, again = run("triton", *inputs), run("triton", *inputs)
        self.assertTrue(all(a.equal(b) for a, b in zip(found, again, strict=True)))
        error = worst(found, run("reference", *inputs, dtype=torch.float64))
        report(f"experts, {routing}, adapters of rank {rank}", error=error)
        self.assertLess(error, 1.2e-2)

    @parameterized.expand([(0,), (5,)])
    def test_other_tokens_change_no_bit(self, rank):
        """Another 700 tokens, with another routing, before and after the tokens."""
        logits, (x, *weights), here = case("random", rank)
        other, (y, *_), _ = case("one_expert")
        y = y * 100
        for before, after in ((0, 700), (700, 0), (333, 367)):
            together = torch.cat([other[:before], logits, other[before : before + after]])
            rows = torch.cat([y[:before], x, y[before : before + after]])
            mine = slice(before, before + 700)
            alone = self.token_results(logits, x, weights)
            found = self.token_results(together, rows, weights, mine)
            self.assertTrue(all(a.equal(b) for a, b in zip(alone, found, strict=True)))

    def token_results(self, logits, x, weights, mine=slice(None)):
        """Return the result and the gradients of the tokens `mine`, whose upstream gradient is always the same."""
        leaves = [t.clone().requires_grad_() for t in (logits, x)]
        y = compute([*leaves, *weights])
        upstream = torch.ones_like(y)
        upstream[mine] = torch.randn(700, HIDDEN, generator=torch.Generator().manual_seed(1)).cuda().bfloat16()
        return [t[mine] for t in (y.detach(), *torch.autograd.grad(y, leaves, upstream))]

    def test_no_host_sync(self):
        inputs = case("random", rank=5)
        upstream = torch.ones(700, HIDDEN, device="cuda").bfloat16()

        def step():
            leaves = [x.clone().requires_grad_() for x in (inputs[0], *inputs[1])]
            y = compute(leaves)
            torch.autograd.grad(y, leaves, upstream)

        step()
        with synchronising_is_an_error():
            step()

    @parameterized.expand([("qwen3_next_moe",), ("qwen3_5_moe",)])
    def test_the_audit_finds_exactly_nothing(self, family):
        found = audit_model(model_on_gpu(family), lengths=[130, 1, 65, 200])
        self.assertTrue(found.ok, found.table())
        self.assertIn("triton", implementations_used()["experts"])
        self.assertFalse([note for note in found.notes if "experts" in note])
        for name, result in found.sources.items():
            influence = torch.tensor(result.influence)
            leak = influence[~torch.eye(len(influence), dtype=torch.bool)].max().item()
            report(f"audit of {family} by {name}", leak=leak)
            self.assertEqual(leak, 0.0)
