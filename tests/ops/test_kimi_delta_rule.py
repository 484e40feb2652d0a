"""The rule with a decay for each channel, against its definition in float64 and against documents alone."""

import unittest

import torch
from common.mixing_ops import make_rule_inputs
from mixins.op import PackedOpTesterMixin
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import kimi_delta_rule


# Decays as strong as a bound of -5 allows, and without a bound.
GATES = {"none": {}, "unbounded": {"lower_bound": None}, "bounded": {"lower_bound": -5.0}}
NAMES = ("output", "dq", "dk", "dv", "dg", "dbeta", "da_log", "ddt_bias")


def make_inputs(length, heads=4, key_heads=2, dtype=torch.float32):
    inputs = make_rule_inputs(length, key_heads=key_heads, value_heads=heads, dtype=dtype, by_channel=True)
    return [x.detach() for x in inputs]


def make_parameters(heads=4, dtype=torch.float32):
    return {"a_log": torch.rand(heads, dtype=dtype) * 2.5, "dt_bias": torch.randn(heads * 8, dtype=dtype)}


def definition(query, key, value, g, beta, a_log=None, dt_bias=None, lower_bound=None, boundaries=None):
    """One head and one token at a time, with explicit matrices."""
    if a_log is not None:
        x, rate = g + dt_bias.view(-1, 8), a_log.exp()[:, None]
        g = -rate * torch.log(1 + x.exp()) if lower_bound is None else lower_bound / (1 + (-rate * x).exp())
    heads, groups = value.shape[2], value.shape[2] // key.shape[2]
    starts, columns = boundaries.cu_seqlens_cpu.tolist(), []
    for head in range(heads):
        rows = []
        for t in range(query.shape[1]):
            if t in starts:
                state = torch.zeros(8, 6, dtype=query.dtype)
            k, rate = key[0, t, head // groups], beta[0, t, head]
            erase = torch.eye(8, dtype=query.dtype) - rate * torch.outer(k, k)
            state = erase @ torch.diag(g[0, t, head].exp()) @ state + rate * torch.outer(k, value[0, t, head])
            rows.append(state.T @ query[0, t, head // groups] / 8**0.5)
        columns.append(torch.stack(rows))
    return torch.stack(columns, 1)[None]


class PackedKimiDeltaRuleTest(PackedOpTesterMixin, unittest.TestCase):
    gate = "none"

    def make_inputs(self, length):
        return make_inputs(length)

    def run_op(self, *inputs, boundaries=None):
        options = GATES[self.gate]
        if options:
            torch.manual_seed(1)
            options = options | make_parameters()
        return kimi_delta_rule(*inputs, boundaries=boundaries, use_qk_l2norm_in_kernel=True, **options)[0]


class BoundedPackedKimiDeltaRuleTest(PackedKimiDeltaRuleTest):
    gate = "bounded"


class KimiDeltaRuleTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    @parameterized.expand(
        [(gate, [5, 1, 9], torch.float64) for gate in GATES] + [("bounded", [70, 1, 66], torch.float32)]
    )
    def test_against_the_definition(self, gate, lengths, dtype):
        """Outputs and all gradients, those of the gate's parameters too."""
        boundaries, heads = SequenceBoundaries.from_lengths(lengths), 2
        inputs = make_inputs(sum(lengths), heads, 1, torch.float64)
        parameters = make_parameters(heads, torch.float64) if gate != "none" else {}
        weight, found = torch.randn(1, sum(lengths), heads, 6, dtype=torch.float64), []
        for function, kind in ((kimi_delta_rule, dtype), (definition, torch.float64)):
            leaves = [x.to(kind).requires_grad_() for x in (*inputs, *parameters.values())]
            options = dict(zip(parameters, leaves[5:], strict=True)) | GATES[gate]
            output = function(*leaves[:5], **options, boundaries=boundaries)
            output = output[0] if isinstance(output, tuple) else output
            found.append([output, *torch.autograd.grad((output * weight).sum(), leaves)])
        # The gradients of the gate's parameters are sums over tokens, which cancel. Their error is one of the summands.
        summands, sizes = found[1][4].abs(), {}
        if parameters:
            x = (inputs[3] + parameters["dt_bias"].view(heads, -1)).abs()
            sizes = {"da_log": (summands * x).sum((0, 1, 3)).norm(), "ddt_bias": summands.sum((0, 1)).norm()}
        for name, a, b in zip(NAMES, *found, strict=False):
            error = (a - b).norm() / sizes.get(name, b.norm())
            # At most a quarter of that with AVX2 and without.
            self.assertLess(error, {torch.float64: 1e-14, torch.float32: 5e-6}[dtype], name)

    def test_bfloat16(self):
        # The decay is computed in float32.
        inputs, parameters = make_inputs(70, dtype=torch.bfloat16), make_parameters()
        for gate in ("bounded", "unbounded"):
            output, state = kimi_delta_rule(*inputs, **parameters, **GATES[gate], output_final_state=True)
            expected, _ = kimi_delta_rule(*(x.float() for x in inputs), **parameters, **GATES[gate])
            self.assertEqual((output.dtype, state.dtype), (torch.bfloat16, torch.float32))
            self.assertTrue(torch.equal(output, expected.bfloat16()))

    def test_refuses(self):
        inputs, parameters = make_inputs(5), make_parameters()
        a_log, dt_bias = parameters.values()
        for pattern, call, options in (
            ("value heads .*multiple", make_inputs(5, heads=3), {}),
            (r"g \(1, 5, 4, 8\).*got \(1, 5, 4\)", [*inputs[:3], inputs[3][..., 0], inputs[4]], {}),
            ("together with a_log", inputs, {"lower_bound": -5.0}),
            (r"a_log \[4\] and dt_bias \[32\], got \(4,\) and none", inputs, {"a_log": a_log}),
            (r"got \(4, 1\) and", inputs, {"a_log": a_log[:, None], "dt_bias": dt_bias}),
            ("negative lower_bound, got 1", inputs, {"lower_bound": 1.0, **parameters}),
            (r"initial_state \(1, 4, 8, 6\)", inputs, {"initial_state": torch.zeros(2, 4, 8, 6)}),
            ("CUDA tensors", inputs, {"impl": "fla"}),
        ):
            with self.subTest(pattern), self.assertRaisesRegex(ValueError, pattern):
                kimi_delta_rule(*call, **options)
