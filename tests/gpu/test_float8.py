"""Products in float8 on a GPU, against the same casts and products on a CPU: `make test-gpu`."""

import copy
import unittest

import pytest
import torch
from common.fused import relative
from common.gpu import report
from common.real_heads import FAMILIES, model_on_gpu, row_on_gpu
from mixins.model import total_relative_error
from parameterized import parameterized
from transformers import set_seed

from transformers_packed import use_cuda_graphs, use_float8
from transformers_packed.ops import float8, glu, implementations_used
from transformers_packed.ops.linear import shared_input_linears
from transformers_packed.ops.terms import Adapter, Float8Weight, Projection


LENGTHS = (300, 1, 63, 64, 596)
# They have no multiples of 16 as sizes, or are no layers of this package's ops.
OTHERS = ("in_proj_a", "in_proj_b", "in_proj_ba", "gate")


def chosen(layer, name):
    return "layers." in name and name.rpartition(".")[2] not in OTHERS and "shared_expert_gate" not in name


def run(model, row):
    model.zero_grad()
    output = model(**row, use_cache=False)
    output.loss.backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def to(device, *tensors):
    return [x.detach().to(device).requires_grad_(x.requires_grad) for x in tensors]


def layers_on(device, x, weights, matrices, gradients):
    """Outputs and gradients of layers that share an input. The first one has an adapter, if there are `matrices`."""
    x, *weights = to(device, x, *weights)
    matrices = to(device, *matrices)
    adapters = [(Adapter(*matrices, 0.5),) if matrices else ()] + [()] * (len(weights) - 1)
    layers = [Projection(Float8Weight(weight), None, a) for weight, a in zip(weights, adapters, strict=True)]
    outputs = shared_input_linears(x, *layers)
    leaves = [leaf for leaf in (x, *weights, *matrices) if leaf.requires_grad]
    found = torch.autograd.grad(outputs, leaves, to(device, *gradients))
    return [y.detach().cpu() for y in (*outputs, *found)]


@pytest.mark.gpu
class Float8Test(unittest.TestCase):
    @parameterized.expand([(37, 64), (1, 16), (129, 528), (513, 9216)])
    def test_casts_are_those_of_a_cpu(self, rows, columns):
        set_seed(0)
        x = torch.randn(rows, columns).bfloat16() * torch.logspace(-8, 8, rows)[:, None].bfloat16()
        factors = [2.0 ** torch.randint(-5, 5, (n,)) for n in (rows, columns)]
        found = []
        for device in ("cuda", "cpu"):
            here, by_row, by_column = (t.to(device) for t in (x, *factors))
            cast, scale = float8.cast_rows(here, factor=by_column)
            padded = -(-rows // 16) * 16
            shapes = [(columns, padded), (rows, columns), (columns, padded)]
            plain, q, t = (torch.empty(s, dtype=float8.DTYPE, device=device) for s in shapes)
            float8.transposed(cast, None, plain)
            maxima = [torch.zeros(n, dtype=torch.int32, device=device) for n in (rows, columns)]
            scales = [torch.empty(n, device=device) for n in (rows, columns)]
            float8.add_maxima(here, by_row, by_column, *maxima)
            float8.cast_both(here, by_row, by_column, *maxima, q, scales[0], t, scales[1])
            found.append([y.float().cpu() for y in (cast, scale, plain, q, t, *scales)])
        for a, b in zip(*found, strict=True):
            self.assertTrue(torch.equal(a, b))

    @parameterized.expand(
        [(f"{tokens}_{kind}", tokens, kind) for tokens in (1, 17, 1000) for kind in ("trained", "adapter", "frozen")]
    )
    def test_layers(self, _, tokens, kind):
        set_seed(0)
        x = torch.randn(tokens, 256).bfloat16().requires_grad_()
        weights = [(torch.randn(n, 256) / 16).bfloat16().requires_grad_(kind != "frozen") for n in (512, 64, 80)]
        matrices = [torch.randn(8, 256).bfloat16() / 16, torch.randn(512, 8).bfloat16()] if kind != "trained" else []
        matrices = [matrix.requires_grad_() for matrix in matrices]
        gradients = [torch.randn(tokens, len(weight)).bfloat16() for weight in weights]
        again, found, expected = (
            layers_on(device, x, weights, matrices, gradients) for device in ("cuda", "cuda", "cpu")
        )
        for a, b, c in zip(again, found, expected, strict=True):
            self.assertTrue(torch.equal(a, b))
            self.assertLess(relative(b, c), 5e-3)

    @parameterized.expand([("trained", False), ("frozen", True)])
    def test_gated(self, _, frozen):
        set_seed(0)
        gate, x, weight = (torch.randn(n, 256).bfloat16().requires_grad_() for n in (300, 300, 128))
        matrices = [m.bfloat16().requires_grad_() for m in (torch.randn(8, 256) / 16, torch.randn(128, 8))]
        found = []
        for device in ("cuda", "cpu"):
            tensors = to(device, gate, x, weight.detach() if frozen else weight, *matrices)
            adapters = (Adapter(*tensors[3:]),) if frozen else ()
            y = glu(tensors[0], tensors[1], Projection(Float8Weight(tensors[2]), None, adapters))
            leaves = [t for t in tensors[: None if frozen else 3] if t.requires_grad]
            found.append([t.detach().cpu() for t in (y, *torch.autograd.grad(y.float().square().sum(), leaves))])
        # The reference rounds the activation of the gate to bfloat16 before it multiplies.
        for a, b in zip(*found, strict=True):
            self.assertLess(relative(a, b), 3e-2)

    @parameterized.expand(FAMILIES)
    def test_models(self, family):
        model, row = model_on_gpu(family), row_on_gpu(LENGTHS)
        expected, gradients = run(model, row)
        use_float8(model, chosen)
        output, found = run(model, row)
        self.assertIn("fused", implementations_used()["linear_float8"])
        error = total_relative_error(found, gradients)
        report(f"float8, {family}", loss=(output.loss - expected.loss).abs().item(), gradients=error)
        self.assertLess((output.loss - expected.loss).abs().item(), 2e-2)
        self.assertTrue(1e-3 < error < 0.25, error)
        again, twice = run(model, row)
        self.assertTrue(torch.equal(output.logits, again.logits))
        # Another document before the last one leaves no bit of it different.
        other = copy.deepcopy(row)
        other["input_ids"][:, : -LENGTHS[-1]] = 5
        self.assertTrue(torch.equal(run(model, other)[0].logits[:, -LENGTHS[-1] :], output.logits[:, -LENGTHS[-1] :]))

    def test_graphs_cast_changed_weights(self):
        model = use_float8(model_on_gpu("qwen3_5"), chosen)
        graphs, row = use_cuda_graphs(copy.deepcopy(model), sum(LENGTHS)), row_on_gpu(LENGTHS)
        for step in range(3):
            (a, first), (b, second) = (run(m, row) for m in (model, graphs))
            self.assertEqual(a.loss.item(), b.loss.item(), step)
            # Stale weights would be 10 % off.
            self.assertLess(total_relative_error(second, first), 1e-2)
            with torch.no_grad():
                for m in (model, graphs):
                    for p in m.parameters():
                        p.data.mul_(0.9)

    def test_gradient_checkpointing_changes_nothing(self):
        model, row = use_float8(model_on_gpu("qwen3_5"), chosen), row_on_gpu(LENGTHS)
        expected = run(model, row)[0].loss.item()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        self.assertEqual(run(model, row)[0].loss.item(), expected)

    def test_another_dtype_is_refused(self):
        with self.assertRaisesRegex(ValueError, "bfloat16"):
            run(use_float8(model_on_gpu("qwen3_5", torch.float32), chosen), row_on_gpu(LENGTHS))
