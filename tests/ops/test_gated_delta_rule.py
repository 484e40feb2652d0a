import unittest

import torch
from common.fused import assert_near
from common.mixing_ops import make_rule_inputs
from common.releases import builtin_chunk_gated_delta_rule
from mixins.op import PackedOpTesterMixin, relative_error
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import (
    gated_delta_rule,
    kimi_delta_rule,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)


TORCH_FUNCTIONS = [("chunk", torch_chunk_gated_delta_rule), ("recurrent", torch_recurrent_gated_delta_rule)]


class PackedGatedDeltaRuleTest(PackedOpTesterMixin, unittest.TestCase):
    normalise, value_heads = True, 4

    def make_inputs(self, length):
        return [x.detach() for x in make_rule_inputs(length, value_heads=self.value_heads)]

    def run_op(self, *inputs, boundaries=None):
        return gated_delta_rule(*inputs, boundaries=boundaries, use_qk_l2norm_in_kernel=self.normalise)[0]


class UngroupedPackedGatedDeltaRuleTest(PackedGatedDeltaRuleTest):
    normalise, value_heads = False, 2


class TorchGatedDeltaRuleTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    def run_all(self, function, inputs, state, normalise, weights):
        """Return output, final state and the gradients of all inputs."""
        output, final_state = function(
            *inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=normalise
        )
        leaves = inputs if state is None else [*inputs, state]
        loss = (output.to(weights[0].dtype) * weights[0]).sum() + (final_state * weights[1]).sum()
        return output, final_state, *torch.autograd.grad(loss, leaves)

    def make(self, length, with_state, value_heads, dtype=torch.float32, by_channel=False):
        inputs = make_rule_inputs(length, batch=2, value_heads=value_heads, dtype=dtype, by_channel=by_channel)
        state = torch.randn(2, value_heads, 8, 6).requires_grad_() if with_state else None
        return inputs, state, (torch.randn(2, length, value_heads, 6), torch.randn(2, value_heads, 8, 6))

    @parameterized.expand(
        [
            (65, True, False, 2),
            (65, False, True, 4),
            *((length, True, True, 4) for length in (1, 64, 130)),
        ]
    )
    def test_chunk_against_builtin_and_recurrent(self, length, with_state, normalise, value_heads):
        inputs, state, weights = self.make(length, with_state, value_heads)
        ours = self.run_all(torch_chunk_gated_delta_rule, inputs, state, normalise, weights)
        names = ["output", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dstate"]
        for oracle in (builtin_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
            expected = self.run_all(oracle, inputs, state, normalise, weights)
            for name, a, b in zip(names, ours, expected, strict=False):
                self.assertEqual(a.shape, b.shape, name)
                self.assertEqual(a.dtype, b.dtype, name)
                self.assertLess(relative_error(a, b), 1e-5, f"{name} against {oracle.__module__}")

    @parameterized.expand([(1,), (64,), (65,)])
    def test_chunk_against_recurrent_with_a_decay_for_each_channel(self, length):
        inputs, state, weights = self.make(length, True, 4, torch.float64, by_channel=True)
        state = state.detach().double().requires_grad_()
        ours, expected = (
            self.run_all(function, inputs, state, False, [x.double() for x in weights])
            for _, function in TORCH_FUNCTIONS
        )
        assert_near(ours, expected, 1e-12)

    def test_bfloat16(self):
        inputs, state, weights = self.make(65, True, 4, torch.bfloat16)
        ours = self.run_all(torch_chunk_gated_delta_rule, inputs, state, True, weights)
        self.assertEqual(ours[0].dtype, torch.bfloat16)
        self.assertEqual(ours[1].dtype, torch.float32)
        # The same computation in float32, on the same rounded inputs.
        exact = [x.detach().float().requires_grad_() for x in inputs]
        for oracle, given in (
            (builtin_chunk_gated_delta_rule, inputs),
            (torch_recurrent_gated_delta_rule, inputs),
            (torch_recurrent_gated_delta_rule, exact),
        ):
            expected = self.run_all(oracle, given, state, True, weights)
            # Each rounds to bfloat16 once. The stock function also sums the gradients of a group in bfloat16.
            assert_near(ours, expected, 2**-6)
            self.assertLess(relative_error(ours[1], expected[1]), 1e-5)

    @parameterized.expand([(1, False), (16, True), (128, True)])
    def test_chunk_size_does_not_matter(self, chunk_size, by_channel):
        inputs = [x.detach() for x in make_rule_inputs(70, by_channel=by_channel)]
        output, state = torch_chunk_gated_delta_rule(*inputs, chunk_size=chunk_size, output_final_state=True)
        expected, expected_state = torch_recurrent_gated_delta_rule(*inputs, output_final_state=True)
        self.assertLess(relative_error(output, expected), 1e-5)
        self.assertLess(relative_error(state, expected_state), 1e-5)

    @parameterized.expand(TORCH_FUNCTIONS)
    def test_packing_keywords_are_ignored(self, _, function):
        inputs = [x.detach() for x in make_rule_inputs(20)]
        packing = SequenceBoundaries.from_lengths([7, 13]).kernel_kwargs()
        plain = function(*inputs, output_final_state=True)
        torch.testing.assert_close(function(*inputs, output_final_state=True, **packing), plain, rtol=0, atol=0)

    @parameterized.expand([("chunk", 60.0, False), ("chunk", 300.0, True)])
    def test_strong_decay_overflows_nowhere(self, name, decay, by_channel):
        # Summed over a chunk, exp(-g) far exceeds the range of float32.
        inputs = make_rule_inputs(130, decay=decay, by_channel=by_channel)
        exact, found = [x.detach().double().requires_grad_() for x in inputs], []
        for function, leaves in ((dict(TORCH_FUNCTIONS)[name], inputs), (torch_recurrent_gated_delta_rule, exact)):
            output, state = function(*leaves, output_final_state=True, use_qk_l2norm_in_kernel=True)
            found.append([output, state, *torch.autograd.grad(output.sum() + state.sum(), leaves)])
        self.assertLess(relative_error(found[0][0], found[1][0]), 1e-4 if by_channel else 1e-5)
        assert_near(*found, 1e-4)


class GatedDeltaRuleTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)

    @parameterized.expand([(gated_delta_rule, 70), (kimi_delta_rule, 64)])
    def test_continues_from_a_state(self, rule, split):
        inputs = [x.detach() for x in make_rule_inputs(130, batch=2, by_channel=rule is kimi_delta_rule)]
        whole, final_state = rule(*inputs, output_final_state=True)
        first, state = rule(*(x[:, :split] for x in inputs), output_final_state=True)
        second, state = rule(*(x[:, split:] for x in inputs), initial_state=state, output_final_state=True)
        self.assertLess(relative_error(torch.cat([first, second], dim=1), whole), 1e-5)
        self.assertLess(relative_error(state, final_state), 1e-5)

    @parameterized.expand([(gated_delta_rule, [1, 70, 2]), (kimi_delta_rule, [4, 70, 1])])
    def test_states_of_documents(self, rule, lengths):
        """The states of a packed row are those of its documents, in values and in gradients."""
        boundaries = SequenceBoundaries.from_lengths(lengths)
        row = make_rule_inputs(sum(lengths), by_channel=rule is kimi_delta_rule)
        *inputs, state = (x.detach().double().requires_grad_() for x in (*row, self.states(lengths)))

        def packed():
            options = {"initial_state": state, "output_final_state": True}
            return rule(*inputs, boundaries=boundaries, **options)

        def alone():
            documents = zip(*(x.split(lengths, dim=1) for x in inputs), state.split(1), strict=True)
            found = [torch_chunk_gated_delta_rule(*x, initial_state=s, output_final_state=True) for *x, s in documents]
            outputs, states = zip(*found, strict=True)
            return torch.cat(outputs, dim=1), torch.cat(states)

        results = []
        for function in (packed, alone):
            outputs = function()
            upstream = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y) for y in outputs]
            results.append([*outputs, *torch.autograd.grad(outputs, [*inputs, state], upstream)])
        for a, b in zip(*results, strict=True):
            self.assertLess((a - b).abs().max().item(), 1e-12 * b.abs().max().item())
        final = rule(*inputs, boundaries=boundaries, output_final_state=True)[1]
        self.assertEqual(final.shape, state.shape)
        self.assertFalse(torch.allclose(final, results[0][1]))

    def states(self, lengths):
        return torch.randn(len(lengths), 4, 8, 6, generator=torch.Generator().manual_seed(3))

    def test_a_state_for_each_document(self):
        boundaries = SequenceBoundaries.from_lengths([4, 6])
        with self.assertRaisesRegex(ValueError, r"expected an initial_state \(2, 4, 8, 6\), .*got \(1, 4, 8, 6\)"):
            gated_delta_rule(*make_rule_inputs(10), boundaries=boundaries, initial_state=torch.zeros(1, 4, 8, 6))

    def test_refuses_heads_that_do_not_group(self):
        inputs = make_rule_inputs(5, key_heads=2, value_heads=3)
        with self.assertRaisesRegex(ValueError, r"^expected .*multiple.*, got 3 and 2\."):
            gated_delta_rule(*inputs)
