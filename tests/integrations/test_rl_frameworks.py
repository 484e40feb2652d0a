"""Micro-batches as RL frameworks hand them to a model without padding: `import transformers_packed.auto` keeps them apart.

The frameworks themselves are not run. `verl`, `openrlhf` and `nemo_rl` call a model with the arguments that the sources of
verl (`use_remove_padding`, January 2026), OpenRLHF (`packing_samples`, August 2026) and NeMo RL (`sequence_packing`, August
2026) pass.
"""

import importlib
import sys
import tempfile
import unittest
from types import SimpleNamespace

import torch
from mixins.model import total_relative_error
from mixins.patch import builtin_model
from parameterized import parameterized
from transformers import AutoModelForCausalLM

import transformers_packed


# Prompts are padded on the left and answers on the right, as both frameworks lay them out.
PROMPTS, ANSWERS = (3, 7, 5), (6, 2, 4)


def micro_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 90, (len(PROMPTS), max(PROMPTS) + max(ANSWERS)), generator=generator)
    mask = torch.zeros_like(ids)
    for row, prompt, answer in zip(mask, PROMPTS, ANSWERS, strict=True):
        row[max(PROMPTS) - prompt : max(PROMPTS) + answer] = 1
    positions = (mask.cumsum(-1) - 1).clip(min=0)
    return {"input_ids": ids * mask, "attention_mask": mask, "position_ids": positions}


def verl(model, batch: dict) -> torch.Tensor:
    real = batch["attention_mask"].bool()
    ids, positions = batch["input_ids"][real][None], batch["position_ids"][real][None]
    return model(input_ids=ids, attention_mask=None, position_ids=positions, use_cache=False).logits[0]


def openrlhf(model, batch: dict) -> torch.Tensor:
    real = batch["attention_mask"].bool()
    ids, positions = batch["input_ids"][real][None], batch["position_ids"][real][None]
    return model(ids, attention_mask=None, position_ids=positions)["logits"][0]


def nemo_rl(model, batch: dict) -> torch.Tensor:
    real = batch["attention_mask"].bool()
    ids, positions = batch["input_ids"][real][None], batch["position_ids"][real][None]
    ends = torch.nn.functional.pad(real.sum(1).cumsum(0), (1, 0)).int()
    lengths = SimpleNamespace(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=int(ends.diff().max()))
    options = {"use_cache": False, "flash_attn_kwargs": lengths}
    return model(input_ids=ids, attention_mask=None, position_ids=positions, **options).logits[0]


def padded(model, batch: dict) -> torch.Tensor:
    return model(**batch, use_cache=False).logits[batch["attention_mask"].bool()]


def scores_and_gradients(model, call, batch: dict) -> dict[str, torch.Tensor]:
    """The log-probability of each next token of a document, and the gradients of their sum."""
    real = batch["attention_mask"].bool()
    ids, positions = batch["input_ids"][real], batch["position_ids"][real]
    logps = call(model.train(), batch)[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    logps = logps[positions[1:] > 0]
    model.zero_grad()
    logps.sum().backward()
    return {"logps": logps.detach()} | {name: x.grad.clone() for name, x in model.named_parameters()}


class RlFrameworksTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = cls.enterClassContext(tempfile.TemporaryDirectory())
        builtin_model("qwen3_5").save_pretrained(folder)
        cls.stock = AutoModelForCausalLM.from_pretrained(folder)
        cls.addClassCleanup(transformers_packed.unregister)
        sys.modules.pop("transformers_packed.auto", None)
        importlib.import_module("transformers_packed.auto")
        cls.ours = AutoModelForCausalLM.from_pretrained(folder)

    @parameterized.expand([("verl", verl), ("openrlhf", openrlhf), ("nemo_rl", nemo_rl)])
    def test_packed_equals_padded(self, name, call):
        batch = micro_batch()
        expected = scores_and_gradients(self.stock, padded, batch)
        leaking = scores_and_gradients(self.stock, call, batch)
        self.assertGreater(total_relative_error(leaking, expected), 1e-2)
        self.assertLess(total_relative_error(scores_and_gradients(self.ours, call, batch), expected), 1e-5)
