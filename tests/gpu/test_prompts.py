"""Shared prompts and trees of documents on a GPU, against the same documents without sharing: `make test-gpu`."""

import copy
import unittest
from functools import cache

import torch
from common.fused import errors
from common.gpu import needs_gpu, report
from common.mixing_ops import BARS, AttentionCase, ConvCase, KimiCase, QkvCase, RuleCase, run_with_gradients
from common.real_heads import FAMILIES, model_on_gpu
from common.trees import ROWS, documents_of, make_row
from mixins.model import gradients, padded_batch, total_relative_error
from parameterized import parameterized

from transformers_packed import SequenceBoundaries, audit_model
from transformers_packed.ops import dispatch, implementations_used


TREES = "branches", "depth_first", "conversation"
MIXERS = RuleCase(), KimiCase(None), KimiCase(-5.0), ConvCase(), QkvCase(), AttentionCase("sdpa")
PROMPTS, ANSWERS = (300, 2, 131), ((200, 64, 1), (70, 3), (5, 129, 90, 2))


def make_batch() -> tuple[dict, list[int]]:
    """Return a padded batch, and which of its rows answer the first prompt."""
    generator = torch.Generator().manual_seed(0)
    documents = []
    for length, answers in zip(PROMPTS, ANSWERS, strict=True):
        prompt = torch.randint(1, 97, (length,), generator=generator)
        for k, n in enumerate(answers):
            # The first tokens of the answers to a prompt differ.
            own = torch.randint(1, 97, (n,), generator=generator)
            documents.append(torch.cat([prompt, own.index_fill(0, torch.tensor([0]), 10 + k)]))
    order = [3, 0, 7, 1, 4, 8, 2, 5, 6]
    batch = padded_batch([documents[i] for i in order], "left")
    return {name: x.cuda() for name, x in batch.items()}, [i for i, k in enumerate(order) if k < 3]


@needs_gpu
class SharedPromptsTest(unittest.TestCase):
    def models(self, family):
        model = model_on_gpu(family, all_experts=True)
        return model, copy.deepcopy(model).float()

    def run_model(self, model, batch, shares):
        model.share_prompts = shares
        output = model(**batch, use_cache=False)
        return output, gradients(model, output.loss)

    @parameterized.expand(FAMILIES)
    def test_gradients(self, family):
        """Errors in bfloat16 are at most twice those without sharing. In float32, the two agree."""
        dispatch._used.clear()
        model, exact = self.models(family)
        batch, _ = make_batch()
        expected = self.run_model(exact, batch, False)[1]
        apart, shared = (self.run_model(model, batch, shares)[1] for shares in (False, True))
        in_float32 = total_relative_error(self.run_model(exact, batch, True)[1], expected)
        errors = [total_relative_error({n: x.float() for n, x in g.items()}, expected) for g in (apart, shared)]
        report(f"shared prompts, {family}", float32=in_float32, unshared=errors[0], shared=errors[1])
        self.assertLess(in_float32, 1e-5)
        self.assertLess(errors[1], 2 * errors[0])
        used = implementations_used(isolating=True)
        self.assertIn("triton", used["causal_conv1d_qkv"])
        self.assertIn("varlen_attn", used["attention"])
        self.assertNotEqual(used["gated_delta_rule"], ["reference"])

    def test_an_answer_depends_on_no_other(self):
        """To the bit, in outputs; and the gradient of its tokens is zero for a loss of the others."""
        model, _ = self.models("qwen3_5")
        batch, answers = make_batch()
        changed, row = {name: x.clone() for name, x in batch.items()}, answers[0]
        changed["input_ids"][row, -1] = changed["input_ids"][row, -1] % 96 + 1
        model.share_prompts = True
        before, after = (model(**x, use_cache=False).logits for x in (batch, changed))
        others = [i for i in range(len(before)) if i != row]
        self.assertTrue(torch.equal(before[others], after[others]))
        self.assertFalse(torch.equal(before[row], after[row]))

    def test_repeats_bit_for_bit(self):
        model, _ = self.models("qwen3_5")
        batch, _ = make_batch()
        torch.use_deterministic_algorithms(True)
        self.addCleanup(torch.use_deterministic_algorithms, False)
        (a, first), (b, second) = (self.run_model(model, batch, True) for _ in range(2))
        self.assertTrue(torch.equal(a.loss, b.loss))
        for name, gradient in first.items():
            self.assertTrue(torch.equal(gradient, second[name]), name)


class OneByOne:
    """A case of an op on each document of a row alone, after its ancestors."""

    def __init__(self, case, row, has_ancestors):
        self.case, self.row, self.has_ancestors = case, row, has_ancestors

    def run(self, impl, inputs, boundaries):
        outputs = []
        for tokens, own in documents_of(self.row):
            tokens = tokens if self.has_ancestors else tokens[-own:]
            rows = [x[:, tokens] if x.shape[:2] == (1, self.row.total_length) else x for x in inputs]
            outputs.append(self.case.run(impl, rows, SequenceBoundaries.from_lengths([len(tokens)]))[:, -own:])
        return torch.cat(outputs, 1)


@cache
def tree_reference(case, name, has_ancestors=True):
    """Return inputs rounded to bfloat16, the weight of outputs, and the results of the CPU in float64."""
    row = make_row(name)
    inputs = [x.float() for x in case.cast(case.make(row.total_length), "cpu", torch.bfloat16)]
    shape = 1, row.total_length, *case.output_shape
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    alone = OneByOne(case, row, has_ancestors)
    return inputs, weight, run_with_gradients(alone, "reference", [x.double() for x in inputs], weight, None)


def tree_errors(case, name, dtype, has_ancestors=True):
    """Return the largest error of a document's outputs, and of a gradient."""
    inputs, weight, expected = tree_reference(case, name, has_ancestors)
    dispatch._used.clear()
    row = make_row(name).to("cuda")
    actual = run_with_gradients(case, "auto", case.cast(inputs, "cuda", dtype), weight.cuda(), row)
    actual = [x.cpu() for x in actual]
    outputs = errors(*(x[0].split(row.lengths, 1) for x in (actual, expected)))
    return max(outputs), max(errors(actual[1:], expected[1:]))


@needs_gpu
class TreesTest(unittest.TestCase):
    """Documents that continue others, to any depth. In levels, levels apart, and with states that tokens read."""

    @parameterized.expand(
        [(f"{case.name}_{name}_{dtype}", case, name, dtype) for case in MIXERS for name in TREES for dtype in BARS]
    )
    def test_equals_documents_with_their_ancestors(self, _, case, name, dtype):
        output, gradient = tree_errors(case, name, dtype)
        used = implementations_used()[case.name.split()[0]]
        report(f"{case.name}: {name}, {dtype}", output=output, gradient=gradient, used=used)
        self.assertLess(output, BARS[dtype][0])
        self.assertLess(gradient, BARS[dtype][1])
        if dtype == torch.bfloat16:
            self.assertNotIn("reference", used)

    @parameterized.expand([(case.name, case) for case in MIXERS])
    def test_the_comparison_can_fail(self, _, case):
        output, gradient = tree_errors(case, "conversation", torch.bfloat16, has_ancestors=False)
        self.assertGreater(output, 10 * BARS[torch.bfloat16][0])
        self.assertGreater(gradient, BARS[torch.bfloat16][1])

    @parameterized.expand([(name, dtype) for name in TREES for dtype in BARS])
    def test_isolation(self, name, dtype):
        """Siblings and cousins have no influence on each other, to the bit, in forward and backward."""
        (lengths, parent_of), depends = ROWS[name], []
        for document, parent in enumerate(parent_of):
            depends.append({document, *(depends[parent] if parent >= 0 else ())})
        report_of_row = audit_model(model_on_gpu(dtype=dtype), lengths=lengths, parent_of=parent_of)
        self.assertTrue(report_of_row.ok, report_of_row)
        result = report_of_row.sources["parent_of"]
        for matrix in (result.influence, result.backward):
            for i, line in enumerate(matrix):
                for j, size in enumerate(line):
                    self.assertEqual(size != 0, i in depends[j], (i, j, size))
