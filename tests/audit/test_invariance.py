"""The audit of invariance finds each operation whose results depend on the sizes of rows, and names it."""

import json
import unittest
from functools import partial
from unittest import mock

import torch
from common.commands import run_command
from mixins.vision import TINY
from parameterized import parameterized
from torch.utils._pytree import tree_map
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5TextConfig, set_seed

from transformers_packed import AuditReport, audit_model
from transformers_packed.cli import audit as command
from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
from transformers_packed.ops import norm


SETTINGS = {**TINY, "initializer_range": 0.15}
LLAMA = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "initializer_range")
# Rows of other lengths then end with full vectors on a CPU, where all other operations here have equal bits.
measure = partial(audit_model, lengths=[16, 80], invariance=True)


def llama():
    set_seed(0)
    config = LlamaConfig(**{name: SETTINGS[name] for name in LLAMA}, num_hidden_layers=2)
    return LlamaForCausalLM._from_config(config, dtype=torch.float64)


def qwen3_5():
    set_seed(0)
    return Qwen3_5ForCausalLM._from_config(Qwen3_5TextConfig(**SETTINGS), dtype=torch.float64)


@torch.library.custom_op("tests::split_sum", mutates_args=())
def split_sum(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A linear layer with its sums in two parts for many rows, as a library with tiles may compute it."""
    if x.numel() // x.shape[-1] <= 200:
        return x @ weight.T
    # Larger than the rounding, so that nothing else can be taken for it.
    return (x[..., 1::2] @ weight[:, 1::2].T + x[..., ::2] @ weight[:, ::2].T) * (1 + 1e-9)


class SplitLinear(torch.nn.Linear):
    def forward(self, x):
        return split_sum(x, self.weight)


def by_scale(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + 1e-9 * (x.shape[1] > 200))


def by_kernel(x: torch.Tensor) -> torch.Tensor:
    """The same, not seen as an operator of PyTorch."""
    return torch.from_numpy(by_scale(x.detach().numpy()))


class InvarianceTest(unittest.TestCase):
    def test_equal_bits_everywhere(self):
        model = llama()
        report = measure(model)
        self.assertTrue(report.ok, report.table())
        self.assertFalse(report.refused)
        self.assertEqual((report.sources, report.leaks), ({}, []))
        result = report.invariance
        self.assertEqual((result.worst, result.document, result.operations, result.remainder), (None, None, [], None))
        measured = {place.name: place for place in result.placements if not place.reason}
        self.assertEqual(len(measured), 1 + 8 + 6 + 1)
        for place in measured.values():
            self.assertEqual((place.hidden_states, place.logps), ([0.0, 0.0], [0.0, 0.0]))
        self.assertIn("needs a model on a CUDA device", report.refusals["CUDA graph"])
        self.assertIn("takes no shared prompts", report.refusals["leaf of a tree"])

    def test_an_operator_is_named(self):
        model = llama()
        for layer in model.model.layers:
            layer.mlp.up_proj.__class__ = SplitLinear
        report = measure(model)
        self.assertFalse(report.ok)
        result = report.invariance
        # The last bit of attention, which adding it to the stream rounds away, may differ too.
        (operation,) = (operation for operation in result.operations if operation.size > 1e-14)
        self.assertEqual((operation.name, operation.calls), ("tests::split_sum", 2))
        self.assertEqual(result.remainder, 0.0)
        places = {place.name: place for place in result.placements}
        self.assertGreater(places[result.worst].hidden_states[result.document], 1e-12)
        self.assertEqual(places["row, 0 before, 16 after"].worst, 0.0)
        self.assertGreater(places["row, 0 before, 240 after"].worst, 0.0)
        self.assertIn("tests::split_sum: 2 calls, by up to ", report.table())
        read = AuditReport.from_json(report.to_json())
        self.assertEqual(read, report)
        self.assertFalse(json.loads(report.to_json())["ok"])

    @parameterized.expand([(by_scale, "aten::mul in rms_norm (reference)"), (by_kernel, "rms_norm (reference)")])
    def test_an_op_of_this_package_is_named(self, plant, name):
        reference = norm.IMPLEMENTATIONS["reference"]

        def planted(*args, **kwargs):
            return tree_map(plant, reference.run(*args, **kwargs))

        with mock.patch.dict(norm.IMPLEMENTATIONS, reference=reference._replace(run=planted)):
            report = audit_model(qwen3_5(), lengths=[16], invariance=True, gradients=False)
        result = report.invariance
        found = {operation.name for operation in result.operations if operation.size > 1e-12}
        self.assertEqual(found, {name, name.replace("rms_norm", "gated_rms_norm")})
        self.assertEqual(result.remainder, 0.0)

    def test_documents_that_are_cut(self):
        model = qwen3_5()
        before = [(vars(module).copy(), module.training) for module in model.modules()]
        report = audit_model(model, lengths=[48], invariance=True)
        self.assertTrue(report.ok, report.table())
        for place in report.invariance.placements:
            self.assertEqual(place.other_sums, place.name in ("shared prompt", "leaf of a tree"))
            if place.other_sums:
                self.assertTrue(0 < place.worst < 1e-9, place)
        self.assertIn("other sums, so differences are expected: shared prompt, leaf of a tree", report.table())
        self.assertEqual([(vars(module), module.training) for module in model.modules()], before)

    def test_what_is_refused(self):
        for arguments, message in (
            ({"parent_of": [-1, 0]}, "no parent_of and no tolerance"),
            ({"tolerance": 0.1}, "no parent_of and no tolerance"),
            ({"lengths": []}, "lengths of at least one document"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                measure(llama(), **arguments)
        report = measure(llama(), gradients=False)
        self.assertNotIn("gradient checkpointing", [place.name for place in report.invariance.placements])
        with self.assertRaisesRegex(ValueError, "reports of leaks"):
            report.plot("audit.png")

    def test_exit_status(self):
        refusing = llama()
        refusing.model.forward = None
        split = llama()
        split.model.layers[0].mlp.up_proj.__class__ = SplitLinear
        options = ("llama", "--invariance", "--lengths", "16")
        for model, expected, text in (
            (llama(), 0, '"ok": true'),
            (split, 1, 'ok": false'),
            (refusing, 2, "could not be audited: TypeError"),
        ):
            with self.subTest(expected=expected), mock.patch.object(command, "load_model", return_value=model):
                status, stdout, stderr = run_command("audit", *options, "--json")
                self.assertEqual(status, expected, stdout + stderr)
                self.assertIn(text, stdout + stderr)
        for mode, expected in (((), 1), (("--batch-invariant",), 0)):
            # A batch without padding takes another path than a row.
            status, stdout, _ = run_command("audit", "qwen3_5_text", *options[1:], *mode)
            self.assertEqual(status, expected, stdout)
        status, _, stderr = run_command("audit", *options, "--plot", "audit.png")
        self.assertEqual(status, 2)
        self.assertIn("--plot without --invariance", stderr)
