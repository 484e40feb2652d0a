"""Shared prompts on a GPU, against the same documents without sharing: `make test-gpu`."""

import copy
import unittest

import pytest
import torch
from common.gpu import report
from common.real_heads import FAMILIES, REAL_HEADS
from mixins.model import gradients, padded_batch, total_relative_error
from parameterized import parameterized
from transformers import set_seed

from transformers_packed.ops import dispatch, implementations_used


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


@pytest.mark.gpu
@unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
class SharedPromptsTest(unittest.TestCase):
    def models(self, family):
        cls, config_class, options = FAMILIES[family]
        if "num_experts" in options:
            # All experts process all tokens, because rounding may change the experts that a router chooses.
            options = {**options, "num_experts_per_tok": options["num_experts"]}
        set_seed(0)
        model = cls._from_config(config_class(**REAL_HEADS | options), dtype=torch.bfloat16).cuda().train()
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


if __name__ == "__main__":
    unittest.main()
